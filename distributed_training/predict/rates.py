"""How fast a machine works: measured (`plan --calibrate`), else estimated from datasheets."""

import itertools
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distributed_training.settings.cache import cache_folder
from distributed_training.settings.machine import ADAPTER_BYTES_PER_S, Gpu

_TEXT = Path(__file__).with_name("constants.json").read_text(encoding="utf-8")
_ENTRIES = json.loads(_TEXT, object_hook=lambda entry: SimpleNamespace(**entry))
# What was fitted or measured rather than derived, such as FITTED.launching_s.step; the file also
# has units, the records that gave the values and the ranges in which they were seen.
FITTED = SimpleNamespace(**{name: entry.value for name, entry in vars(_ENTRIES).items()})
TILES = ((128, 256), (256, 128))  # rows and columns of a matrix product's result
PARTS = (1, 2, 4)  # of each of its sums, which are added up


def host_costs(seconds: SimpleNamespace, factor: float) -> SimpleNamespace:
    """Seconds to launch things, such as FITTED.launching_s, of a host that takes `factor` times as
    long."""
    return SimpleNamespace(**{name: factor * each for name, each in vars(seconds).items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a process can do in a second."""

    gemm_flops: float  # of large 16-bit matrix products
    fp32_gemm_flops: float
    memory_bytes: float  # that element-wise kernels read and write
    head_memory_bytes: float | None = None  # the same in the loss, in the update; None: no other
    update_memory_bytes: float | None = None
    attention_flops: float  # of causal attention over long sequences
    link_bytes: float  # that a process sends in a collective inside a node
    network_bytes: float = ADAPTER_BYTES_PER_S
    num_sms: int = 1  # multiprocessors; 1: matrix products are not cut into waves
    kernel_s: float = FITTED.kernel_s
    link_latency_s: float = FITTED.link_latency_s
    host: SimpleNamespace = field(default_factory=lambda: FITTED.launching_s)
    on_host: bool = False  # no device works while Python does
    peak_flops: float | None = None  # by the datasheet, for MFU
    measured_at: str = ""  # when, on this machine; else all is from the table
    measured: tuple[str, ...] = ()  # of "host" and "gpu"


def rates_of(gpu: Gpu) -> Rates:
    """Rates of a GPU of the table.

    Long matrix products draw more power than most GPUs may, which then lower clock and voltage:
    at a rate of power ^ 1/2. Element-wise kernels are bound by the memory's bandwidth, or, where
    that is large, by what a multiprocessor can work on."""
    shares = FITTED.gpu_shares
    powers = vars(FITTED.full_power)
    generation = "{}.{}".format(*gpu.compute_capability)
    needed_w = powers.get(generation, powers["others"]) * gpu.flops / 1e12
    gemm = shares.gemm * gpu.flops * min(1.0, math.sqrt(gpu.power_w / needed_w))
    bandwidth = shares.memory * gpu.memory_gb_s * 1e9
    return Rates(
        gemm_flops=gemm,
        fp32_gemm_flops=shares.gemm * gpu.fp32_tflops * 1e12,
        memory_bytes=min(bandwidth, FITTED.multiprocessor_bytes_per_s * gpu.num_sms),
        attention_flops=shares.attention * gemm,
        link_bytes=FITTED.link_share * gpu.link_gb_s * 1e9,
        num_sms=gpu.num_sms,
        peak_flops=gpu.flops,
    )


def cpu_rates(num_cpus: int, num_processes: int) -> Rates:
    """Rates of a process without a GPU, with an equal share of the cores."""
    cores = num_cpus / num_processes
    core = FITTED.cpu_core
    link = FITTED.cpu_link
    return Rates(
        gemm_flops=core.gemm_flops * cores,
        fp32_gemm_flops=core.fp32_gemm_flops * cores,
        memory_bytes=core.memory_bytes * cores,
        head_memory_bytes=core.head_memory_bytes * cores,
        attention_flops=FITTED.gpu_shares.attention * core.fp32_gemm_flops * cores,
        link_bytes=link.bytes_per_s,
        network_bytes=link.bytes_per_s,
        link_latency_s=link.latency_s,
        host=host_costs(FITTED.cpu_launching_s, max(1.0, 1 / cores)),
        on_host=True,
    )


def tiled(m: float, k: float, n: float, num_sms: int) -> float:
    """Products that a GPU does for an m x k by k x n matrix product: each multiprocessor works on
    one tile of the result at a time, and all work on equally many."""
    found = []
    for (rows, columns), parts in itertools.product(TILES, PARTS):
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        waves = -(-tiles * parts // num_sms)
        products = waves * num_sms * rows * columns * k / parts
        found.append(products if parts == 1 else FITTED.split_cost * products)
    return min(found)


def calibration_file(device: str) -> Path:
    """Where `plan --calibrate` keeps what it measured of a kind of device."""
    return cache_folder() / f"calibration-{device.replace(' ', '-')}.json"


def measured_rates(device: str, base: Rates) -> Rates:
    """Return `base` with the rates that `plan --calibrate` measured for this kind of device."""
    path = calibration_file(device)
    document = json.loads(path.read_text()) if path.is_file() else {}
    if document and ("training_s" in document or not base.on_host):  # else of an earlier version
        return from_calibration(document, base)
    return base


def from_calibration(document: Mapping[str, Any], base: Rates) -> Rates:
    """Rates from what `calibrate` wrote; what it does not measure is taken from `base`."""
    found: dict[str, Any] = {"measured": ("gpu",)}
    for name, dtype in (("gemm_flops", "bfloat16"), ("fp32_gemm_flops", "float32")):
        products = [p for p in document["matrix_products"] if p["dtype"] == f"torch.{dtype}"]
        found[name] = _product_rate(products, base.num_sms)
    traffic = document["memory_bytes_per_s"]
    if base.on_host:  # caches make a difference
        found["memory_bytes"] = traffic["block"]
        found["head_memory_bytes"] = traffic["head"]
        found["update_memory_bytes"] = traffic["update"]
    else:
        found["memory_bytes"] = statistics.mean((traffic["gelu"], traffic["adamw"]))
    longest = max(document["attention"], key=lambda entry: entry["length"])
    slowed = 1 + FITTED.attention_half / longest["length"]
    found["attention_flops"] = longest["flops_per_s"]["both"] * slowed
    if document["collectives"]:
        found |= _link_rates(document["collectives"], base.on_host)
    block = document["seconds"].get("compiled_block")
    if block is not None:
        found["host"] = host_costs(base.host, block / FITTED.launching_s.block)
        found["measured"] = ("host", "gpu")
    return replace(
        base,
        **found,
        measured_at=document.get("made_at", "today"),
        kernel_s=document["seconds"]["kernel"],
    )


def _product_rate(products: list[Mapping[str, Any]], num_sms: int) -> float:
    """FLOP/s of the largest products, whole tiles counted."""
    m = max(product["tokens"] for product in products)
    found = []
    for product in products:
        if product["tokens"] < m:
            continue
        k = product["in"]
        n = product["out"]
        shapes = {"forward": (m, k, n), "inputs": (m, n, k), "weights": (n, m, k)}
        for name, shape in shapes.items():
            rate = product["flops_per_s"][name]
            found.append(rate * tiled(*shape, num_sms) / math.prod(shape))
    return statistics.median(found)


def _link_rates(collectives: list[Mapping[str, Any]], on_host: bool) -> dict[str, float]:
    """Of the largest group: bytes/s of its largest message, latency of its quickest."""
    members = max(entry["members"] for entry in collectives)
    entries = [entry for entry in collectives if entry["members"] == members]
    entries.sort(key=lambda entry: entry["bytes"])
    largest = entries[-1]
    sent = (members - 1) / members * largest["bytes"]
    latency = min(entry["seconds"]["all_gather"] for entry in entries)
    if on_host:  # gloo's differ, and none hides behind another
        latency = statistics.mean(entries[0]["seconds"].values()) / (members - 1) ** 0.5
    return {"link_bytes": sent / largest["seconds"]["all_gather"], "link_latency_s": latency}
