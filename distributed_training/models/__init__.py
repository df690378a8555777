"""Find models by name or by path. Each model family has a separate folder. This module imports
torch only inside functions.

A family is a package that exports SIZES, `read_size`, MODEL, `to_hf`, `to_config` and
STORES_TRANSPOSED. MODEL names the class of its decoder. The last three describe the Hugging Face
format of the family's weights (see gpt2/). Its `__init__.py` must import torch only inside
functions.

The value of `model` in CONFIG may be the name of a size or of a Hub repository, or the path of a
Hugging Face folder."""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.data.hub import CLASS_KEYS, fetch_folder, is_repo_id
from distributed_training.models.config_file import CONFIG_FILE
from distributed_training.models.size import ModelSize, differing_value
from distributed_training.models.table import match_names, read_table
from distributed_training.models.weights import (
    TORCH_DTYPES,
    StoredTensor,
    all_finite,
    convert_command,
    dtype_name,
    open_weights,
    write_tensors,
)
from distributed_training.settings.errors import RunError, UserError
from distributed_training.settings.files import did_you_mean, load_model_json, one_of, shown

if TYPE_CHECKING:
    import torch

    from distributed_training.models.decoder import Decoder
    from distributed_training.models.initial_weights import Slices, WeightSource

OUTPUT_LAYER = "lm_head.weight"  # name in transformers, the same in every family
HUB = "hub"  # the family that runs any decoder with code from transformers
ALL = slice(None)
# A spelling may mean several models, such as versions, if their numbers of parameters differ less.
MAX_SIZE_RATIO = 1.1
_QUANTIZED = re.compile(r"\b(q\d|int4|nf4|bnb|gguf|awq|gptq|qlora)|4.?bit", re.IGNORECASE)
FAMILIES = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Model to train, with its family, size and published weights."""

    label: str  # short name, for folders and titles
    family: str  # name of a folder in this package
    size: ModelSize
    hub_id: str | None = None  # name of the published weights on the Hugging Face Hub
    weights_dir: Path | None = None  # Hugging Face folder that CONFIG names, if any
    has_own_code: bool = False  # whether its config.json names code, which is never run
    has_own_config: bool = True  # False if the size is only known to equal a published model's

    @property
    def code(self) -> Any:
        """Return the family's package, which is imported on first use."""
        return _load(self.family)

    @property
    def files(self) -> Any:
        """Return models/hub/files.py, which converts the tensors of files, for a model that uses
        transformers' code. Otherwise, return None: the family's `to_hf` converts them."""
        if self.family != HUB:
            return None
        return importlib.import_module(f"{__name__}.{HUB}.files")

    @property
    def class_keys(self) -> dict[str, str]:
        """Return the keys of the exported config.json by which transformers selects the tokenizer's
        class."""
        document = self.code.to_config(self.size, 0)
        return {key: document[key] for key in CLASS_KEYS if document.get(key)}

    def build_meta_model(self, *, dropout: float = 0.0) -> Decoder:
        """Build the model without weights, on the meta device."""
        import torch

        with torch.device("meta"):
            return pkgutil.resolve_name(self.code.MODEL)(self.size, dropout)

    def weights_source(self, folder: Path) -> WeightSource:
        """Return a source that reads parameters from the Hugging Face weights in `folder`. Each
        parameter keeps its stored dtype, and rows of vocabulary padding are left out. Raises
        UserError if the files do not fit this model."""
        import torch

        parameters = self._named_tensors()
        stored = self._match_tensors(parameters, folder)

        def read(our_name: str, slices: Slices) -> torch.Tensor:
            places, tensor = stored[our_name]
            if not parameters[our_name].shape:  # a number
                return tensor.read()  # type: ignore[no-any-return]
            row_slice, *columns = slices or (ALL,)
            places = places[row_slice]
            first, last = (int(places.min()), int(places.max())) if len(places) else (0, -1)
            values = tensor.read(slice(first, last + 1))
            if not torch.equal(places, torch.arange(first, last + 1)):
                values = values[places - first]
            selected = (ALL, *columns)
            return values[selected]  # type: ignore[no-any-return] # mapped if the rows are in order

        return read

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that weight files contain, without values, by this package's names."""
        from distributed_training.models.initial_weights import stored_buffers

        model = self.build_meta_model()
        return {**dict(model.named_parameters()), **stored_buffers(model)}

    def _hf_rows(self, our_name: str, num_rows: int) -> tuple[str, torch.Tensor]:
        """Return the Hugging Face name of this package's tensor `our_name`, and the row of ours
        from which each of its rows comes."""
        import torch

        rows = torch.arange(num_rows, device="cpu")
        name, rows = self.code.to_hf(our_name, rows, self.size)
        return name, rows.flatten()

    def _is_transposed(self, our_name: str) -> bool:
        """Return whether Hugging Face stores this package's tensor `our_name` transposed."""
        return self.code.STORES_TRANSPOSED and our_name.startswith("blocks.")

    def _match_tensors(
        self, parameters: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, tuple[torch.Tensor, StoredTensor]]:
        """Return {parameter name: (place of each of its rows in the stored tensor, this tensor)}.
        Raises UserError if tensors in `folder` are missing or unexpected, or have the wrong shape
        or dtype."""
        what = f"weights {folder} do not fit {self.label}"
        embedding = (self.size.config or {}).get("embedding", "transformer.wte.weight")
        stored = open_weights(folder)
        if self.files:
            stored = self.files.match(stored, self.size.config).text
        unexpected = set(stored)
        if self.size.tied:
            unexpected.discard(OUTPUT_LAYER)
        matched: dict[str, tuple[torch.Tensor, StoredTensor]] = {}
        for our_name, values in parameters.items():
            num_rows = len(values) if values.dim() else 1
            name, rows = self._hf_rows(our_name, num_rows)
            shape = [len(rows), *values.shape[1:]] if values.dim() else []
            is_transposed = len(shape) == 2 and self._is_transposed(our_name)
            if is_transposed:
                shape.reverse()
            candidates = [name, name.partition(".")[2]]  # saved with or without an output layer
            if self.size.tied and name == embedding:
                candidates.append(OUTPUT_LAYER)
            stored_name = next((key for key in candidates if key in stored), name)
            tensor = stored.get(stored_name)
            if tensor is None or tensor.shape != shape or tensor.dtype not in TORCH_DTYPES:
                why = f"{name} is missing"
                if tensor is not None:
                    why = f"{name} is {tensor.dtype} {tensor.shape}"
                why += f", but it should be a float tensor of shape {shape}"
                raise UserError(what, why)
            unexpected.discard(stored_name)
            if is_transposed:
                tensor = tensor.transposed()
            matched[our_name] = rows.argsort(), tensor
        if unexpected:
            more = f" and {len(unexpected) - 1} more tensors" if len(unexpected) > 1 else ""
            why = f"the weights contain {min(unexpected)}{more}, which this model does not have"
            command = convert_command(folder)
            fix = f"to drop the tensors that transformers does not use, run: {command}"
            raise UserError(what, why, fix)
        return matched

    def save(
        self,
        weights: WeightSource,
        folder: Path,
        *,
        eos_token_id: int,
        dtype: torch.dtype,
        original: Path | None = None,
        text: bool = False,
    ) -> None:
        """Write the model's weights and config to a folder that transformers can load. If the model
        is the text decoder of a multimodal model in the folder `original`, write the multimodal
        model, with the tensors of its other parts as they are. With `text`, write only the text
        decoder.

        `weights` must be on the CPU. One tensor is read at a time. Tensors that `original` stores
        unquantized keep their dtype, and the others are stored in `dtype`. Raises RunError if a
        value is non-finite in its dtype."""
        import torch

        tensors = self._named_tensors()
        stored: dict[str, StoredTensor] = {} if original is None else open_weights(original)
        others: dict[str, StoredTensor] = {}
        names: dict[str, str] | None = None
        document = self.code.to_config(self.size, eos_token_id)
        if original is not None and self.files:
            matched = self.files.match(stored, self.size.config)
            stored |= {name: stored[file] for name, file in matched.file_names.items()}
            if not text and self.files.is_multimodal(self.size.config):
                others, names = matched.others, matched.file_names
                document = load_model_json(original / CONFIG_FILE)
                for key in ("quantization_config", "auto_map"):
                    document.pop(key, None)
        header: dict[str, torch.Tensor] = {}
        for our_name, tensor in tensors.items():
            # Buffers keep their dtype.
            values = tensor.to(dtype if tensor.requires_grad else tensor.dtype)
            for name, part in self._stored_tensors(our_name, values, names).items():
                own_dtype = TORCH_DTYPES.get(stored[name].dtype) if name in stored else None
                header[name] = part.to(getattr(torch, own_dtype)) if own_dtype else part
        meta_others = {name: tensor.read().to("meta") for name, tensor in others.items()}

        def iter_converted() -> Iterator[torch.Tensor]:
            for our_name in tensors:
                parts = self._stored_tensors(our_name, weights(our_name, ()), names)
                for name, rows in parts.items():
                    converted_rows = rows.to(header[name].dtype)
                    if not all_finite(converted_rows):
                        what = f"{name} has non-finite values in {dtype_name(header[name].dtype)}"
                        raise RunError(what, fix="lower learning_rate")
                    yield converted_rows
            for tensor in others.values():
                yield tensor.read()

        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "model.safetensors"
        write_tensors(file, {**header, **meta_others}, iter_converted(), {"format": "pt"})
        document["dtype"] = dtype_name(dtype)
        (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")

    def _stored_tensors(
        self, our_name: str, values: torch.Tensor, whole_names: Mapping[str, str] | None
    ) -> dict[str, torch.Tensor]:
        """Return {stored name: tensor} for each Hugging Face tensor that this package's tensor
        `our_name` contains. For a whole multimodal model, `whole_names` are the names in its files
        by names in transformers. They are missing for tensors that a conversion changes."""
        name, part = self.code.to_hf(our_name, values, self.size)
        if whole_names is not None and name in whole_names:
            return {whole_names[name]: part}
        if self.files:
            is_whole = whole_names is not None
            return self.files.to_files(name, part, self.size.config, whole=is_whole)  # type: ignore[no-any-return]
        rows = part.reshape(-1, *values.shape[1:])
        return {name: rows.t() if self._is_transposed(our_name) else rows}

    def hf_matrix(self, matrix: str) -> tuple[str, torch.Tensor]:
        """Return the Hugging Face name of a matrix in a block, and the index of each of its rows
        there in this package's matrix."""
        _, layer, name = matrix.split(".", 2)
        kind = self.size.kind_of(int(layer))
        num_rows, _ = dict(zip(kind.hf_matrices, kind.matrices, strict=True))[name]
        hf_name, rows = self._hf_rows(f"{matrix}.weight", num_rows)
        return hf_name.removesuffix(".weight"), rows

    def check_weights(self, folder: Path) -> None:
        """Raise UserError unless `folder` contains readable weights that fit this model. The check
        compares model sizes and the tensors' names, dtypes and shapes, but not values."""
        size = self.code.read_size(folder)
        if difference := differing_value(self.size, size):
            key, own, stored = difference
            what = f"weights {folder} have {key}={stored}, but the model has {own}"
            raise UserError(what, fix=f"set model to {shown(str(folder))}")
        self._match_tensors(self._named_tensors(), folder)


def find_model(name: str) -> ModelSpec:
    """Return the model selected by `name`, which is the value of `model` in CONFIG. Raises
    UserError if there is no such model."""
    for family in FAMILIES:
        module = _load(family)
        for label, size in module.SIZES.items():
            hub_id = module.HUB_IDS.get(label)
            if "-".join(name.split()) in (label, hub_id):
                return ModelSpec(label=label, family=family, size=size, hub_id=hub_id)
    folder = Path(name).resolve()
    if folder.name == CONFIG_FILE:
        folder = folder.parent
    if (folder / CONFIG_FILE).is_file():
        label = folder_label(folder)
        return replace(_read_spec(label, folder), weights_dir=folder)
    if (folder / "adapter_config.json").is_file():
        what = f"model={shown(name)} is a folder of adapters"
        fix = f"to continue training the adapters, set model to auto and weights to {shown(name)}"
        raise UserError(what, "adapters need a base model", fix)
    if name in read_table():
        return _listed_spec(name)
    missing = None
    if "/" in name and is_repo_id(name) and not folder.exists():
        try:
            return read_published(name)
        except UserError as error:
            missing = error
    names, has_all_words = match_names(name, read_table())
    if has_all_words:
        # Of versions with the same size, the last one in the table is the newest.
        specs = [_listed_spec(hub_id) for hub_id in names]
        counts = [spec.size.num_parameters for spec in specs]
        if max(counts) < MAX_SIZE_RATIO * min(counts):
            newest = specs[-1]
            owner, _, label = name.rpartition("/")
            if owner.lower() in ("", str(newest.hub_id).partition("/")[0].lower()):
                return newest
            # somebody's copy or fine-tuned model
            return replace(newest, label=label, hub_id=name, has_own_config=False)
        what = f"model={shown(name)} means models of several sizes"
        raise UserError(what, fix=f"name one of {', '.join(spec.label for spec in specs)}")
    raise missing or _missing_config(name)


def read_published(hub_id: str) -> ModelSpec:
    """Return the model in a Hub repository, with the size that its config.json describes. Raises
    UserError if the file is not available or the model is not supported."""
    spec = _read_spec(hub_id.rpartition("/")[2], _fetch_config(hub_id))
    return replace(spec, hub_id=hub_id)


def _listed_spec(hub_id: str) -> ModelSpec:
    """Return a model in the table, with the size in the table."""
    entry = read_table()[hub_id]
    return ModelSpec(
        label=hub_id.rpartition("/")[2],
        family=HUB,
        size=_load(HUB).listed_size(entry),
        hub_id=hub_id,
        has_own_config="config" in entry and hub_id not in entry["also"],
    )


def folder_label(folder: Path) -> str:
    """Return a short name for a model folder. For hf/, best/ or merged/ in a run's folder, return
    the run's model and the folder's name, such as gpt2-hf. Otherwise, return the folder's name."""
    if folder.name not in ("hf", "best", "merged"):
        return folder.name
    run = re.sub(r"^\d{8}-\d{6}-[^-]+-|-x\d+(-\d+)?$", "", folder.parent.name)
    return f"{run}-{folder.name}" if run else folder.name


def _read_spec(label: str, folder: Path) -> ModelSpec:
    """Return the model in `folder`. Its family is the one of the model's type, or the one that runs
    transformers' code. Raises UserError if this family does not support the model."""
    config = load_model_json(folder / CONFIG_FILE)
    model_type = config.get("model_type")
    family = next((name for name in FAMILIES if model_type in _load(name).MODEL_TYPES), HUB)
    size = _load(family).read_size(folder)
    return ModelSpec(label=label, family=family, size=size, has_own_code="auto_map" in config)


@functools.cache
def _fetch_config(hub_id: str) -> Path:
    try:
        return fetch_folder(hub_id, (CONFIG_FILE,))
    except OSError as error:
        raise _missing_config(hub_id, f"no folder has this name, and {error}") from None


def _missing_config(name: str, why: str = "") -> UserError:
    names, is_listed = match_names(name, read_table())
    refused, is_refused = match_names(name, read_table(refused=True))
    if is_refused and not is_listed:
        entry = read_table(refused=True)[refused[-1]]
        what = f"model={shown(name)}: model_type {shown(entry['config']['model_type'])} "
        return UserError(what + entry["refused"], fix=_load(HUB).SUPPORTED)
    advice = did_you_mean(name, [label for family in FAMILIES for label in _load(family).SIZES])
    if names and not advice:
        advice = f"did you mean {one_of(names[-3:])}?"
    repo_id = name if "/" in name else "OWNER/NAME"
    fix = f"{advice} To get this file, whose path you can set as model, run: hf download {repo_id} "
    fix += f"{CONFIG_FILE} --local-dir my-model"
    if _QUANTIZED.search(name):
        fix += ". For 4-bit weights, set base_dtype to nf4"
    return UserError(f"{CONFIG_FILE} of model={shown(name)} is needed", why, fix.strip())


@functools.cache
def _load(family: str) -> Any:
    if family not in FAMILIES:  # A plan.json could name any code.
        raise UserError(f"the model family {shown(family)} is not part of this package")
    return importlib.import_module(f"{__name__}.{family}")
