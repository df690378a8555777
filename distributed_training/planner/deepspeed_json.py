"""Fill in a strategy's DeepSpeed configuration from CONFIG, and reject it if it contradicts CONFIG.

This module does not import torch."""

import copy
from typing import Any

from distributed_training.plan.plan import Draft
from distributed_training.planner.deepspeed_sections import check_sections, check_with_deepspeed
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

# AdamW settings that every strategy uses. A DeepSpeed configuration may repeat these values.
ACCEPTED_OPTIMIZER_VALUES: dict[str, tuple[Any, ...]] = {
    "betas": ([0.9, 0.999],),
    "eps": (1e-8,),
    "adam_w_mode": (True,),
    "bias_correction": (True,),
    "amsgrad": (False,),
    "torch_adam": (True, False),
}
# With these loss-scale settings, fp16 skips the same steps under every strategy.
FP16_LOSS_SCALING = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1}
# DeepSpeed scheduler -> value of CONFIG's lr_schedule with the same shape
LR_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def fill_deepspeed_json(plan: Draft, notes: list[str]) -> dict[str, Any]:
    """Return the strategy's DeepSpeed configuration with CONFIG's values in place of "auto". Raises
    UserError if this JSON contradicts CONFIG or contains a section that this suite does not
    accept."""
    config = plan.config
    batch = plan.batch
    document = copy.deepcopy(dict(plan.strategy.document))
    source = plan.strategy.source
    unusual_paths = check_sections(document, str(source))
    config_values = {
        "train_micro_batch_size_per_gpu": ("micro_batch_size", batch.micro_batch_size),
        "gradient_accumulation_steps": ("num_microbatches", batch.num_microbatches),
        "gradient_clipping": ("max_grad_norm", config.max_grad_norm or 0.0),
        "bf16.enabled": ("precision", config.precision == "bf16"),
        "fp16.enabled": ("precision", config.precision == "fp16"),
        "optimizer.params.lr": ("learning_rate", config.learning_rate),
        "optimizer.params.weight_decay": ("weight_decay", config.weight_decay),
    }
    for path, (key, value) in config_values.items():
        *sections, name_in_section = path.split(".")
        section = document
        for name in sections:
            section = section.setdefault(name, {})
        if not _agrees(section.get(name_in_section, AUTO), value):
            what = f"{source}: {path}={shown(section[name_in_section])}, but CONFIG gives {key}="
            what += repr(getattr(batch, key, getattr(config, key)))
            raise UserError(what, fix=f'write "auto" in the JSON or change {key}')
        section[name_in_section] = value
    # DeepSpeed asserts that this value fits the number of GPUs. Check the value here and drop it.
    json_size = document.pop("train_batch_size", AUTO)
    if not _agrees(json_size, batch.global_batch_size):
        what = f"{source}: train_batch_size={shown(json_size)} differs from the run's batch size, "
        what += batch.describe()
        raise UserError(what, fix='write "auto" in the JSON')
    # Every engine uses the same optimizer settings.
    for name, value in document.pop("optimizer")["params"].items():
        if name in ("lr", "weight_decay") or value in (
            AUTO,
            *ACCEPTED_OPTIMIZER_VALUES.get(name, ()),
        ):
            continue
        what = (
            f"{source}: optimizer.params.{name}={shown(value)} differs from the value that all "
            "strategies use"
        )
        accepted_values = ACCEPTED_OPTIMIZER_VALUES.get(name)
        raise UserError(
            what, fix=f"write {accepted_values[0]!r}" if accepted_values else "remove it"
        )
    scheduler = document.pop("scheduler", None)
    unwanted = [f"pipeline.{key}" for key in document.get("pipeline", {}) if key != "stages"]
    if unwanted:
        why = "CONFIG sets it with pipeline_cut and activation_checkpointing"
        raise UserError(f"{source}: {unwanted[0]} is not accepted in the JSON", why, "remove it")
    if scheduler:
        # Reject a scheduler even if all its values are "auto", because DeepSpeed's default warm-up
        # is logarithmic, but the warm-up of this suite is linear.
        scheduler_type = scheduler.get("type") if isinstance(scheduler, dict) else None
        lr_schedule = LR_SCHEDULES.get(str(scheduler_type), "linear, cosine or constant")
        why = "CONFIG sets the schedule of every strategy with lr_schedule and warmup_steps"
        fix = f"remove it and set lr_schedule to {lr_schedule}"
        raise UserError(f"{source}: scheduler is not accepted in the JSON", why, fix)
    if config.precision == "fp16":
        fp16_section = document["fp16"] = {**FP16_LOSS_SCALING, **document["fp16"]}
        changed = [
            f"fp16.{name}={fp16_section[name]}"
            for name in FP16_LOSS_SCALING
            if fp16_section[name] != FP16_LOSS_SCALING[name]
        ]
        if fp16_section.get("loss_scale"):
            changed.append(f"fp16.loss_scale={fp16_section['loss_scale']}")
        if changed:
            what = f"{', '.join(changed)} in {source.name}"
            notes.append(
                f"because of {what}, this run may skip other steps than runs with other strategies"
            )
    zero = document.get("zero_optimization", {})
    if zero.get("stage") == 3:  # memory_efficient_linear is slower if blocks are compiled
        zero.setdefault("memory_efficient_linear", False)
    for part in ("offload_optimizer", "offload_param"):
        section = zero.get(part)
        if isinstance(section, dict) and section.get("nvme_path") == AUTO:
            section["nvme_path"] = str(plan.offload_dir)
    unresolved_paths = ", ".join(_auto_paths(document))
    if unresolved_paths:
        raise UserError(
            f'{source}: "auto" is not supported for {unresolved_paths}', fix="write a value"
        )
    if unusual_paths:
        check_with_deepspeed(document, str(source))
        names = ", ".join(unusual_paths)
        notes.append(f"{source.name} sets {names}, which the predictions do not consider")
    return document


def _agrees(json_value: object, value: object) -> bool:
    """Return whether `json_value` is "auto" or equals `value`. True and 1 count as different
    values."""
    is_same_type = isinstance(json_value, bool) == isinstance(value, bool)
    return json_value == AUTO or (is_same_type and json_value == value)


def _auto_paths(node: Any, path: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [path.lstrip(".")] if node == AUTO else []
    paths = []
    for key, value in node.items():
        paths += _auto_paths(value, f"{path}.{key}")
    return paths
