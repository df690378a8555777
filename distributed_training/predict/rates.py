"""How fast a machine works: measured (`plan --calibrate`), else estimated from datasheets.

The shares of a datasheet's figures are one H200's, from six of its records (results/PREDICTIONS.md
names them) and the breakdown of one step under torch's profiler. For any other GPU they are an
estimate.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from distributed_training.settings.gpus import Gpu

# Shares of a datasheet's figures that long kernels reach.
GEMM_SHARE, FP32_GEMM_SHARE, MEMORY_SHARE, ATTENTION_SHARE = 0.72, 0.80, 0.75, 0.44
LINK_SHARE = 0.67  # of a link, by NCCL's large all-gathers
ATTENTION_HALF = 600  # tokens at which attention reaches half of its best rate
KERNEL_S = 4.0e-6  # start and end of a kernel in which the GPU idles
LINK_LATENCY_S = 20e-6  # of a collective inside a node; between nodes twice as much
NETWORK_BYTES_PER_S = 50e9  # of a GPU between nodes: one 400 Gbit/s adapter each
# Tiles of a matrix product's result, and what they cost by an element: smaller ones load more.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 1.1))
SPLITS = ((1, 1.0), (2, 1.05), (4, 1.1))  # parts of a sum that are added up, and what that costs
# Seconds in which a host like those of the H200 records launches one compiled block: what HostCosts
# are relative to. `calibrate` gave 1.36 ms on a host 1.2 times as fast.
COMPILED_BLOCK_S = 1.6e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """Seconds that Python needs to launch things, on the machine of the H200 records."""

    step: float = 7e-3  # data, clipping, the optimizer, timing
    block: float = 1.2e-3  # forward and backward of a compiled block
    eager_block: float = 4.1e-3
    split_block: float = 5.7e-3  # eager, with the backward pass in two parts
    operation: float = 1.4e-3  # more, for an operation of a pipeline's stage
    tensor_parallel: float = 2.3e-3  # more, for a block
    fsdp_unit: float = 1.4e-3  # more, for what is gathered and reduced together
    dtensor: float = 0.12e-3  # more, for a DTensor
    stage_tensor: float = 0.46e-3  # more, for a parameter tensor of a stage: rounded copies
    ddp_tensor: float = 0.05e-3  # more, for a parameter tensor
    zero_tensor: float = 0.10e-3  # more, for a parameter tensor under ZeRO-1 and 2
    zero_update: float = 0.08e-3  # for a tensor of the part that a process updates: the GPU waits
    zero_wait: float = 0.35e-3  # for a block under ZeRO-1 and 2: the GPU waits
    zero3_block: float = 3.1e-3  # more, for a block
    zero3_gather: float = 1.6e-3  # more, for a block that several processes hold
    zero3_wait: float = 0.8e-3  # for a block: the GPU waits
    zero3_shared_wait: float = 1.7e-3  # the same where several processes hold it
    swapped_block: float = 0.0  # for a block whose parameters and optimizer are in files


# Seconds that Python and gloo take on a core of 2 to 3 GHz beside a step's arithmetic, set with the
# runs of 1, 2 and 4 processes in sight (results/PREDICTIONS.md has them).
CPU_HOST = HostCosts(
    step=8e-3, block=0.0, eager_block=0.0, split_block=0.0, operation=3e-3, tensor_parallel=15e-3,
    fsdp_unit=12e-3, dtensor=0.0, stage_tensor=0.0, ddp_tensor=0.0, zero_tensor=0.85e-3,
    zero_update=0.0, zero_wait=0.0, zero3_block=0.0, zero3_gather=0.0, zero3_wait=16e-3,
    zero3_shared_wait=34e-3, swapped_block=25e-3,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a process can do in a second."""

    gemm_flops: float  # of large 16-bit matrix products
    fp32_gemm_flops: float
    memory_bytes: float  # that element-wise kernels read and write
    head_memory_bytes: float | None = None  # the same in the loss, the update; None: no other
    update_memory_bytes: float | None = None
    attention_flops: float  # of causal attention over long sequences
    link_bytes: float  # that a process sends in a collective inside a node
    network_bytes: float = NETWORK_BYTES_PER_S
    num_sms: int = 1  # multiprocessors; 1: matrix products are not cut into waves
    attention_half: float = ATTENTION_HALF
    kernel_s: float = KERNEL_S
    link_latency_s: float = LINK_LATENCY_S
    disk_bytes: float = 2.7e9  # a local NVMe disk, read and written in turns
    host_adam_s: float = 0.46e-9  # a parameter: gradient to the host, CPU Adam, weight back
    host: HostCosts = field(default_factory=HostCosts)
    on_host: bool = False  # no device works while Python does
    core_share: float = 1.0  # what a process has of a core while all compute
    peak_flops: float | None = None  # by the datasheet, for MFU
    estimated: bool = True  # from the table rather than measured here


def rates_of(gpu: Gpu) -> Rates:
    """Rates of a GPU of the table."""
    return Rates(
        gemm_flops=GEMM_SHARE * gpu.flops,
        fp32_gemm_flops=FP32_GEMM_SHARE * gpu.fp32_flops,
        memory_bytes=MEMORY_SHARE * gpu.memory_bytes_per_s,
        attention_flops=ATTENTION_SHARE * gpu.flops,
        link_bytes=LINK_SHARE * gpu.link_bytes_per_s,
        num_sms=gpu.num_sms,
        peak_flops=gpu.flops,
    )


def cpu_rates(num_cpus: int, num_processes: int) -> Rates:
    """Rates of a process without a GPU, with an equal share of the cores: rounded from `measure
    calibrate` on two cores of an AMD EPYC (results/PREDICTIONS.md), a guess for any others."""
    cores = num_cpus / num_processes
    return Rates(
        gemm_flops=4e9 * cores,  # bf16 has no units of its own there
        fp32_gemm_flops=100e9 * cores,
        memory_bytes=1.5e9 * cores,
        head_memory_bytes=9e9 * cores,
        update_memory_bytes=1.7e9 * cores,
        attention_flops=60e9 * cores,
        link_bytes=0.4e9,
        network_bytes=0.4e9,
        kernel_s=15e-6,
        link_latency_s=3e-3,
        host_adam_s=2e-9,
        host=scaled(CPU_HOST, max(1.0, 1 / cores)),
        on_host=True,
        core_share=min(1.0, cores),
    )


def scaled(host: HostCosts, factor: float) -> HostCosts:
    """Costs of a host that takes `factor` times as long."""
    return HostCosts(**{part.name: factor * getattr(host, part.name) for part in fields(host)})


def tiled(m: float, k: float, n: float, num_sms: int) -> float:
    """Products that a GPU does for an m x k by k x n matrix product: each multiprocessor works on
    one tile of the result at a time, and all work on equally many."""
    return min(
        -(-math.ceil(m / a) * math.ceil(n / b) * parts // num_sms) * num_sms * a * b * k
        * cost * more / parts
        for a, b, cost in TILES for parts, more in SPLITS
    )  # fmt: skip


def calibration_file(device: str) -> Path:
    """Where `plan --calibrate` keeps what it measured of a kind of device."""
    given = os.environ.get("DISTRIBUTED_TRAINING_CACHE")
    cache = Path(given) if given else Path.home() / ".cache" / "distributed-training"
    return cache / f"calibration-{device.replace(' ', '-')}.json"


def measured_rates(device: str, base: Rates) -> Rates | None:
    """`base` with what was measured of this kind of device in its place; None before that."""
    path = calibration_file(device)
    document = json.loads(path.read_text()) if path.is_file() else None
    if document is None or (base.on_host and "training_s" not in document):  # of an earlier version
        return None
    return from_calibration(document, base)


def from_calibration(document: Mapping[str, Any], base: Rates) -> Rates:
    """Rates from what `calibrate` wrote; what it does not measure is taken from `base`."""
    found: dict[str, Any] = {"estimated": False}
    for dtype, name in (("bfloat16", "gemm_flops"), ("float32", "fp32_gemm_flops")):
        products = [p for p in document["matrix_products"] if p["dtype"] == f"torch.{dtype}"]
        largest = max(p["tokens"] for p in products)
        found[name] = statistics.median(
            rate * tiled(*shape, base.num_sms) / math.prod(shape)
            for product in products if product["tokens"] == largest
            for shape, rate in _shapes(product)
        )  # fmt: skip
    traffic = document["memory_bytes_per_s"]
    if base.on_host:  # caches make a difference
        names = {"block": "memory_bytes", "head": "head_memory_bytes"}
        found |= {name: traffic[part] for part, name in names.items()}
        found["update_memory_bytes"] = traffic["update"]
    else:
        found["memory_bytes"] = statistics.mean((traffic["gelu"], traffic["adamw"]))
    (short, slow), (long, fast) = [
        (entry["length"], entry["flops_per_s"]["both"]) for entry in document["attention"]
    ]
    # rate = best x length / (length + half)
    half = (fast - slow) / (slow / short - fast / long)
    if half > 0:
        found |= {"attention_half": half, "attention_flops": slow * (short + half) / short}
    found["kernel_s"] = document["seconds"]["kernel"]
    if between := document["collectives"]:
        most = max(entry["members"] for entry in between)
        sizes = [entry for entry in between if entry["members"] == most]
        last = max(sizes, key=lambda entry: entry["bytes"])
        sent = (most - 1) / most * last["bytes"]
        found["link_bytes"] = sent / last["seconds"]["all_gather"]
        found["link_latency_s"] = min(entry["seconds"]["all_gather"] for entry in sizes)
        if base.on_host:  # gloo's differ, and none hides behind another
            least = min(sizes, key=lambda entry: entry["bytes"])["seconds"]
            found["link_latency_s"] = statistics.mean(least.values()) / (most - 1) ** 0.5
    if (block := document["seconds"].get("compiled_block")) is not None:
        found["host"] = scaled(base.host, block / COMPILED_BLOCK_S)
    return replace(base, **found)


def _shapes(product: Mapping[str, Any]) -> list[tuple[tuple[int, int, int], float]]:
    """((m, k, n), FLOP/s) of the three products of a layer."""
    tokens, into, out = product["tokens"], product["in"], product["out"]
    rates = product["flops_per_s"]
    return [
        ((tokens, into, out), rates["forward"]),
        ((tokens, out, into), rates["inputs"]),
        ((out, tokens, into), rates["weights"]),
    ]
