"""A strategy's DeepSpeed JSON, filled in from CONFIG; refused where they disagree. No torch."""

from __future__ import annotations

import copy
from typing import Any

from distributed_training.plan.batch import Batch
from distributed_training.settings.config import AUTO, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown
from distributed_training.settings.strategies import Strategy


def fill_deepspeed_json(
    strategy: Strategy, config: RunConfig, batch: Batch, *, offload_dir: str
) -> dict[str, Any]:
    """Return the strategy's DeepSpeed JSON with every "auto" replaced by what CONFIG says.

    Raises UserError naming both sides where the JSON holds another value than CONFIG.
    """
    document = copy.deepcopy(dict(strategy.document))
    decided = {
        "train_micro_batch_size_per_gpu": ("micro_batch_size", batch.micro_batch_size),
        "gradient_accumulation_steps": ("num_microbatches", batch.num_microbatches),
        "gradient_clipping": ("max_grad_norm", config.max_grad_norm or 0.0),
        "bf16.enabled": ("precision", config.precision == "bf16"),
        "fp16.enabled": ("precision", config.precision == "fp16"),
    }
    for path, (key, value) in decided.items():
        name, _, inner = path.partition(".")
        section, last = (document.setdefault(name, {}), inner) if inner else (document, name)
        if not _same(section.get(last, AUTO), value):
            raise UserError(
                f"{strategy.source}: {path}={shown(section[last])} but CONFIG makes "
                f"{key}={getattr(batch, key, getattr(config, key))!r}",
                fix=f'write "auto" in the JSON or change {key}',
            )
        section[last] = value
    # It would assert in DeepSpeed for any other number of GPUs: checked and dropped.
    written = document.pop("train_batch_size", AUTO)
    if not _same(written, batch.global_batch_size):
        raise UserError(
            f"{strategy.source}: train_batch_size={shown(written)} is not {batch.describe()}",
            fix='write "auto" in the JSON',
        )
    _check_optimizer(strategy, config, document.pop("optimizer", {}))
    unwanted = {f"pipeline.{key}" for key in document.get("pipeline", {}) if key != "stages"}
    unwanted |= {"scheduler"} if document.pop("scheduler", None) else set()
    for path in unwanted:
        raise UserError(
            f"{strategy.source}: {path} is not for the JSON",
            "lr_schedule, pipeline_cut and activation_checkpointing in CONFIG decide it",
            "remove it",
        )
    for part in ("offload_optimizer", "offload_param"):
        section = document.get("zero_optimization", {}).get(part) or {}
        if section.get("nvme_path") == AUTO:
            section["nvme_path"] = offload_dir
    left = ", ".join(_auto_paths(document))
    if left:
        raise UserError(f'{strategy.source}: "auto" is not understood at {left}', "write a value")
    return document


def _check_optimizer(strategy: Strategy, config: RunConfig, section: dict[str, Any]) -> None:
    """Every engine builds the same optimizer; a JSON may only repeat what CONFIG says."""
    params, where = section.get("params", {}), f"{strategy.source}: optimizer"
    if not isinstance(params, dict):
        raise UserError(f"{where}.params is not a JSON object")
    if section.get("type", "AdamW") != "AdamW":
        raise UserError(
            f"{where}.type={shown(section['type'])} but every strategy trains with AdamW, so that "
            "runs can be compared",
            fix='write "AdamW" or remove the optimizer section',
        )
    keys = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    for name, value in params.items():
        key = keys.get(name)
        wanted = getattr(config, key) if key else AUTO
        if not _same(value, wanted):
            has = f"CONFIG has {key}={shown(wanted)}" if key else "it is fixed for all strategies"
            fix = f'write "auto" in the JSON and set {key} in CONFIG' if key else "remove it"
            raise UserError(f"{where}.params.{name}={shown(value)} but {has}", fix=fix)


def _same(written: object, value: object) -> bool:
    """Open, or equal, and not just because Python counts True as 1."""
    return written == AUTO or (
        isinstance(written, bool) == isinstance(value, bool) and written == value
    )


def _auto_paths(node: Any, prefix: str = "") -> list[str]:
    if isinstance(node, dict):
        inner = [(f"{prefix}.{key}" if prefix else key, value) for key, value in node.items()]
    elif isinstance(node, list):
        inner = [(f"{prefix}[{index}]", value) for index, value in enumerate(node)]
    else:
        return [prefix] if node == AUTO else []
    return [found for path, value in inner for found in _auto_paths(value, path)]
