"""What GPUs can do by their vendor's datasheets: the table that rates are estimated from.

Sources: NVIDIA's datasheets of each; whitepapers of GA102 (RTX 3090), AD102 (4090) and GB202
(5090); of the A10G, AWS's variant, what CUDA reports. Dense, without sparsity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import nearest, parse_as, shown

GIB = 2**30
Positive = Annotated[float, Field(gt=0)]
_EXAMPLE = '{"memory_gib": 48, "tflops": 150, "memory_gb_s": 700}'


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_bytes: int
    flops: float  # of 16-bit matrix products with fp32 sums, a second
    fp32_flops: float  # of fp32 ones, without TF32
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to a neighbour in the node, each way
    num_sms: int  # multiprocessors, each of which works on one tile of a matrix product
    compute_capability: tuple[int, int]
    power_w: float  # that it may draw, which is what limits long matrix products


def _gpu(
    name: str, memory_gib: float, tflops: float, fp32_tflops: float, memory_gb_s: float,
    link_gb_s: float, num_sms: int, capability: tuple[int, int], power_w: float,
) -> Gpu:  # fmt: skip
    return Gpu(
        name=name, memory_bytes=int(memory_gib * GIB), flops=tflops * 1e12,
        fp32_flops=fp32_tflops * 1e12, memory_bytes_per_s=memory_gb_s * 1e9,
        link_bytes_per_s=link_gb_s * 1e9, num_sms=num_sms, compute_capability=capability,
        power_w=power_w,
    )  # fmt: skip


# Memory is what nvidia-smi reports. Links: NVLink 5 has 900 GB/s each way, 4 has 450, 3 has 300, 2
# has 150, the H800's and A800's 200; PCIe 5 x16 about 63, 4 31.5, 3 15.75. Entries whose names
# contain others' come first, and of one model what is meant without its form comes before PCIe.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("GB200", 185, 2500, 80, 8000, 900, 148, (10, 0), 1200),
        _gpu("B200", 178, 2250, 75, 8000, 900, 148, (10, 0), 1000),
        _gpu("GH200", 95, 989.5, 67, 4000, 450, 132, (9, 0), 700),
        _gpu("H200", 140.4, 989.5, 67, 4800, 450, 132, (9, 0), 700),
        _gpu("H100-PCIe", 79.6, 756, 51, 2000, 63, 114, (9, 0), 350),
        _gpu("H100-NVL", 93.1, 835, 60, 3900, 300, 132, (9, 0), 400),
        _gpu("H100-80GB", 79.6, 989.5, 67, 3350, 450, 132, (9, 0), 700),
        _gpu("H800", 79.6, 989.5, 67, 3350, 200, 132, (9, 0), 700),
        _gpu("H20", 95.6, 148, 44, 4000, 450, 78, (9, 0), 400),
        _gpu("A100-80GB-PCIe", 79.2, 312, 19.5, 1935, 31.5, 108, (8, 0), 300),
        _gpu("A100-40GB-PCIe", 39.4, 312, 19.5, 1555, 31.5, 108, (8, 0), 250),
        _gpu("A100-80GB", 79.2, 312, 19.5, 2039, 300, 108, (8, 0), 400),
        _gpu("A100-40GB", 39.4, 312, 19.5, 1555, 300, 108, (8, 0), 400),
        _gpu("A800", 79.2, 312, 19.5, 2039, 200, 108, (8, 0), 400),
        _gpu("A30", 23.5, 165, 10.3, 933, 31.5, 56, (8, 0), 165),
        _gpu("A40", 44.4, 149.7, 37.4, 696, 31.5, 84, (8, 6), 300),
        _gpu("RTX-A6000", 47.5, 154.8, 38.7, 768, 31.5, 84, (8, 6), 300),
        _gpu("RTX-6000-Ada", 47.5, 364.2, 91.1, 960, 31.5, 142, (8, 9), 300),
        _gpu("L40S", 44.4, 362, 91.6, 864, 31.5, 142, (8, 9), 350),
        _gpu("L40", 44.4, 181, 90.5, 864, 31.5, 142, (8, 9), 300),
        _gpu("L4", 22.2, 121, 30.3, 300, 31.5, 58, (8, 9), 72),
        _gpu("A10G", 22.1, 70, 35, 600, 31.5, 80, (8, 6), 300),
        _gpu("A10", 22.1, 125, 31.2, 600, 31.5, 72, (8, 6), 150),
        _gpu("V100-32GB-PCIe", 31.7, 112, 14, 900, 15.75, 80, (7, 0), 250),
        _gpu("V100-16GB-PCIe", 15.8, 112, 14, 900, 15.75, 80, (7, 0), 250),
        _gpu("V100-32GB", 31.7, 125, 15.7, 900, 150, 80, (7, 0), 300),
        _gpu("V100-16GB", 15.8, 125, 15.7, 900, 150, 80, (7, 0), 300),
        _gpu("T4", 14.6, 65, 8.1, 320, 15.75, 40, (7, 5), 70),
        _gpu("RTX-5090", 31.4, 209.5, 104.8, 1792, 63, 170, (12, 0), 575),
        _gpu("RTX-4090", 23.5, 165.2, 82.6, 1008, 31.5, 128, (8, 9), 450),
        _gpu("RTX-3090", 23.6, 71, 35.6, 936, 31.5, 82, (8, 6), 350),
    )
}


class _Given(BaseModel, strict=True, extra="forbid"):
    """A GPU that a user describes, `--gpu '{"memory_gib": 48, ...}'`."""

    memory_gib: Positive
    tflops: Positive
    fp32_tflops: Positive | None = None
    memory_gb_s: Positive
    link_gb_s: Positive = 31.5
    num_sms: Annotated[int, Field(ge=1)] = 100
    power_w: Positive = 1000
    name: str = "own GPU"


def find_gpu(device_name: str | None) -> Gpu | None:
    """The entry for what nvidia-smi or CUDA calls a device; None for one that is not in the table,
    as for parts of a chip (MIG) and laptops' chips.
    """
    words = (device_name or "").upper().replace("-", " ").split()
    if "MIG" in words or "LAPTOP" in words:
        return None
    for gpu in GPUS.values():
        if set(gpu.name.upper().split("-")) <= set(words):
            return gpu
    # A name without its memory: the first of the same form that the model's own word finds.
    forms = {"PCIE", "NVL"}
    for gpu in GPUS.values():
        model, *rest = gpu.name.upper().removeprefix("RTX-").split("-")
        numbered = model.isdecimal()  # "6000" alone may be another's
        if model in words and not numbered and forms & set(rest) == forms & set(words):
            return gpu
    return None


def known_gpu(name: str) -> Gpu:
    """The entry that a user names, in any case, with "@500W" under that limit of power; UserError
    with the nearest names."""
    limited = re.fullmatch(r"(.+)@(\d+) ?W", name.strip(), re.IGNORECASE)
    if limited:
        return limited_to(known_gpu(limited[1]), float(limited[2]))
    by_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    text = name.strip().lower().replace(" ", "-").replace("_", "-")
    found = by_name.get(text) or find_gpu(name)
    if found is not None:
        return found
    near = nearest(text, by_name)
    fix = f"did you mean {by_name[near].name}? " if near else ""
    fix += f"or describe it: --gpu '{_EXAMPLE}'"
    why = f"the table has {', '.join(GPUS)}"
    raise UserError(f"GPU {shown(name)} is not known", why, fix)


def limited_to(gpu: Gpu, power_w: float | None) -> Gpu:
    """The GPU where it may draw less than by its datasheet; None: it may draw that."""
    return gpu if power_w is None else replace(gpu, power_w=min(power_w, gpu.power_w))


def described_gpu(document: Mapping[str, Any]) -> Gpu:
    """The GPU that `--gpu` describes as JSON; UserError for a key that is wrong or missing."""
    given = parse_as(_Given, document, "--gpu", f"write {_EXAMPLE}").model_dump()
    given["fp32_tflops"] = given["fp32_tflops"] or given["tflops"] / 4
    return _gpu(**given, capability=(8, 0))
