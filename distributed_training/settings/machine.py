"""Describe the hardware of a machine. Read the GPU data in gpus.json, from which rates are
estimated.

The values come from NVIDIA's datasheets, with three exceptions:
- RTX 3090, 4090 and 5090: the whitepapers for GA102, AD102 and GB202
- RTX 3060: the rates follow from 3,584 cores at 1.78 GHz as in the whitepaper for GA102
- A10G, an AWS variant of the A10: the values that CUDA reports

Rates are for dense matrices, without sparsity. Memory sizes are as reported by nvidia-smi. Link
bandwidths are in GB/s per direction:
- NVLink: 900 for version 5, 450 for 4, 300 for 3, 150 for 2, and 200 for the H800 and A800
- PCIe x16: about 63 for version 5, 31.5 for 4, and 15.75 for 3

`host` names a typical machine with the GPU: a cloud instance, or a workstation. `ram_gib` and
`disk_gb` are its RAM and local disks per GPU.

An entry whose name contains another entry's name comes before that entry. A plain name such as V100
denotes the model's first entry whose form factor is not PCIe or NVL."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from distributed_training.settings.config import Positive
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, parse_as, parse_json, shown

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
    cpu_has_bf16: bool = False  # whether the CPU has instructions for bf16 matrix multiplications


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
    disk_gb: Positive = 1000  # local disk space of `host` per GPU

    @property
    def flops(self) -> float:
        return self.tflops * 1e12


_TABLE = load_json(Path(__file__).with_name("gpus.json"), "the table of GPUs")
GPUS = {entry["name"]: Gpu(**entry) for entry in _TABLE}


def find_gpu(device_name: str | None) -> Gpu | None:
    """Return the entry in gpus.json for a device name from nvidia-smi or CUDA. Return None for a
    device without an entry, for a partial GPU (MIG) and for a laptop GPU."""
    name_parts = (device_name or "").upper().replace("-", " ").split()
    if "MIG" in name_parts or "LAPTOP" in name_parts:
        return None
    for gpu in GPUS.values():
        if set(gpu.name.upper().split("-")) <= set(name_parts):
            return gpu
    # If no entry matches completely, for example because the memory differs, use the first entry of
    # the same model and form factor (PCIe, NVL).
    form_factors = {"PCIE", "NVL"}
    for gpu in GPUS.values():
        model, *suffixes = gpu.name.upper().removeprefix("RTX-").split("-")
        numbered = model.isdecimal()  # "6000" alone may be part of another name
        if (
            model in name_parts
            and not numbered
            and form_factors & set(suffixes) == form_factors & set(name_parts)
        ):
            return gpu
    return None


def parse_gpu(name: str) -> Gpu:
    """Return the GPU that a user specifies by name or as JSON. Names are not case-sensitive. A
    suffix such as "@500W" lowers the power limit. Raises UserError for an unknown GPU."""
    if name.lstrip().startswith("{"):
        try:
            document = parse_json(name)
        except ValueError as error:
            raise UserError(f"--gpu {shown(name)} is not valid JSON", str(error)) from None
        return parse_as(Gpu, document, "--gpu", f"write {GPU_EXAMPLE}")
    if match := re.fullmatch(
        r"(.+)@(\d+) ?W",
        name.strip(),
        re.IGNORECASE,
    ):
        return with_power_limit(parse_gpu(match[1]), float(match[2]))
    text = name.strip().replace(" ", "-").replace("_", "-")
    text = re.sub(r"(?i)^(?:RTX-?)?(\d{4})", r"RTX-\1", text)
    gpu = find_gpu(text)
    if gpu is not None:
        return gpu
    if re.match(r"(?i)MI\d|INSTINCT|RX-|GAUDI|TPU|TRN|ARC-", text):
        what = f"GPU {shown(name)} is not supported"
        raise UserError(what, "the suite needs CUDA", "name a GPU by NVIDIA, such as H100-80GB")
    fix = f"to describe another GPU, write --cluster 1x8 --gpu '{GPU_EXAMPLE}', for example"
    raise UserError(f"GPU {shown(name)} is not known", f"the known GPUs are {', '.join(GPUS)}", fix)


def with_power_limit(gpu: Gpu, power_w: float | None) -> Gpu:
    """Return `gpu` with its power limit lowered to `power_w` watts. If `power_w` is None, the limit
    is unknown, and `gpu` is returned unchanged."""
    return gpu if power_w is None else gpu.model_copy(update={"power_w": min(power_w, gpu.power_w)})
