"""Files with the weights of a Hugging Face folder, chosen as transformers chooses them."""

import math
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open

from distributed_training.data import hub
from distributed_training.models.config_file import CONFIG_FILE
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, open_regular, parse_as, shown

# One file, or the index that names the files of weights in several parts: the first that is there
FORMS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
# dtype as safetensors and as torch call it
TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOATS = set(TORCH_DTYPES)
# Buffers that older releases of transformers saved beside the weights
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|(^|\.)position_ids$")
_BIN_DTYPES = {f"torch.{name}": dtype for dtype, name in TORCH_DTYPES.items()}


class _Index(BaseModel, strict=True):
    """An index of weights in several files."""

    weight_map: Annotated[dict[str, str], Field(min_length=1)]  # name of a tensor -> its file


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str  # as safetensors calls it
    shape: list[int]
    # The tensor, on the CPU, or the box of it that is given as a slice for each dimension. Pages of
    # its file are in RAM once somebody uses them.
    read: Callable[..., Any]


def convert_command(folder: Path) -> str:
    """Return a command that writes the folder's weights as model.safetensors, beside what is there,
    as transformers loads them."""
    code = f"from transformers import AutoModelForCausalLM as M; p={str(folder)!r}; "
    return f'python -c "{code}M.from_pretrained(p).save_pretrained(p)"'


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights; none if it has none that can be read."""
    for single, index in FORMS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return [folder / name for name in indexed_files(folder / index)]
    return []


def fetch_weights(repo_id: str) -> Path:
    """Return the folder with the weights of a model on the Hub; OSError if they are not there."""
    first: OSError | None = None
    for single, index in FORMS:
        try:
            return hub.fetch_folder(repo_id, (CONFIG_FILE, single))
        except OSError as error:
            first = first or error
        try:
            folder = hub.fetch_folder(repo_id, (CONFIG_FILE, index))
        except OSError:
            continue
        return hub.fetch_folder(repo_id, (CONFIG_FILE, *indexed_files(folder / index)))
    assert first is not None, "there are names of files"
    raise first


def indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index puts together, all in the index's folder."""
    document = parse_as(_Index, load_json(index, "weights"), str(index), "fetch it again")
    names = sorted(set(document.weight_map.values()))
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for name in names:
        if Path(name).name != name or not name.endswith(suffix) or len(name.encode()) > 255:
            raise UserError(f"{index} names {shown(name)}", f"weights are {suffix} files beside it")
    return names


def require_weights(folder: Path) -> list[Path]:
    """Return `weight_files`; raise UserError if the folder has none, or not all of its parts."""
    files = weight_files(folder)
    if not files:
        other = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")
        names = sorted({file.name for pattern in other for file in folder.glob(pattern)})
        why = f"it has no {', '.join(name for form in FORMS for name in form)}"
        if names:
            why += f", only {', '.join(names[:3])}"
        fix = "set weights to random to train this model from scratch"
        raise UserError(f"{folder} has no weights that can be read", why, fix)
    if missing := [file.name for file in files if not file.exists()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        what = f"weights {folder}: {', '.join(missing[:3])}{more} cannot be read"
        raise UserError(what, "the index names files that are not there", "fetch it again")
    return files


def open_weights(folder: Path) -> dict[str, Stored]:
    """Return a folder's tensors by name, without reading them. Raises UserError if a file is
    missing or damaged, or holds more than tensors."""
    stored: dict[str, Stored] = {}

    def read(file: Path, name: str, *box: slice) -> Any:
        # Opened for each tensor: the pages of a mapped file would stay in this process's memory.
        with safe_open(file, "pt") as opened:
            return opened.get_slice(name)[box] if box else opened.get_tensor(name)

    for file in require_weights(folder):
        try:
            open_regular(file).close()
        except OSError as error:
            what = f"weights {folder}: {file.name} cannot be read"
            raise UserError(what, error.strerror or str(error), "fetch it again") from None
        if file.suffix == ".bin":
            stored |= _open_bin(file)
            continue
        try:
            # Opening a file reads its header and compares it with the file's length.
            with safe_open(file, "np") as header:
                for name in header.keys():  # noqa: SIM118, no dict
                    part = header.get_slice(name)
                    how = partial(read, file, name)
                    stored[name] = Stored(part.get_dtype(), part.get_shape(), how)
        except (SafetensorError, OSError) as error:
            what = f"weights {folder}: {file.name} cannot be read"
            raise UserError(what, str(error), "fetch it again") from None
    return {name: tensor for name, tensor in stored.items() if not _BUFFERS.search(name)}


def _open_bin(file: Path) -> dict[str, Stored]:
    """Return the tensors of a file that torch.save wrote. Nothing in it is run."""
    import torch

    try:
        # Older files are no archives, which can only be read whole.
        mapped = zipfile.is_zipfile(file)
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        tensors = {name: tensor for name, tensor in saved.items() if torch.is_tensor(tensor)}
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, AttributeError) as error:
        why = str(error).strip().partition("\n")[0]
        fix = f"if you trust it, convert it: {convert_command(file.parent)}"
        what = f"weights {file} cannot be read with weights_only=True"
        raise UserError(what, shown(why)[1:-1], fix) from None
    return {
        name: Stored(
            _BIN_DTYPES.get(str(tensor.dtype), str(tensor.dtype)), list(tensor.shape),
            partial(lambda tensor, *box: tensor[box], tensor),
        )
        for name, tensor in tensors.items()
    }  # fmt: skip


def stored_dtype(folder: Path) -> str:
    """Return the dtype of most of a folder's weights, as torch calls it."""
    sizes = Counter[str]()
    for tensor in open_weights(folder).values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    (most, _), *_ = sizes.most_common(1) or [("none", 0)]
    if most not in TORCH_DTYPES:
        why = f"most of them are {most}, and {', '.join(TORCH_DTYPES)} are read"
        raise UserError(f"weights {folder} are not supported", why, "convert them to BF16")
    return TORCH_DTYPES[most]


def is_tied(folder: Path, tied: bool, embedding: str, head: str = "lm_head.weight") -> bool:
    """Return whether the output layer has the embedding's weights, where a folder's config.json
    says whether they are `tied`. As in transformers, the weights decide if they have both with
    different values. `embedding` may lack its first part in the file."""
    if not tied or not weight_files(folder):
        return tied
    stored = open_weights(folder)
    rows = stored.get(embedding) or stored.get(embedding.partition(".")[2])
    other = stored.get(head)
    if rows is None or other is None:
        return True
    if (rows.shape, rows.dtype) != (other.shape, other.dtype):
        return False
    import torch

    return torch.equal(rows.read(), other.read())
