"""How fast a machine works: measured (`measure calibrate`), else estimated from datasheets.

The shares of a datasheet's figures are one H200's, from six of its records (results/PREDICTIONS.md
names them) and the breakdown of one step under torch's profiler. For any other GPU they are an
estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distributed_training.settings.gpus import Gpu

# Shares of a datasheet's figures that long kernels reach.
GEMM_SHARE, FP32_GEMM_SHARE, MEMORY_SHARE, ATTENTION_SHARE = 0.72, 0.86, 0.75, 0.44
LINK_SHARE = 0.67  # of a link, by NCCL's large all-gathers
ATTENTION_HALF = 600  # tokens at which attention reaches half of its best rate
KERNEL_S = 4.0e-6  # start and end of a kernel in which the GPU idles
LINK_LATENCY_S = 20e-6  # of a collective inside a node; between nodes twice as much
NETWORK_BYTES_PER_S = 50e9  # of a GPU between nodes: one 400 Gbit/s adapter each


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """Seconds that Python needs to launch things, on the machine of the H200 records."""

    step: float = 6e-3  # data, clipping, the optimizer, timing
    block: float = 1.5e-3  # forward and backward of a compiled block
    eager_block: float = 3.5e-3
    split_block: float = 4.9e-3  # eager, with the backward pass in two parts
    operation: float = 1.2e-3  # more, for an operation of a pipeline's stage
    tensor_parallel: float = 3.6e-3  # more, for a block
    fsdp_unit: float = 1.8e-3  # more, for what is gathered and reduced together
    dtensor: float = 0.10e-3  # more, for a parameter tensor that is a DTensor: clipping, update
    stage_tensor: float = 0.40e-3  # more, for a parameter tensor of a stage: rounded copies
    ddp_tensor: float = 0.10e-3  # more, for a parameter tensor
    zero_tensor: float = 0.05e-3  # more, for a parameter tensor under ZeRO-1 and 2
    zero_update: float = 0.07e-3  # for a tensor of the part that a process updates: the GPU waits
    zero_wait: float = 0.3e-3  # for a block under ZeRO-1 and 2: the GPU waits
    zero3_block: float = 2.4e-3  # more, for a block
    zero3_gather: float = 4.9e-3  # more, for a block that several processes hold
    zero3_wait: float = 0.6e-3  # for a block: the GPU waits
    zero3_shared_wait: float = 2.2e-3  # the same where several processes hold it


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a process can do in a second."""

    gemm_flops: float  # of large 16-bit matrix products
    fp32_gemm_flops: float
    memory_bytes: float  # that element-wise kernels read and write
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
    """Rates of a process without a GPU, with an equal share of the cores: of server cores of 2 to
    3 GHz with AVX-512, a guess for any others."""
    cores = num_cpus / num_processes
    return Rates(
        gemm_flops=20e9 * cores,  # bf16 has no units of its own on most
        fp32_gemm_flops=60e9 * cores,
        memory_bytes=5e9 * cores,
        attention_flops=30e9 * cores,
        link_bytes=0.5e9,
        network_bytes=0.5e9,
        kernel_s=8e-6,
        link_latency_s=200e-6,
        host_adam_s=2e-9,
        host=HostCosts(),
    )
