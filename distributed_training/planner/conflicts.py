"""Reject settings that cannot be combined, and find settings that have no effect with a layout.
This module does not import torch.

A setting that has no effect causes a note, because several strategies may share CONFIG, a preset or
a command line."""

from collections.abc import Callable
from typing import NoReturn

from distributed_training.planner.layouts import Candidate
from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import Options


def _used_axes(candidate: Candidate) -> set[str]:
    """Return the axes whose size is not 1 in the strategy's mesh or in the candidate's mesh."""
    named_mesh = candidate.strategy.mesh
    return {axis for axis, n in candidate.mesh.items() if (named_mesh[axis], n) != (1, 1)}


def _uses_ddp(candidate: Candidate) -> bool:
    averages_with_torch = candidate.strategy.traits.averages_with_torch
    return averages_with_torch and _used_axes(candidate) <= {"dp_replicate"}


def _uses_fsdp(candidate: Candidate) -> bool:
    axes = _used_axes(candidate)
    shards = not axes.isdisjoint({"dp_shard", "cp"})
    return candidate.strategy.traits.averages_with_torch and shards and "pp" not in axes


# (keys, whether a layout uses them, the reason why another layout does not)
CONDITIONS: tuple[tuple[tuple[str, ...], Callable[[Candidate], bool], str], ...] = (
    (("fsdp_prefetch",), _uses_fsdp, "only FSDP gathers parameters by block"),
    (("bucket_cap_mb",), _uses_ddp, "only PyTorch's DDP has buckets of this size"),
    (("pipeline_schedule",), lambda candidate: candidate.mesh["pp"] > 1,
     "there is no pipeline with pp=1"),
    (("sequence_parallel",), lambda candidate: candidate.mesh["tp"] > 1,
     "no layers are split with tp=1"),
    (("offload_dir",), lambda candidate: candidate.strategy.swaps_to_disk,
     "the strategy keeps no state on disk"),
    (("lora_alpha", "lora_dropout", "lora_targets"),
     lambda candidate: candidate.config.lora_rank > 0, "without LoRA, there are no adapters"),
)  # fmt: skip


def check_settings(
    request: Request, candidate: Candidate, options: Options, notes: list[str]
) -> None:
    """Raise UserError if settings cannot be combined. For every setting that has no effect, add a
    note. Whether a setting has an effect depends on the layout and on the engine's `options`.
    `request` may still contain "auto" for a key that the candidate's CONFIG resolves."""
    _check_model(candidate)
    _check_strategy(candidate)
    _check_base(candidate)
    _note_idle(request, candidate, options, notes)
    options.check(candidate.config.precision, candidate.model.size.hidden_size)


def _note_idle(request: Request, candidate: Candidate, options: Options, notes: list[str]) -> None:
    reasons = options.idle()
    for keys, uses, why in CONDITIONS:
        if not uses(candidate):
            reasons |= dict.fromkeys(keys, why)
    values = request.to_key_values()
    for key, why in reasons.items():
        if request.is_set(key):
            notes.append(f"{key}={values[key]!r} has no effect, because {why}")


def _refuse(candidate: Candidate, key: str, other: str, why: str, fix: str) -> NoReturn:
    value = getattr(candidate.config, key)
    raise UserError(f"{key}={value!r} cannot be used with {other}", why, fix)


def _check_model(candidate: Candidate) -> None:
    config = candidate.config
    size = candidate.model.size
    if config.max_length > size.num_positions:
        why = f"the model has {size.num_positions} positions"
        fix = f"set max_length to {size.num_positions} or less"
        _refuse(candidate, "max_length", f"model={config.model!r}", why, fix)


def _check_strategy(candidate: Candidate) -> None:
    config = candidate.config
    strategy = candidate.strategy
    strategy_setting = f"strategy={config.strategy!r}"
    if config.lora_rank > 0 and strategy.swaps_to_disk and config.precision == "fp32":
        other = f"{strategy_setting} and precision='fp32'"
        why = "DeepSpeed rounds the frozen weights that it stores in files to 16 bits"
        _refuse(candidate, "lora_rank", other, why, "set precision to bf16, or strategy to offload")
    if config.optimizer != "adamw" and not strategy.traits.builds_on_device:
        fix = "set optimizer to adamw, or strategy to dp, fsdp, tp or pp"
        why = "the strategy's engine keeps the optimizer state in fp32"
        _refuse(candidate, "optimizer", strategy_setting, why, fix)
    if config.has_bf16_weights:
        fix = "set optimizer to adamw-bf16"
        splits_model = not _used_axes(candidate).isdisjoint({"cp", "pp"})
        if splits_model or not strategy.traits.averages_with_torch:
            why = "only dp, fsdp and tp train weights that have no fp32 copy"
            _refuse(candidate, "optimizer", strategy_setting, why, fix)
        if config.lora_rank:
            why = "the adapters' fp32 copy is small"
            _refuse(candidate, "optimizer", f"lora_rank={config.lora_rank}", why, fix)
        if config.precision != "bf16":
            other = f"precision={config.precision!r}"
            _refuse(
                candidate, "optimizer", other, "the weights are in bf16", "set precision to bf16"
            )
    if config.gradient_compression != "none" and not _uses_ddp(candidate):
        why = "this layout does not use PyTorch's DDP, whose communication hook the key selects"
        fix = "set strategy to dp, or gradient_compression to none"
        _refuse(candidate, "gradient_compression", strategy_setting, why, fix)
    if config.on_nonfinite == "skip" and not strategy.traits.averages_with_torch:
        why = "the strategy's engine updates the weights before it reports the gradient norm"
        _refuse(
            candidate, "on_nonfinite", strategy_setting, why, "set on_nonfinite to rollback or stop"
        )


def _check_base(candidate: Candidate) -> None:
    """Raise UserError if the requested dtype for frozen weights cannot be used."""
    config = candidate.config
    key = "base_dtype"
    if config.base_dtype is None:
        return
    if config.lora_rank == 0:
        why = "without LoRA, no weights are frozen"
        _refuse(candidate, key, "lora_rank=0", why, "set lora_rank to 16, or base_dtype to None")
    if config.base_dtype == "bf16":
        if config.precision != "bf16":
            other = f"precision={config.precision!r}"
            why = f"frozen weights then have the dtype {config.precision}"
            _refuse(candidate, key, other, why, "set base_dtype to None")
        return
    strategy_setting = f"strategy={config.strategy!r}"
    matrices = candidate.model.size.block_matrices
    if config.base_dtype == "fp8":
        if not candidate.strategy.traits.builds_on_device:
            why = "the strategy's engine does not compute in fp8"
            _refuse(candidate, key, strategy_setting, why, "set strategy to dp or fsdp")
        tp = candidate.mesh["tp"]
        if odd := [n for shape in matrices for n in shape if n % (16 * tp)]:
            why = f"fp8 needs multiples of {16 * tp}, but a matrix has {odd[0]} rows or columns"
            _refuse(candidate, key, f"model={config.model!r}", why, "set base_dtype to None")
        return
    split_axes = {axis: size for axis, size in candidate.mesh.items() if axis in ("pp", "tp")}
    if not candidate.strategy.traits.builds_on_device or set(split_axes.values()) != {1}:
        why = "quantized layers must stay whole or be sharded by FSDP"
        _refuse(candidate, key, strategy_setting, why, "set strategy to dp or fsdp")
    if odd_columns := [columns for _, columns in matrices if columns % 64]:
        why = f"each group of 64 values shares a scale, but a matrix has {odd_columns[0]} columns, "
        why += "which is not a multiple of 64"
        _refuse(candidate, key, f"model={config.model!r}", why, "set base_dtype to None")
