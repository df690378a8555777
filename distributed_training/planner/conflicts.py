"""Reject settings that cannot be combined, and find settings that have no effect with a layout.
This module does not import torch.

A setting on the command line is rejected if it has no effect. In CONFIG or a preset, such a setting
only causes a note unless the key is strict, because several strategies may share CONFIG or a
preset. A value that the plan would have anyway, such as a default, also causes only a note.
Therefore the values of a resolved CONFIG can be repeated on the command line."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.planner.layouts import Candidate
from distributed_training.settings.config import AUTO, KEYS, Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Prerequisite:
    """Condition that a layout must meet for some keys to have an effect."""

    keys: tuple[str, ...]
    is_met: Callable[[Candidate], bool]
    why: str
    fix: str  # setting that meets the condition
    conflict: str = "strategy={strategy!r}"  # setting that the keys cannot be used with
    off_values: tuple[Any, ...] = (None, AUTO)  # values that turn the keys off or leave them open
    # Values, besides the default, that the keys have in a plan that does not meet the condition
    resolved_values: tuple[Any, ...] = ()
    is_strict: bool = False  # True if the keys are also rejected in CONFIG or a preset


def _used_axes(candidate: Candidate) -> set[str]:
    """Return the axes whose size is not 1 in the strategy's mesh or in the candidate's mesh."""
    named_mesh = candidate.strategy.mesh
    return {axis for axis, n in candidate.mesh.items() if (named_mesh[axis], n) != (1, 1)}


def _uses_ddp(candidate: Candidate) -> bool:
    averages_with_torch = candidate.strategy.traits.averages_with_torch
    return averages_with_torch and _used_axes(candidate) <= {"dp_replicate"}


def _uses_fsdp(candidate: Candidate) -> bool:
    axes = _used_axes(candidate)
    return candidate.strategy.traits.averages_with_torch and "dp_shard" in axes and "pp" not in axes


PREREQUISITES = (
    Prerequisite(
        keys=("fsdp_prefetch",), is_met=_uses_fsdp, is_strict=True,
        why="only FSDP gathers parameters by block", fix="strategy to fsdp",
    ),
    Prerequisite(
        keys=("bucket_cap_mb",), is_met=_uses_ddp, is_strict=True,
        why="this layout does not use PyTorch's DDP, whose bucket size the key sets",
        fix="strategy to dp",
    ),
    Prerequisite(
        keys=("gradient_compression",), is_met=_uses_ddp, off_values=("none",), is_strict=True,
        why="this layout does not use PyTorch's DDP, whose communication hook the key selects",
        fix="strategy to dp",
    ),
    Prerequisite(
        keys=("pipeline_schedule",), is_met=lambda candidate: candidate.mesh["pp"] > 1,
        resolved_values=("1f1b",), why="there is no pipeline with pp=1", fix="strategy to pp",
    ),
    Prerequisite(
        keys=("sequence_parallel",), is_met=lambda candidate: candidate.mesh["tp"] > 1,
        off_values=(False,), why="no layers are split with tp=1", fix="strategy to tp",
    ),
    Prerequisite(
        keys=("offload_dir",), is_met=lambda candidate: candidate.strategy.swaps_to_disk,
        why="the strategy keeps no state on disk", fix="strategy to infinity",
    ),
    Prerequisite(
        keys=("lora_alpha", "lora_dropout", "lora_targets"), off_values=(None, 0.0),
        is_met=lambda candidate: candidate.config.lora_rank > 0,
        conflict="lora_rank=0", why="without LoRA, there are no adapters", fix="lora_rank to 16",
    ),
)  # fmt: skip


def idle_settings(request: Request, candidate: Candidate) -> Iterator[tuple[str, Prerequisite]]:
    """Yield each key that the user set but that has no effect with the layout, together with the
    condition that the layout does not meet."""
    for prerequisite in PREREQUISITES:
        for key in prerequisite.keys:
            is_off = getattr(request, key) in prerequisite.off_values
            if request.is_set(key) and not is_off and not prerequisite.is_met(candidate):
                yield key, prerequisite


def check_settings(
    request: Request, candidate: Candidate, options: Options, notes: list[str]
) -> None:
    """Raise UserError if settings cannot be combined, or if a setting that has no effect is
    rejected. For every other setting that has no effect, add a note. Whether a setting has an
    effect depends on the layout and on the engine's other `options`. `request` may still contain
    "auto" for a key that the candidate's CONFIG resolves."""
    _check_model(candidate)
    _check_strategy(candidate)
    _check_base(candidate)
    _check_loss_chunks(candidate)
    _check_idle(request, candidate, options, notes)
    options.check(candidate.config.precision, candidate.model.size.hidden_size)


def _check_idle(request: Request, candidate: Candidate, options: Options, notes: list[str]) -> None:
    for key, prerequisite in idle_settings(request, candidate):
        value = f"{key}={getattr(request, key)!r}"
        is_resolved = getattr(request, key) in (KEYS[key].default, *prerequisite.resolved_values)
        is_refused = prerequisite.is_strict or request.set_by[key] == "command line"
        if is_refused and not is_resolved:
            other = prerequisite.conflict.format(strategy=request.strategy)
            fix = f"leave out {key}, or set {prerequisite.fix}"
            raise UserError(f"{value} cannot be used with {other}", prerequisite.why, fix)
        notes.append(f"{value} has no effect, because {prerequisite.why}")
    for key, why in options.idle().items():
        value = f"{key}={getattr(options, key)!r} has no effect"
        if request.set_by.get(key) == "command line":
            raise UserError(value, why, f"leave out {key}")
        if request.is_set(key):
            notes.append(f"{value}, because {why}")


def _refuse(candidate: Candidate, key: str, other: str, why: str, fix: str) -> NoReturn:
    value = getattr(candidate.config, key)
    raise UserError(f"{key}={value!r} cannot be used with {other}", why, fix)


def _check_model(candidate: Candidate) -> None:
    config = candidate.config
    size = candidate.model.size
    model_setting = f"model={config.model!r}"
    if config.max_length > size.num_positions:
        why = f"the model has {size.num_positions} positions"
        fix = f"set max_length to {size.num_positions} or less"
        # transformers' implementation has sliding-window attention, so longer samples are possible.
        hub_name = f"{HUB_PREFIX}{config.model}"
        with contextlib.suppress(UserError):
            if config.max_length <= find_model(hub_name).size.num_positions:
                fix += f", or model to {hub_name!r}"
        _refuse(candidate, "max_length", model_setting, why, fix)


def _check_strategy(candidate: Candidate) -> None:
    config = candidate.config
    strategy = candidate.strategy
    strategy_setting = f"strategy={config.strategy!r}"
    if config.lora_rank > 0 and strategy.swaps_to_disk and config.precision == "fp32":
        other = f"{strategy_setting} and precision='fp32'"
        why = "DeepSpeed rounds the frozen weights that it stores in files to 16 bits"
        _refuse(candidate, "lora_rank", other, why, "set precision to bf16, or strategy to offload")
    if config.optimizer != "adamw" and not strategy.traits.compacts_moments:
        fix = "set optimizer to adamw, or strategy to dp, fsdp, tp or pp"
        why = "the strategy's engine keeps the optimizer state in fp32"
        _refuse(candidate, "optimizer", strategy_setting, why, fix)
    if config.on_nonfinite == "skip" and not strategy.traits.leaves_out_updates:
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
    split_axes = {axis: size for axis, size in candidate.mesh.items() if axis in ("pp", "tp")}
    if not candidate.strategy.traits.builds_on_device or set(split_axes.values()) != {1}:
        strategy_setting = f"strategy={config.strategy!r}"
        why = "quantized layers must stay whole or be sharded by FSDP"
        _refuse(candidate, key, strategy_setting, why, "set strategy to dp or fsdp")
    matrices = candidate.model.size.block_matrices
    if odd_columns := [columns for _, columns in matrices if columns % 64]:
        why = f"each group of 64 values shares a scale, but a matrix has {odd_columns[0]} columns, "
        why += "which is not a multiple of 64"
        _refuse(candidate, key, f"model={config.model!r}", why, "set base_dtype to None")


def _check_loss_chunks(candidate: Candidate) -> None:
    config = candidate.config
    if config.loss_chunk_tokens not in (0, AUTO) and config.precision == "fp16":
        why = "gradients of chunks would be computed before the loss is scaled"
        fix = "set precision to bf16, or loss_chunk_tokens to 0"
        _refuse(candidate, "loss_chunk_tokens", "precision='fp16'", why, fix)


def droppable_keys(request: Request, candidate: Candidate) -> set[str]:
    """Return the keys that have no effect and on which comparable runs may differ. The command
    `compare` may leave out these keys."""
    idle = idle_settings(request, candidate)
    return {key for key, _ in idle if not KEYS[key].work}
