"""Predict the memory and time of a plan on a cluster. This module does not import torch."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from distributed_training.plan.plan import Draft
from distributed_training.predict.measured import Evidence, compare, describe_run, read_runs
from distributed_training.predict.memory import MemoryEstimate, estimate_memory
from distributed_training.predict.rates import FITTED, Rates, cpu_rates, gpu_rates
from distributed_training.predict.speed import StepTime, estimate_step
from distributed_training.predict.traffic import sent_by_axis
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown
from distributed_training.settings.machine import (
    GIB,
    Machine,
    find_gpu,
    parse_gpu,
    replace_other_names,
    with_power_limit,
)

# Counts of at most four digits, because larger clusters take minutes to rank. The last count may be
# followed by a space, unless it has four digits, like 3060. The end of 7900xtx is part of a name.
_CLUSTER_PATTERN = re.compile(
    r"(?:(\d{1,4})(?:x(?!tx?$)\s*|\s+x\s+))?(?:(\d{1,4})(?:x(?!tx?$)\s*|\s+x\s+))?"
    r"(?:(\d{1,3})(?:\s+(?!gi?b\b)|$))?(.*)",
    re.IGNORECASE,
)
# A count after the name, as in T4 x2, 4090 (2) or 8xH100 x 2 nodes, but not the end of 2x3060
_COUNT_LAST = re.compile(
    r"(.*?(?:[a-z]|\d{4}).*?)\s*(?:\(x?(\d{1,3})x?\)|(?<!rt)(?<!gt)(?<!ma)x\s*(\d{1,3})x?|\s(\d{1,3})x)",
    re.IGNORECASE,
)
_NODES = re.compile(r"(?<=\d)\s*(?:nodes?|machines?|servers?)\b(?: of| x|,)?", re.IGNORECASE)
_NUMBERS = {"single": 1, "dual": 2, "two": 2, "three": 3, "four": 4, "quad": 4, "eight": 8}
_NUMBER = re.compile(rf"\b({'|'.join(_NUMBERS)})\b", re.IGNORECASE)
# "yes": the upper end of the typical range fits into memory. "tight": the prediction and the lower
# end fit. "unlikely": only the lower end fits. "no": not even the lower end fits.
MemoryFit = Literal["yes", "tight", "unlikely", "no"]
MEMORY_FITS: tuple[MemoryFit, ...] = get_args(MemoryFit)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Identical nodes on which the processes of a plan run."""

    num_processes: int
    processes_per_node: int
    machine: Machine  # hardware of one node
    rates: Rates | None  # None for an unknown GPU
    is_local: bool  # whether this machine is one of the nodes
    assumption: str = ""  # the source of a remote machine's RAM and disk space, for the user


def parse_cluster(text: str, gpu: str | None = None) -> Cluster:
    """Parse a cluster in the form `nodes x GPUs x kind`, such as "2x8xH100-80GB". The numbers may
    be omitted, as in "8xH200" (one node) or "L4" (one GPU). If `gpu` names the kind, the form is
    `nodes x GPUs`, such as "2x8". Raises UserError for text in any other form, or an unknown
    GPU."""
    counted = replace_other_names(re.sub("[\u00d7*]", "x", text))
    counted = _NUMBER.sub(lambda word: str(_NUMBERS[word[0].lower()]), counted)
    counted = _NODES.sub("x ", counted).strip().removeprefix("x")
    if last := _COUNT_LAST.fullmatch(counted):
        counted = f"{last[2] or last[3] or last[4]} x {last[1]}"
    match = _CLUSTER_PATTERN.fullmatch(counted)
    assert match is not None  # every part is optional
    numbers = [int(part) for part in match.groups()[:3] if part]
    name = match[4]
    if 0 in numbers or len(numbers) > 2 or bool(name) == (gpu is not None):
        raise UserError(
            f"--cluster {shown(text)} is not accepted",
            "it must be NxMxGPU, MxGPU, or NxM with --gpu, for N nodes of M GPUs",
            "write 2x8xH100-80GB, or 8xH200, or 2x8 with --gpu",
        )
    nodes, gpus_per_node = [1] * (2 - len(numbers)) + numbers
    gpu_spec = parse_gpu(replace_other_names(gpu) if gpu else name)
    machine = Machine(
        num_gpus=gpus_per_node,
        gpu_name=gpu_spec.name,
        gpu_memory_bytes=int(gpu_spec.memory_gib * GIB),
        compute_capability=gpu_spec.compute_capability,
        ram_bytes=int(gpu_spec.ram_gib * gpus_per_node * GIB),
        disk_bytes=int(gpu_spec.disk_gb * gpus_per_node * 1e9),
        num_cpus=8 * gpus_per_node,
        power_w=gpu_spec.power_w,
        shares_memory=gpu_spec.shares_memory,
    )
    return Cluster(
        num_processes=nodes * gpus_per_node,
        processes_per_node=gpus_per_node,
        machine=machine,
        rates=gpu_rates(gpu_spec),
        is_local=False,
        assumption=f"Each GPU is assumed to have {gpu_spec.ram_gib:g} GiB of RAM and "
        f"{gpu_spec.disk_gb:g} GB of disk, as in {gpu_spec.host}",
    )


def local_cluster(
    machine: Machine,
    num_processes: int,
    processes_here: int,
    cores: Mapping[str, float] | None = None,
) -> Cluster:
    """Return the cluster of a local run: this machine and, with several nodes, identical machines.
    `cores` contains the measured rates of a CPU core."""
    rates = None
    if machine.num_gpus == 0:
        rates = cpu_rates(machine.num_cpus, processes_here, cores)
    elif (gpu_spec := find_gpu(machine.gpu_name)) is not None:
        rates = gpu_rates(with_power_limit(gpu_spec, machine.power_w))
    return Cluster(
        num_processes=num_processes,
        processes_per_node=processes_here,
        machine=machine,
        rates=rates,
        is_local=True,
    )


@dataclass(frozen=True)
class Prediction:
    """Predicted memory of a plan and, if the GPU's rates are known, its predicted time. Both are
    computed when they are first needed, because the planner needs the times of few layouts."""

    plan: Draft
    rates: Rates | None

    @functools.cached_property
    def memory(self) -> MemoryEstimate:
        return estimate_memory(self.plan)

    @functools.cached_property
    def estimate(self) -> StepTime | None:
        """Time of a step by which layouts are compared, or None if the GPU's rates are unknown or
        the run does not fit."""
        if self.rates is None or not self.fits:
            return None
        return estimate_step(self.plan, self.rates)

    @property
    def step(self) -> StepTime | None:
        """`estimate`, for the user. None on CPUs that were not measured, because a typical core is
        assumed there: on other cores, steps took 0.3 to 1.2 times as long."""
        return self.estimate if self.rates is not None and self.rates.is_known else None

    @property
    def ram_bytes(self) -> int:
        """RAM that the processes of a node need together. They share the files of libraries."""
        machine = self.plan.machine
        processes_here = self.plan.processes_here
        needed = self.memory.host_bytes * processes_here
        if machine.torch_has_cuda and not machine.num_gpus:
            needed -= FITTED.process_bytes.cuda_libraries * (processes_here - 1)
        return needed

    @property
    def missing_bytes(self) -> int:
        """Memory that a GPU and its host lack."""
        machine = self.plan.machine
        gpu_bytes = self.memory.needed_bytes - machine.gpu_memory_bytes
        return max(0, gpu_bytes if machine.num_gpus else 0) + max(
            0, self.ram_bytes - machine.ram_bytes
        )

    @property
    def memory_fit(self) -> MemoryFit:
        """Likelihood that the processes fit into GPU memory, host memory and the disk, as a value
        from MEMORY_FITS."""
        machine = self.plan.machine
        processes_here = self.plan.processes_here
        fits_host = (
            self.ram_bytes <= machine.ram_bytes
            and self.memory.state["disk"] * processes_here <= machine.disk_bytes
        )
        return self.gpu_memory_fit if fits_host else "no"

    @property
    def gpu_memory_fit(self) -> MemoryFit:
        """Likelihood that every process fits into its GPU, as a value from MEMORY_FITS. The value
        is "yes" if there are no GPUs."""
        machine = self.plan.machine
        low_bytes, high_bytes = self.memory.likely_bytes
        if machine.num_gpus == 0 or high_bytes <= machine.gpu_memory_bytes:
            return "yes"
        if self.memory.needed_bytes <= machine.gpu_memory_bytes:
            return "tight"
        return "unlikely" if low_bytes <= machine.gpu_memory_bytes else "no"

    @property
    def fits(self) -> bool:
        """True unless `memory_fit` is "no"."""
        return self.memory_fit != "no"

    @functools.cached_property
    def evidence(self) -> Evidence:
        """Measured runs that are comparable with the predicted time, which must be known."""
        assert self.rates is not None
        assert self.step is not None
        if self.rates.on_host:
            return Evidence("from the measured speed of these cores", None)
        return compare(describe_run(self.plan, self.step.bound_by), read_runs())

    @property
    def likely_s(self) -> list[float] | None:
        """Range that should contain 80% of measured step times, in seconds. None if no comparable
        run was measured."""
        if self.step is None or self.evidence.shares is None:
            return None
        return [share * self.step.seconds for share in self.evidence.shares]

    @property
    def tokens_per_s(self) -> float | None:
        if self.step is None:
            return None
        tokens = self.plan.batch.global_batch_size * self.plan.config.max_length
        return tokens / self.step.seconds

    @property
    def mfu(self) -> float | None:
        plan = self.plan
        if self.rates is None or not self.rates.peak_flops or self.tokens_per_s is None:
            return None
        flops = plan.size.flops_per_token(plan.attention_span, frozen=plan.config.lora_rank > 0)
        return self.tokens_per_s * flops / (self.rates.peak_flops * plan.num_processes)

    def as_record(self) -> dict[str, Any]:
        """Return the values to store in a run's record."""
        return {
            "fits": self.fits,
            "peak_bytes": self.memory.peak_bytes,
            "memory_bytes": self.memory.peak_by_component,
            "needed_bytes": self.memory.needed_bytes,
            "host_bytes": self.memory.host_bytes,
            "step_time_s": self.step and self.step.seconds,
            "tokens_per_s": self.tokens_per_s,
            "bound_by": self.step and self.step.bound_by,
            "likely_s": self.likely_s,
            "evidence": self.step and self.evidence.nearest,
            "likely_bytes": self.memory.likely_bytes,
            "sent_bytes": sent_by_axis(self.plan),
        }
