"""Estimate the rates of a machine from datasheets and fitted values."""

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from distributed_training.settings.machine import NIC_BYTES_PER_S, Gpu

_ENTRIES = json.loads(
    Path(__file__).with_name("constants.json").read_text(encoding="utf-8"),
    object_hook=lambda entry: SimpleNamespace(**entry),
)
# Fitted or measured values, such as FITTED.launching_s.step. constants.json also contains their
# units, source records and observed ranges.
FITTED = SimpleNamespace(**{name: entry.value for name, entry in vars(_ENTRIES).items()})
TILES = ((128, 256), (256, 128))  # (rows, columns) of a tile in a matrix multiplication's result
SPLIT_K = (1, 2, 4)  # numbers of parts into which the inner dimension may be split (split-K)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates (per second) and latencies (in seconds) of one process."""

    gemm_flops: float  # FLOP/s of large 16-bit matrix multiplications
    fp32_gemm_flops: float
    memory_bytes_per_s: float  # bytes/s that element-wise kernels read and write
    # memory_bytes_per_s in the loss; None if there is no separate rate
    head_memory_bytes_per_s: float | None = None
    attention_flops: float  # FLOP/s of causal attention over long sequences, heads of 64
    wide_attention: float = 1.0  # the rate with heads of 128 or more, relative to heads of 64
    linear_attention: float = 1.0  # the rate of linear attention, relative to attention_flops
    link_bytes_per_s: float  # bytes/s that a process sends in a collective inside a node
    # bytes that a matrix multiplication moves per weight while it does not multiply
    weight_bytes: float = 0.0
    network_bytes_per_s: float = NIC_BYTES_PER_S
    num_sms: int = 1  # multiprocessors; 1 if matrix multiplications do not run in waves
    link_latency_s: float = FITTED.link_latency_s
    host: SimpleNamespace = field(default_factory=lambda: FITTED.launching_s)
    on_host: bool = False  # whether Python and the computation share the CPU
    is_known: bool = True  # whether times are predicted, or only compared
    peak_flops: float | None = None  # FLOP/s according to the datasheet, for MFU


def gpu_rates(gpu: Gpu) -> Rates:
    """Return the rates of a GPU, estimated from its datasheet values.

    On most GPUs, long matrix multiplications would exceed the power limit, so the GPU lowers its
    clock and voltage. The rate of matrix multiplications is then proportional to the square root of
    the power limit. Element-wise kernels are bound by memory bandwidth or, if the bandwidth is
    large, by the throughput of the multiprocessors."""
    shares = FITTED.gpu_shares
    watts_by_generation = vars(FITTED.full_power)
    generation = "{}.{}".format(*gpu.compute_capability)
    needed_w = watts_by_generation.get(generation, watts_by_generation["others"]) * gpu.flops / 1e12
    gemm_flops = shares.gemm * gpu.flops * min(1.0, math.sqrt(gpu.power_w / needed_w))
    bandwidth = shares.memory * gpu.memory_gb_s * 1e9
    return Rates(
        gemm_flops=gemm_flops,
        fp32_gemm_flops=shares.gemm * gpu.fp32_tflops * 1e12,
        memory_bytes_per_s=min(bandwidth, FITTED.multiprocessor_bytes_per_s * gpu.num_sms),
        attention_flops=shares.attention * gemm_flops,
        wide_attention=FITTED.wide_attention if gpu.compute_capability >= (9, 0) else 1.0,
        linear_attention=FITTED.linear_attention,
        link_bytes_per_s=FITTED.link_share * gpu.link_gb_s * 1e9,
        num_sms=gpu.num_sms,
        peak_flops=gpu.flops,
    )


def cpu_rates(
    num_cpus: int, num_processes: int, measured: Mapping[str, float] | None = None
) -> Rates:
    """Return the rates of a process on CPUs: those that were `measured` (start/cores.py) or, to
    rank layouts, those of an equal share of typical cores."""
    shares = FITTED.cpu_shares
    core = vars(FITTED.cpu_core)
    cores = num_cpus / num_processes
    share = {name: rate * cores for name, rate in core.items()}
    share["calls"] = core["calls"] * min(1.0, cores)  # Python runs on one core of the process.
    rates = SimpleNamespace(**(measured or share))
    slowdown = core["calls"] / rates.calls
    launching_s = {name: slowdown * value for name, value in vars(FITTED.cpu_launching_s).items()}
    link = FITTED.cpu_link
    return Rates(
        gemm_flops=rates.gemm_flops,
        fp32_gemm_flops=rates.fp32_gemm_flops,
        weight_bytes=shares.weight_bytes,
        memory_bytes_per_s=shares.memory * rates.memory_bytes,
        head_memory_bytes_per_s=shares.head_memory * rates.memory_bytes,
        attention_flops=FITTED.gpu_shares.attention * rates.fp32_gemm_flops,
        link_bytes_per_s=link.bytes_per_s,
        network_bytes_per_s=link.bytes_per_s,
        link_latency_s=link.latency_s,
        host=SimpleNamespace(**launching_s),
        on_host=True,
        is_known=measured is not None,
    )


@functools.cache
def tiled_multiplications(m: float, k: float, n: float, num_sms: int) -> float:
    """Return the number of scalar multiplications for an `m x k` matrix times a `k x n` matrix,
    including tile and wave quantization. Each multiprocessor computes one whole tile of the result
    at a time, and all multiprocessors are assumed to compute the same number of tiles."""
    costs = []
    for (rows, columns), split_k in itertools.product(TILES, SPLIT_K):
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        waves = -(-tiles * split_k // num_sms)
        multiplications = waves * num_sms * rows * columns * k / split_k
        costs.append(multiplications if split_k == 1 else FITTED.split_cost * multiplications)
    return min(costs)
