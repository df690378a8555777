"""Adapters as folders that the library PEFT opens, and merged into the weights beside them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field, FiniteFloat
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from distributed_training.models import ModelSpec, save_tensors
from distributed_training.models.decoder import Decoder, Linear
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, open_regular, parse_as, shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


class Adapters(BaseModel, strict=True):
    """An adapter_config.json, as far as it changes what is computed."""

    peft_type: Literal["LORA"]
    base_model_name_or_path: str
    r: Annotated[int, Field(ge=1, le=2**16)]
    lora_alpha: FiniteFloat
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    rank_pattern: Annotated[dict[str, int], Field(max_length=0)] | None = None
    alpha_pattern: Annotated[dict[str, float], Field(max_length=0)] | None = None
    target_modules: list[str] | str | None = None
    # Each of these changes what is computed, in a way that is not done here.
    bias: Literal["none"] = "none"
    lora_bias: Literal[False] = False
    modules_to_save: Annotated[list[str], Field(max_length=0)] | None = None
    layers_to_transform: None = None
    layers_pattern: Annotated[list[str] | str, Field(max_length=0)] | None = None
    layer_replication: None = None
    target_parameters: Annotated[list[str], Field(max_length=0)] | None = None
    trainable_token_indices: None = None
    exclude_modules: Annotated[list[str] | str, Field(max_length=0)] | None = None
    alora_invocation_tokens: None = None
    use_qalora: Literal[False] = False
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "eva"] = True  # others change bases


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
    save_tensors(tensors, folder / WEIGHTS_FILE, metadata)
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
    pairs = []  # checked before any is added
    for name, linear in model.named_modules():
        if isinstance(linear, Linear):
            numbers = torch.arange(linear.out_features)[:, None]
            for theirs, rows in spec.name_rows(name, numbers).items():
                a = left.pop(f"{PREFIX}{theirs}.lora_A.weight", None)
                b = left.pop(f"{PREFIX}{theirs}.lora_B.weight", None)
                if a is not None or b is not None:
                    shape = (len(rows), linear.in_features)
                    a, b = _checked_pair(a, b, shape, f"{whose}: {theirs}")
                    pairs.append((linear.weight, rows[:, 0], a, b))
    if not left:
        for weight, numbers, a, b in pairs:
            weight[numbers] += scale * (b.float() @ a.float())
    else:
        what = f"{next(iter(left))} is no adapter of a matrix of {spec.label}'s blocks"
        raise UserError(what, "only those can be used here", "merge it with PEFT")


def _checked_pair(
    a: torch.Tensor | None, b: torch.Tensor | None, shape: tuple[int, int], what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B; raise UserError unless they are adapters of a matrix of `shape` [out, in]."""
    if a is None or b is None:
        missing = "lora_A" if a is None else "lora_B"
        raise UserError(f"{what} has no {missing}", fix="fetch the adapters again")
    rank = len(a) if a.dim() == 2 else 0
    for name, tensor, expected in (("A", a, [rank, shape[1]]), ("B", b, [shape[0], rank])):
        if list(tensor.shape) != expected or not tensor.is_floating_point():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise UserError(f"{what}: lora_{name} is {found} and should be a float {expected}")
        if not tensor.isfinite().all():
            raise UserError(f"{what}: lora_{name} has numbers that are not finite")
    return a, b


def load_adapters(model: Decoder, spec: ModelSpec, folder: Path) -> None:
    """Merge the adapters in `folder` into a model that has their base's weights. Raises UserError
    for a file that is missing or damaged, or that is not what the config says."""
    config = read_config(folder)
    file = folder / WEIGHTS_FILE
    try:
        open_regular(file).close()
        with safe_open(file, "pt") as opened:
            base = (opened.metadata() or {}).get("base_fingerprint")
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"adapters {file} cannot be read", why, "fetch them again") from None
    if base is not None and not base.lstrip("-").isdecimal():
        raise UserError(f"adapters {file}: base_fingerprint {shown(base)} is not a number")
    _check_names(config, tensors, model, spec, folder)
    scale = config.lora_alpha / config.r
    merge_adapters(model, spec, tensors, scale, base=base, whose=folder)


def _check_names(
    config: Adapters,
    tensors: Mapping[str, torch.Tensor],
    model: Decoder,
    spec: ModelSpec,
    folder: Path,
) -> None:
    """Raise UserError unless the tensors are adapters of rank `config.r` of all its targets."""
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight") and tensor.dim() == 2 and len(tensor) != config.r:
            what = f"{folder}: {name} has rank {len(tensor)} and r is {config.r}"
            raise UserError(what, f"{CONFIG_FILE} and {WEIGHTS_FILE} do not belong together")
    adapted = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    if not adapted:
        raise UserError(f"{folder}: {WEIGHTS_FILE} has no adapters", fix="fetch them again")
    targets = config.target_modules
    if not isinstance(targets, list):  # a pattern, or by architecture: what one block has, all have
        targets = sorted({".".join(name.split(".")[-2:]) for name in adapted})
    for name, linear in model.named_modules():
        if isinstance(linear, Linear):
            for theirs in spec.name_rows(name, torch.empty(linear.out_features, 1)):
                named = any(theirs == target or theirs.endswith(f".{target}") for target in targets)
                if named != (theirs in adapted):
                    has = "has no adapter" if named else "has an adapter and is no target"
                    raise UserError(f"{folder}: {theirs} {has}", "target_modules says otherwise")
