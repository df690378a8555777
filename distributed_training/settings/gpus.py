"""What GPUs can do by their vendor's datasheets, gpus.json: what rates are estimated from.

Sources: NVIDIA's datasheets of each; whitepapers of GA102 (RTX 3090), AD102 (4090) and GB202
(5090); of the A10G, AWS's variant, what CUDA reports. Dense, without sparsity. Memory is what
nvidia-smi reports. Links: NVLink 5 has 900 GB/s each way, 4 has 450, 3 has 300, 2 has 150, the
H800's and A800's 200; PCIe 5 x16 about 63, 4 31.5, 3 15.75. Entries whose names contain others'
come first, and of one model what is meant without its form comes before PCIe.
"""

import json
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import did_you_mean, load_json, parse_as, shown

GIB = 2**30
ADAPTER_BYTES_PER_S = 50e9  # of a GPU between nodes: one 400 Gbit/s adapter each
Positive = Annotated[float, Field(gt=0)]
_EXAMPLE = '{"memory_gib": 48, "tflops": 150, "memory_gb_s": 700}'


class Gpu(BaseModel, strict=True, extra="forbid", frozen=True):
    """One kind of GPU: an entry of the table, or what `--gpu '{"memory_gib": 48, ...}'` says."""

    name: str = "own GPU"
    memory_gib: Positive
    tflops: Positive  # of 16-bit matrix products with fp32 sums
    # Of fp32 ones, without TF32
    fp32_tflops: Positive = Field(default_factory=lambda given: given.get("tflops", 0) / 4)
    memory_gb_s: Positive
    link_gb_s: Positive = 31.5  # to a neighbour in the node, each way
    # Multiprocessors, each of which works on one tile of a matrix product
    num_sms: Annotated[int, Field(ge=1)] = 100
    compute_capability: Annotated[tuple[int, int], Field(strict=False)] = (8, 0)
    power_w: Positive = 1000  # that it may draw, which is what limits long matrix products

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def flops(self) -> float:
        return self.tflops * 1e12


_TABLE = load_json(Path(__file__).with_suffix(".json"), "the table of GPUs")
GPUS = {entry["name"]: Gpu(**entry) for entry in _TABLE}


def find_gpu(device_name: str | None) -> Gpu | None:
    """The entry for what nvidia-smi or CUDA calls a device; None for one that is not in the table,
    as for parts of a chip (MIG) and laptops' chips."""
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
    """The entry that a user names, in any case, with "@500W" under that limit of power, or a GPU
    described as JSON; UserError with the nearest names."""
    if name.lstrip().startswith("{"):
        try:
            document = json.loads(name)
        except json.JSONDecodeError as error:
            raise UserError(f"--gpu {shown(name)} is not JSON", str(error)) from None
        return parse_as(Gpu, document, "--gpu", f"write {_EXAMPLE}")
    if limited := re.fullmatch(r"(.+)@(\d+) ?W", name.strip(), re.IGNORECASE):
        return limited_to(known_gpu(limited[1]), float(limited[2]))
    text = name.strip().replace(" ", "-").replace("_", "-")
    found = find_gpu(text)
    if found is not None:
        return found
    fix = f"{did_you_mean(text, GPUS)} or describe it: --gpu '{_EXAMPLE}'"
    raise UserError(f"GPU {shown(name)} is not known", f"the table has {', '.join(GPUS)}", fix)


def limited_to(gpu: Gpu, power_w: float | None) -> Gpu:
    """The GPU where it may draw less than by its datasheet; None: it may draw that."""
    return gpu if power_w is None else gpu.model_copy(update={"power_w": min(power_w, gpu.power_w)})
