"""Test that split and unsplit backward passes give the same gradients and need the same number of
FLOPs, also with weights that are rounded once per step."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from distributed_training.models import ModelSpec, find_model, gpt2
from distributed_training.parallel.blocks import apply_compile
from distributed_training.parallel.pipeline import RoundedWeights
from distributed_training.parallel.zero_bubble import WeightGradients
from distributed_training.settings.files import ROOT
from distributed_training.settings.request import build_config
from tests.support import draw_model

MODELS = {"gpt2": "gpt2-tiny", "another family": str(ROOT / "tests/models/grouped")}
TOKENS = 2 * 16  # per micro-batch


def build(name):
    return draw_model(find_model(MODELS.get(name, MODELS["gpt2"])), seed=0)


def build_bf16():
    model = build("gpt2")
    model.compute_dtype = torch.bfloat16
    return model


def micro_batches(count):
    ids = torch.randint(2048, (count, 2, 17), generator=torch.Generator().manual_seed(5))
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]


def run_split_backward(model, batches):
    """Run all forward passes, the first parts of all backward passes, and all second parts."""
    weights, second_parts = WeightGradients(model, (1, 1)), []
    for loss in [model(*batch) for batch in batches]:
        loss.backward()
        second_parts.append(weights.build_dw_runner())
    for second_part in second_parts:
        second_part()


@pytest.mark.parametrize("name", [*MODELS, "bf16", "padding"])
def test_split_and_unsplit_backward_give_equal_gradients(name):
    """With bf16, weights are rounded once per step and gradients are fp32."""
    model, batches = build_bf16() if name == "bf16" else build(name), micro_batches(3)
    if name == "padding":
        model.token_embedding.padding_idx = int(batches[0][0][0, 0])
    expected, dtype = copy.deepcopy(model), model.compute_dtype or torch.float32
    with RoundedWeights(expected, dtype):
        for batch in batches:
            expected(*batch).backward()
    with RoundedWeights(model, dtype):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        run_split_backward(model, batches)
    # The embedding is used at both ends, and the two terms of its gradient are added in different
    # orders and dtypes. In a pipeline, each stage has only one of the terms.
    for (key, parameter), whole in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert parameter.grad.dtype == torch.float32
        is_embedding = parameter is model.token_embedding.weight
        tolerance = 4 * torch.finfo(dtype).eps if is_embedding else 0.0
        assert (parameter.grad - whole.grad).abs().max() <= tolerance * whole.grad.max(), key


def test_blocks_share_one_compiled_graph(monkeypatch):
    """All blocks share one compiled graph, also within DDP, which torch would split at DDP's
    buckets. With one graph per block, the ninth block would run uncompiled, because torch compiles
    a function at most eight times."""
    replicas = SimpleNamespace(bucket_bytes_cap=1)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", replicas)
    size = gpt2.gpt2_size(vocab_size=2048, num_layers=3, num_heads=2, hidden_size=16)
    model = draw_model(ModelSpec(label="", family="gpt2", size=size), seed=0)
    counter = CompileCounterWithBackend("aot_eager")
    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_options: compile_with(function, backend=counter)
    )
    apply_compile(
        model, build_config({"compile": True, "loss_chunk_tokens": 0}), compile_outer_layers=False
    )
    run_split_backward(model, micro_batches(2))
    assert counter.frame_count == 2  # one graph for the blocks and one for the loss


def test_split_and_unsplit_backward_need_equally_many_flops():
    def count_flops(function):
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    model, (batch,) = build("gpt2"), micro_batches(1)
    whole_flops = count_flops(model(*batch).backward)
    weights = WeightGradients(model, (1, 1))
    forward_flops = count_flops(lambda: model(*batch))
    loss = model(*batch)
    first_flops = count_flops(loss.backward)
    second_flops = count_flops(weights.build_dw_runner())
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    assert second_flops == 2 * TOKENS * sum(matrix.numel() for matrix in matrices)
    assert first_flops + second_flops == whole_flops
    assert forward_flops == count_flops(lambda: build("gpt2")(*batch))


def test_a_saved_loss_does_not_keep_activations_alive():
    """Losses must not keep activations alive, because a schedule keeps all micro-batches' losses
    until the end of the step."""
    model, (batch,) = build("gpt2"), micro_batches(1)
    weights = WeightGradients(model, (1, 1))
    loss = model(*batch)
    loss.backward()
    inputs = [weakref.ref(tap.matmul[1]) for tap in weights.pending]
    assert len(inputs) == 4 * model.size.num_layers
    weights.build_dw_runner()()
    assert all(x() is None for x in inputs)
    assert loss.grad_fn


def test_an_error_leaves_the_fp32_parameters_in_place():
    model = build_bf16()
    with pytest.raises(ZeroDivisionError), RoundedWeights(model, torch.bfloat16):
        raise ZeroDivisionError
    assert {p.dtype for p in model.parameters()} == {torch.float32}
