"""Read and write LoRA adapters in PEFT's folder format, prepare them for further training, and
merge them into weights."""

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from distributed_training.models import ModelSpec, split_consecutive
from distributed_training.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterConfig,
    read_adapters,
)
from distributed_training.models.initial_weights import Slices, WeightSource
from distributed_training.models.size import ModelSize
from distributed_training.models.weights import all_finite, write_tensors
from distributed_training.settings.config import Request, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

PREFIX = "base_model.model."
_ROUNDINGS = {"nf4 bf16": torch.bfloat16, "nf4 fp16": torch.float16, "nf4 fp32": torch.float32}


class InitialAdapters(NamedTuple):
    """Initial adapters for a run that continues training earlier adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of matrices in our blocks
    # A [rank, in] and B [out, rank] under our names, and a mask of B if some of its values stay 0
    tensors: dict[str, torch.Tensor]
    base_fingerprint: str | None  # fingerprint of the base weights


class _Adapter(NamedTuple):
    """LoRA matrices A and B (fp32) for a subset of the rows of one matrix in this package's
    model."""

    name: str
    rows: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Trained adapters of a model. A matrix in this package may combine several Hugging Face
    matrices, each with its own adapter."""

    by_matrix: Mapping[str, list[_Adapter]]
    rank: int
    scale: float  # factor by which B A is scaled before it is added to the weights
    base_fingerprint: str | None  # fingerprint of the base weights
    rounding: str | None  # format of a quantized base and the compute dtype, such as "nf4 bf16"
    origin: object  # folder or run of the adapters, for messages

    def rounding_dtype(self) -> torch.dtype | None:
        """Return the compute dtype if the base was in NF4, or None if the base was not quantized.
        Raises UserError if the format is unknown or bitsandbytes is not installed."""
        if self.rounding is None:
            return None
        if self.rounding not in _ROUNDINGS:
            what = f"adapters {self.origin}: base_rounding {shown(self.rounding)} is not known"
            raise UserError(what, f"supported values are {', '.join(_ROUNDINGS)}")
        if importlib.util.find_spec("bitsandbytes") is None:
            what = f"{self.origin}: these adapters were trained on an NF4 base model"
            why = "the package bitsandbytes is not installed"
            raise UserError(what, why, "run: pip install bitsandbytes")
        return _ROUNDINGS[self.rounding]

    def trained_base(self, base: WeightSource, size: ModelSize) -> WeightSource:
        """Return a source of the `base` weights on which the adapters were trained. If the base was
        quantized, the source returns dequantized NF4 values."""
        dtype = self.rounding_dtype()
        if dtype is None:
            return base
        from distributed_training.models.nf4 import dequantized_source

        return dequantized_source(base, size, dtype)

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

    def initial(self, size: ModelSize) -> InitialAdapters:
        """Return the adapters in a form from which training can continue.

        If a matrix in this package combines several Hugging Face matrices, each of them may have
        its own A matrix. The A matrix of the combined adapter stacks the distinct A matrices. The
        rank can therefore be larger than the rank of the trained adapters. A mask keeps each row of
        B at 0 in the columns that belong to other adapters."""
        matrices = self.by_matrix.items()
        distinct = {
            name: _distinct([adapter.a for adapter in adapters]) for name, adapters in matrices
        }
        rank = self.rank * max(map(len, distinct.values()))
        tensors = {}
        shapes = dict(zip(size.matrix_names, size.block_matrices, strict=True))
        for name, adapters in matrices:
            rows, columns = shapes[name.split(".", 2)[2]]
            stacked_a = torch.zeros(rank, columns)
            b_rows = torch.zeros(rows, rank)
            mask = torch.zeros(rows, rank)
            is_used = torch.zeros(rank)
            for adapter in adapters:
                matches = (i for i, a in enumerate(distinct[name]) if torch.equal(adapter.a, a))
                first = self.rank * next(matches)
                ranks = slice(first, first + self.rank)
                stacked_a[ranks] = adapter.a
                b_rows[adapter.rows, ranks] = adapter.b
                mask[adapter.rows, ranks] = is_used[ranks] = 1.0
            tensors[f"{name}.adapter.a"] = stacked_a
            tensors[f"{name}.adapter.b"] = b_rows
            if not torch.equal(mask, is_used.expand_as(mask)):
                tensors[f"{name}.adapter.mask"] = mask
        targets = tuple(name for name in size.matrix_names if f"blocks.0.{name}" in self.by_matrix)
        return InitialAdapters(rank, self.scale * rank, targets, tensors, self.base_fingerprint)


def read_folder(spec: ModelSpec, folder: Path) -> Adapters:
    """Return the adapters in `folder`. Raises UserError if they are not plain LoRA adapters for the
    model."""
    config = read_adapters(folder)
    tensors, metadata = _read_tensors(config, spec, folder)
    base_fingerprint, rounding = map(metadata.get, ("base_fingerprint", "base_rounding"))
    return Adapters(
        by_matrix=_group_by_matrix(tensors, spec, folder), rank=config.r, scale=config.scale,
        base_fingerprint=base_fingerprint, rounding=rounding, origin=folder,
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
    return Adapters(
        by_matrix=_group_by_matrix(to_peft(state, spec), spec, origin), rank=config.lora_rank,
        scale=config.lora_alpha / config.lora_rank, base_fingerprint=str(fingerprint),
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
    tensors, rank = _drop_zeros(to_peft(state, spec))
    metadata = {"format": "pt", "base_fingerprint": str(fingerprint)}
    if (rounding := base_rounding(config)) is not None:
        metadata["base_rounding"] = rounding
    write_tensors(folder / ADAPTER_WEIGHTS, tensors, tensors.values(), metadata)
    document: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": config.lora_alpha * rank / config.lora_rank,
        "lora_dropout": config.lora_dropout,
        "target_modules": sorted({".".join(name.split(".")[-4:-2]) for name in tensors}),
        "fan_in_fan_out": spec.code.STORES_TRANSPOSED,
    }  # fmt: skip
    (folder / ADAPTER_CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def base_rounding(config: RunConfig) -> str | None:
    """Return the quantization format of the base model and the compute dtype as one string, such as
    "nf4 bf16". Return None if the base model is not quantized."""
    return f"nf4 {config.precision}" if config.base_dtype == "nf4" else None


def _drop_zeros(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """Remove unneeded zeros from adapters. The keys of `tensors` are PEFT's names. Return
    (adapters, their rank).

    Adapters whose B is zero are removed. In the remaining adapters, zero columns of B are removed
    together with the corresponding rows of A. The new rank is the largest number of nonzero columns
    in any B."""
    nonzero = {}  # name of B -> (columns, nonzero ones first; number of nonzero columns)
    for name, b in tensors.items():
        if ".lora_B." in name:
            nonzero[name] = torch.argsort(~b.any(0), stable=True), int(b.any(0).sum())
    rank = max(count for _, count in nonzero.values())
    if rank == 0:  # Nothing has been trained yet.
        return tensors, len(next(iter(nonzero.values()))[0])
    trimmed = {}
    for name, (order, count) in nonzero.items():
        if count == 0:  # this Hugging Face matrix is a part of ours that has no adapter
            continue
        a_name = name.replace(".lora_B.", ".lora_A.")
        columns = order[:rank].sort().values
        trimmed[a_name] = tensors[a_name][columns].contiguous()
        trimmed[name] = tensors[name][:, columns].contiguous()
    return trimmed, rank


def to_peft(state: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Convert adapters from this package's parameter names to PEFT's. If one matrix in this package
    combines several Hugging Face matrices, each of these gets a copy of A and its own rows of B."""
    tensors = {}
    for name, a in state.items():
        matrix, is_a, _ = name.partition(".adapter.a")
        if is_a:
            b = state[f"{matrix}.adapter.b"]
            for hf_name, rows in spec.split_by_hf_matrix(matrix, b).items():
                tensors[f"{PREFIX}{hf_name}.lora_A.weight"] = a.clone()
                tensors[f"{PREFIX}{hf_name}.lora_B.weight"] = rows.contiguous()
    return tensors


def read_initial(spec: ModelSpec, folder: Path) -> InitialAdapters:
    """Return the adapters in `folder` in a form from which training can continue. Raises UserError
    if they are not plain LoRA adapters for the model."""
    return read_folder(spec, folder).initial(spec.size)


def keys_to_continue(config: Request, model: ModelSpec, folder: Path) -> tuple[dict[str, Any], str]:
    """Return (LoRA keys of CONFIG with their values, note for the user) for a run that continues
    training the adapters in `folder`. Raises UserError if CONFIG sets a different rank, alpha or
    targets, or if the adapters do not fit `model`."""
    adapters = read_adapters(folder)
    initial = read_initial(model, folder)
    targets = None if initial.targets == model.size.matrix_names else ",".join(initial.targets)
    keys: dict[str, Any] = {}
    adapter_values = {
        "lora_rank": (adapters.r, initial.rank),
        "lora_alpha": (adapters.lora_alpha, initial.alpha),
        "lora_targets": (targets, targets),
    }
    for key, (shown_value, value) in adapter_values.items():
        config_value = getattr(config, key)
        if config.is_set(key) and config_value not in (shown_value, value):
            what = f"{key}={config_value!r} does not match the adapters in {folder}"
            fix = f"leave out {key}, or merge the adapters with PEFT and train new ones"
            raise UserError(what, f"the adapters have {key}={shown_value!r}", fix)
        keys[key] = value
    if not config.is_set("lora_dropout"):
        keys["lora_dropout"] = adapters.lora_dropout
    note = f"training continues from the rank-{adapters.r} adapters in {folder}, on "
    note += adapters.base_model_name_or_path
    if initial.rank != adapters.r:
        note += (
            ". They need as much memory as adapters of rank "
            f"{initial.rank}, because q, k and v (or gate "
        )
        note += "and up) each have their own A matrix"
    return keys, note


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors without duplicates."""
    distinct: list[torch.Tensor] = []
    for tensor in tensors:
        if not any(torch.equal(tensor, other) for other in distinct):
            distinct.append(tensor)
    return distinct


def check_base(fingerprint: int, base: str | None, origin: object) -> None:
    """Raise UserError if the `fingerprint` of a model's weights differs from `base`, the
    fingerprint of the weights on which adapters were trained. `base` is None if this fingerprint is
    unknown. In that case, any weights are accepted. `origin` names the adapters in the message."""
    if base is not None and int(base) != fingerprint:
        what = f"{origin}: these adapters were trained on other weights"
        raise UserError(
            what,
            "the base model's weights do not match those used in training",
            "restore the original weights",
        )


def has_quantized_base(folder: Path) -> bool:
    """Return whether the adapters in `folder` were trained on a quantized base model."""
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as weight_file:
        return "base_rounding" in (weight_file.metadata() or {})


def _iter_matrices(spec: ModelSpec) -> Iterator[tuple[str, int, str, torch.Tensor]]:
    """Yield (our_name, num_columns, hf_name, rows) for each Hugging Face matrix in the blocks.
    `our_name` names the matrix in this package that contains the Hugging Face matrix. `rows`
    contains the indices of the rows of `our_name` that belong to the Hugging Face matrix."""
    size = spec.size
    for layer in range(size.num_layers):
        for matrix, (rows, columns) in zip(size.matrix_names, size.block_matrices, strict=True):
            name = f"blocks.{layer}.{matrix}"
            row_numbers = torch.arange(rows)[:, None]
            for hf_name, hf_rows in spec.split_by_hf_matrix(name, row_numbers).items():
                yield name, columns, hf_name, hf_rows[:, 0]


def _group_by_matrix(
    tensors: Mapping[str, torch.Tensor], spec: ModelSpec, origin: object
) -> dict[str, list[_Adapter]]:
    """Group adapters by the matrix in this package that they adapt. The keys of `tensors` are
    PEFT's names. Raises UserError if an adapter's A or B is missing or does not fit the matrix."""
    by_matrix = defaultdict[str, list[_Adapter]](list)
    for name, columns, hf_name, rows in _iter_matrices(spec):
        a, b = (tensors.get(name) for name in _peft_names(hf_name))
        if a is not None or b is not None:
            a, b = _check_pair(a, b, (len(rows), columns), f"{origin}: {hf_name}")
            by_matrix[name].append(_Adapter(name, rows, a.float(), b.float()))
    return dict(by_matrix)


def _peft_names(matrix: str) -> tuple[str, str]:
    """Return PEFT's names for A and B of a Hugging Face matrix."""
    return f"{PREFIX}{matrix}.lora_A.weight", f"{PREFIX}{matrix}.lora_B.weight"


def _refuse_others(names: Iterable[str], spec: ModelSpec) -> None:
    """Raise UserError unless all `names` belong to adapters of matrices in the blocks. `names` are
    the tensor names in an adapter file."""
    allowed = {name for _, _, hf_name, _ in _iter_matrices(spec) for name in _peft_names(hf_name)}
    if unexpected := next((name for name in names if name not in allowed), None):
        what = f"{shown(unexpected)} is not an adapter of a matrix in {spec.label}'s blocks"
        raise UserError(what, "no other tensors are supported", "merge the adapters with PEFT")


def _check_pair(
    a: torch.Tensor | None, b: torch.Tensor | None, shape: tuple[int, int], what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B. Raises UserError unless both are finite and fit a matrix of `shape`
    [out, in]."""
    if a is None or b is None:
        missing_name = "lora_A" if a is None else "lora_B"
        raise UserError(f"{what} has no {missing_name}", fix="download the adapters again")
    rank = len(a) if a.dim() == 2 else 0
    for name, tensor, expected in (("A", a, [rank, shape[1]]), ("B", b, [shape[0], rank])):
        if list(tensor.shape) != expected or not tensor.is_floating_point():
            actual = f"{tensor.dtype} {list(tensor.shape)}"
            problem = f"{what}: lora_{name} is {actual}"
            fix = "use the adapters of this model"
            raise UserError(problem, f"it should be a float tensor of shape {expected}", fix)
        if not all_finite(tensor):
            fix = "train or download the adapters again"
            raise UserError(f"{what}: lora_{name} has non-finite values", fix=fix)
    return a, b


def _read_tensors(
    config: AdapterConfig, spec: ModelSpec, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of the adapters in `folder`, and the metadata of their file. The metadata
    may contain the fingerprint of the base weights. Raises UserError if the file is missing,
    damaged or inconsistent with the config."""
    file = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(file, "pt") as weight_file:
            metadata = weight_file.metadata() or {}
            # Check the names first, because loading hundreds of thousands of tensors takes a
            # minute.
            _refuse_others(weight_file.keys(), spec)
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        pickled = file.with_suffix(".bin")
        fix = "download them again"
        if pickled.is_file():
            fix = f"load {pickled} with PEFT and save it again"
        raise UserError(f"adapters {file} cannot be read", why, fix) from None
    base = metadata.get("base_fingerprint")
    if base is not None and not re.fullmatch(r"-?[0-9]{1,20}", base):
        raise UserError(f"adapters {file}: base_fingerprint {shown(base)} is not a number")
    _check_names(config, tensors, spec, folder)
    return tensors, metadata


def _check_names(
    config: AdapterConfig, tensors: Mapping[str, torch.Tensor], spec: ModelSpec, folder: Path
) -> None:
    """Raise UserError unless the tensors are adapters of rank `config.r` for exactly the targets in
    `config`."""
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight") and tensor.dim() == 2 and len(tensor) != config.r:
            what = f"{folder}: {name} has rank {len(tensor)}, but r is {config.r}"
            why = f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} do not belong together"
            raise UserError(what, why, "download both again")
    adapted = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    if not adapted:
        raise UserError(f"{folder}: {ADAPTER_WEIGHTS} has no adapters", fix="download them again")
    targets = config.target_modules
    if not isinstance(targets, list):  # a pattern, which may select blocks, or None
        targets = sorted({".".join(name.split(".")[-2:]) for name in adapted})
    for _, _, hf_name, _ in _iter_matrices(spec):
        is_target = any(hf_name == target or hf_name.endswith(f".{target}") for target in targets)
        if is_target != (hf_name in adapted):
            has = (
                "has no adapter but is a target"
                if is_target
                else "has an adapter but is not a target"
            )
            if targets is not config.target_modules:
                why = "all blocks must have adapters of the same matrices"
                fix = "merge the adapters with PEFT"
                raise UserError(f"{folder}: {hf_name} has no adapter", why, fix)
            why = f"target_modules in {ADAPTER_CONFIG} does not match {ADAPTER_WEIGHTS}"
            fix = (
                "download both again, or set model to auto if the adapters belong to another model"
            )
            raise UserError(f"{folder}: {hf_name} {has}", why, fix)
