"""Read the config of LoRA adapters in a PEFT folder, and find the folder that contains their base
weights. This module does not import torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, FiniteFloat

from distributed_training.data import hub
from distributed_training.models.weights import fetch_weights
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, parse_as, shown

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_FIX = "use plain LoRA adapters, or merge these adapters into their base model with PEFT first"
# Keys that do not affect the computation of trained adapters
_IGNORED_KEYS = {
    "task_type",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "fan_in_fan_out",
    "target_modules",
    "loftq_config",
    "eva_config",
    "megatron_core",
    "qalora_group_size",
}


class AdapterConfig(BaseModel, strict=True):
    """Keys of an adapter_config.json that affect the computation."""

    peft_type: Literal["LORA"]
    base_model_name_or_path: str
    r: Annotated[int, Field(ge=1, le=2**16)]
    lora_alpha: Annotated[FiniteFloat, Field(gt=0, le=2**31)]  # same bounds as in CONFIG
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_parameters: list[str] | None = None
    use_rslora: bool = False
    revision: Literal["main"] | None = None
    bias: Literal["none"] = "none"
    # The initializations that leave the base weights unchanged
    init_lora_weights: Literal[True, False, "gaussian", "eva", "orthogonal"] = True

    @property
    def alpha(self) -> float:
        """Return the value of CONFIG's `lora_alpha` that gives these adapters their scale."""
        return self.lora_alpha * self.r**0.5 if self.use_rslora else self.lora_alpha


def read_adapters(folder: Path) -> AdapterConfig:
    """Return the config of the adapters in `folder`. Raises UserError unless the adapters only add
    the scaled product `B A` to the base weights."""
    file = folder / ADAPTER_CONFIG
    document = load_json(file, "adapters")
    config = parse_as(AdapterConfig, document, str(file), _FIX)
    for key in sorted(set(document) - _IGNORED_KEYS - set(AdapterConfig.model_fields)):
        value = document[key]
        if value is not None and value is not False and value not in ("", [], {}):
            what = f"{file}: {key}={shown(value)} is not supported"
            raise UserError(what, "this key changes how the adapters are computed", _FIX)
    return config


def is_adapter(folder: Path) -> bool:
    """Return whether a folder contains LoRA adapters in PEFT's format."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_name(folder: Path) -> str:
    """Return the folder of the adapters' base model, or the base model's name on the Hub. Raises
    UserError if the config names neither."""
    name = read_adapters(folder).base_model_name_or_path
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if not hub.is_repo_id(name):
        what = f"{folder / ADAPTER_CONFIG}: base_model_name_or_path={shown(name)} is not available"
        why = "it is neither a folder nor the name of a model on the Hub"
        raise UserError(what, why, "set base_model_name_or_path to the folder of the base model")
    return name


def base_folder(folder: Path) -> Path:
    """Return the folder of the base weights if `folder` contains adapters. Otherwise, return
    `folder`. Raises UserError if the base weights are not available."""
    if not is_adapter(folder):
        return folder
    name = base_name(folder)
    if Path(name).is_dir():
        return Path(name)
    try:
        return fetch_weights(name)
    except OSError as error:
        command = f"hf download {name}"
        missing = f"base_model_name_or_path={name!r} is"
        raise hub.fetch_error(missing, error, command) from None
