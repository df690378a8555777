"""Test that experts, their adapters and their quantized matrices compute what separate products of
each expert do. Tests on a GPU are in tests/gpu/test_hub_kernels.py."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from distributed_training.models import find_model
from distributed_training.models.adapters import ADAPTER_WEIGHTS
from distributed_training.models.attention import Documents, mask_documents
from distributed_training.models.decoder import EXPERT_ENDS
from distributed_training.models.hub import experts, measure_size
from distributed_training.models.hub.attention import attention
from distributed_training.models.peft import Adapters, read_folder, save_adapters
from distributed_training.models.quantized import dequantized_source, quantize_matrices
from distributed_training.models.wide_attention import wide_attention
from distributed_training.parallel.lora import apply_lora
from distributed_training.records.record import METRICS_FILE
from distributed_training.settings.config import Config
from tests.conftest import assert_ok, run_command, settings
from tests.models.hub_folders import make_folder
from tests.models.theirs import gpt_oss_attention, logits, small_config
from tests.pool import SCRIPT
from tests.reference import call_reference
from tests.support import assert_near, read_model

NUM_EXPERTS, HIDDEN, INNER, TOKENS, RANK = 6, 64, 32, 40, 4
CPU = torch.device("cpu")


def gate(x):
    first, second = x.chunk(2, -1)
    return F.silu(first) * second


def make_layer(lora):
    layer = torch.nn.Module()
    vars(layer).update(
        num_experts=NUM_EXPERTS, has_gate=True, has_bias=False, is_transposed=False,
        has_post_expert_norm=False, _apply_gate=gate,
    )  # fmt: skip
    layer.register_buffer(EXPERT_ENDS, torch.zeros(NUM_EXPERTS, dtype=torch.int32))
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        stack = torch.randn(NUM_EXPERTS, rows, columns) / columns**0.5
        layer.register_parameter(name, torch.nn.Parameter(stack, requires_grad=not lora))
        if lora:
            a = torch.randn(NUM_EXPERTS, RANK, columns) / columns**0.5
            b = torch.randn(NUM_EXPERTS, rows, RANK)
            layer.add_module(f"{name}_adapter", experts.StackAdapter(a, b, 2.0))
    return layer


def compute_separately(layer, x, chosen, weights):
    def matrix(name, expert):
        adapter = getattr(layer, f"{name}_adapter", None)
        change = 0 if adapter is None else adapter.scale * adapter.b[expert] @ adapter.a[expert]
        return getattr(layer, name)[expert] + change

    y = torch.zeros_like(x)
    for expert in range(NUM_EXPERTS):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        hidden = gate(x[rows] @ matrix("gate_up_proj", expert).T)
        products = hidden @ matrix("down_proj", expert).T
        y = y.index_add(0, rows, products * weights[rows, places, None])
    return y


@pytest.mark.parametrize("chosen", [None, (0, 3), (5, 0)])  # at random, or the same for all tokens
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_experts_equal_separate_products(chosen, lora, compiled):
    layer = make_layer(lora)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weights = torch.rand(TOKENS, 2, requires_grad=True)
    draws = [
        torch.tensor(chosen or torch.randperm(NUM_EXPERTS)[:2].tolist()) for _ in range(TOKENS)
    ]
    values = [x, weights, *(p for p in layer.parameters() if p.requires_grad)]
    compute = experts.experts
    if compiled:
        compute = torch.compile(compute, fullgraph=True, backend="aot_eager")
    found, expected = (
        [y, *torch.autograd.grad(y.square().sum(), values)]
        for y in (function(layer, x, torch.stack(draws), weights)
                  for function in (compute, compute_separately))
    )  # fmt: skip
    for actual, wanted in zip(found, expected, strict=True):
        assert_near(actual, wanted)
    counts = torch.stack(draws).flatten().bincount(minlength=NUM_EXPERTS)
    assert torch.equal(layer.latest_ends, counts.cumsum(0))


def check_names_of_vllm(files, tensors, kind):
    """Check what vLLM's LoRAModel.from_local_checkpoint (lora/lora_model.py) expects as names, and
    its LoRAModelManager._stack_moe_lora_weights as shapes, read in November 2026."""
    modules = {
        name[name.index("experts") :].partition(".lora_")[0] for name in files if "experts." in name
    }
    if kind == "qwen3_moe":
        parts = ("gate_proj", "up_proj", "down_proj")
        assert modules == {f"experts.{expert}.{part}" for expert in range(4) for part in parts}
        return
    assert modules == {"experts", "experts.base_layer"}
    for module, stack in (("experts.base_layer", "gate_up_proj"), ("experts", "down_proj")):
        a, b = (
            files[f"base_model.model.model.layers.0.mlp.{module}.lora_{x}.weight"] for x in "AB"
        )
        adapter = f"blocks.0.mlp.experts.{stack}_adapter"
        assert torch.equal(a.unflatten(0, (4, -1)), tensors[f"{adapter}.a"])
        assert torch.equal(b.unflatten(1, (-1, 4)).permute(2, 0, 1), tensors[f"{adapter}.b"])


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text"])
def test_adapters_of_experts_are_those_of_peft(kind, tmp_path):
    """PEFT's files have an adapter per expert (qwen3_moe), or one for all experts."""
    folder = make_folder(kind, tmp_path / "model")
    spec = find_model(str(folder))
    targets = "q_proj,experts.gate_up_proj,experts.down_proj"
    config = Config(lora_rank=RANK, lora_alpha=8.0, lora_targets=targets)
    model = read_model(spec, folder)
    apply_lora(model, spec, config, CPU, {})
    tensors = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    for tensor in tensors.values():
        tensor.normal_(std=0.1)
    adapters = Adapters(
        spec=spec, tensors=tensors, config=config, base_fingerprint=None, origin=tmp_path
    )
    save_adapters(adapters, tmp_path / "adapters", str(folder))
    ids = torch.randint(spec.size.vocab_size, (2, 20))
    ours = model(ids)
    assert_near(call_reference(logits, folder, ids, adapters=tmp_path / "adapters"), ours)

    check_names_of_vllm(load_file(tmp_path / "adapters" / ADAPTER_WEIGHTS), tensors, kind)
    again = read_folder(spec, tmp_path / "adapters").tensors
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    merged = read_model(spec, folder)
    weights = {name: p.detach().clone() for name, p in merged.named_parameters()}
    read = adapters.merged(lambda name, slices: weights[name][slices])
    merged.load_state_dict({name: read(name, ()) for name in weights}, strict=False)
    assert_near(merged(ids), ours)


@pytest.mark.parametrize(
    ("model_type", "changes", "router"),
    [
        ("afmoe", {}, "mlp.router.gate"),
        ("hunyuan_v1_moe", {}, "mlp.gate.wg"),
        ("gemma4_text", {"enable_moe_block": True, "top_k_experts": 2}, "router.proj"),
    ],
)
def test_routers_have_no_adapters(model_type, changes, router):
    size = measure_size({**small_config(model_type).to_dict(), **changes})
    matrices = {name for kind in size.kinds for name in kind.hf_matrices}
    assert matrices - set(size.part_names(None)) == {router}


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_quantized_experts_have_4_bits(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    inner = "intermediate_size" if kind == "gpt_oss" else "moe_intermediate_size"
    sizes = {"hidden_size": 128, "head_dim": 32, inner: 64}
    folder = make_folder(kind, tmp_path, **sizes)
    spec = find_model(str(folder))
    weights = {name: p.detach() for name, p in read_model(spec, folder).named_parameters()}

    def source(name, slices):
        return weights[name][slices]

    model = spec.build_meta_model()
    read = quantize_matrices(model, source, CPU, "nf4")
    stack = "blocks.0.mlp.experts.down_proj"
    codes, scales = read(stack, ()), read(f"{stack}_scales", ())
    assert 8 * (codes.nbytes + scales.nbytes) < 5.1 * weights[stack].numel()
    module = model.get_submodule(stack.rpartition(".")[0])
    matrices = experts._dequantize(codes, scales, "nf4")
    stored = matrices.transpose(1, 2) if module.is_transposed else matrices
    rounded = dequantized_source(source, spec.size, "nf4", torch.float32)(stack, ())
    assert torch.equal(stored, rounded)
    assert (rounded - weights[stack]).norm() < 0.1 * weights[stack].norm()


@pytest.mark.parametrize("masked", [False, True])
def test_wide_attention_equals_torch(masked, monkeypatch):
    monkeypatch.setattr("distributed_training.models.wide_attention._CHUNK", 16)
    tensors = [torch.randn(2, heads, 40, 24, requires_grad=True) for heads in (6, 2, 2)]
    positions = torch.cat([torch.arange(13), torch.arange(27)]).expand(2, -1)
    mask = mask_documents(positions, torch.float32) if masked else None
    expected = F.scaled_dot_product_attention(
        *tensors, attn_mask=mask, is_causal=not masked, enable_gqa=True, scale=0.3
    )
    found = wide_attention(*tensors, mask, 0.3)
    for actual, wanted in zip(
        (found, *torch.autograd.grad(found.square().sum(), tensors)),
        (expected, *torch.autograd.grad(expected.square().sum(), tensors)),
        strict=True,
    ):
        assert_near(actual, wanted)


class GptOssAttention(SimpleNamespace):
    """Values that transformers' function for attention reads, under the name of its module."""

    __module__ = gpt_oss.__name__


@pytest.mark.processes
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("compiled", [False, True])
def test_sinks_equal_transformers(window, compiled):
    tensors = [torch.randn(2, heads, 40, 8, requires_grad=True) for heads in (6, 2, 2)]
    sinks = torch.randn(6, requires_grad=True)
    module = GptOssAttention(is_causal=True, num_key_value_groups=3, sinks=sinks, training=True)
    positions = torch.cat([torch.arange(13), torch.arange(27)]).expand(2, -1)
    documents = Documents(positions, mask=mask_documents(positions, torch.float32))
    options = {"documents": documents, "sliding_window": window, "scaling": 0.3, "s_aux": sinks}
    ours = attention
    if compiled:
        ours = torch.compile(attention, fullgraph=True, backend="aot_eager")
    y, _ = ours(module, *tensors, None, **options)
    found = y, *torch.autograd.grad(y.square().sum(), [*tensors, sinks])
    far = torch.ones(40, 40, dtype=torch.bool).tril(-(window or 40))
    mask = documents.mask.masked_fill(far, -torch.inf)
    expected = call_reference(gpt_oss_attention, tensors, sinks, mask, 0.3)
    for actual, wanted in zip(found, expected, strict=True):
        assert_near(actual, wanted)


def test_a_run_exports_the_adapters_of_experts(tmp_path):
    folder = make_folder("qwen3_moe", tmp_path / "model")
    values = {
        "strategy": "dp", "model": folder, "tokenizer": "embedded", "dataset": "embedded",
        "max_steps": 2, "max_length": 32, "num_samples": 16, "eval_samples": 2, "generate": None,
        "lora_rank": 2, "lora_targets": "experts.down_proj", "output_dir": tmp_path / "runs",
    }  # fmt: skip
    assert_ok(run_command([sys.executable, SCRIPT, *settings(values)]))
    run_dir = tmp_path / "runs" / "latest"
    row = json.loads((run_dir / METRICS_FILE).read_text().splitlines()[-1])
    assert row["grad_norm"] > 0
    assert 1 <= row["expert_load"] <= 2  # each token has two of four experts
    (file,) = run_dir.glob(f"hf/{ADAPTER_WEIGHTS}")
    names = load_file(file).keys()
    assert {name.split(".")[-3] for name in names} == {"down_proj"}
    assert len(names) == 2 * 2 * 4  # A and B of each expert in two blocks
