"""A strategy's DeepSpeed JSON with every "auto" filled in from CONFIG, or what stands against it.

No torch import.
"""

from __future__ import annotations

import copy
from typing import Any

from distributed_training.config import AUTO, RunConfig
from distributed_training.errors import UserError
from distributed_training.files import shown
from distributed_training.strategy import Strategy


def fill_deepspeed_json(
    strategy: Strategy, config: RunConfig, *, dp_size: int, offload_dir: str
) -> dict[str, Any]:
    """Return the strategy's DeepSpeed JSON with every "auto" replaced by what CONFIG says.

    Raises UserError naming both sides where the JSON holds another value than CONFIG.
    """
    document = copy.deepcopy(dict(strategy.document))
    decided = {
        ("train_micro_batch_size_per_gpu",): ("batch_size", config.micro_batch_size),
        ("gradient_accumulation_steps",): ("grad_accum_steps", config.grad_accum_steps),
        ("gradient_clipping",): ("max_grad_norm", config.max_grad_norm or 0.0),
        ("bf16", "enabled"): ("precision", config.precision == "bf16"),
        ("fp16", "enabled"): ("precision", config.precision == "fp16"),
    }
    for path, (key, value) in decided.items():
        section = document
        for part in path[:-1]:
            section = section.setdefault(part, {})
        written = section.get(path[-1], AUTO)
        if written != AUTO and not _same(written, value):
            user_value = config.to_user_words()[key]
            raise UserError(
                f"{strategy.source}: {'.'.join(path)}={shown(written)} but CONFIG "
                f"{key}={user_value!r}",
                fix=f'write "auto" in the JSON or change {key}',
            )
        section[path[-1]] = value
    _check_batch(strategy, config, document, dp_size)
    _drop_optimizer(strategy, config, document)
    if document.pop("scheduler", None) not in (None, {}):
        raise UserError(
            f"{strategy.source}: it has a scheduler section but CONFIG lr_schedule decides",
            fix="remove the section",
        )
    for key in set(document.get("pipeline", {})) - {"stages"}:
        raise UserError(
            f"{strategy.source}: pipeline.{key} is not for the JSON",
            "CONFIG pipeline_cut and activation_checkpointing decide",
            "remove it",
        )
    for part in ("offload_optimizer", "offload_param"):
        section = document.get("zero_optimization", {}).get(part) or {}
        if section.get("nvme_path") == AUTO:
            section["nvme_path"] = offload_dir
    left = _auto_paths(document)
    if left:
        raise UserError(
            f'{strategy.source}: "auto" is not understood at {", ".join(left)}', fix="write a value"
        )
    return document


def _check_batch(
    strategy: Strategy, config: RunConfig, document: dict[str, Any], dp_size: int
) -> None:
    """`train_batch_size` would assert in DeepSpeed for any other number of GPUs: check, drop."""
    written = document.pop("train_batch_size", AUTO)
    actual = config.micro_batch_size * config.grad_accum_steps * dp_size
    if written != AUTO and not _same(written, actual):
        raise UserError(
            f"{strategy.source}: train_batch_size={shown(written)} but CONFIG gives {actual} = "
            f"batch_size {config.micro_batch_size} x grad_accum_steps {config.grad_accum_steps} "
            f"x {dp_size} data-parallel processes",
            fix='write "auto" in the JSON',
        )


def _drop_optimizer(strategy: Strategy, config: RunConfig, document: dict[str, Any]) -> None:
    """The suite builds the optimizer itself; a JSON may only repeat what CONFIG says."""
    section = document.pop("optimizer", {})
    params = section.get("params", {})
    if not isinstance(params, dict):
        raise UserError(f"{strategy.source}: optimizer.params is not a JSON object")
    decided = {
        "lr": ("learning_rate", config.learning_rate),
        "weight_decay": ("weight_decay", config.weight_decay),
    }
    if section.get("type", "AdamW") != "AdamW":
        raise UserError(
            f"{strategy.source}: optimizer.type={shown(section['type'])} but every strategy trains "
            "with AdamW, so that runs can be compared",
            fix='write "AdamW" or remove the optimizer section',
        )
    for name, value in params.items():
        key, wanted = decided.get(name, ("", None))
        if value != AUTO and not (key and _same(value, wanted)):
            written = f"{strategy.source}: optimizer.params.{name}={shown(value)}"
            if not key:
                raise UserError(
                    f"{written} but {name} is fixed for all strategies", fix="remove it"
                )
            raise UserError(
                f"{written} but CONFIG has {key}={shown(wanted)}",
                fix=f'write "auto" in the JSON and set {key} in CONFIG',
            )


def _same(written: object, value: object) -> bool:
    """Equal, and not just because Python counts True as 1."""
    return isinstance(written, bool) == isinstance(value, bool) and written == value


def _auto_paths(node: Any, prefix: str = "") -> list[str]:
    if isinstance(node, dict):
        inner = [(f"{prefix}.{key}" if prefix else key, value) for key, value in node.items()]
    elif isinstance(node, list):
        inner = [(f"{prefix}[{index}]", value) for index, value in enumerate(node)]
    else:
        return [prefix] if node == AUTO else []
    return [found for path, value in inner for found in _auto_paths(value, path)]
