"""Read and write LoRA adapters in PEFT's folder format, prepare them for further training, and
merge them into weights."""

import importlib.util
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from distributed_training.models import ModelSpec, split_consecutive
from distributed_training.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapters
from distributed_training.models.initial_weights import Slices, WeightSource
from distributed_training.models.quantized import dequantized_source
from distributed_training.models.size import ModelSize
from distributed_training.models.weights import all_finite, write_tensors
from distributed_training.settings.config import Request, RunConfig
from distributed_training.settings.errors import UserError

PREFIX = "base_model.model."
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class _Adapter(NamedTuple):
    """LoRA matrices A and B (fp32) of one Hugging Face matrix, and the rows of this package's
    matrix to which the rows of B belong."""

    rows: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Trained adapters of a model. A matrix in this package may combine several Hugging Face
    matrices, each with its own adapter."""

    by_matrix: Mapping[str, list[_Adapter]]
    targets: str | None  # Hugging Face matrices with adapters, as the value of `lora_targets`
    rank: int
    scale: float  # factor by which B A is scaled before it is added to the weights
    base_fingerprint: str | None  # fingerprint of the base weights
    rounding: str | None  # format of a quantized base and the compute dtype, such as "nf4 bf16"
    origin: object  # folder or run of the adapters, for messages

    @property
    def base_dtypes(self) -> tuple[str, torch.dtype | None]:
        """Return the format of a quantized base, or "", and the compute dtype. Raises UserError if
        the base was in NF4 and bitsandbytes is not installed."""
        base_dtype, _, precision = (self.rounding or "").partition(" ")
        if base_dtype == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            what = f"{self.origin}: these adapters were trained on an NF4 base model"
            why = "the package bitsandbytes is not installed"
            raise UserError(what, why, "run: pip install bitsandbytes")
        return base_dtype, _DTYPES.get(precision)

    def trained_base(self, base: WeightSource, size: ModelSize) -> WeightSource:
        """Return a source of the `base` weights on which the adapters were trained. If the base was
        quantized, the source returns dequantized values."""
        base_dtype, dtype = self.base_dtypes
        return dequantized_source(base, size, base_dtype, dtype) if dtype else base

    def merged(self, base: WeightSource, size: ModelSize) -> WeightSource:
        """Return a source of the `base` weights with the adapters merged in. The weights and the
        adapters are added in fp32."""
        weights = self.trained_base(base, size)

        def read(name: str, slices: Slices) -> torch.Tensor:
            values = weights(name, ())
            if adapters := self.by_matrix.get(name.removesuffix(".weight")):
                values = values.to(torch.float32, copy=True)
                for adapter in adapters:
                    update = (adapter.b @ adapter.a).mul_(self.scale)
                    runs = split_consecutive(adapter.rows)
                    for run, delta in zip(runs, update.split([*map(len, runs)]), strict=True):
                        values[run[0] : run[-1] + 1] += delta  # index_add_ takes 10 times as long
            return values[slices]

        return read

    def check_base(self, fingerprint: int) -> None:
        """Raise UserError if the `fingerprint` of a model's weights differs from the fingerprint of
        the weights on which the adapters were trained. Adapters from PEFT have no fingerprint."""
        if self.base_fingerprint not in (None, str(fingerprint)):
            what = f"{self.origin}: these adapters were trained on other weights"
            why = "the base model's weights do not match those used in training"
            raise UserError(what, why, "restore the original weights")

    def stacked(self) -> dict[str, torch.Tensor]:
        """Return the adapters under this package's names, as `apply_lora` stacks them."""
        tensors = {}
        for name, adapters in self.by_matrix.items():
            order = torch.cat([adapter.rows for adapter in adapters]).argsort()
            tensors[f"{name}.adapter.a"] = torch.cat([adapter.a for adapter in adapters])
            tensors[f"{name}.adapter.b"] = torch.cat([adapter.b for adapter in adapters])[order]
        return tensors


def read_folder(spec: ModelSpec, folder: Path) -> Adapters:
    """Return the adapters in `folder`. Raises UserError if they are not plain LoRA adapters for the
    model."""
    config = read_adapters(folder)
    file = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(file, "pt") as weight_file:
            tensors = {name: weight_file.get_tensor(name) for name in weight_file.keys()}  # noqa: SIM118
            metadata = weight_file.metadata() or {}
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        pickled = file.with_suffix(".bin")
        fix = "download them again"
        if pickled.is_file():
            fix = f"load {pickled} with PEFT and save it again"
        raise UserError(f"adapters {file} cannot be read", why, fix) from None
    all_parts = [name for parts in spec.size.adapted_parts(None).values() for name in parts]
    parts = [
        part for part in all_parts
        if any(name.endswith(f".{part}.lora_A.weight") for name in tensors)
    ]  # fmt: skip
    if not parts:
        raise UserError(
            f"adapters {file} fit no matrix of {spec.label}", fix="use its own adapters"
        )
    targets = None if parts == all_parts else ",".join(parts)
    return Adapters(
        by_matrix=_group_by_matrix(tensors, spec, targets, config.r, folder), targets=targets,
        rank=config.r, scale=config.scale, base_fingerprint=metadata.get("base_checksum"),
        rounding=metadata.get("base_rounding"), origin=folder,
    )  # fmt: skip


def adapters_from_state(
    state: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    config: RunConfig,
    fingerprint: int,
    origin: object,
) -> Adapters:
    """Return the adapters of a run. `state` maps this package's parameter names to the run's
    tensors."""
    rank, targets = config.lora_rank, config.lora_targets
    tensors = to_peft(state, spec, config)
    return Adapters(
        by_matrix=_group_by_matrix(tensors, spec, targets, rank, origin), targets=targets,
        rank=rank, scale=config.lora_alpha / rank, base_fingerprint=str(fingerprint),
        rounding=base_rounding(config), origin=origin,
    )  # fmt: skip


def save_adapters(
    state: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    config: RunConfig,
    folder: Path,
    *,
    base: str,
    fingerprint: int,
) -> None:
    """Write the adapters in `state` to a folder that PEFT can load. `state` maps this package's
    parameter names to tensors. `base` is the folder of the base model or its name on the Hub."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_peft(state, spec, config)
    metadata = {"format": "pt", "base_checksum": str(fingerprint)}
    if (rounding := base_rounding(config)) is not None:
        metadata["base_rounding"] = rounding
    write_tensors(folder / ADAPTER_WEIGHTS, tensors, tensors.values(), metadata)
    document: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True,
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": sorted({".".join(name.split(".")[-4:-2]) for name in tensors}),
        "fan_in_fan_out": spec.code.STORES_TRANSPOSED,
    }  # fmt: skip
    (folder / ADAPTER_CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def base_rounding(config: RunConfig) -> str | None:
    """Return the quantization format of the base model and the compute dtype as one string, such as
    "nf4 bf16". Return None if the base model is not quantized."""
    is_quantized = config.base_dtype in ("fp8", "nf4")
    return f"{config.base_dtype} {config.precision}" if is_quantized else None


def to_peft(
    state: Mapping[str, torch.Tensor], spec: ModelSpec, config: RunConfig
) -> dict[str, torch.Tensor]:
    """Convert a run's adapters from this package's parameter names to PEFT's. The tensors of each
    Hugging Face matrix are separate."""
    tensors = {}
    for name, stacked_a in state.items():
        matrix, is_a, _ = name.partition(".adapter.a")
        if is_a:
            rows = spec.hf_rows(matrix, config.lora_targets)
            stacked_b = state[f"{matrix}.adapter.b"]
            b = torch.empty_like(stacked_b)
            b[torch.cat([*rows.values()]).argsort()] = stacked_b
            for hf_name, a_part, b_part in zip(
                rows, stacked_a.split(config.lora_rank), b.split([*map(len, rows.values())]),
                strict=True,
            ):  # fmt: skip
                name_a, name_b = _peft_names(hf_name)
                tensors[name_a] = a_part.contiguous()
                tensors[name_b] = b_part.contiguous()
    return tensors


def keys_to_continue(config: Request, model: ModelSpec, folder: Path) -> tuple[dict[str, Any], str]:
    """Return (LoRA keys of CONFIG with their values, note for the user) for a run that continues
    training the adapters in `folder`. Raises UserError if CONFIG sets a different rank, alpha or
    targets, or if the adapters do not fit `model`."""
    adapters = read_adapters(folder)
    initial = read_folder(model, folder)
    adapted_parts = model.size.adapted_parts
    keys: dict[str, Any] = {
        "lora_rank": adapters.r, "lora_alpha": initial.scale * adapters.r,
        "lora_targets": initial.targets,
    }  # fmt: skip
    for key, value in keys.items():
        typed = getattr(config, key)
        if key == "lora_targets":
            matches = adapted_parts(typed) == adapted_parts(value)
        else:
            matches = typed in (value, getattr(adapters, key, None))
        if config.is_set(key) and not matches:
            what = f"{key}={typed!r} does not match the adapters in {folder}"
            fix = f"leave out {key}, or merge the adapters with PEFT and train new ones"
            raise UserError(what, f"the adapters have {key}={value!r}", fix)
    if not config.is_set("lora_dropout"):
        keys["lora_dropout"] = adapters.lora_dropout
    note = f"training continues from the rank-{adapters.r} adapters in {folder}, on "
    return keys, note + adapters.base_model_name_or_path


def _peft_names(matrix: str) -> tuple[str, str]:
    """Return PEFT's names for A and B of a Hugging Face matrix."""
    return f"{PREFIX}{matrix}.lora_A.weight", f"{PREFIX}{matrix}.lora_B.weight"


def _group_by_matrix(
    tensors: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    targets: str | None,
    rank: int,
    origin: object,
) -> dict[str, list[_Adapter]]:
    """Group adapters by the matrix in this package that they adapt. The keys of `tensors` are
    PEFT's names. Raises UserError unless there is a finite A and B of rank `rank` for exactly those
    matrices of all blocks that `targets` selects."""
    by_matrix = defaultdict[str, list[_Adapter]](list)
    remaining = dict(tensors)
    size = spec.size
    for layer in range(size.num_layers):
        for matrix, (_, columns) in zip(size.matrix_names, size.block_matrices, strict=True):
            our_name = f"blocks.{layer}.{matrix}"
            for hf_name, rows in spec.hf_rows(our_name, targets).items():
                pair = []
                shapes = ([rank, columns], [len(rows), rank])
                for name, shape in zip(_peft_names(hf_name), shapes, strict=True):
                    tensor = remaining.pop(name, None)
                    if tensor is None or list(tensor.shape) != shape or not all_finite(tensor):
                        what = f"{origin}: {name} is not a finite tensor of shape {shape}"
                        raise UserError(what, fix="use adapters of the same matrices in all blocks")
                    pair.append(tensor.float())
                by_matrix[our_name].append(_Adapter(rows, *pair))
    if remaining:
        what = f"{origin}: {min(remaining)} is not an adapter of a matrix in {spec.label}'s blocks"
        raise UserError(what, "no other tensors are supported", "merge the adapters with PEFT")
    return dict(by_matrix)
