"""Describe the hardware of a machine. Read the GPU data in gpus.json, from which rates are
estimated. `source` names where an entry's values come from.

Rates are for dense matrices, without sparsity, with fp32 accumulation. Memory sizes are as CUDA
reports them, or 98% of the datasheet's. Link bandwidths are in GB/s per direction:
- NVLink: 900 for version 5, 450 for 4, 300 for 3, 150 for 2, and 200 for the H800 and A800
- PCIe x16: about 63 for version 5, 31.5 for 4, and 15.75 for 3; half as much for x8

`host` names a typical machine with the GPU: a cloud instance, a workstation, a PC or a laptop.
`ram_gib` and `disk_gb` are its RAM and local disks per GPU.

If a device's name does not contain its memory, the first entry of its model is used."""

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_core import from_json

from distributed_training.settings.config import Positive
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import did_you_mean, load_json, one_of, parse_as, shown

GIB = 2**30
NIC_BYTES_PER_S = 50e9  # bandwidth between nodes: one 400 Gbit/s network card per GPU
GPU_EXAMPLE = '{"memory_gib": 48, "tflops": 150, "memory_gb_s": 700}'


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware properties on which "auto" values and preflight checks depend."""

    num_gpus: int  # NVIDIA GPUs that this process may use, according to `CUDA_VISIBLE_DEVICES`
    gpu_name: str | None
    # Smallest memory of any visible GPU, or the available RAM if GPUs share it; 0 without GPUs
    gpu_memory_bytes: int
    compute_capability: tuple[int, int]  # lowest of the visible GPUs; (0, 0) without GPUs
    ram_bytes: int  # available bytes, limited by free RAM and by the cgroup
    num_cpus: int
    disk_bytes: int = sys.maxsize  # free space in the current folder
    power_w: float | None = None  # lowest power limit of the visible GPUs; None if unknown
    shares_memory: bool = False  # whether the GPUs use the same memory as the CPU
    torch_has_cuda: bool = False  # whether torch loads CUDA's libraries, even without a GPU


class Gpu(BaseModel, strict=True, extra="forbid", frozen=True):
    """GPU model, described by an entry in gpus.json or by JSON passed to `--gpu`."""

    name: str = "own GPU"
    memory_gib: Positive
    tflops: Positive  # rate of 16-bit matrix multiplications with fp32 accumulation
    # Rate of fp32 matrix multiplications without TF32
    fp32_tflops: Positive = Field(default_factory=lambda values: values.get("tflops", 0) / 4)
    memory_gb_s: Positive
    link_gb_s: Positive = 31.5  # bandwidth to another GPU in the node, per direction
    # Streaming multiprocessors. Each computes one tile of a matrix multiplication at a time.
    num_sms: Annotated[int, Field(ge=1)] = 100
    compute_capability: Annotated[tuple[int, int], Field(strict=False)] = (8, 0)
    power_w: Positive = 1000  # power limit, which bounds the rate of long matrix multiplications
    host: str = "a workstation"  # typical machine with this GPU
    ram_gib: Positive = 64  # RAM of `host` per GPU
    shares_memory: bool = False  # whether the GPU has no memory of its own
    disk_gb: Positive = 1000  # local disk space of `host` per GPU
    source: str = ""  # where the values come from
    # Other names, such as those of machines in clouds, each with the text before `name` that counts
    # the GPUs. A name with $ must end the text.
    also: dict[str, str] = {}

    @property
    def flops(self) -> float:
        return self.tflops * 1e12


_TABLE = load_json(Path(__file__).with_name("gpus.json"), "the table of GPUs")
GPUS = {entry["name"]: Gpu(**entry) for entry in _TABLE}
_OTHER_NAMES = {
    rf"\b(?:standard_)?{name.replace('.', '[.]').replace(' ', '[ _-]?')}\b": count + gpu.name
    for gpu in GPUS.values()
    for name, count in gpu.also.items()
}


# Words that distinguish GPUs whose names are otherwise equal
_FORM_WORDS = {"MIG", "PCIE", "NVL", "TI", "SUPER", "LAPTOP", "D", "MAX", "Q"}
_OTHER_VENDORS = re.compile(
    r"\b(AMD|APPLE|MAC\w*|INTEL|M[1-9]|MI\d+\w*|INSTINCT|RADEON|RX|XTX?|RYZEN|STRIX|GAUDI|TPU|TRN|ARC)\b"
)
# Places between words that users write without a space, as in 4070TiSuper or RTXA6000
_GAPS = re.compile(
    r"(?<=\d)(?=TI|SUPER|LAPTOP|MOBILE|ADA|PCIE|SXM|NVL|D\b)|(?<=TI)(?=SUPER)|(?<=RTX)(?=A?\d)|(?<=\bRX)(?=\d)|(?<=\d{4})(?=XTX?\b)|[\s_(),-]+"
)
# Words that distinguish no entries
_COMMON_WORDS = re.compile(
    r"NVIDIA|GEFORCE|[GR]TX|TESLA|HGX|GPU|CARD|GRAPHICS|SXM\d?|HBM\d?E?|G?DDR\dX?|VRAM|AMPERE|HOPPER|BLACKWELL"
    r"|GENERATION|WORKSTATION|SERVER|DESKTOP|EDITION|\d*GI?B?"
)
_NAME_WORDS = {word for name in GPUS for word in name.upper().split("-")}


@functools.cache
def find_gpu(device_name: str | None) -> Gpu | None:
    """Return the entry in gpus.json for a device name from nvidia-smi or CUDA. Return None for a
    device without an entry and for a partial GPU (MIG)."""
    words = (device_name or "").upper().replace("-", " ").split()
    return next(iter(_find_gpus({*words})), None)


def _find_gpus(words: set[str]) -> list[Gpu]:
    """Return the entries whose names consist of these words. If there are none, for example because
    the memory is not named, return the entries that differ only in their memory."""
    complete = []
    same_model = []
    for gpu in GPUS.values():
        entry = {*gpu.name.upper().split("-")}
        if entry & _FORM_WORDS != words & _FORM_WORDS:
            continue
        if entry <= words:
            complete.append(gpu)
        elif {word for word in entry if not word.endswith("GB")} <= words:
            same_model.append(gpu)
    return complete or same_model


def replace_other_names(text: str) -> str:
    """Replace the other names of GPUs by those in gpus.json, such as p5.48xlarge by 8xH100-80GB."""
    for pattern, name in _OTHER_NAMES.items():
        text = re.sub(pattern, name, text, flags=re.IGNORECASE)
    return text


def parse_gpu(name: str) -> Gpu:
    """Return the GPU that a user specifies by name or as JSON. Names are not case-sensitive, and
    3060, rtx4090 and "RTX 4070 Ti" are names, too. A suffix such as "@500W" lowers the power limit.
    Raises UserError for an unknown GPU, and for a name that leaves the memory open."""
    if name.lstrip().startswith("{"):
        try:
            document = from_json(name)
        except ValueError as error:
            raise UserError(f"--gpu {shown(name)} is not valid JSON", str(error)) from None
        return parse_as(Gpu, document, "--gpu", f"write {GPU_EXAMPLE}")
    if match := re.fullmatch(r"(.+)@(\d+) ?W", name.strip(), re.IGNORECASE):
        return with_power_limit(parse_gpu(match[1]), float(match[2]))
    text = _GAPS.sub(" ", name.strip().upper()).replace("MOBILE", "LAPTOP")
    text = re.sub(r"(DGX )?SPARK", "GB10", re.sub(r"(?<=\d) (?=GI?B?\b)", "", text))
    # Plurals, such as 3090s
    words = {word if word in _NAME_WORDS else word.removesuffix("S") for word in text.split()}
    known = _find_gpus({"RTX", *words})
    gpus = known
    if size := re.search(r"\b(\d+)GI?B?\b", text):
        gib = int(size[1])
        gpus = [gpu for gpu in known if abs(gpu.memory_gib - gib) <= gib / 10]
    if len({gpu.memory_gib for gpu in gpus}) == 1:
        gpu = gpus[0]
        unknown = words - {*gpu.name.upper().split("-")}
        unknown = {word for word in unknown if not _COMMON_WORDS.fullmatch(word)}
        if not unknown:
            return gpu
        what = f"GPU {shown(name)} has words that are not known: {', '.join(sorted(unknown))}"
        raise UserError(
            what,
            fix=f"write {gpu.name}, 2x{gpu.name} for two of them, or 2x8x{gpu.name} for two nodes",
        )
    models = {re.sub(r"-\d+GB$", "", gpu.name): gpu for gpu in known}
    if len(models) > 1:
        what = f"GPU {shown(name)} names {' and '.join(models)}, but a plan is for equal GPUs"
        least = min(known, key=lambda gpu: gpu.memory_gib).name
        raise UserError(
            what, "the one with the least memory limits all", f"write 2x{least}, for example"
        )
    if known:
        what = f"GPU {shown(name)} does not name one of the known sizes of memory"
        raise UserError(what, fix=f"write {one_of([gpu.name for gpu in known])}")
    if _OTHER_VENDORS.search(text):
        what = f"GPU {shown(name)} is not supported"
        raise UserError(what, "the suite needs CUDA", "name a GPU by NVIDIA, such as H100-80GB")
    fix = f"{did_you_mean(text.replace(' ', '-'), GPUS)} To describe another GPU, write "
    fix += f"--cluster 1x8 --gpu '{GPU_EXAMPLE}', for example. "
    fix += "To plan for this machine, with or without GPUs, omit --cluster"
    raise UserError(f"GPU {shown(name)} is not known", fix=fix.strip())


def with_power_limit(gpu: Gpu, power_w: float | None) -> Gpu:
    """Return `gpu` with its power limit lowered to `power_w` watts. If `power_w` is None, the limit
    is unknown, and `gpu` is returned unchanged."""
    return gpu if power_w is None else gpu.model_copy(update={"power_w": min(power_w, gpu.power_w)})
