"""Reject settings that cannot be combined, and find settings that have no effect with a layout.
This module does not import torch.

A setting that has no effect causes a note, because several strategies may share CONFIG, a preset or
a command line."""

from typing import NoReturn

from distributed_training.plan.plan import Draft
from distributed_training.settings.errors import UserError

# DeepSpeed swaps no shards that are smaller than this, such as all shards of gpt2-tiny.
MIN_SWAPPED_BYTES = 2**20


def check_settings(plan: Draft, notes: list[str]) -> None:
    """Raise UserError if settings cannot be combined. For every setting that has no effect, add a
    note. Whether a setting has an effect depends on the layout and on the engine's options."""
    for check in CHECKS:
        check(plan)
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
    return reasons


def _setting(plan: Draft, key: str) -> str:
    return f"{key}={getattr(plan.config, key)!r}"


def _gpu(plan: Draft) -> str:
    return plan.machine.gpu_name or "a CPU"


def _refuse(
    plan: Draft,
    key: str,
    other: str,
    why: str,
    fix: str,
) -> NoReturn:
    """Reject the value of `key`, which cannot be used with the setting or the device `other`."""
    raise UserError(f"{_setting(plan, key)} cannot be used with {other}", why, fix)


def check_positions(plan: Draft) -> None:
    positions = plan.size.num_positions
    if plan.config.max_length > positions:
        _refuse(
            plan,
            "max_length",
            _setting(plan, "model"),
            f"the model has {positions} positions",
            f"set max_length to {positions} or less",
        )


def check_sequence_parallel(plan: Draft) -> None:
    """Sequence parallelism gives every rank the same number of samples or, if tp does not divide
    the samples, of tokens."""
    length = plan.config.max_length
    tp = plan.mesh["tp"]
    _, token_parts = plan.tp_parts
    if length % token_parts:
        _refuse(
            plan,
            "max_length",
            f"{tp=}",
            f"{tp=} divides neither max_length nor the {plan.batch.micro_batch_size} samples of a "
            "micro-batch, and sequence_parallel gives every rank the same number of them",
            f"set max_length to {length // tp * tp or tp}",
        )


def check_precision(plan: Draft) -> None:
    precision = plan.config.precision
    on_gpu = plan.machine.num_gpus > 0
    if precision == "fp16" and not on_gpu:
        _refuse(plan, "precision", _gpu(plan), "fp16 needs a GPU", "set precision to fp32")
    if precision == "bf16" and on_gpu and plan.machine.compute_capability < (8, 0):
        _refuse(
            plan,
            "precision",
            _gpu(plan),
            "bf16 needs compute capability 8.0",
            "set precision to fp16",
        )


def check_swapping_on_cpu(plan: Draft) -> None:
    """On a CPU, the swap buffer itself serves as device memory. DeepSpeed reuses the buffer too
    early, so gradients are wrong."""
    if plan.machine.num_gpus or plan.strategy.offload["param"] != "nvme":
        return
    sizes = (rows * columns for rows, columns in plan.size.matrix_shapes)
    shard_bytes = max(plan.size.embedding_parameters, *sizes) * 4 / plan.num_processes
    if shard_bytes >= MIN_SWAPPED_BYTES:
        _refuse(
            plan,
            "model",
            f"{_setting(plan, 'strategy')} on a CPU",
            "without a GPU, DeepSpeed overwrites parameters that are in use",
            "set model to gpt2-tiny for a smoke test",
        )


def check_frozen_weights_on_disk(plan: Draft) -> None:
    config = plan.config
    if config.lora_rank > 0 and plan.strategy.swaps_to_disk and config.precision == "fp32":
        _refuse(
            plan,
            "lora_rank",
            f"{_setting(plan, 'strategy')} and {_setting(plan, 'precision')}",
            "DeepSpeed rounds the frozen weights that it stores in files to 16 bits",
            "set precision to bf16, or strategy to offload",
        )


def check_pipeline_schedule(plan: Draft) -> None:
    schedules = plan.strategy.traits.schedules
    if plan.mesh["pp"] > 1 and plan.config.pipeline_schedule not in schedules:
        _refuse(
            plan,
            "pipeline_schedule",
            _setting(plan, "strategy"),
            f"the strategy's engine supports only {', '.join(schedules)}",
            f"set pipeline_schedule to {schedules[0]}, or strategy to pp or 3d",
        )


def check_activation_checkpointing(plan: Draft) -> None:
    config = plan.config
    key = "activation_checkpointing"
    if config.activation_checkpointing == "none":
        return
    if plan.schedule.splits_backward:
        _refuse(
            plan,
            key,
            _setting(plan, "pipeline_schedule"),
            "the schedule keeps the activations for the second half of each backward pass",
            f"set {key} to none, or pipeline_schedule to 1f1b",
        )
    if config.checkpointed_blocks is not None and plan.mesh["pp"] > 1:
        _refuse(
            plan,
            "checkpointed_blocks",
            _setting(plan, "strategy"),
            "its ranks need memory for different numbers of micro-batches",
            "set checkpointed_blocks to None",
        )
    is_eager = not config.compile and plan.machine.num_gpus > 0
    if config.activation_checkpointing == "offload-attention" and is_eager:
        _refuse(
            plan,
            key,
            "compile=False",
            "without torch.compile, only inputs leave the GPU",
            f"set {key} to offload",
        )


def check_optimizer(plan: Draft) -> None:
    config = plan.config
    traits = plan.strategy.traits
    strategy = _setting(plan, "strategy")
    if config.optimizer != "adamw" and not traits.builds_on_device:
        _refuse(
            plan,
            "optimizer",
            strategy,
            "the strategy's engine keeps the optimizer state in fp32",
            "set optimizer to adamw, or strategy to dp, fsdp, tp or pp",
        )
    if not config.has_bf16_weights:
        return
    fix = "set optimizer to adamw-bf16"
    if plan.mesh["cp"] * plan.mesh["pp"] > 1 or not traits.averages_with_torch:
        _refuse(
            plan,
            "optimizer",
            strategy,
            "only dp, fsdp and tp train weights that have no fp32 copy",
            fix,
        )
    if config.lora_rank > 0:
        _refuse(
            plan,
            "optimizer",
            _setting(plan, "lora_rank"),
            "the adapters' fp32 copy is small",
            fix,
        )
    if config.precision != "bf16":
        _refuse(
            plan,
            "optimizer",
            _setting(plan, "precision"),
            "the weights are in bf16",
            "set precision to bf16",
        )


def check_gradient_compression(plan: Draft) -> None:
    is_on = plan.config.gradient_compression != "none" and plan.num_processes > 1
    if is_on and not _uses_ddp(plan):
        _refuse(
            plan,
            "gradient_compression",
            _setting(plan, "strategy"),
            "this layout does not use PyTorch's DDP, whose communication hook the key selects",
            "set strategy to dp, or gradient_compression to none",
        )


def check_on_nonfinite(plan: Draft) -> None:
    if plan.config.on_nonfinite == "skip" and not plan.strategy.traits.averages_with_torch:
        _refuse(
            plan,
            "on_nonfinite",
            _setting(plan, "strategy"),
            "the strategy's engine updates the weights before it reports the gradient norm",
            "set on_nonfinite to stop",
        )


def check_base_dtype(plan: Draft) -> None:
    dtype = plan.config.base_dtype
    if dtype is None:
        return
    if plan.config.lora_rank == 0:
        _refuse(
            plan,
            "base_dtype",
            "lora_rank=0",
            "without LoRA, no weights are frozen",
            "set lora_rank to 16, or base_dtype to None",
        )
    if dtype == "bf16" and plan.config.precision != "bf16":
        _refuse(
            plan,
            "base_dtype",
            _setting(plan, "precision"),
            f"frozen weights then have the dtype {plan.config.precision}",
            "set base_dtype to None",
        )
    if dtype == "fp8":
        check_fp8(plan)
    if dtype == "nf4":
        check_nf4(plan)


def check_fp8(plan: Draft) -> None:
    if plan.machine.compute_capability < (8, 9):
        _refuse(
            plan,
            "base_dtype",
            _gpu(plan),
            "fp8 needs a GPU with compute capability 8.9",
            "set base_dtype to None or nf4",
        )
    if plan.mesh["tp"] > 1 or not plan.strategy.traits.builds_on_device:
        _refuse(
            plan,
            "base_dtype",
            _setting(plan, "strategy"),
            "fp8 needs whole matrices, and an engine that multiplies them",
            "set strategy to dp or fsdp",
        )
    sizes = {size for shape in plan.size.matrix_shapes for size in shape}
    odd_sizes = sorted(size for size in sizes if size % 16)
    if odd_sizes:
        _refuse(
            plan,
            "base_dtype",
            _setting(plan, "model"),
            f"fp8 needs numbers of rows and columns that 16 divides, unlike {odd_sizes}",
            "set base_dtype to None",
        )


def check_nf4(plan: Draft) -> None:
    is_split = plan.mesh["pp"] * plan.mesh["tp"] > 1
    if is_split or not plan.strategy.traits.builds_on_device:
        _refuse(
            plan,
            "base_dtype",
            _setting(plan, "strategy"),
            "quantized layers must stay whole or be sharded by FSDP",
            "set strategy to dp or fsdp",
        )
    odd_columns = sorted({columns for _, columns in plan.size.matrix_shapes if columns % 64})
    if odd_columns:
        why = (
            f"each group of 64 values shares a scale, but 64 does not divide {odd_columns} columns"
        )
        _refuse(plan, "base_dtype", _setting(plan, "model"), why, "set base_dtype to None")


# The first conflict is reported.
CHECKS = (
    check_positions,
    check_sequence_parallel,
    check_precision,
    check_swapping_on_cpu,
    check_frozen_weights_on_disk,
    check_pipeline_schedule,
    check_activation_checkpointing,
    check_optimizer,
    check_gradient_compression,
    check_on_nonfinite,
    check_base_dtype,
)
