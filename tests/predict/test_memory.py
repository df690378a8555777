"""Compare peak memory with sums computed by hand, tensor by tensor, and model state with published
figures."""

import dataclasses
import math

import pytest
import torch

from distributed_training.models import find_model
from distributed_training.models.gpt2 import SIZES
from distributed_training.planner.data import read_data
from distributed_training.planner.make_plan import draft_plan, make_plan
from distributed_training.predict.mechanism import pipeline_ranks
from distributed_training.predict.memory import estimate_memory
from distributed_training.predict.predict import local_cluster, parse_cluster
from distributed_training.predict.rates import FITTED
from distributed_training.settings.detect import torch_has_cuda
from distributed_training.settings.files import ROOT, load_object
from distributed_training.settings.request import build_config
from tests.planner.helpers import plan_for
from tests.support import CPU_MACHINE, GPU_MACHINE, named_strategy, small_text

SIZE = SIZES["gpt2"]
B, T, D, L, H = 32, 1024, 768, 12, 12
TOKENS, VOCABULARY = B * T, 50304


def peak(tmp_path, num_processes=1, **config):
    values = {"model": "gpt2", "batch_size": B, "max_length": T, "checked": False, **config}
    machine = dataclasses.replace(GPU_MACHINE, num_gpus=num_processes)
    return estimate_memory(plan_for(tmp_path, machine, num_processes, **values))


def test_a_compiled_dp_step_matches_a_hand_calculation(tmp_path):
    """When the loss is computed, memory holds fp32 weights, Adam moments, rounded weights, the
    activations of 12 blocks, and logits. With a chunked loss, only one chunk's logits are held,
    together with the gradients of the hidden states and of the output layer's rows."""
    chunked = peak(tmp_path, strategy="dp").peak_by_component
    assert chunked["logits"] == 2 * (TOKENS * D + VOCABULARY * D + 8192 * VOCABULARY)
    memory = peak(tmp_path, strategy="dp", loss_chunk_tokens=0).peak_by_component
    padded = SIZE.num_parameters + (VOCABULARY - SIZE.vocab_size) * D
    assert memory["parameters"] == pytest.approx(4 * padded)
    assert memory["optimizer"] == pytest.approx(8 * padded)
    assert memory["copies"] == pytest.approx(2 * padded)
    assert memory["gradients"] == 0  # gradients grow while activations are freed
    # Values per token: x, its norm, q k v, attention, the residual sum, its norm, and the MLP's
    # hidden units twice.
    block = TOKENS * (2 * D * (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4) + 4 * H + 16)
    ends = 3 * TOKENS * 2 * D + 2 * VOCABULARY * D
    assert memory["activations"] == pytest.approx(L * block + ends)
    assert memory["logits"] == pytest.approx(2 * TOKENS * VOCABULARY)


def test_rank_0_of_a_v_schedule_has_the_first_and_last_stage(tmp_path):
    """In a V-shaped schedule, rank 0 has the first and the last stage. These stages contain blocks
    0 and 11, the embeddings, the final norm and the tied output layer."""
    config = {"strategy": "pp", "pipeline_schedule": "zb-v", "pipeline_cut": "1,5,5,1"}
    memory = peak(tmp_path, 2, **config).by_rank[0]
    assert memory["parameters"] == 4 * (2 * (12 * D**2 + 13 * D) + (2 * VOCABULARY + 1024 + 2) * D)


def test_ddp_keeps_gradients_in_buckets_and_fsdp_shards_state(tmp_path):
    one, two, four = (
        peak(tmp_path, count, strategy=name).peak_by_component
        for count, name in ((1, "dp"), (2, "dp"), (4, "fsdp"))
    )
    assert two["gradients"] == two["parameters"] == one["parameters"]
    assert four["parameters"] == pytest.approx(one["parameters"] / 4)
    assert four["optimizer"] == pytest.approx(one["optimizer"] / 4)
    around = VOCABULARY * D + SIZE.position_parameters + SIZE.final_norm_parameters
    assert four["copies"] == pytest.approx(2 * (around + 2 * SIZE.kinds[0].parameters))
    assert four["activations"] == one["activations"]


def test_without_compile_the_loss_is_kept_in_fp32(tmp_path):
    config = {"strategy": "dp", "loss_chunk_tokens": 0}
    compiled, eager = (peak(tmp_path, **config, compile=c).peak_by_component for c in (True, False))
    assert eager["logits"] == 6 * compiled["logits"]


def test_tensor_parallelism_saves_gathered_activations(tmp_path):
    """Without tp, a block keeps 16 values per token. With tp, 2 of these values are not sharded.
    The batch grows with the number of processes, so each quarter of the model processes four times
    as many tokens."""
    split = peak(tmp_path, 4, strategy="tp", num_microbatches=1).peak_by_component["activations"]
    alone = peak(tmp_path, 1, strategy="dp").peak_by_component["activations"]
    assert split / alone == pytest.approx(4 * (2 + 14 / 4) / 16, rel=0.05)


def test_the_first_stage_of_1f1b_matches_a_hand_calculation(tmp_path):
    """When the first stage of two runs a backward pass, it holds the activations of 6 blocks and
    the output of the stage for two micro-batches, and 8 receive buffers. With few tokens, memory
    peaks later, when compiled code rounds the embedding's gradient from 4 to 2 bytes per value. If
    the backward pass is split, this gradient does not exist."""
    config = {"strategy": "pp", "num_microbatches": 8, "pipeline_cut": "6,6"}
    tokens = 2 * TOKENS // 8
    block = tokens * (2 * 16 * D + 4 * H + 16)
    memory = peak(tmp_path, 2, **config, pipeline_schedule="1f1b").by_rank[0]
    expected = 2 * (6 * block + tokens * 2 * D) + tokens * 2 * (4 * D + D) + 8 * tokens * 2 * D
    assert memory["activations"] == pytest.approx(expected)
    config |= {"batch_size": 4, "max_length": 16}
    whole, split = (
        peak(tmp_path, 2, **config, pipeline_schedule=schedule).by_rank[0]["activations"]
        for schedule in ("1f1b", "zb-h1")
    )
    assert whole - split == pytest.approx(6 * VOCABULARY * D, rel=0.02)


def test_1f1b_holds_most_activations_on_the_first_rank(tmp_path):
    """Under 1F1B, rank r of p ranks keeps the activations of `p - r` micro-batches. Under GPipe,
    every rank keeps the activations of all micro-batches."""
    config = {"strategy": "pp", "pp": 4, "num_microbatches": 16}
    few, many = (
        [place["activations"] for place in peak(tmp_path, 4, **config, **schedule).by_rank]
        for schedule in ({"pipeline_schedule": "1f1b"}, {"pipeline_schedule": "gpipe"})
    )
    assert few == sorted(few, reverse=True)
    assert all(a >= b for a, b in zip(many, few, strict=True))
    assert many[0] == pytest.approx(4 * few[0], rel=0.1)


@pytest.mark.parametrize("dataset", ["", "ellmoor"])
def test_tokenizing_adds_ram_on_one_process_for_chats_or_without_a_cache(
    dataset, tmp_path, monkeypatch
):
    monkeypatch.setenv("DISTRIBUTED_TRAINING_CACHE", str(tmp_path / "cache"))
    values = {
        "model": "gpt2-tiny",
        "strategy": "dp",
        "dataset": dataset or str(small_text()),
        "num_samples": 4,
    }
    config = build_config({**values, "output_dir": str(tmp_path)})
    first, second, two = (
        make_plan(config, local_cluster(CPU_MACHINE, count, count), read_data)
        for count in (1, 1, 2)
    )
    saved = first.prediction["host_bytes"] - second.prediction["host_bytes"]
    assert saved == (0 if dataset else FITTED.process_bytes.tokenizing)
    assert two.prediction["host_bytes"] < first.prediction["host_bytes"]


def test_torch_for_cuda_needs_more_ram_even_without_a_gpu(tmp_path):
    needed = []
    for is_built_for_cuda in (False, True):
        machine = dataclasses.replace(CPU_MACHINE, torch_has_cuda=is_built_for_cuda)
        plan = plan_for(tmp_path, machine, 1, model="gpt2", strategy="dp", checked=False)
        needed.append(estimate_memory(plan).host_bytes)
    assert needed[1] - needed[0] == FITTED.process_bytes.cuda_libraries
    assert torch_has_cuda() == torch.backends.cuda.is_built()


@pytest.mark.parametrize("preset", ["laptop", "short-answers"])
def test_ram_of_a_preset_for_cpus_is_what_was_measured(preset, tmp_path):
    """Without compilation, a fifth of the RAM of tensors at the peak is of tensors that were
    freed."""
    record = load_object(ROOT / f"results/records/quality/{preset}.json", "record")
    measured = record["runs"]["seed 0"]["peak_host_bytes"]
    values = load_object(ROOT / f"configs/presets/{preset}.json", "preset")
    values |= {"weights": "random", "checked": False}
    values.pop("_comment")
    machine = dataclasses.replace(CPU_MACHINE, torch_has_cuda=True)
    plan = plan_for(tmp_path, machine, 1, **values)
    assert estimate_memory(plan).host_bytes == pytest.approx(measured, rel=0.05)


def test_a_save_copies_the_state_to_ram_if_it_fits(tmp_path):
    """The copy of fp32 weights and Adam moments is sharded over the ranks that hold the same
    parameters. If RAM is short, no copy is made."""
    four, none = (peak(tmp_path, 4, strategy="dp", checkpoint_every=every) for every in (None, 0))
    copied = four.host_bytes - none.host_bytes
    assert copied == pytest.approx(3 * four.peak_by_component["parameters"] / 4)
    small = dataclasses.replace(GPU_MACHINE, ram_bytes=4 * four.host_bytes - 1)
    plan = plan_for(tmp_path, small, 4, model="gpt2", strategy="dp", checked=False)
    assert estimate_memory(plan).host_bytes == none.host_bytes
    for_files = (peak(tmp_path, strategy="infinity", checkpoint_every=e) for e in (None, 0))
    assert len({each.host_bytes for each in for_files}) == 1, (
        "too large for RAM, so not copied there"
    )


def test_recomputing_rounds_weights_again(tmp_path):
    """The expected numbers count the tensors that a block saved when compiled with torch 2.13. With
    selective checkpointing, these tensors are the block's input, q k v, attention, the attention
    projection and the MLP's hidden units. Rounded weights are saved only without checkpointing. The
    peak occurs in the last block's backward pass, which has recomputed the whole block and holds
    the gradient of the MLP's hidden units."""
    none, some, full = (
        peak(tmp_path, strategy="dp", activation_checkpointing=mode).peak_by_component
        for mode in ("none", "selective", "full")
    )
    padded = SIZE.num_parameters + (VOCABULARY - SIZE.vocab_size) * D
    assert none["copies"] == pytest.approx(2 * padded)
    assert some["copies"] == full["copies"] == pytest.approx(2 * VOCABULARY * D, rel=0.03)
    kept = TOKENS * (2 * D * (1 + 3 + 1 + 1 + 4) + 4 * H + 16)
    block = TOKENS * (2 * D * (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4) + 4 * H + 16)
    backward = block + TOKENS * 2 * 4 * D
    assert some["activations"] == pytest.approx(L * kept + backward, rel=0.01)
    assert full["activations"] == pytest.approx(L * TOKENS * 2 * D + backward), "a block's input"
    one = peak(tmp_path, activation_checkpointing="full", checkpointed_blocks=1).peak_by_component
    assert none["activations"] - one["activations"] == pytest.approx(block - TOKENS * 2 * D)
    assert none["copies"] - one["copies"] == pytest.approx(2 * SIZE.kinds[0].parameters)


def test_offloaded_inputs_are_in_ram_except_for_two(tmp_path):
    """With offload-attention, q k v, attention and its projection are also in RAM."""
    modes = ("full", "offload", "offload-attention")
    full, offload, attention = (
        peak(tmp_path, strategy="dp", activation_checkpointing=m) for m in modes
    )
    saved = (p.peak_by_component["activations"] for p in (full, offload))
    assert next(saved) - next(saved) == pytest.approx((L - 2) * TOKENS * 2 * D)
    hidden, qkv = (2 ** math.ceil(math.log2(TOKENS * 2 * n)) for n in (D, 3 * D))
    assert offload.host_bytes - full.host_bytes == L * hidden
    assert attention.host_bytes - full.host_bytes == L * (3 * hidden + qkv)


def test_dropout_saves_two_masks_per_block(tmp_path):
    none, some = (peak(tmp_path, strategy="dp", dropout=d).peak_by_component for d in (0.0, 0.1))
    assert some["activations"] - none["activations"] == pytest.approx(L * 2 * TOKENS * D)


WHOLE = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}


def state(strategy, precision="bf16", **axes):
    """Return the number of bytes per parameter for parameters, gradients, optimizer state, host
    memory and disk."""
    values = {"model": "gpt2", "strategy": "3d", "precision": precision, **WHOLE}
    mesh = {**WHOLE, **axes}
    config = build_config({**values, **axes})
    cluster = parse_cluster(f"{math.prod(mesh.values())}xH200")
    plan = dataclasses.replace(draft_plan(config, cluster), strategy=strategy)
    fullest = max(process.parameters for process in pipeline_ranks(plan))
    return tuple(size / fullest for size in estimate_memory(plan).state.values())


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("dp", "bf16", (4, 4, 8, 0, 0)),
        ("tp", "bf16", (4, 4, 8, 0, 0)),  # per parameter of a process's shard
        ("fsdp", "bf16", (1, 1, 2, 0, 0)),
        ("zero1", "bf16", (2, 2, 3, 0, 0)),
        ("zero1", "fp32", (4, 4, 3, 0, 0)),
        ("zero2", "bf16", (2, 0.5, 3, 0, 0)),
        ("zero3", "bf16", (0.5, 0.5, 3, 0, 0)),
        ("offload", "bf16", (2, 0, 0, 3 + 1, 0)),
        ("infinity", "bf16", (0, 0, 0, 1, 3 + 0.5)),
    ],
)
def test_state_bytes_on_four_processes(name, precision, expected):
    axis = {"dp": "dp_replicate", "tp": "tp"}.get(name, "dp_shard")
    assert state(named_strategy(name), precision, **{axis: 4}) == pytest.approx(expected)


@pytest.mark.parametrize(("model", "kv"), [("Qwen3-0.6B", 1024), ("Llama-3.2-1B", 512)])
def test_fp16_keeps_keys_and_values_of_every_query_head(model, kv, tmp_path):
    """In fp16, k and v with 2048 values each replace k and v. The output layer's gradient is kept
    in fp32, and a chunk's share of it exists twice, beside the chunk's logits. In bf16, only the
    fp32 copy counts."""
    config = {"strategy": "dp", "model": model, "batch_size": 8, "loss_chunk_tokens": 1024}
    half, full = (peak(tmp_path, **config, precision=p).peak_by_component for p in ("fp16", "bf16"))
    size = find_model(model).size
    kept_bytes = 2 * 2 * (2048 - kv) * 8 * T * size.num_layers
    assert half["activations"] - full["activations"] == pytest.approx(kept_bytes)
    vocabulary = size.padded_vocab_size
    logits = 2 * 1024 * vocabulary + (4 + 6 - 2 - 4) * vocabulary * size.hidden_size
    assert half["logits"] - full["logits"] == pytest.approx(logits)


def test_an_nf4_base_takes_4_bits_and_an_8_bit_scale_per_64_values(tmp_path):
    config = {"strategy": "dp", "lora_rank": 8}
    four, whole = (peak(tmp_path, **config, base_dtype=d).peak_by_component for d in ("nf4", None))
    values = L * 12 * D**2
    assert whole["parameters"] - four["parameters"] == pytest.approx((2 - 33 / 64) * values)
    config |= {"batch_size": 1, "max_length": 16, "activation_checkpointing": "selective"}
    four, whole = (peak(tmp_path, **config, base_dtype=d).peak_by_component for d in ("nf4", None))
    matrix = 2 * 4 * D**2  # the matrix that is currently gathered
    assert four["activations"] - whole["activations"] == pytest.approx(matrix, rel=0.1)


def test_a_frozen_untied_embedding_is_in_host_memory(tmp_path):
    """With adapters, a whole model on a GPU reads its embedding from host memory. The embedding is
    sharded by FSDP, and trained without adapters."""
    whole, sharded, trained = (
        peak(tmp_path, count, model="Qwen3-8B", **config, batch_size=1).state
        for count, config in (
            (1, {"strategy": "dp", "lora_rank": 8}),
            (2, {"strategy": "fsdp", "lora_rank": 8}),
            (1, {"strategy": "dp", "lora_rank": 0}),
        )
    )
    embedding = 2 * 151_936 * 4096
    assert whole["parameters"] == pytest.approx(2 * sharded["parameters"] - embedding, rel=0.01)
    assert [each["host"] for each in (whole, sharded, trained)] == [2**31, 0, 0]


@pytest.mark.parametrize(("strategy", "num_processes", "per_gpu"), [("dp", 2, 8), ("fsdp", 4, 2)])
def test_weights_without_an_fp32_copy_need_eight_bytes(strategy, num_processes, per_gpu, tmp_path):
    config = {"strategy": strategy, "model": "gpt2-xl", "batch_size": 1, "max_length": 16}
    config |= {"optimizer": "adamw-bf16-weights"}
    memory = peak(tmp_path, num_processes, **config).peak_by_component
    state = sum(memory[name] for name in ("parameters", "gradients", "optimizer"))
    assert state == pytest.approx(per_gpu * SIZES["gpt2-xl"].num_parameters, rel=0.01)
    if strategy == "dp":  # the passes use the weights themselves
        assert memory["copies"] == 0


@pytest.mark.parametrize(
    ("precision", "axes", "expected"),
    [
        ("bf16", {"dp_shard": 4}, (1 + 2, 4, 2)),
        ("fp32", {"dp_shard": 4}, (1 + 4, 4, 2)),
        ("fp32", {}, (4, 4, 8)),
        ("fp32", {"dp_replicate": 2}, (4 + 4, 4, 8)),
    ],
)
def test_state_bytes_of_a_stage_while_its_micro_batches_run(precision, axes, expected):
    """Compare the state with the formula in strategies/LAWS.md. For bf16 during a
    step, the formula is `12 N_r / S + 6 N_r` bytes."""
    assert state(named_strategy("3d"), precision, pp=2, **axes) == pytest.approx((*expected, 0, 0))
