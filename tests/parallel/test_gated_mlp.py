"""Test the parts of blocks that are computed together if they have LoRA adapters: gated MLPs
(parallel/gated_mlp.py), and layers with the same input (parallel/lora.py)."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from distributed_training.models import find_model
from distributed_training.models.decoder import Linear
from distributed_training.models.hub.fusions import ACTIVATIONS
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.models.quantized import quantize_matrices
from distributed_training.parallel import blocks
from distributed_training.parallel.lora import Adapter, apply_lora
from distributed_training.settings.config import Config
from tests.models.hub_folders import make_folder
from tests.planner.helpers import gpu, plan_for
from tests.support import read_model

CPU = torch.device("cpu")
IDS = torch.arange(40).view(2, 20)
HIDDEN, UNITS = 32, 128
SHAPES = (HIDDEN, UNITS), (HIDDEN, UNITS), (UNITS, HIDDEN)
QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
GATED = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


gated_mlp = pytest.importorskip("distributed_training.parallel.gated_mlp")  # needs Triton


def make_mlp(rank, device="cpu"):
    """Return gate, up and down, with adapters."""
    torch.manual_seed(0)
    config = SimpleNamespace(lora_alpha=2.0 * rank, lora_rank=rank, lora_dropout=0.0)
    layers = []
    for columns, rows in SHAPES:
        layer = Linear(columns, rows, bias=False).requires_grad_(False)
        a, b = torch.randn(rank, columns) / columns**0.5, torch.randn(rows, rank) / 8
        layer.adapter = Adapter(a, b, config)
        layers.append(layer.to(device))
    return layers


def separately(gate, up, down, x, activation):
    return down(ACTIVATIONS[activation](gate(x)) * up(x))


def gradients(compute, layers, activation, dtype=torch.float32):
    """Return an MLP's output, and the gradients of its input and its adapters."""
    x, factor = torch.randn(2, 2, 75, HIDDEN, generator=torch.Generator().manual_seed(0)).to(
        layers[0].weight.device
    )
    x = x.to(dtype).requires_grad_()
    output = compute(*layers, x, activation)
    adapters = [tensor for layer in layers for tensor in layer.adapter.parameters()]
    return [output, *torch.autograd.grad((output * factor).sum(), [x, *adapters])]


@pytest.mark.parametrize(("rank", "activation"), [(4, "silu"), (16, "gelu"), (24, "silu")])
def test_a_fused_mlp_equals_separate_operations(rank, activation):
    layers = make_mlp(rank)
    found, expected = (gradients(f, layers, activation) for f in (gated_mlp.compute, separately))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()


def adapted_model(folder, base_dtype=None, num_hidden_layers=2, **values):
    """Return a model with adapters, and its adapters' parameters."""
    shape = {"hidden_size": 64, "intermediate_size": UNITS, "num_hidden_layers": num_hidden_layers}
    make_folder("qwen2", folder, **shape)
    spec = find_model(str(folder))
    model, source = spec.build_meta_model(), spec.weights_source(folder)
    if base_dtype:
        source = quantize_matrices(model, source, CPU, base_dtype)
    InitialWeights(source=source).fill(model, CPU)
    apply_lora(model, spec, Config(lora_rank=4, **values), CPU, {})
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number, parameter in enumerate(adapters):
        torch.manual_seed(number)
        torch.nn.init.normal_(parameter, std=0.2)
    return model, adapters


def adapter_gradients(model, adapters):
    return torch.autograd.grad(model(IDS, IDS), adapters)


@pytest.mark.parametrize("base_dtype", [None, "nf4", "fp8"])
def test_only_mlps_with_all_adapters_are_fused(base_dtype, tmp_path):
    model, adapters = adapted_model(tmp_path, base_dtype)
    expected = adapter_gradients(model, adapters)
    mlps = [block.mlp for block in model.blocks.values()]
    classes = {type(mlp) for mlp in mlps}
    gated_mlp.fuse_gated_mlps(model, "q_proj,gate_proj,down_proj")
    assert {type(mlp) for mlp in mlps} == classes
    gated_mlp.fuse_gated_mlps(model, None)
    assert len({type(mlp) for mlp in mlps} - classes) == 1
    for one, other in zip(adapter_gradients(model, adapters), expected, strict=True):
        # fp8 also rounds the activations.
        assert (one - other).norm() < (1e-2 if base_dtype == "fp8" else 1e-5) * other.norm()


@pytest.mark.parametrize(
    ("targets", "base_dtype"), [(None, None), ("q_proj,v_proj,up_proj", None), (None, "nf4")]
)
def test_layers_with_the_same_input_are_computed_together(targets, base_dtype, tmp_path):
    model, adapters = adapted_model(tmp_path, base_dtype, lora_targets=targets)
    layers = [layer for layer in model.modules() if getattr(layer, "adapter", None)]
    groups = [layer.adapter.group for layer in layers if layer.adapter.group]
    assert sorted(map(len, groups)) == ([2, 2] if targets else [2, 2, 3, 3])
    attention = model.blocks["0"].self_attn
    assert [*attention.q_proj.adapter.group][-1] is attention.v_proj
    found = adapter_gradients(model, adapters)
    for layer in layers:
        layer.adapter.group = ()
    for one, other in zip(found, adapter_gradients(model, adapters), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_layers_with_and_without_biases_are_computed_separately(tmp_path):
    spec = find_model(str(make_folder("qwen2", tmp_path)))
    model = read_model(spec, tmp_path)
    first, second = (block.self_attn for block in model.blocks.values())
    first.k_proj.bias = None
    apply_lora(model, spec, Config(lora_rank=4), CPU, {})
    assert not first.q_proj.adapter.group
    assert len(second.q_proj.adapter.group) == 3
    model(IDS, IDS).backward()


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_blocks_share_their_graphs(mode, tmp_path):
    model, adapters = adapted_model(tmp_path, num_hidden_layers=4)
    expected = adapter_gradients(model, adapters)
    gated_mlp.fuse_gated_mlps(model, None)
    blocks.apply_checkpointing(model, mode, compiled=True)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks.values():
        block.forward = blocks._compile(block.forward, counter)
    found = adapter_gradients(model, adapters)
    assert counter.frame_count == 2  # The first block's input needs no gradient.
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize(
    ("kind", "changes", "same_inputs", "gated_mlps"),
    [
        ("llama", {}, {QKV, GATED[:2]}, {(*GATED, "silu")}),
        ("llama", {"mlp_bias": True}, {QKV, GATED[:2]}, set()),
        ("olmo2", {}, {QKV, GATED[:2]}, {(*GATED, "silu")}),
        ("gemma2", {}, {QKV, GATED[:2]}, {(*GATED, "gelu")}),
        ("llama", {"hidden_act": "gelu"}, {QKV, GATED[:2]}, set()),  # without tanh
        ("phi3", {}, set(), set()),
        ("falcon_h1", {}, {QKV, tuple(f"feed_forward.{x}_proj" for x in ("up", "gate"))},
         {(*(f"feed_forward.{x}_proj" for x in ("gate", "up", "down")), "silu")}),
    ],
)  # fmt: skip
def test_tracing_finds_what_can_be_computed_together(
    kind, changes, same_inputs, gated_mlps, tmp_path
):
    for block in find_model(str(make_folder(kind, tmp_path, **changes))).size.kinds:
        assert {*block.same_inputs} == same_inputs
        assert {*block.gated_mlps} == gated_mlps


@pytest.mark.parametrize(
    ("values", "machine", "is_fused"),
    [
        ({}, {}, True),
        ({"lora_rank": 64}, {}, True),
        ({"lora_rank": 65}, {}, False),
        ({"lora_rank": 33}, {"compute_capability": (7, 5)}, False),
        ({"lora_dropout": 0.1}, {}, False),
        ({"precision": "fp32"}, {}, False),
        ({"strategy": "tp"}, {}, False),
        ({"strategy": "zero2"}, {}, False),
        ({}, {"num_gpus": 0}, False),
        ({"lora_rank": 0}, {}, False),
    ],
)
def test_the_plan_says_whether_kernels_compute_gated_mlps(values, machine, is_fused, tmp_path):
    values = {"strategy": "dp", "lora_rank": 16, "model": "Qwen3-0.6B", **values}
    plan = plan_for(tmp_path, gpu(**machine), 2, checked=False, **values)
    assert plan.fuses_gated_mlps == is_fused
