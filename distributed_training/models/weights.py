"""Find and read the weight files in a Hugging Face folder, in transformers' order of preference.
Only safetensors files are read, because reading them executes no code."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from distributed_training.data import hub
from distributed_training.models.config_file import CONFIG_FILE
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_object, parse_as, plural, require_regular

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # index of several files
# dtype in safetensors -> dtype in torch
TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPE_CODES = {name: code for code, name in {**TORCH_DTYPES, "U8": "uint8"}.items()}
# Buffers that older releases of transformers saved with the weights
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|(^|\.)position_ids$")


def all_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite. `isfinite().all()` would take 14 times as long."""
    # NaN propagates to the minimum and the maximum.
    return not values.numel() or all(map(math.isfinite, values.aminmax()))


def rename_parts(name: str, new_names: Mapping[str, str]) -> str:
    """Return a parameter's name with those of its parts replaced that are keys of `new_names`."""
    return ".".join(new_names.get(part, part) for part in name.split("."))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class _Index(BaseModel, strict=True):
    """Contents of an index of several weight files."""

    weight_map: dict[str, str]  # tensor -> file


class StoredTensor(NamedTuple):
    """Tensor in a weight file."""

    dtype: str  # name in safetensors
    shape: list[int]
    # Function that returns the tensor on the CPU. Given one slice per dimension, it returns only
    # that part of the tensor. In mapped files, pages are loaded into RAM only when their values are
    # used.
    read: Callable[..., Any]

    def transposed(self) -> StoredTensor:
        """Return this matrix transposed. Its `read` accepts only a slice of rows."""

        def read(rows: slice) -> Any:
            return self.read(slice(None), rows).t()

        return StoredTensor(self.dtype, self.shape[::-1], read)


def convert_command(folder: Path) -> str:
    """Return a command that loads the folder's weights with transformers and writes them to
    model.safetensors in the same folder."""
    code = f"from transformers import AutoModelForCausalLM as M; p={str(folder)!r}; "
    return f'python -c "{code}M.from_pretrained(p).save_pretrained(p)"'


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files, or [] if there are none. Raises UserError if the index
    is not JSON."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.exists():
        return []
    fix = "download it again, or save the model again with transformers"
    parsed = parse_as(_Index, load_object(index, "weights"), str(index), fix)
    return [folder / name for name in sorted(set(parsed.weight_map.values()))]


def fetch_weights(repo_id: str) -> Path:
    """Download a model's weights from the Hub and return their folder. Raises OSError if neither
    the Hub nor the local Hub cache has the weights."""
    try:
        return hub.fetch_folder(repo_id, (CONFIG_FILE, SINGLE_FILE))
    except OSError as error:
        try:
            folder = hub.fetch_folder(repo_id, (CONFIG_FILE, INDEX_FILE))
        except OSError:
            raise error from None
    return hub.fetch_folder(repo_id, tuple(file.name for file in weight_files(folder)))


def require_weights(folder: Path) -> list[Path]:
    """Return `weight_files(folder)`. Raises UserError if the folder contains no weight files, or if
    its index lists a missing file."""
    files = weight_files(folder)
    if not files:
        why = f"it has neither {SINGLE_FILE} nor {INDEX_FILE}"
        fix = "to train this model from scratch, set weights to random. To convert weights in "
        fix += f"another format, run: {convert_command(folder)}"
        raise UserError(f"{folder} contains no readable weights", why, fix)
    if missing_files := [file.name for file in files if not file.exists()]:
        what = f"weights {folder}: {missing_files[0]} cannot be read"
        why = f"the index lists {plural(len(missing_files), 'file')} that do not exist"
        raise UserError(what, why, "download them again")
    return files


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return a folder's tensors by name. Their values are not read yet. Raises UserError if a file
    is missing or damaged."""
    stored: dict[str, StoredTensor] = {}
    for file in require_weights(folder):
        tensors, _ = open_file(file, "download it again")
        stored |= {name: tensors[name] for name in tensors if not _BUFFERS.search(name)}
    return stored


def open_file(file: Path, fix: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata. Raises UserError, which
    advises to `fix` it, if the file is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    require_regular(file, "weights")
    try:
        # safe_open reads the header and checks it against the length of the file.
        with safe_open(file, "np") as header:
            stored = {}
            for name in header.keys():  # noqa: SIM118, it is not a dict
                tensor = header.get_slice(name)
                read = partial(read_stored, file, name)
                stored[name] = StoredTensor(tensor.get_dtype(), tensor.get_shape(), read)
            return stored, header.metadata() or {}
    except (SafetensorError, OSError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{file} cannot be read", why, fix) from None


def read_stored(file: Path, name: str, *slices: slice) -> Any:
    """Return a tensor of a safetensors file, or the part that one slice per dimension selects. The
    file is opened each time, because a mapping that stays open keeps its pages in RAM."""
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return tensors.get_slice(name)[slices] if slices else tensors.get_tensor(name)


def stored_dtype(folder: Path) -> str:
    """Return torch's name for the dtype of the largest tensor in a folder of weights that is not
    quantized."""
    tensors = [tensor for tensor in open_weights(folder).values() if tensor.dtype in TORCH_DTYPES]
    return TORCH_DTYPES[max(tensors, key=lambda tensor: math.prod(tensor.shape)).dtype]


def is_tied(folder: Path, tied: bool, embedding: str) -> bool:
    """Return whether a model's output layer shares the weights of its embedding.

    `tied` is the value in the folder's config.json, and `embedding` is the name of the embedding's
    weight. The files may omit the first component of this name. As in transformers, the layers are
    not tied if the files contain both weights and their values differ."""
    if not tied or not weight_files(folder):
        return tied
    stored = open_weights(folder)
    embedding_weight = stored.get(embedding) or stored.get(embedding.partition(".")[2])
    head_weight = stored.get("lm_head.weight")
    if embedding_weight is None or head_weight is None:
        return True
    if embedding_weight.dtype != head_weight.dtype:
        return False
    import torch

    return torch.equal(embedding_weight.read(), head_weight.read())


def write_tensors(
    file: Path,
    meta_tensors: Mapping[str, torch.Tensor],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
    *,
    sync: bool = False,
) -> tuple[int, int]:
    """Write `tensors` to a safetensors file, with only one tensor in memory at a time. Return the
    size of the file in bytes and its CRC-32. If `sync` is True, the file is then on disk.

    `meta_tensors` maps the names of the tensors to tensors with the same shapes and dtypes, in the
    same order. These tensors may be on the meta device. Equal tensors in the same order, with equal
    metadata, produce identical files. The `save_file` function of safetensors would need all
    tensors in memory at once."""
    sizes = (tensor.numel() * tensor.itemsize for tensor in meta_tensors.values())
    ends = [*accumulate(sizes, initial=0)]
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    for (name, part), offsets in zip(meta_tensors.items(), pairwise(ends), strict=True):
        code = DTYPE_CODES[dtype_name(part.dtype)]
        header[name] = {"dtype": code, "shape": list(part.shape), "data_offsets": offsets}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    checksum = 0
    # A process may have mapped the old file into memory, so do not overwrite it.
    file.unlink(missing_ok=True)
    with open(file, "wb") as output:
        for data in chain([memoryview(head)], map(_view_bytes, tensors, meta_tensors.values())):
            output.write(data)
            checksum = zlib.crc32(data, checksum)
            del data  # Otherwise, this tensor would stay in memory while the next tensor is read.
        assert output.tell() == len(head) + ends[-1], "tensors are missing"
        if sync:
            output.flush()
            os.fsync(output.fileno())
        return output.tell(), checksum


def _view_bytes(tensor: torch.Tensor, expected: torch.Tensor) -> memoryview:
    import torch

    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    return tensor.reshape(-1).view(torch.uint8).numpy().data
