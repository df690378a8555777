"""Read and write LoRA adapters in PEFT's folder format, prepare them for further training, and
merge them into weights."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distributed_training.models import ModelSpec
from distributed_training.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapters
from distributed_training.models.decoder import COMPUTE_DTYPES
from distributed_training.models.initial_weights import Slices, WeightSource
from distributed_training.models.private import peft_expert_targets
from distributed_training.models.quantized import dequantized_source
from distributed_training.models.weights import all_finite, open_file, write_tensors
from distributed_training.settings.config import Config, Request
from distributed_training.settings.errors import RunError, UserError

PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Trained adapters of a model."""

    spec: ModelSpec
    tensors: Mapping[str, torch.Tensor]  # by this package's names (parallel/lora.py)
    config: Config  # its keys for LoRA and, if the base was quantized, for the base's dtypes
    base_fingerprint: str | None  # fingerprint of the base weights
    origin: object  # folder or run of the adapters, for messages

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype in which the run that trained the adapters computed."""
        return COMPUTE_DTYPES[self.config.precision] or torch.float32

    def trained_base(self, base: WeightSource) -> WeightSource:
        """Return a source of the `base` weights on which the adapters were trained. If the base was
        quantized, the source returns dequantized values."""
        if not self.config.has_quantized_base:
            return base
        return dequantized_source(
            base, self.spec.size, str(self.config.base_dtype), self.compute_dtype
        )

    def merged(self, base: WeightSource) -> WeightSource:
        """Return a source of the `base` weights with the adapters merged in. The weights and the
        adapters are added in fp32."""
        weights = self.trained_base(base)

        def read(name: str, slices: Slices) -> torch.Tensor:
            values = weights(name, ())
            matrix = name.removesuffix(".weight")
            adapter = f"{matrix}.adapter" if matrix != name else f"{name}_adapter"
            if f"{adapter}.a" not in self.tensors:
                return values[slices]
            values = values.to(torch.float32, copy=True)
            scale = self.config.lora_alpha / self.config.lora_rank
            a, b = self.tensors[f"{adapter}.a"], self.tensors[f"{adapter}.b"]
            layer = int(name.split(".")[1])
            transposes = a.dim() == 3 and self.spec.size.kind_of(layer).transposes_stacks
            target = values.mT if transposes else values
            target.add_(b @ a, alpha=scale)
            return values[slices]

        return read

    def check_base(self, fingerprint: int) -> None:
        """Raise UserError if the `fingerprint` of a model's weights differs from the fingerprint of
        the weights on which the adapters were trained. Adapters from PEFT have no fingerprint."""
        if self.base_fingerprint not in (None, str(fingerprint)):
            what = f"{self.origin}: these adapters were trained on other weights"
            why = "the base model's weights do not match those used in training"
            raise UserError(what, why, "restore the original weights")


def read_folder(spec: ModelSpec, folder: Path) -> Adapters:
    """Return the adapters in `folder`. Raises UserError if they are not plain LoRA adapters for the
    model."""
    config = read_adapters(folder)
    file = folder / ADAPTER_WEIGHTS
    fix = f"download them again, or load {folder} with PEFT and save it again"
    stored, metadata = open_file(file, fix)
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    if spec.files:  # the adapters may fit a whole multimodal model
        tensors = _rename(tensors, spec.files.find_whole(spec.size.config).text_name)
        tensors = _rename(tensors, spec.files.adapter_renaming(spec.size.config))
    all_parts = spec.size.part_names(None)
    parts = []
    for part in all_parts:
        if any(name.endswith(f".{part}.lora_A.weight") for name in tensors):
            parts.append(part)
    stacks: dict[str, None] = {}
    separate = False  # whether each expert has its own adapters
    parameters = tuple(f".{name}" for name in config.target_parameters or ())
    for kind in spec.size.kinds:
        for stack in kind.stacks:
            name = f"blocks.{kind.layers[0]}.{stack}"
            hf_name, _ = spec.code.to_hf(name, torch.empty(0), spec.size)
            if f".{hf_name}".endswith(parameters):
                stacks[stack] = None
            elif spec.size.config["separate_experts"]:
                matrices = [matrix for matrix, _, _ in _stack_parts(spec, name)]
                if any(_peft_names(matrix)[0] in tensors for matrix in matrices):
                    stacks[stack] = None
                    separate = True
    if not parts and not stacks:
        raise UserError(
            f"adapters {file} fit no matrix of {spec.label}", fix="use its own adapters"
        )
    values: dict[str, Any] = {
        "lora_rank": config.r,
        "lora_alpha": config.alpha,
        "lora_targets": None if parts == all_parts and not stacks else ",".join([*parts, *stacks]),
    }
    if "base_rounding" in metadata:
        values["base_dtype"], values["precision"] = metadata["base_rounding"].split()
    run_config = Config(**values)
    return Adapters(
        spec=spec,
        tensors=_from_peft(tensors, spec, run_config, folder, separate),
        config=run_config,
        base_fingerprint=metadata.get("base_checksum"),
        origin=folder,
    )


def save_adapters(adapters: Adapters, folder: Path, base: str, *, text: bool = False) -> None:
    """Write adapters to a folder that PEFT can load. `base` is the folder of the base model or its
    name on the Hub. If it is multimodal, the adapters fit the whole model or, with `text`, only its
    text decoder. Raises RunError if a value is not finite."""
    spec, config = adapters.spec, adapters.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_peft(adapters.tensors, spec, config)
    fits_whole = spec.files and spec.files.is_multimodal(spec.size.config) and not text
    if fits_whole:
        tensors = _rename(tensors, spec.files.find_whole(spec.size.config).name)
    expert_targets: tuple[str, ...] = ()
    if spec.files:
        text_config = spec.code.to_config(spec.size, 0)
        fitted = spec.size.config["document"] if fits_whole else text_config
        expert_targets = peft_expert_targets(fitted["model_type"])
    targets = set()
    parameters = set()
    for name in tensors:
        if ".experts." in name:
            continue
        module = name.removeprefix(PREFIX).rsplit(".", 2)[0]
        # Other parts of a whole model may have matrices with the same last names.
        target = module if fits_whole else ".".join(module.split(".")[-2:])
        if module.endswith(expert_targets):  # PEFT would adapt the experts instead.
            parameters.add(f"{target}.weight")
        else:
            targets.add(target)
    stacks = spec.size.adapted_stack_names(config.lora_targets)
    if spec.size.separates_experts(config.lora_targets):
        targets |= {name.split(".")[-3] for name in tensors if ".experts." in name}
    else:
        parameters.update(stacks)
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise RunError(f"{name} has non-finite values", fix="lower learning_rate")
    metadata = {"format": "pt", "base_checksum": str(adapters.base_fingerprint)}
    if config.has_quantized_base:
        metadata["base_rounding"] = f"{config.base_dtype} {config.precision}"
    if spec.files and not fits_whole:
        tensors = _rename(tensors, spec.files.adapter_renaming(spec.size.config))
    write_tensors(folder / ADAPTER_WEIGHTS, tensors, tensors.values(), metadata)
    document: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        # PEFT refuses dropout beside adapters of parameters, such as stacks of experts.
        "lora_dropout": 0.0 if parameters or stacks else config.lora_dropout,
        "target_modules": sorted(targets),
        "fan_in_fan_out": spec.code.STORES_TRANSPOSED,
    }
    if parameters:
        document["target_parameters"] = sorted(parameters)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def to_peft(
    state: Mapping[str, torch.Tensor], spec: ModelSpec, config: Config
) -> dict[str, torch.Tensor]:
    """Convert a run's adapters from this package's parameter names to PEFT's. The tensors of each
    Hugging Face matrix are separate."""
    tensors = {}
    separate = spec.size.separates_experts(config.lora_targets)
    for name, a in state.items():
        if not name.endswith("adapter.a"):
            continue
        adapter = name.removesuffix(".a")
        b = state[f"{adapter}.b"]
        for hf_name, part_a, part_b in _split(adapter, a, b, spec, config, separate):
            name_a, name_b = _peft_names(hf_name)
            tensors[name_a] = part_a.contiguous()
            tensors[name_b] = part_b.contiguous()
    return tensors


def _rename(
    tensors: Mapping[str, torch.Tensor], function: Callable[[str], str]
) -> dict[str, torch.Tensor]:
    """Apply `function` to the names of tensors without PREFIX."""
    return {PREFIX + function(name.removeprefix(PREFIX)): x for name, x in tensors.items()}


def _stack_parts(spec: ModelSpec, stack: str) -> list[tuple[str, int, torch.Tensor]]:
    """Return (Hugging Face matrix, its expert, its rows in the expert's matrix) for each matrix in
    a `stack` such as "blocks.0.mlp.experts.down_proj"."""
    _, layer, name = stack.split(".", 2)
    experts, rows, _ = spec.size.kind_of(int(layer)).stacks[name]
    indices = torch.arange(experts * rows).view(experts, rows, 1)
    hf_name, _ = spec.code.to_hf(stack, indices, spec.size)
    stored = spec.files.to_files(hf_name, indices, spec.size.config)
    return [
        (name.removesuffix(".weight"), int(values[0, 0]) // rows, values[:, 0] % rows)
        for name, values in stored.items()
    ]


def _whole_stack_name(spec: ModelSpec, stack: str, targets: str | None) -> str:
    """Return PEFT's name of a whole stack's adapter. PEFT wraps a module once for each of its
    stacks with adapters, of which the last one is outermost."""
    _, layer, name = stack.split(".", 2)
    names = list(spec.size.kind_of(int(layer)).adapted_stacks(targets))
    hf_name, _ = spec.code.to_hf(stack, torch.empty(0), spec.size)
    module = hf_name.rpartition(".")[0]
    return module + ".base_layer" * (len(names) - 1 - names.index(name))


def _split(
    adapter: str,
    a: torch.Tensor,
    b: torch.Tensor,
    spec: ModelSpec,
    config: Config,
    separate: bool = False,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name, A, B) for each Hugging Face matrix that shares the `adapter` with matrices `a`
    and `b`, in PEFT's layout. If `separate`, each expert has its own matrices."""
    if a.dim() == 2:
        name, rows = spec.hf_matrix(adapter.removesuffix(".adapter"))
        yield name, a, b[rows]
        return
    stack = adapter.removesuffix("_adapter")
    if separate:
        for hf_name, expert, part_rows in _stack_parts(spec, stack):
            yield hf_name, a[expert], b[expert, part_rows]
    else:
        hf_name = _whole_stack_name(spec, stack, config.lora_targets)
        yield hf_name, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def keys_to_continue(
    request: Request, model: ModelSpec, folder: Path
) -> tuple[dict[str, Any], str]:
    """Return (LoRA keys of CONFIG with their values, note for the user) for a run that continues
    training the adapters in `folder`. Raises UserError if CONFIG sets a different rank, alpha or
    targets, or if the adapters do not fit `model`."""
    adapters = read_adapters(folder)
    initial = read_folder(model, folder).config
    part_names = model.size.part_names
    keys = {key: getattr(initial, key) for key in ("lora_rank", "lora_alpha", "lora_targets")}
    for key, value in keys.items():
        typed = getattr(request, key)
        matches = typed == value
        if key == "lora_targets":
            matches = part_names(typed) == part_names(value)
        if request.is_set(key) and not matches:
            what = f"{key}={typed!r} does not match the adapters in {folder}"
            fix = f"leave out {key}, or merge the adapters with PEFT and train new ones"
            raise UserError(what, f"the adapters have {key}={value!r}", fix)
    if not request.is_set("lora_dropout"):
        keys["lora_dropout"] = adapters.lora_dropout
    note = f"training continues from the rank-{adapters.r} adapters in {folder}, on "
    return keys, note + adapters.base_model_name_or_path


def _peft_names(matrix: str) -> tuple[str, str]:
    """Return PEFT's names for A and B of a Hugging Face matrix."""
    return f"{PREFIX}{matrix}.lora_A.weight", f"{PREFIX}{matrix}.lora_B.weight"


def _from_peft(
    tensors: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    config: Config,
    origin: object,
    separate: bool,
) -> dict[str, torch.Tensor]:
    """Convert adapters from PEFT's names to this package's, in fp32. Raises UserError unless there
    is a finite A and B for exactly those matrices of all blocks that `config` selects."""
    ours = {}
    used = set()

    def fill(target: torch.Tensor, name: str, places: torch.Tensor) -> None:
        """Copy a tensor of PEFT to `places` of the flattened `target`."""
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != places.shape or not all_finite(tensor):
            what = f"{origin}: {name} is not a finite tensor of shape {list(places.shape)}"
            raise UserError(what, fix="use adapters of the same matrices in all blocks")
        target.put_(places, tensor.float())
        used.add(name)

    for layer in range(spec.size.num_layers):
        shapes = spec.size.kind_of(layer).adapter_shapes(config.lora_rank, config.lora_targets)
        for name, (a_shape, b_shape) in shapes.items():
            adapter = f"blocks.{layer}.{name}"
            a = torch.empty(a_shape)
            b = torch.empty(b_shape)
            a_indices = torch.arange(a.numel()).view(a_shape)
            b_indices = torch.arange(b.numel()).view(b_shape)
            parts = list(_split(adapter, a_indices, b_indices, spec, config, separate))
            for hf_name, a_places, b_places in parts:
                name_a, name_b = _peft_names(hf_name)
                fill(a, name_a, a_places)
                fill(b, name_b, b_places)
            for hf_name, a_places, _ in parts:
                name_a, _ = _peft_names(hf_name)
                if not torch.equal(a.take(a_places), tensors[name_a].float()):
                    what = f"{origin}: {name_a} differs from A of the expert's other matrix"
                    raise UserError(what, fix="merge the adapters with PEFT")
            ours[f"{adapter}.a"] = a
            ours[f"{adapter}.b"] = b
    if unknown := tensors.keys() - used:
        what = f"{origin}: {min(unknown)} is not an adapter of a matrix in {spec.label}'s blocks"
        raise UserError(what, "no other tensors are supported", "merge the adapters with PEFT")
    return ours
