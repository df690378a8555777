"""Reject settings that cannot be combined, and find settings that have no effect with a layout.
This module does not import torch.

A setting that has no effect causes a note, because several strategies may share CONFIG, a preset or
a command line."""

from collections.abc import Iterator
from typing import NamedTuple

from distributed_training.plan.plan import Draft
from distributed_training.settings.errors import UserError

# DeepSpeed swaps no shards that are smaller than this, such as all shards of gpt2-tiny.
MIN_SWAPPED_BYTES = 2**20


class Conflict(NamedTuple):
    """A key whose value cannot be used with another setting or device."""

    key: str
    other: str
    reason: str
    fix: str


def check_settings(plan: Draft, notes: list[str]) -> None:
    """Raise UserError if settings cannot be combined. For every setting that has no effect, add a
    note. Whether a setting has an effect depends on the layout and on the engine's options."""
    for found in find_conflicts(plan):  # The first conflict is reported.
        what = f"{_setting(plan, found.key)} cannot be used with {found.other}"
        raise UserError(what, found.reason, found.fix)
    options = plan.strategy.options(plan.engine_options)
    options.check(plan.config.precision, plan.size.hidden_size)
    request = plan.requested
    for key, why in {**options.idle(), **_find_idle(plan)}.items():
        if request.is_set(key):
            value = request.to_key_values()[key]
            notes.append(f"{key}={value!r} has no effect, because {why}")


def _uses_ddp(plan: Draft) -> bool:
    """Return whether PyTorch's DDP averages gradients."""
    return plan.uses_ddp and plan.strategy.traits.averages_with_torch


def _find_idle(plan: Draft) -> dict[str, str]:
    """Return the keys that have no effect with the layout, each with the reason."""
    reasons = {}
    if not _uses_ddp(plan):
        reasons["bucket_cap_mb"] = "PyTorch's DDP does not average the gradients"
        reasons["gradient_compression"] = reasons["bucket_cap_mb"]
    if plan.mesh["pp"] == 1:
        reasons["pipeline_schedule"] = "there is no pipeline with pp=1"
    if plan.config.activation_checkpointing == "none":
        reasons["checkpointed_blocks"] = "no blocks recompute activations"
    if not plan.strategy.swaps_to_disk:
        reasons["offload_dir"] = "the strategy keeps no state on disk"
    if plan.config.lora_rank == 0:
        for key in ("lora_alpha", "lora_dropout", "lora_targets"):
            reasons[key] = "without LoRA, there are no adapters"
    kind = plan.config.preference
    used = {"dpo": "preference_label_smoothing", "simpo": "preference_margin"}
    for key in used.values():
        if used.get(kind) != key:
            reasons[key] = f"preference={kind!r} does not use it"
    return reasons


def _setting(plan: Draft, key: str) -> str:
    return f"{key}={getattr(plan.config, key)!r}"


def find_conflicts(plan: Draft) -> Iterator[Conflict]:
    """Yield every conflict in a plan."""
    config = plan.config
    size = plan.size
    traits = plan.strategy.traits
    device = plan.machine.gpu_name or "a CPU"
    on_gpu = plan.machine.num_gpus > 0
    capability = plan.machine.compute_capability
    has_adapters = config.lora_rank > 0
    model = _setting(plan, "model")
    strategy = _setting(plan, "strategy")
    precision = _setting(plan, "precision")
    if config.max_length > size.num_positions:
        why = f"the model has {size.num_positions} positions"
        if size.context_length > size.num_positions:
            why = "the positions of a record would depend on the other records and on padding"
        yield Conflict("max_length", model, why, f"set max_length to {size.num_positions} or less")
    # Sequence parallelism gives every rank the same number of samples or, if tp does not divide the
    # samples, of tokens.
    tp = plan.mesh["tp"]
    _, token_parts = plan.tp_parts
    if config.max_length % token_parts:
        yield Conflict(
            "max_length",
            f"{tp=}",
            f"{tp=} divides neither max_length nor the {plan.batch.micro_batch_size} samples of a "
            "micro-batch, and sequence_parallel gives every rank the same number of them",
            f"set max_length to {config.max_length // tp * tp or tp}",
        )
    needs_whole = tp > 1 and size.needs_whole_samples
    if needs_whole and token_parts > 1:
        yield Conflict(
            "micro_batch_size",
            f"{tp=}",
            "blocks of the model mix tokens in layers that tp does not shard, so that each rank "
            "needs whole samples",
            f"set micro_batch_size to a multiple of {tp}",
        )
    if config.dropout and tp > 1 and size.kinds[0].traced_values:
        yield Conflict(
            "dropout",
            f"{tp=}",
            "transformers' code drops terms of sums over ranks",
            "set dropout to 0",
        )
    if config.expert_parallel:
        fix = "set expert_parallel to False"
        counts = {count for kind in size.kinds for count, *_ in kind.stacks.values()}
        num_ranks = plan.mesh["dp_shard"] * plan.mesh["cp"]
        shards_experts = plan.uses_fsdp and num_ranks > 1 and tp == plan.mesh["pp"] == 1
        if not counts:
            yield Conflict("expert_parallel", model, "no block contains a stack of experts", fix)
        if not shards_experts:
            why = "only FSDP's shards over dp_shard or cp are whole experts"
            yield Conflict("expert_parallel", strategy, why, f"set strategy to fsdp, or {fix[4:]}")
        if any(count % num_ranks for count in counts):
            why = f"each GPU needs the same number of the {max(counts)} experts"
            yield Conflict("expert_parallel", f"{num_ranks} GPUs", why, fix)
    if config.has_pairs and not size.packs:
        why = "the model cannot keep two answers in one sample apart"
        yield Conflict("preference", model, why, "use a model that can pack records")
    if config.has_pairs and not (traits.averages_with_torch or traits.uses_zero):
        why = "the strategy's engine was not tested with pairs of answers"
        yield Conflict("preference", strategy, why, "set strategy to dp")
    if config.precision == "fp16" and not on_gpu:
        yield Conflict("precision", device, "fp16 needs a GPU", "set precision to fp32")
    if config.precision == "bf16" and on_gpu and capability < (8, 0):
        yield Conflict(
            "precision", device, "bf16 needs compute capability 8.0", "set precision to fp16"
        )
    # On a CPU, the swap buffer itself serves as device memory. DeepSpeed reuses the buffer too
    # early, so gradients are wrong.
    if plan.strategy.offload["param"] == "nvme" and not on_gpu:
        sizes = (rows * columns for rows, columns in size.matrix_shapes)
        shard_bytes = max(size.embedding_parameters, *sizes) * 4 / plan.num_processes
        if shard_bytes >= MIN_SWAPPED_BYTES:
            yield Conflict(
                "model",
                f"{strategy} on a CPU",
                "without a GPU, DeepSpeed overwrites parameters that are in use",
                "set model to gpt2-tiny for a smoke test",
            )
    if has_adapters and plan.strategy.swaps_to_disk and config.precision == "fp32":
        yield Conflict(
            "lora_rank",
            f"{strategy} and {precision}",
            "DeepSpeed rounds the frozen weights that it stores in files to 16 bits",
            "set precision to bf16, or strategy to offload",
        )
    has_pipeline = plan.mesh["pp"] > 1
    if has_pipeline and config.pipeline_schedule not in traits.schedules:
        yield Conflict(
            "pipeline_schedule",
            strategy,
            f"the strategy's engine supports only {', '.join(traits.schedules)}",
            f"set pipeline_schedule to {traits.schedules[0]}, or strategy to pp or 3d",
        )
    mode = "activation_checkpointing"
    recomputes = config.activation_checkpointing != "none"
    if recomputes and plan.schedule.splits_backward:
        yield Conflict(
            mode,
            _setting(plan, "pipeline_schedule"),
            "the schedule keeps the activations for the second half of each backward pass",
            f"set {mode} to none, or pipeline_schedule to 1f1b",
        )
    if recomputes and config.checkpointed_blocks is not None and has_pipeline:
        yield Conflict(
            "checkpointed_blocks",
            strategy,
            "its ranks need memory for different numbers of micro-batches",
            "set checkpointed_blocks to None",
        )
    is_eager = on_gpu and not config.compile
    if config.activation_checkpointing == "offload-attention" and is_eager:
        why = "without torch.compile, only inputs leave the GPU"
        yield Conflict(mode, "compile=False", why, f"set {mode} to offload")
    if config.optimizer != "adamw" and not traits.builds_on_device:
        yield Conflict(
            "optimizer",
            strategy,
            "the strategy's engine keeps the optimizer state in fp32",
            "set optimizer to adamw, or strategy to dp, fsdp, tp or pp",
        )
    if config.has_bf16_weights:
        fix = "set optimizer to adamw-bf16"
        if has_pipeline or plan.mesh["cp"] > 1 or not traits.averages_with_torch:
            why = "only dp, fsdp and tp train weights that have no fp32 copy"
            yield Conflict("optimizer", strategy, why, fix)
        if has_adapters:
            why = "the adapters' fp32 copy is small"
            yield Conflict("optimizer", _setting(plan, "lora_rank"), why, fix)
        if config.precision != "bf16":
            yield Conflict(
                "optimizer", precision, "the weights are in bf16", "set precision to bf16"
            )
    is_compressed = config.gradient_compression != "none" and plan.num_processes > 1
    if is_compressed and not _uses_ddp(plan):
        yield Conflict(
            "gradient_compression",
            strategy,
            "this layout does not use PyTorch's DDP, whose communication hook the key selects",
            "set strategy to dp, or gradient_compression to none",
        )
    if config.on_nonfinite == "skip" and not traits.averages_with_torch:
        yield Conflict(
            "on_nonfinite",
            strategy,
            "the strategy's engine updates the weights before it reports the gradient norm",
            "set on_nonfinite to stop",
        )
    if config.base_dtype is not None and not has_adapters:
        yield Conflict(
            "base_dtype",
            "lora_rank=0",
            "without LoRA, no weights are frozen",
            "set lora_rank to 16, or base_dtype to None",
        )
    quantized = [shape for kind in size.kinds for shape in kind.quantized_shapes]
    if config.base_dtype == "fp8":
        if capability < (8, 9):
            yield Conflict(
                "base_dtype",
                device,
                "fp8 needs a GPU with compute capability 8.9",
                "set base_dtype to None or nf4",
            )
        if tp > 1 or not traits.builds_on_device:
            yield Conflict(
                "base_dtype",
                strategy,
                "fp8 needs whole matrices, and an engine that multiplies them",
                "set strategy to dp or fsdp",
            )
        all_sizes = {length for shape in quantized for length in shape}
        if odd_sizes := sorted(length for length in all_sizes if length % 16):
            why = f"fp8 needs numbers of rows and columns that 16 divides, unlike {odd_sizes}"
            yield Conflict("base_dtype", model, why, "set base_dtype to None")
    if config.base_dtype == "nf4":
        if has_pipeline or tp > 1 or not traits.builds_on_device:
            yield Conflict(
                "base_dtype",
                strategy,
                "quantized layers must stay whole or be sharded by FSDP",
                "set strategy to dp or fsdp",
            )
        odd_columns = sorted({columns for _, columns in quantized if columns % 64})
        if odd_columns:
            why = (
                "each group of 64 values shares a scale, but 64 does not divide "
                f"{odd_columns} columns"
            )
            yield Conflict("base_dtype", model, why, "set base_dtype to None")
