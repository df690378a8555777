"""Tests on real GPUs. Run them with `bash tests/run.sh tests/gpu -m gpu`."""

import gzip
import os
import sys

import pytest
import torch

from distributed_training.models.attention import attend, describe_documents
from distributed_training.parallel.lora import move_embedding_to_host
from tests.conftest import assert_ok, only_record, run_command, settings
from tests.parallel.test_gated_mlp import gated_mlp, gradients, make_mlp, separately
from tests.parity.support import (
    BASE,
    DEEP,
    GLOBAL_BATCH,
    assert_equal_runs,
    assert_resumes,
    assert_same_bits,
    mesh,
    micro_batches,
    run_cases,
)
from tests.parity.test_layouts import CASES as LAYOUTS
from tests.parity.test_packing import PACKED
from tests.pool import SCRIPT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
    str(index) for index in range(torch.cuda.device_count())
)
STRATEGIES = ("dp", "fsdp", "zero1", "zero2", "zero3", "offload")
# These runs use fp32 without TF32. Results differ slightly, because the order of summation differs
# between GPU kernels.
EAGER = {**BASE, "compile": False, "batch_size": 8}


@pytest.fixture(scope="module")
def runs():
    """Return the results of runs on one GPU: an eager reference run, and compiled runs with every
    strategy, with and without gradient accumulation."""
    cases = {"reference": {**EAGER, "strategy": "dp"}}
    for strategy in STRATEGIES:
        values = {**BASE, "strategy": strategy, "compile": True}
        cases[strategy] = {**values, "batch_size": 8}
        cases[f"{strategy} accumulating"] = {**values, "batch_size": 4, "grad_accum_steps": 2}
    return run_cases(cases, 1, steps=6, CUDA_VISIBLE_DEVICES=VISIBLE.split(",")[0])


@pytest.mark.parametrize("suffix", ["", " accumulating"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_strategy_equals_eager_on_one_gpu(strategy, suffix, runs):
    assert_equal_runs(runs[strategy + suffix], runs["reference"])


@pytest.mark.parametrize("data", ["packed", "padded"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_layouts_on_several_gpus_equal_one_gpu(count, data):
    """Every layout gives the same results as an eager run on one GPU. All layouts use NCCL. Layouts
    that can be compiled use compiled code."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs")
    base = {**DEEP, "pack": data == "packed"}
    cases = {
        name: {**base, **values}
        for name, values in LAYOUTS[count].items()
        if name.startswith(f"{data}/") and not name.endswith("infinity")
    }
    cases["hybrid"] = {**base, "strategy": "hybrid", "global_batch": GLOBAL_BATCH}
    whole = {**base, "compile": False, "strategy": "dp", "batch_size": GLOBAL_BATCH}
    one, *_ = gpus = VISIBLE.split(",")
    reference = run_cases({data: whole}, 1, steps=6, CUDA_VISIBLE_DEVICES=one)[data]
    found = run_cases(cases, count, steps=6, CUDA_VISIBLE_DEVICES=",".join(gpus[:count]))
    for name, values in found.items():
        print(f"comparing {name}")
        assert_equal_runs(values, reference)


@pytest.mark.parametrize(("groups", "value_size"), [(8, 64), (2, 64), (8, 32)])
@pytest.mark.parametrize("compiled", [False, True])
def test_document_attention_kernel_equals_the_document_mask(groups, value_size, compiled):
    ends = torch.tensor([[5, 70, 128, 128], [128, 128, 128, 128]], device="cuda")
    positions = torch.tensor([[*range(5), *range(65), *range(58)], [*range(128)]], device="cuda")
    shapes = [
        (2, heads, 128, size) for heads, size in ((8, 64), (groups, 64), (groups, value_size))
    ]
    torch.manual_seed(0)
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    found = []
    for dropout in (0.0, 0.1):  # with dropout, attention uses a mask
        documents = describe_documents(
            positions, ends, dtype=torch.bfloat16, head_sizes={64}, dropout=dropout, max_documents=5
        )
        assert (documents.mask is None) == (dropout == 0)
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        function = torch.compile(attend) if compiled else attend
        y = function(*own, documents)
        found.append([y, *torch.autograd.grad(y.square().sum(), own)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


NUM_REPLAYED = 30  # the evaluation halfway comes after the capture
# Layouts whose steps are replayed as one CUDA graph and compared with eager steps. DeepSpeed
# strategies have no CUDA graphs.
DROPPING = {"dropout": 0.2}
REPLAYED = {
    1: {
        "dp": {"strategy": "dp", **micro_batches(1)},
        "dp accumulating": {"strategy": "dp", **micro_batches(4), **DROPPING},
        "dp fp16": {"strategy": "dp", **micro_batches(2), "precision": "fp16"},
        "dp chunked": {"strategy": "dp", **micro_batches(1), "loss_chunk_tokens": 100},
        "dp records": {"strategy": "dp", **micro_batches(2), **PACKED},
    },
    2: {
        "fsdp": {"strategy": "fsdp", **micro_batches(2), **DROPPING},
        "fsdp fp16": {"strategy": "fsdp", **micro_batches(2), "precision": "fp16"},
        "tp2": {**mesh(tp=2), **micro_batches(2)},
        "pp2-zb-v": {**mesh(pp=2), **micro_batches(4), "pipeline_schedule": "zb-v"},
        "pp2-zb-v records": {
            **mesh(pp=2), **micro_batches(4), "pipeline_schedule": "zb-v", **PACKED,
        },
    },
    4: {
        "hsdp2x2": {"strategy": "fsdp", "dp_replicate": 2, **micro_batches(2)},
        "shard2-tp2": {**mesh(dp_shard=2, tp=2), **micro_batches(2)},
        "copies2-tp2": {**mesh(dp_replicate=2, tp=2), **micro_batches(1)},
        "pp4-zb-h1": {**mesh(pp=4), **micro_batches(8), "pipeline_schedule": "zb-h1"},
        "shard2-pp2-interleaved": {
            **mesh(dp_shard=2, pp=2), **micro_batches(4), "pipeline_schedule": "interleaved",
        },
        "tp2-pp2": {**mesh(tp=2, pp=2), **micro_batches(4)},
    },
    8: {"shard2-tp2-pp2": {**mesh(dp_shard=2, tp=2, pp=2), **micro_batches(4)}},
}  # fmt: skip


def exactly(count):
    """Return environment variables that select the first `count` GPUs and deterministic cuBLAS
    kernels."""
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(VISIBLE.split(",")[:count])}
    return {**gpus, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("count", REPLAYED)
def test_cuda_graph_steps_equal_steps_without_a_graph_bitwise(count, precision):
    if torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs")
    base = {**DEEP, "pack": False, "precision": precision}
    cases = {
        f"{name}, graph={graph}": {**base, **values, "cuda_graphs": graph}
        for name, values in REPLAYED[count].items()
        for graph in (True, False)
    }
    found = run_cases(cases, count, function="train_exactly", steps=NUM_REPLAYED, **exactly(count))
    for name in REPLAYED[count]:
        print(f"comparing {name}")
        replayed, launched = (found[f"{name}, graph={graph}"] for graph in (True, False))
        assert (replayed["replayed"], launched["replayed"]) == (True, False)
        assert_same_bits(replayed, launched)


@pytest.mark.parametrize("count", [1, 2])
def test_inputs_that_wait_on_the_host_change_no_bits(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs")
    layouts = {
        1: {
            "dp": {"strategy": "dp", **micro_batches(2)},
            "dp eager": {"strategy": "dp", **micro_batches(1), "compile": False},
            "dp lora": {"strategy": "dp", **micro_batches(1), "lora_rank": 4},
        },
        2: {
            "fsdp": {"strategy": "fsdp", **micro_batches(2), "checkpointed_blocks": 4},
            "tp2": {**mesh(tp=2), **micro_batches(1)},
            "pp2": {**mesh(pp=2), **micro_batches(4)},
        },
    }[count]
    cases = {
        f"{name}, {mode}": {**DEEP, **values, "activation_checkpointing": mode}
        for name, values in layouts.items()
        for mode in ("full", "offload", "offload-attention")
        if mode != "offload-attention" or "eager" not in name
    }
    found = run_cases(cases, count, function="train_exactly", steps=NUM_REPLAYED, **exactly(count))
    for case, others in found.items():
        print(f"comparing {case}")
        full = found[f"{case.split(', ')[0]}, full"]
        assert others["replayed"] == full["replayed"]
        # Different graphs are compiled for offload-attention, which round differently.
        compare = assert_equal_runs if "attention" in case else assert_same_bits
        compare(others, full)


def test_a_failed_capture_continues_without_a_graph():
    count = min(2, torch.cuda.device_count())
    values = {**DEEP, **micro_batches(1), "strategy": "dp" if count == 1 else "fsdp"}
    expected, found = (
        run_cases(
            {"dp or fsdp": {**values, "cuda_graphs": failing}}, count, function="train_exactly",
            steps=NUM_REPLAYED, failing=failing, **exactly(count),
        )["dp or fsdp"]
        for failing in (False, True)
    )  # fmt: skip
    assert not found["replayed"]
    assert_same_bits(found, expected)


def test_a_resumed_run_with_cuda_graphs_is_bitwise_equal():
    count = min(2, torch.cuda.device_count())
    cases = {
        "dp": {**DEEP, **micro_batches(1), "strategy": "dp"},
        "fsdp": {**DEEP, **micro_batches(1), "strategy": "fsdp" if count > 1 else "dp"},
    }
    assert_resumes(cases, count, steps=NUM_REPLAYED, **exactly(count))


def run_script(values, count=1, *options):
    processes = ["--num_gpus", str(count)] if count > 1 else []
    command = [sys.executable, SCRIPT, *settings(values), *processes, *options]
    return run_command(command, CUDA_VISIBLE_DEVICES=",".join(VISIBLE.split(",")[:count]))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_and_records_memory(precision, tmp_path):
    values = {
        **BASE, "strategy": "dp", "precision": precision, "output_dir": tmp_path, "epochs": 1,
        "num_samples": 320, "max_length": 64, "warmup_steps": 0,
    }  # fmt: skip
    assert_ok(run_script(values))
    record = only_record(tmp_path)
    assert record["status"] == "ok"
    assert record["loss_curve"][-1][1] < record["loss_curve"][0][1] - 0.5
    assert record["memory"]["peak_reserved_bytes"] > record["memory"]["peak_allocated_bytes"] / 2
    assert_ok(run_command([sys.executable, SCRIPT, "eval", record["run_dir"]]))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_trace_has_kernels(graphs, tmp_path):
    values = {**BASE, "strategy": "dp", "profile": 2, "max_steps": 20, "num_samples": 320}
    assert_ok(run_script({**values, "cuda_graphs": graphs, "output_dir": tmp_path}))
    (file,) = tmp_path.glob("latest/trace-rank0.json.gz")
    assert b'"cat": "kernel"' in gzip.decompress(file.read_bytes())


def test_out_of_memory_is_recorded_and_explained(tmp_path):
    values = {
        "model": "gpt2-large", "dataset": "embedded", "tokenizer": "embedded", "weights": "random",
        "strategy": "dp", "batch_size": 2048, "max_length": 1024, "epochs": 1, "num_samples": -1,
        "output_dir": tmp_path, "compile": False, "eval_samples": 1, "checkpoint_every": 0,
    }  # fmt: skip
    result = run_script(values, 1, "--force")  # without --force, the run is rejected
    assert result.returncode == 1
    assert "Out of GPU memory" in result.stderr
    assert "num_microbatches=" in result.stderr
    assert "Traceback" not in result.stderr
    assert only_record(tmp_path)["status"] == "oom"


def test_an_embedding_in_host_memory_returns_the_same_rows():
    layer = torch.nn.Embedding(4096, 256, device="cuda", dtype=torch.bfloat16)
    layer.requires_grad_(False)
    ids = torch.randint(4096, (2, 64), device="cuda")
    expected = layer(ids)
    before = torch.cuda.memory_allocated()
    move_embedding_to_host(layer)
    assert torch.cuda.memory_allocated() == before - layer.weight.nbytes
    assert torch.equal(layer(ids), expected)
    assert torch.equal(torch.compile(layer)(ids), expected)


@pytest.mark.parametrize(("rank", "activation"), [(16, "silu"), (24, "gelu")])
def test_the_fused_mlp_is_as_exact_as_separate_operations(rank, activation):
    """parallel/gated_mlp.py in bf16, and the same MLP with separate operations in bf16, are
    compared with separate operations in fp32."""
    layers = make_mlp(rank, "cuda")
    exact = gradients(separately, layers, activation)
    separate, fused = (
        gradients(compute, layers, activation, torch.bfloat16)
        for compute in (separately, gated_mlp.compute)
    )
    for values, others, reference in zip(fused, separate, exact, strict=True):
        error, usual = ((v.float() - reference).norm() for v in (values, others))
        assert 0 < error < 1.2 * usual < 0.2 * reference.norm()
