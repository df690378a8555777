"""Which models there are: one folder a family, found by name or by path. No torch import.
A family is a package that exports `sizes`, `build`, and `to_hf`, `to_config` and STORES_TRANSPOSED,
which say how Hugging Face has its weights (see gpt2/); it imports torch only inside of functions.
It may stand anywhere: `model` in CONFIG is the name of a size, the path of a Hugging Face folder,
its name on the Hub, or the path of a family, with `:size` for other than its first."""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from distributed_training.data.hub import cannot_fetch, fetch_folder
from distributed_training.models.config_file import CONFIG_FILE
from distributed_training.models.weights import (
    FLOATS,
    TORCH_DTYPES,
    Stored,
    convert_command,
    open_weights,
    require_weights,
)
from distributed_training.settings.errors import RunError, UserError
from distributed_training.settings.files import (
    did_you_mean,
    expand_home,
    folder_label,
    load_json,
    shown,
)
from distributed_training.settings.own_code import load_code

if TYPE_CHECKING:
    import torch

    from distributed_training.models.decoder import Box, Decoder, Source

OUTPUT_LAYER = "lm_head.weight"  # as transformers calls it in every family
_MOST = {
    "num_heads": 2**14, "hidden_size": 2**20, "vocab_size": 2**24,
    "num_positions": 2**28, "block_parameters": 2**44,
}  # fmt: skip
HUB = "hub"  # the family for any kind of model
HUB_PREFIX = f"{HUB}:"
ALL = slice(None)
FAMILIES = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]


Line = tuple[float, float]  # (a, b) of a + b T, for samples of T tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """Bytes per token of a block in bf16, as traced: what it keeps for its backward pass, and what
    element-wise kernels read and write."""

    attention_width: int  # numbers of all heads of a token
    fused: bool  # whether attention is one kernel, which skips what causality hides
    kept_eager: Line
    kept_compiled: Line
    kept_selective: Line  # if what matrices and attention return is kept
    forward_eager: Line
    forward_compiled: Line
    backward_eager: Line
    backward_compiled: Line

    def bytes_per_token(self, what: str, way: str, length: int) -> float:
        """Return the bytes of `what`, "kept", "forward" or "backward", in samples of `length`."""
        base, slope = getattr(self, f"{what}_{way}")
        return base + slope * length


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Shape of one decoder-only language model; its family fills in what its blocks hold. Counts
    are exact, and of the whole model, without vocabulary padding unless it says so."""

    vocab_size: int
    num_positions: int  # tokens of the longest sequence
    num_layers: int
    num_heads: int
    hidden_size: int
    # Shapes of those of one block: tp splits them by rows and by columns in turn.
    block_matrices: tuple[tuple[int, int], ...]
    block_parameters: int
    block_parameters_split: int  # those that tp divides; the others every process holds whole
    block_norm_parameters: int  # those that each process of tp uses on its own tokens
    final_norm_parameters: int
    position_parameters: int = 0  # of the position embedding
    tied: bool = True  # whether the output layer has the token embedding's weights
    num_kv_heads: int | None = None  # groups of heads that share keys and values; None: none do
    mlp_units: int | None = None  # what tp deals out of the hidden units; None: each by itself
    block_tensors: int = 12  # parameters of a block, each a tensor
    # The modules with `block_matrices`, in that order, as `lora_targets` names them.
    matrix_names: tuple[str, ...] = ("qkv", "attention_out", "mlp_in", "mlp_out")
    splits: bool = True  # whether tp and pp can divide it
    traced: Traced | None = None  # in place of formulas
    packs: bool = True  # whether its attention keeps packed records apart
    kept_values: int = 0  # kept of a token for a block's backward pass, besides what matrices see
    config: Any = None  # what else the family's modules need

    @property
    def attention_width(self) -> int:
        """Numbers of all heads of a token."""
        if self.traced is not None:
            return self.traced.attention_width
        return self.block_matrices[1][1]

    @property
    def values_in(self) -> int:
        """Of a token, outputs of a block's matrices that tp splits by rows."""
        return sum(rows for rows, _ in self.block_matrices[::2])

    @property
    def values_out(self) -> int:
        """Of a token, inputs of those that it splits by columns."""
        return sum(columns for _, columns in self.block_matrices[1::2])

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding as stored."""
        # Matrix units like multiples of 64; 128 leaves room for splits of the vocabulary.
        return -(-self.vocab_size // 128) * 128

    @property
    def embedding_parameters(self) -> int:
        """Of the token embedding, and of an output layer that is not tied to it."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Exact parameter count, a tied embedding counted once."""
        ends = self.embedding_parameters * (1 if self.tied else 2)
        ends += self.position_parameters + self.final_norm_parameters
        return ends + self.num_layers * self.block_parameters

    def adapted(self, targets: str | None) -> tuple[str, ...]:
        """The matrices that CONFIG's `lora_targets` names; raise UserError for what is none."""
        if targets is None:
            return self.matrix_names
        names = tuple(name.strip() for name in targets.split(","))
        if unknown := set(names).difference(self.matrix_names):
            what = f"lora_targets={targets!r}: blocks have no matrix {', '.join(sorted(unknown))}"
            raise UserError(what, f"they have {', '.join(self.matrix_names)}")
        return names

    def count_adapters(self, rank: int, targets: str | None, tp: int = 1) -> tuple[int, int]:
        """(parameters of a block's adapters on each process along tp, those that all have)."""
        names = self.adapted(targets)
        held = whole = 0
        for index, (rows, columns) in enumerate(self.block_matrices):
            if self.matrix_names[index] in names:
                split, common = (rows, columns) if index % 2 == 0 else (columns, rows)
                whole += rank * common
                held += rank * (common + split // tp)
        return held, whole

    def num_learning(self, rank: int, targets: str | None) -> int:
        """Parameters that are trained: adapters of a rank, or with 0 all."""
        if rank == 0:
            return self.num_parameters
        return self.num_layers * self.count_adapters(rank, targets)[0]

    def flops_per_token(self, seq_len: int, *, frozen: bool = False) -> int:
        """FLOPs of both passes for one token of a `seq_len` sequence: 6N (4N: weights are `frozen`)
        + 12 L D T, D of all heads, attention over the full T x T square (PaLM, appendix B)."""
        # Looking tokens up multiplies nothing; a tied embedding's rows do so at the output.
        used = self.num_parameters - (0 if self.tied else self.embedding_parameters)
        return (4 if frozen else 6) * used + 12 * self.num_layers * self.attention_width * seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model that can be trained."""

    label: str  # a short name, for folders and titles
    family: str  # a folder of this package, or the path of one outside
    size: ModelSize
    hub_id: str | None = None  # of published weights on the Hugging Face Hub
    weights_dir: Path | None = None  # the Hugging Face folder, where CONFIG gives one

    def __post_init__(self) -> None:
        # A plan is sent as JSON, which does not know the class of a family's configuration.
        if isinstance(self.size.config, dict) and (kind := getattr(self.code, "Config", None)):
            config = TypeAdapter(kind).validate_python(self.size.config)
            object.__setattr__(self, "size", replace(self.size, config=config))

    @property
    def path(self) -> str:
        """The value of CONFIG's `model` for the model in `weights_dir`."""
        return f"{HUB_PREFIX if self.family == HUB else ''}{self.weights_dir}"

    @property
    def code(self) -> Any:
        """What the family exports."""
        return _load(self.family)

    def build(self, *, dropout: float, seed: int, source: Source | None = None) -> Decoder:
        """Build the model in fp32 on torch's default device with the weights of `source`; without
        one they are random and depend on `seed` alone. On the device "meta" it has no weights."""
        import torch

        from distributed_training.models.decoder import fill_parameters

        device = torch.get_default_device()
        if source is None or device.type == "meta":
            return self.code.build(self.size, dropout=dropout, seed=seed)
        with torch.device("meta"):
            model = self.code.build(self.size, dropout=dropout, seed=seed)
        fill_parameters(model, source, device)
        return model

    def load(self, model: Decoder, folder: Path) -> None:
        """Copy Hugging Face's weights in `folder` into `model`; UserError if they do not fit."""
        read = self.weights_source(folder)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(read(name, ()))

    def weights_source(self, folder: Path) -> Source:
        """Return a source of Hugging Face's weights in `folder`, each in the dtype of its file; the
        vocabulary's padding is 0. Raises UserError if the files do not fit this model."""
        import torch

        with torch.device("meta"):
            parameters = dict(self.build(dropout=0.0, seed=0).named_parameters())
        pieces = self._match(parameters, folder)

        def read(ours: str, box: Box) -> torch.Tensor:
            shape = parameters[ours].shape
            bounds: Any = zip_longest(box, shape, fillvalue=ALL)
            ranges = [part.indices(size) for part, size in bounds]
            first, stop, _ = ranges[0]
            columns = [slice(*each) for each in ranges[1:]]
            # The index of our row for each row of theirs
            indices = self.code.to_hf(ours, torch.arange(shape[0], device="cpu"), self.size)
            parts = []
            for rows, (tensor, transposed) in zip(indices.values(), pieces[ours], strict=True):
                rows = rows.flatten()
                (inside,) = torch.where((rows >= first) & (rows < stop))
                for run in _consecutive(inside):
                    theirs = slice(int(run[0]), int(run[-1]) + 1)
                    place = [*columns, theirs] if transposed else [theirs, *columns]
                    part = tensor.read(*place)
                    parts.append((rows[run] - first, part.t() if transposed else part))
            if len(parts) == 1 and torch.equal(parts[0][0], torch.arange(stop - first)):
                return parts[0][1]  # as it is in the file, of which nothing has been copied
            dtypes = {TORCH_DTYPES[tensor.dtype] for tensor, _ in pieces[ours]}
            dtype = getattr(torch, dtypes.pop() if len(dtypes) == 1 else "float32")
            sizes = [stop - start for start, stop, _ in ranges]
            values = torch.zeros(sizes, dtype=dtype, device="cpu")
            for rows, part in parts:
                values.index_copy_(0, rows, part.to(dtype))
            return values

        return read

    def _match(
        self, parameters: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, list[tuple[Stored, bool]]]:
        """Find the tensors in `folder` that make up each parameter, and whether they are
        transposed. Raises UserError for tensors that are missing, unexpected, or of another
        shape."""
        what = f"weights {folder} do not fit {self.label}"
        stored = open_weights(folder)
        if (module_names := getattr(self.code, "module_names", None)) is not None:
            stored = {new: stored[name] for name, new in module_names(stored, self.size).items()}
        unexpected = set(stored)
        pieces: dict[str, list[tuple[Stored, bool]]] = {}
        for ours, values in parameters.items():
            rest = values.shape[1:]
            transposed = self.code.STORES_TRANSPOSED and ours.startswith("blocks.")
            pieces[ours] = []
            for name, part in self.code.to_hf(ours, values, self.size).items():
                shape = [part.numel() // rest.numel(), *rest]
                if transposed:
                    shape.reverse()
                expected = name
                if name not in stored:  # as of a model that was saved without its output layer
                    name = name.partition(".")[2]
                if name not in stored and self.size.tied and ours.startswith("token_embedding"):
                    name = OUTPUT_LAYER
                tensor = stored.get(name)
                if tensor is None or tensor.shape != shape or tensor.dtype not in FLOATS:
                    found = "missing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
                    raise UserError(what, f"{expected} is {found} and should be a float {shape}")
                unexpected.discard(name)
                pieces[ours].append((tensor, transposed))
        if self.size.tied:
            unexpected.discard(OUTPUT_LAYER)
        if unexpected:
            more = f" and {len(unexpected) - 1} more tensors" if len(unexpected) > 1 else ""
            why = f"{min(unexpected)}{more} in the file have no place in this model"
            fix = f"if transformers may drop them: {convert_command(folder)}"
            raise UserError(what, why, fix)
        return pieces

    def save(
        self,
        weights: Source | Mapping[str, torch.Tensor],
        folder: Path,
        *,
        eos_token_id: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a model's weights, on the CPU, as a folder that transformers opens. A source is
        asked for one after the other. `dtype`: of the files; None is fp32. Raises RunError for
        numbers that are not finite in it."""
        import torch

        dtype = dtype or torch.float32
        with torch.device("meta"):
            outline = self.build(dropout=0.0, seed=0)
        meta = {name: value.to(dtype) for name, value in outline.named_parameters()}
        header = {name: part for ours in meta for name, part in self._stored(ours, meta[ours])}

        def parts() -> Iterator[torch.Tensor]:
            for ours in meta:
                values = weights(ours, ()) if callable(weights) else weights[ours]
                for name, part in self._stored(ours, values):
                    written = part.to(dtype)
                    if not written.isfinite().all():
                        what = f"{name} has numbers that are not finite in {name_of(dtype)}"
                        raise RunError(what, fix="lower learning_rate")
                    yield written

        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(header, parts(), folder / "model.safetensors", {"format": "pt"})
        document = {**self.code.to_config(self.size, eos_token_id), "dtype": name_of(dtype)}
        (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")

    def _stored(self, ours: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of Hugging Face's files that one of ours is, with their names."""
        file_name = getattr(self.code, "file_name", lambda name, size: name)
        transposed = self.code.STORES_TRANSPOSED and ours.startswith("blocks.")
        for name, part in self.code.to_hf(ours, values, self.size).items():
            rows = part.reshape(-1, *values.shape[1:])
            yield file_name(name, self.size), rows.t() if transposed else rows

    def name_rows(self, matrix: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What has a row for each of one of our matrices, as Hugging Face's modules have it."""
        parts = self.code.to_hf(f"{matrix}.weight", rows, self.size).items()
        last = rows.shape[1:]
        return {name.removesuffix(".weight"): part.reshape(-1, *last) for name, part in parts}

    def check_weights(self, folder: Path) -> None:
        """Raise UserError unless `folder` holds readable weights that fit; load nothing."""
        if not (folder / CONFIG_FILE).is_file():
            what = f"weights={str(folder)!r} is not a Hugging Face model folder"
            raise UserError(what, "it has no config.json", "give an earlier run's hf/ folder")
        (found,) = self.code.sizes(folder).values()
        for name in (field.name for field in fields(ModelSize)):
            theirs, ours = getattr(found, name), getattr(self.size, name)
            if theirs != ours:
                what = f"weights {folder}: {name}={theirs} but the model has {ours}"
                raise UserError(what, fix=f"set model to {shown(str(folder))}")
        require_weights(folder)
        import torch

        with torch.device("meta"):
            self._match(dict(self.build(dropout=0.0, seed=0).named_parameters()), folder)


def _consecutive(numbers: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut rising numbers into runs without gaps."""
    import torch

    (breaks,) = torch.where(numbers.diff() != 1)
    return numbers.tensor_split(breaks + 1) if len(numbers) else ()


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def save_tensors(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file, the same bytes each time."""
    write_tensors(tensors, tensors.values(), file, metadata)


def write_tensors(
    outline: Mapping[str, torch.Tensor],
    tensors: Iterable[torch.Tensor],
    file: Path,
    metadata: dict[str, str],
) -> None:
    """Write a safetensors file of `tensors`, one in memory at a time. `outline` has their names,
    shapes and dtypes, in their order, and may be on "meta". The library's own function needs all of
    them at once."""
    import torch

    codes = {name: code for code, name in TORCH_DTYPES.items()}
    ends = accumulate((part.numel() * part.itemsize for part in outline.values()), initial=0)
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    for (name, part), offsets in zip(outline.items(), pairwise(ends), strict=True):
        shape = list(part.shape)
        header[name] = {
            "dtype": codes[name_of(part.dtype)],
            "shape": shape,
            "data_offsets": offsets,
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.unlink(missing_ok=True)  # somebody may have mapped it into memory
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for part, expected in zip(tensors, outline.values(), strict=True):
            assert (part.shape, part.dtype) == (expected.shape, expected.dtype)
            opened.write(part.reshape(-1).view(torch.uint8).numpy().data)


def find_model(name: str) -> ModelSpec:
    """The model that CONFIG's `model` names; raise UserError where there is none."""
    names = []
    kinds: dict[str, str] = {}
    for family in FAMILIES:
        module = _load(family)
        kinds |= dict.fromkeys(module.MODEL_TYPES, family)
        for label, size in module.sizes().items():
            hub_id = module.HUB_IDS.get(label)
            if name in (label, hub_id):
                return ModelSpec(label=label, family=family, size=size, hub_id=hub_id)
            names.append(label)
    # hub:NAME selects transformers' code even if a family of this suite has the model.
    asked, name = name, name.removeprefix(HUB_PREFIX)
    expand_home("model", name)  # one of a plan.json may be no path at all
    hub_id = name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None
    folder = _fetch_config(name) if hub_id else Path(name).resolve()
    if (folder / CONFIG_FILE).is_file():
        config = load_json(folder / CONFIG_FILE, "model")
        kind = config.get("model_type") if isinstance(config, dict) else None
        native = kinds.get(kind) if isinstance(kind, str) and asked == name else None
        family, size = _read_size(folder, native)
        label = name.rpartition("/")[2] if hub_id else folder_label(folder)
        weights_dir = None if hub_id else folder
        return ModelSpec(
            label=label, family=family, size=size, hub_id=hub_id, weights_dir=weights_dir
        )
    if (folder / "adapter_config.json").is_file():
        what = f"model={shown(name)} is a folder of adapters"
        fix = f"leave model at auto and set weights to {shown(name)} to continue training them"
        raise UserError(what, "their base is the model", fix)
    path, _, chosen = name.partition(":")
    folder = Path(path).resolve()
    wanted = name
    if (folder / "__init__.py").is_file():
        sizes = _load(str(folder)).sizes()
        label = chosen or next(iter(sizes))
        if label in sizes:
            return ModelSpec(label=label, family=str(folder), size=sizes[label])
        names = [f"{folder}:{size}" for size in sizes]
        wanted = f"{folder}:{label}"
    why = f"model is {', '.join(names)}, 'auto', a name of the Hub, or a folder with config.json "
    why += "or __init__.py"
    raise UserError(f"model={shown(name)} is not accepted", why, did_you_mean(wanted, names))


def _read_size(folder: Path, native: str | None) -> tuple[str, ModelSize]:
    """Return the family that trains the model in `folder`, and its size: the `native` one, or for
    kinds and options that it does not have, the one through transformers."""
    refusal: UserError | None = None
    for family in filter(None, (native, HUB)):
        try:
            (size,) = _load(family).sizes(folder).values()
            _refuse_absurd(size, folder)
            return family, size
        except UserError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _refuse_absurd(size: ModelSize, folder: Path) -> None:
    """Raise UserError for sizes far beyond any model's, which would be laid out for hours."""
    for name, most in _MOST.items():
        if (count := getattr(size, name)) > most:
            what = f"{folder}: {name} {count} is more than any model has"
            raise UserError(what, f"at most {most} is accepted", "check its config.json")


@functools.cache
def _fetch_config(hub_id: str) -> Path:
    try:
        return fetch_folder(hub_id, ("config.json",))
    except OSError as error:
        why = OSError(f"nor is it a folder; {error}")
        raise cannot_fetch("model", hub_id, why, f"hf download {hub_id}") from None


@functools.cache
def _load(family: str) -> Any:
    if family in FAMILIES:
        return importlib.import_module(f"{__name__}.{family}")
    module = load_code(Path(family, "__init__.py"), f"the model family {family}")
    wanted = ("sizes", "build", "to_hf", "to_config", "STORES_TRANSPOSED")
    if missing := [name for name in wanted if not hasattr(module, name)]:
        raise UserError(f"the model family {family} has no {', '.join(missing)}")
    return module
