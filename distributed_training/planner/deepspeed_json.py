"""Fill in a strategy's DeepSpeed configuration from CONFIG, and reject it if it contradicts CONFIG.

Settings that CONFIG does not determine are passed on. DeepSpeed checks them when the engine is
built. This module does not import torch."""

import copy
from typing import Any

from distributed_training.plan.plan import Draft
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import JsonObject, shown

# AdamW settings that every strategy uses. A DeepSpeed configuration may repeat these values.
OPTIMIZER_VALUES = {
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "adam_w_mode": True,
    "bias_correction": True,
    "amsgrad": False,
    "torch_adam": True,
}
# With these loss-scale settings, fp16 skips the same steps under every strategy.
FP16_LOSS_SCALING = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1}
# Sections and settings that CONFIG or the layout determines or that concern messages and buffers.
# None of them changes the results beyond rounding.
LAYOUT_SECTIONS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "aio",
    "timers",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
}
LAYOUT_SETTINGS = {
    "enabled",
    "stages",
    "stage",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "allgather_partitions",
    "allgather_bucket_size",
    "round_robin_gradients",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "memory_efficient_linear",
    "stage3_gather_16bit_weights_on_model_save",
    "offload_optimizer",
    "offload_param",
}


def fill_deepspeed_json(plan: Draft) -> JsonObject:
    """Return the strategy's DeepSpeed configuration with CONFIG's values in place of "auto". Raises
    UserError if this JSON contradicts CONFIG."""
    config = plan.config
    batch = plan.batch
    document = copy.deepcopy(dict(plan.strategy.document))
    source = plan.strategy.source
    config_values = {
        "train_batch_size": ("global_batch_size", batch.global_batch_size),
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
        if section.get(name_in_section, AUTO) not in (AUTO, value):
            given = (dict(config) | dict(batch))[key]
            raise UserError(
                f"{source}: {path}={shown(section[name_in_section])}, but CONFIG gives "
                f"{key}={given!r}",
                fix=f'write "auto" in the JSON or change {key}',
            )
        section[name_in_section] = value
    # Every engine uses the same optimizer settings.
    for name, value in document.pop("optimizer")["params"].items():
        if name in ("lr", "weight_decay") or value in (AUTO, OPTIMIZER_VALUES.get(name)):
            continue
        raise UserError(
            f"{source}: optimizer.params.{name}={shown(value)} differs from the value that all "
            "strategies use",
            fix='write "auto" or remove it',
        )
    if document.pop("scheduler", None):
        # Reject a scheduler even if all its values are "auto", because DeepSpeed's default warm-up
        # is logarithmic, but the warm-up of this suite is linear.
        raise UserError(
            f"{source}: scheduler is not accepted in the JSON",
            "CONFIG sets the schedule of every strategy",
            "remove it and set lr_schedule and warmup_steps",
        )
    if config.precision == "fp16":
        document["fp16"] = {**FP16_LOSS_SCALING, **document["fp16"]}
    sizes = document.get("zero_optimization", {}).items()
    zero: Any = {name: value for name, value in sizes if value != AUTO}  # DeepSpeed's defaults
    document["zero_optimization"] = zero
    if zero.get("stage") == 3:  # memory_efficient_linear is slower if blocks are compiled
        zero.setdefault("memory_efficient_linear", False)
    for part in ("offload_optimizer", "offload_param"):
        section = zero.get(part)
        if isinstance(section, dict) and section.get("nvme_path") == AUTO:
            section["nvme_path"] = str(plan.offload_dir)
    return document


def other_settings(document: JsonObject) -> JsonObject:
    """Return the sections and settings of a filled-in DeepSpeed configuration that neither CONFIG
    nor the layout determines, by their dotted paths. They may change the results, and the
    predictions ignore them. A section or a setting that is turned off is left out."""
    others = {name: value for name, value in document.items() if name not in LAYOUT_SECTIONS}
    for section in ("zero_optimization", "bf16", "fp16", "pipeline"):
        settings = others.pop(section, {})
        for name, value in settings.items() if settings.get("enabled", True) else ():
            if name not in LAYOUT_SETTINGS and value != FP16_LOSS_SCALING.get(name):
                others[f"{section}.{name}"] = value
    return {
        path: value
        for path, value in others.items()
        if value and not (isinstance(value, dict) and value.get("enabled") is False)
    }
