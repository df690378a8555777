"""Cuts of a model into stages against brute force, and what is refused before anything starts."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from distributed_training.config import PIPELINE_SCHEDULES, build_config
from distributed_training.layout import (
    balanced_cut,
    block_flops,
    build_layout,
    output_flops,
    stage_parameters,
)
from distributed_training.layout_rules import SCHEDULE_RULES
from distributed_training.model import build_model
from distributed_training.parallel.pipeline import SCHEDULES, build_stages
from distributed_training.sizes import SIZES, ModelSize
from distributed_training.strategy import ROOT, load_strategy
from distributed_training.topology import build_topology
from tests.unit.conftest import refused

DEEP = ModelSize(vocab_size=2048, num_positions=64, num_layers=7, num_heads=4, hidden_size=32)


def layout_for(world_size, **config):
    built = build_config({"model": "gpt2-medium", "max_length": 1024, **config})
    strategy = load_strategy(built)
    place = {"rank": 0, "local_rank": 0, "device_type": "cpu"}
    topology = build_topology(strategy, world_size=world_size, config=built, **place)
    return build_layout(built, strategy, SIZES[built.model], topology)


def all_cuts(num_layers, num_stages):
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *ends, num_layers)
        yield [b - a for a, b in itertools.pairwise(bounds)]


def test_every_schedule_of_config_has_a_rule_and_an_implementation():
    assert tuple(SCHEDULE_RULES) == tuple(SCHEDULES) == PIPELINE_SCHEDULES
    for name, rule in SCHEDULE_RULES.items():
        assert rule.v_shaped <= (rule.stages_per_rank == 2), name
        one_stage_only = issubclass(SCHEDULES[name], PipelineScheduleSingle)
        assert not (one_stage_only and rule.stages_per_rank > 1), name


def one_stage_each(pp):
    return tuple(range(pp))


def in_turns(pp):
    return (*range(pp), *range(pp))


def in_a_v(pp):
    return (*range(pp), *reversed(range(pp)))


CUTS = [
    (name, pp, held)
    for name in ("gpt2-tiny", "gpt2", "deep")
    for pp in (2, 3, 4, 6)
    for held in (one_stage_each, in_turns, in_a_v)
    if len(held(pp)) <= (DEEP if name == "deep" else SIZES[name]).num_layers
]


@pytest.mark.parametrize(("name", "pp", "held"), CUTS)
@pytest.mark.parametrize("seq_len", [32, 1024])
def test_no_cut_has_a_cheaper_costliest_process(name, pp, held, seq_len):
    size, ranks = DEEP if name == "deep" else SIZES[name], held(pp)
    block, head = block_flops(size, seq_len), output_flops(size)

    def costliest(counts):
        costs = [0] * pp
        for rank, count in zip(ranks, counts, strict=True):
            costs[rank] += block * count
        costs[ranks[-1]] += head
        return max(costs)

    ours = balanced_cut(size, seq_len, ranks)
    assert sum(ours) == size.num_layers
    assert min(ours) >= 1
    assert costliest(ours) == min(costliest(cut) for cut in all_cuts(size.num_layers, len(ranks)))


@pytest.mark.parametrize(
    ("held", "medium", "xl"),
    [
        (one_stage_each, [7, 7, 7, 3], [13, 13, 13, 9]),
        (in_turns, [3, 3, 3, 2, 4, 4, 4, 1], [6, 6, 6, 6, 7, 7, 7, 3]),
        (in_a_v, [2, 4, 4, 4, 3, 3, 3, 1], [6, 7, 7, 7, 6, 6, 6, 3]),
    ],
)
def test_two_stages_of_a_process_share_its_blocks(held, medium, xl):
    assert balanced_cut(SIZES["gpt2-medium"], 1024, held(4)) == medium
    assert balanced_cut(SIZES["gpt2-xl"], 1024, held(4)) == xl


def test_the_output_layer_counts_as_blocks():
    """gpt2-medium's is worth 3.5 of its 24 blocks."""
    stages = layout_for(4, strategy="pp", grad_accum_steps=8).stages
    assert [len(blocks) for blocks in stages] == [7, 7, 7, 3]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("gpipe", (0, 1, 2, 3)),
        ("interleaved", (0, 1, 2, 3, 0, 1, 2, 3)),
        ("zb-v", (0, 1, 2, 3, 3, 2, 1, 0)),
    ],
)
def test_where_stages_lie(schedule, ranks):
    layout = layout_for(4, strategy="pp", grad_accum_steps=8, pipeline_schedule=schedule)
    assert layout.ranks == ranks
    assert [block for blocks in layout.stages for block in blocks] == list(range(24))


@pytest.mark.parametrize("num_stages", [1, 2, 7])
def test_parameters_of_a_stage_are_those_of_its_module(num_stages):
    counts = [1] * (num_stages - 1) + [DEEP.num_layers - num_stages + 1]
    ends = [sum(counts[: i + 1]) for i in range(num_stages)]
    stages = tuple(range(end - n, end) for end, n in zip(ends, counts, strict=True))
    for index in range(num_stages):
        model = build_model(DEEP, dropout=0.0, seed=0)
        (stage,) = build_stages(model, stages, tuple(range(num_stages)), index)
        held = sum(parameter.numel() for parameter in stage.parameters())
        assert held == stage_parameters(DEEP, stages, index)  # its vocabulary has no padding


def test_every_name_of_the_model_is_in_a_stage():
    whole = dict(build_model(DEEP, dropout=0.0, seed=0).named_parameters())
    layout = (range(0, 3), range(3, 7))
    found = {}
    for place in (0, 1):
        model = build_model(DEEP, dropout=0.0, seed=0)
        for stage in build_stages(model, layout, (0, 1), place):
            found.update(stage.named_parameters())
    assert found.keys() == whole.keys()
    assert all((found[name] == whole[name]).all() for name in whole)


def test_a_cut_of_ones_own():
    layout = layout_for(2, strategy="pp", grad_accum_steps=4, pipeline_cut="20, 4")
    assert layout.stages == (range(0, 20), range(20, 24))
    for cut in ("20,5", "24", "24,0", "10,10,4", "a,b", "-1,25"):
        with refused(f"pipeline_cut='{cut}'", "2 numbers", "24 blocks", "write 14,10"):
            layout_for(2, strategy="pp", grad_accum_steps=4, pipeline_cut=cut)
    with refused("there is no pipeline"):
        layout_for(2, strategy="dp", pipeline_cut="12,12")


def test_heads_that_tp_does_not_divide():
    xl = {"model": "gpt2-xl", "max_length": 1000, "grad_accum_steps": 8}
    with refused("tp=8 does not divide num_heads=25", "start 5 or 25 processes, or take fsdp"):
        layout_for(8, strategy="tp", **xl)
    with refused("start 10 processes and set tp=5 dp_replicate=2, or take fsdp with tp=none"):
        layout_for(8, strategy="tp", tp=8, **xl)
    with refused("tp=10", "set tp=5 dp_replicate=2; or tp=5 dp_shard=2"):
        layout_for(10, strategy="tp", **xl)
    layout_for(10, strategy="tp", tp=5, dp_replicate=2, **xl)
    with refused("tp=3", "start 2 or 4 or 8 or 16 processes"):
        layout_for(3, strategy="tp")
    with refused("tp=2 does not divide", "; set tp=1; or tp=1 dp_replicate=2; or pp=4 tp=1"):
        layout_for(8, strategy="3d", **xl)
    with refused("tp=3 does not divide num_heads=16", "; set tp=2; or tp=1; or"):
        layout_for(6, strategy="3d", pp=1, tp=3)


def test_an_axis_that_fits_comes_with_what_else_it_needs():
    with refused("start 5 or 25 processes and set sequence_parallel=false, or take fsdp"):
        layout_for(8, strategy="tp", model="gpt2-xl")
    with refused("set tp=1 grad_accum_steps=2; or pp=1 tp=1; or"):
        layout_for(8, strategy="3d", model="gpt2-xl")


def test_tokens_that_tp_does_not_divide():
    with refused("max_length=1023", "tp=2", "max_length to 1022", "sequence_parallel to False"):
        layout_for(2, strategy="tp", max_length=1023)
    layout_for(2, strategy="tp", max_length=1023, sequence_parallel=False)


@pytest.mark.parametrize(
    ("schedule", "too_few", "enough"),
    [
        ("1f1b", 3, 4),
        ("gpipe", None, 1),
        ("interleaved", 9, 8),
        ("zb-h1", 11, 12),
        ("zb-v", None, 1),
    ],
)
def test_micro_batches_that_a_schedule_needs(schedule, too_few, enough):
    def build(count):
        layout_for(4, strategy="pp", grad_accum_steps=count, pipeline_schedule=schedule)

    build(enough)
    if too_few is not None:
        with refused(f"pipeline_schedule='{schedule}'", "set grad_accum_steps to"):
            build(too_few)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_recomputation_and_two_halves_of_a_backward_pass(schedule):
    words = {"strategy": "pp", "grad_accum_steps": 4, "pipeline_schedule": schedule}
    for mode in ("selective", "full"):
        with refused(f"'{mode}' does not go", schedule, "set it to none"):
            layout_for(2, activation_checkpointing=mode, **words)
    layout_for(2, activation_checkpointing="none", **words)


@pytest.mark.parametrize("schedule", SCHEDULE_RULES)
def test_bubbles_are_those_of_the_tutorials_simulator(schedule):
    """Equal stages, backward twice as long as forward; whole rounds of micro-batches."""
    sys.path.insert(0, str(ROOT / "pipedream_tutorial"))
    try:
        simulator = importlib.import_module("pipedream.simulator")
        schedules = importlib.import_module("pipedream.schedules")
        measures = importlib.import_module("pipedream.measures")
    finally:
        sys.path.pop(0)
    for pp, m in [(2, 4), (4, 8), (4, 16), (3, 12), (4, 2), (5, 3), (4, 4), (3, 1)]:
        if SCHEDULE_RULES[schedule].bubble(pp, m) is None:
            assert schedule == "zb-v"
            assert m < 2 * pp - 1
            continue
        order = schedules.build_schedule(schedule, pp, m)
        timeline = simulator.simulate(order, simulator.build_costs(order))
        expected = float(measures.idle(timeline).makespan_fraction)
        assert SCHEDULE_RULES[schedule].bubble(pp, m) == pytest.approx(expected)


def test_what_is_not_a_multiple_of_pp_and_allowed():
    for schedule in ("1f1b", "gpipe", "zb-v"):
        layout_for(4, strategy="pp", grad_accum_steps=7, pipeline_schedule=schedule)


def test_more_stages_than_blocks():
    words = {"strategy": "pp", "grad_accum_steps": 32, "pipeline_schedule": "interleaved"}
    with refused("pp=16 needs 32 stages", "24 blocks", "; set pp=8 dp_replicate=2; or"):
        layout_for(16, **words)
    layout_for(16, **words, pp=8, dp_replicate=2)
    with refused("pp=16 needs 32 stages", "; or model=gpt2-large"):
        layout_for(16, **words)


def test_blocks_are_looked_at_before_micro_batches():
    with refused("pp=99 needs 99 stages but gpt2 has 12", "set pp=11 dp_replicate=9 grad_accum"):
        layout_for(99, strategy="pp", model="gpt2")


def test_a_product_that_is_not_the_world_size_names_what_would_be():
    enough = {"grad_accum_steps": 8}
    with refused("pp 2 x dp_shard 3 x tp 2", "; start 12 processes, or set dp_shard=2; or"):
        layout_for(8, strategy="3d", dp_shard=3, **enough)
    with refused("pp 2 x dp_shard -1 x tp 3", "8 processes; set tp=1; or"):
        layout_for(8, strategy="3d", tp=3, model="gpt2-xl", **enough)
    with refused("mesh pp 99 does not make 2 processes; set pp=2 (the mesh"):
        layout_for(2, strategy="pp", pp=99, **enough)
    with refused("start a multiple of 2 processes, or set pp=7 (the mesh"):
        layout_for(7, strategy="hybrid")


@pytest.mark.parametrize(
    ("world_size", "axes"),
    [(8, {}), (8, {"dp_replicate": 2, "dp_shard": 1}), (16, {"tp": 4}), (12, {"pp": 3})],
)
def test_tp_is_innermost_and_every_place_is_taken_once(world_size, axes):
    built = build_config({"strategy": "3d", **axes})
    strategy = load_strategy(built)
    places = []
    for rank in range(world_size):
        topology = build_topology(
            strategy, world_size=world_size, rank=rank, local_rank=rank, device_type="cpu"
        )
        places.append((topology.pp_rank, topology.dp_rank, topology.tp_rank))
    assert places == sorted(set(places)), "rank order is (pp, dp, tp), tp fastest"
    assert len(places) == world_size


def test_axes_of_strategies_that_have_none():
    with refused("tp=2 cannot be set with strategy='zero2'", "3d"):
        layout_for(2, strategy="zero2", tp=2)
