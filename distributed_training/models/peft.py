"""Adapters as folders that the library PEFT opens, and merged into the weights beside them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field, PositiveInt
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from distributed_training.models import ModelSpec
from distributed_training.models.decoder import Decoder, Linear
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, parse_as

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


class Adapters(BaseModel, strict=True):
    """An adapter_config.json, as far as it changes what is computed."""

    peft_type: Literal["LORA"]
    base_model_name_or_path: str
    r: PositiveInt
    lora_alpha: float
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    rank_pattern: Annotated[dict[str, int], Field(max_length=0)] = {}
    alpha_pattern: Annotated[dict[str, float], Field(max_length=0)] = {}


def read_config(folder: Path) -> Adapters:
    """Of a folder with adapters; UserError where we do not compute what they are."""
    file = folder / CONFIG_FILE
    fix = "give plain LoRA adapters, or merge them with PEFT first"
    return parse_as(Adapters, load_json(file, "adapters"), str(file), fix)


def save_adapters(
    state: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    config: RunConfig,
    folder: Path,
    *,
    base: str,
    fingerprint: int,
) -> None:
    """Write `state`, adapters under our names, for the weights `base`: a folder or a Hub's name."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_peft(state, spec)
    metadata = {"format": "pt", "base_fingerprint": str(fingerprint)}
    save_file(tensors, folder / WEIGHTS_FILE, metadata=metadata)
    document = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True,
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": sorted({".".join(name.split(".")[-4:-2]) for name in tensors}),
        "fan_in_fan_out": spec.code.STORES_TRANSPOSED,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n")


def to_peft(state: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Adapters under our names -> under PEFT's: of a matrix of ours that is several of Hugging
    Face's, each gets all of A and its rows of B."""
    tensors = {}
    for name, a in state.items():
        matrix, is_a, _ = name.partition(".adapter.a")
        if is_a:
            for theirs, rows in spec.name_rows(matrix, state[f"{matrix}.adapter.b"]).items():
                tensors[f"{PREFIX}{theirs}.lora_A.weight"] = a.clone()
                tensors[f"{PREFIX}{theirs}.lora_B.weight"] = rows.contiguous()
    return tensors


@torch.no_grad()
def merge_adapters(
    model: Decoder,
    spec: ModelSpec,
    tensors: Mapping[str, torch.Tensor],
    scale: float,
    *,
    base: str | int | None,
    whose: object,
) -> None:
    """Add `scale` B A of adapters under PEFT's names, those of `whose`, to the weights of a whole
    model, in place. Raises UserError where these have another fingerprint than the `base` that the
    adapters were trained beside, if known, and for what is no adapter of a block's matrix."""
    if base is not None and int(base) != model.fingerprint():
        what = f"{whose}: these adapters were trained beside other weights"
        raise UserError(what, "the base has changed since", "restore it")
    left = dict(tensors)
    for name, linear in model.named_modules():
        if isinstance(linear, Linear):
            numbers = torch.arange(linear.out_features)[:, None]
            for theirs, rows in spec.name_rows(name, numbers).items():
                a = left.pop(f"{PREFIX}{theirs}.lora_A.weight", None)
                b = left.pop(f"{PREFIX}{theirs}.lora_B.weight", None)
                if a is not None and b is not None:
                    linear.weight[rows[:, 0]] += scale * (b.float() @ a.float())
    if left:
        what = f"{next(iter(left))} is no adapter of a matrix of {spec.label}'s blocks"
        raise UserError(what, "only those can be used here", "merge it with PEFT")


def load_adapters(model: Decoder, spec: ModelSpec, folder: Path) -> None:
    """Merge the adapters in `folder` into a model that has their base's weights."""
    config = read_config(folder)
    file = folder / WEIGHTS_FILE
    with safe_open(file, "pt") as opened:
        base = (opened.metadata() or {}).get("base_fingerprint")
    scale = config.lora_alpha / config.r
    merge_adapters(model, spec, load_file(file), scale, base=base, whose=folder)
