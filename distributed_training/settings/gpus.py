"""What GPUs can do by their vendor's datasheets: the table that rates are estimated from.

Sources: NVIDIA's datasheets of H200, H100, A100, L40S, L4, A10, T4, V100, and the whitepapers of
the RTX 3090 (GA102), 4090 (AD102) and 5090 (GB202). Dense, without sparsity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


def _gpu(
    name: str, memory_gib: float, tflops: float, fp32_tflops: float, memory_gb_s: float,
    link_gb_s: float, num_sms: int, capability: tuple[int, int],
) -> Gpu:  # fmt: skip
    return Gpu(
        name=name, memory_bytes=int(memory_gib * GIB), flops=tflops * 1e12,
        fp32_flops=fp32_tflops * 1e12, memory_bytes_per_s=memory_gb_s * 1e9,
        link_bytes_per_s=link_gb_s * 1e9, num_sms=num_sms, compute_capability=capability,
    )  # fmt: skip


# Memory is what nvidia-smi reports. Links: NVLink 4 has 450 GB/s each way, 3 has 300, 2 has 150;
# PCIe 5 x16 about 63, 4 31.5, 3 15.75. PCIe entries precede the SXM ones whose names they contain.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 178, 2250, 75, 8000, 900, 148, (10, 0)),
        _gpu("GH200", 95, 989.5, 67, 4000, 450, 132, (9, 0)),
        _gpu("H200", 140.4, 989.5, 67, 4800, 450, 132, (9, 0)),
        _gpu("H100-PCIe", 79.6, 756, 51, 2000, 63, 114, (9, 0)),
        _gpu("H100-NVL", 93.1, 835, 60, 3900, 300, 132, (9, 0)),
        _gpu("H100-80GB", 79.6, 989.5, 67, 3350, 450, 132, (9, 0)),
        _gpu("A100-80GB", 79.2, 312, 19.5, 2039, 300, 108, (8, 0)),
        _gpu("A100-40GB", 39.4, 312, 19.5, 1555, 300, 108, (8, 0)),
        _gpu("A40", 44.4, 149.7, 37.4, 696, 31.5, 84, (8, 6)),
        _gpu("L40S", 44.4, 362, 91.6, 864, 31.5, 142, (8, 9)),
        _gpu("L4", 22.2, 121, 30.3, 300, 31.5, 58, (8, 9)),
        _gpu("A10", 22.1, 125, 31.2, 600, 31.5, 72, (8, 6)),
        _gpu("V100-32GB", 31.7, 125, 15.7, 900, 150, 80, (7, 0)),
        _gpu("V100-16GB", 15.8, 125, 15.7, 900, 150, 80, (7, 0)),
        _gpu("T4", 14.6, 65, 8.1, 320, 15.75, 40, (7, 5)),
        _gpu("RTX-5090", 31.4, 209.5, 104.8, 1792, 63, 170, (12, 0)),
        _gpu("RTX-4090", 23.5, 165.2, 82.6, 1008, 31.5, 128, (8, 9)),
        _gpu("RTX-3090", 23.6, 71, 35.6, 936, 31.5, 82, (8, 6)),
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
    name: str = "own GPU"


def find_gpu(device_name: str | None) -> Gpu | None:
    """The entry for what nvidia-smi or CUDA calls a device; None for one that is not in the table,
    as for parts of a chip (MIG) and laptops' chips.
    """
    words = (device_name or "").replace("-", " ").split()
    if "MIG" in words or "Laptop" in words:
        return None
    for gpu in GPUS.values():
        if all(word in words for word in gpu.name.split("-")):
            return gpu
    # A name without its memory or form: the first that the model's own word finds.
    for gpu in GPUS.values():
        model, *form = gpu.name.split("-")
        if model in words and "RTX" not in words and form not in (["PCIe"], ["NVL"]):
            return gpu
    return None


def known_gpu(name: str) -> Gpu:
    """The entry that a user names, in any case; UserError with the nearest names."""
    by_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    text = name.strip().lower().replace(" ", "-").replace("_", "-")
    found = by_name.get(text) or find_gpu(name.upper().replace("PCIE", "PCIe"))
    if found is not None:
        return found
    near = nearest(text, by_name)
    fix = f"did you mean {by_name[near].name}? " if near else ""
    fix += f"or describe it: --gpu '{_EXAMPLE}'"
    why = f"the table has {', '.join(GPUS)}"
    raise UserError(f"GPU {shown(name)} is not known", why, fix)


def described_gpu(document: Mapping[str, Any]) -> Gpu:
    """The GPU that `--gpu` describes as JSON; UserError for a key that is wrong or missing."""
    given = parse_as(_Given, document, "--gpu", f"write {_EXAMPLE}").model_dump()
    given["fp32_tflops"] = given["fp32_tflops"] or given["tflops"] / 4
    return _gpu(**given, capability=(8, 0))
