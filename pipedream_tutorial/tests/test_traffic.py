"""Compare the memory and traffic formulas with counts from real modules, a simulated ring and
actual orders."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from pipedream.schedules.ops import transfers
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.measures import peak_activations
from pipedream.train.models import GPT2Size, gpt2_blocks

from results.lab.tutorial.traffic import (
    MODELS,
    Layout,
    Model,
    block_activations,
    cost,
    ring_share,
    sent_per_step,
    stage_parameters,
)

SMALL = Model(name="small", layers=8, hidden=16, heads=4, vocabulary=40, sequence=8)
MEDIUM = MODELS["gpt2-medium"]


def test_parameter_counts_match_the_modules() -> None:
    for model in (MEDIUM, MODELS["gpt2-xl"]):
        size = GPT2Size(num_layers=model.layers, hidden=model.hidden, heads=model.heads)
        with torch.device("meta"):
            blocks = gpt2_blocks(size)
        counts = [sum(p.numel() for p in block.parameters()) for block in blocks]
        assert {model.block_parameters} == set(counts)
        norm = 2 * model.hidden  # before the output layer, which shares the embedding's weights
        assert model.parameters == model.embedding_parameters + sum(counts) + norm
    assert MEDIUM.parameters == 354_823_168  # as published
    assert MODELS["gpt2-xl"].parameters == 1_557_611_200


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_ring_devices_send_the_computed_share(n: int) -> None:
    """In a simulated ring of n devices, each device sends `ring_share` of the data during
    reduce-scatter, and again during all-gather."""
    chunks = [[10 * rank + c for c in range(n)] for rank in range(n)]
    expected = [sum(column) for column in zip(*chunks, strict=True)]
    sent_chunks = [0] * n
    for step in range(2 * (n - 1)):
        reduces = step < n - 1
        first = 0 if reduces else n  # each device continues with the chunk that it has summed
        moved = [(r, (r + first - step) % n) for r in range(n)]
        values = [chunks[r][c] for r, c in moved]
        for (r, c), value in zip(moved, values, strict=True):
            to = (r + 1) % n
            chunks[to][c] = chunks[to][c] + value if reduces else value
            sent_chunks[r] += 1
    assert chunks == [expected] * n
    assert {Fraction(count, n) for count in sent_chunks} == {2 * ring_share(n)}


def test_model_state_and_traffic_match_the_zero_paper() -> None:
    """According to the ZeRO paper, the model state on each device takes `16 N`, `4 N + 12 N / P`,
    `2 N + 14 N / P` or `16 N / P` bytes for stages 0 to 3. N is the number of parameters, and P is
    the number of devices."""
    n = MEDIUM.parameters
    for devices in (2, 8):
        found = []
        for stage in range(4):
            layout = Layout(title="", data=devices, zero=stage)
            one = cost(MEDIUM, layout, sequences=devices, microbatch=1)
            found.append(one.weights + one.gradients + one.optimizer)
        gathered = 2 * MEDIUM.embedding_parameters
        share = Fraction(n, devices)
        assert found == [16 * n, 4 * n + 12 * share, 2 * n + 14 * share, 16 * share + gathered]
    # The second number counts the reduce-scatters and all-gathers of N elements per microbatch.
    for stage, times in ((0, 2), (1, 2), (2, 2), (3, 3)):
        moved = sent_per_step(MEDIUM, Layout(title="", data=8, zero=stage), 1, 4, 0)
        elements = times * Fraction(7, 8) * n
        assert moved == {"data": 2 * elements, "tensor": 0, "pipeline": 0}


def test_memory_and_traffic_of_zb_v_differ_from_1f1b() -> None:
    """Under ZB-V, device 0 has the first and the last stage, so the tied embedding is held only
    once. There are twice as many hops between devices as under 1F1B."""
    wide, straight = replace(SMALL, vocabulary=1), Layout(title="", pipeline=4)
    layout = replace(straight, schedule="zb-v")
    parameters = [stage_parameters(SMALL, layout, r) for r in range(4)]
    assert sum(parameters) == SMALL.parameters
    schedule = build_schedule("zb-v", 4, 8)
    ranks = schedule.rank_by_op()
    hops = [0] * 4
    for sender, _ in transfers(schedule):
        hops[ranks[sender]] += 1
    one = SMALL.sequence * SMALL.hidden * 2
    found = [sent_per_step(SMALL, layout, 8, 1, r)["pipeline"] for r in range(4)]
    assert found == [count * one for count in hops]
    # If the ends are negligible, a device holds p microbatches of its blocks.
    blocks = 2 * block_activations(wide, layout, 1)
    ends = 5 * one + 4 * wide.sequence
    activations = cost(wide, layout, sequences=8, microbatch=1).activations
    assert 4 * blocks <= activations <= 4 * (blocks + ends)
    assert peak_activations(schedule) == (4, 4, 4, 4)


def test_memory_cost_of_zb_h1_depends_on_the_logits() -> None:
    """ZB-H1 needs 61% more memory than 1F1B with fp32 logits, and 31% more with bf16 logits, as
    COMPARISON.md states. If the operation I briefly holds both a logit and its gradient, ZB-H1
    needs 38% more memory with bf16 logits."""

    def memory(**changes: object) -> Fraction:
        layout = Layout(title="", pipeline=4, **changes)
        return cost(MEDIUM, layout, sequences=64, microbatch=4).memory

    flush = memory()
    with_logit_gradient = memory(schedule="zb-h1", logit_bytes=2) + 2 * 4 * 1024 * MEDIUM.vocabulary
    found = memory(schedule="zb-h1"), memory(schedule="zb-h1", logit_bytes=2), with_logit_gradient
    assert [round(100 * (one / flush - 1)) for one in found] == [61, 31, 38]
