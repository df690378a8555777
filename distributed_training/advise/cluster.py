"""Machines that are not here: `--cluster 2x8xH100-80GB`. No torch import."""

import re
import sys
from dataclasses import dataclass

from distributed_training.plan.choose import lay_out
from distributed_training.plan.machine import Machine
from distributed_training.plan.plan import Plan
from distributed_training.predict.rates import Rates, cpu_rates, measured_rates, rates_of
from distributed_training.predict.stages import with_orders
from distributed_training.records.record import plural
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown
from distributed_training.settings.gpus import Gpu, find_gpu, known_gpu, limited_to

_FORM = re.compile(r"(?:(\d+)\s*x\s*)?(?:(\d+)(?:\s*x\s*|\s+|$))?(.*)", re.IGNORECASE)
MOST_PROCESSES = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The processes that a plan is for, on nodes that are alike."""

    num_processes: int
    processes_a_node: int
    machine: Machine  # one node
    rates: Rates | None  # None: a GPU of which nothing is known
    name: str

    @property
    def nodes(self) -> int:
        return self.num_processes // self.processes_a_node


def parse_cluster(text: str, gpu: str | None = None) -> Cluster:
    """`nodes x GPUs x kind`, such as "2x8xH100-80GB", "8xH200" or "L4"; or "2x8" of the described
    `gpu`. Raises UserError for what does not parse and for an unknown GPU."""
    found = _FORM.fullmatch(text.strip())
    assert found is not None  # every part is optional
    numbers = [int(part) for part in found.groups()[:2] if part]
    name = found[3]
    if 0 in numbers or name.isdecimal() or bool(name) == (gpu is not None):
        what = f"--cluster {shown(text)} is not nodes x GPUs x kind, or with --gpu, nodes x GPUs"
        raise UserError(what, fix="write 2x8xH100-80GB, or 8xH200, or 2x8 with --gpu")
    nodes, here = [1] * (2 - len(numbers)) + numbers
    if nodes * here > MOST_PROCESSES:
        what = f"--cluster {shown(text)} has {nodes * here:,} GPUs"
        raise UserError(what, fix=f"plan for at most {MOST_PROCESSES:,}")
    return cluster_of(known_gpu(gpu or name), nodes, here)


def cluster_of(gpu: Gpu, nodes: int, here: int) -> Cluster:
    """So many nodes with so many of these GPUs each."""
    machine = Machine(
        num_gpus=here,
        gpu_name=gpu.name,
        gpu_memory_bytes=gpu.memory_bytes,
        compute_capability=gpu.compute_capability,
        ram_bytes=sys.maxsize,  # nobody asked
        num_cpus=8 * here,
        power_w=gpu.power_w,
    )
    name = f"{here} x {gpu.name}"
    return Cluster(
        num_processes=nodes * here,
        processes_a_node=here,
        machine=machine,
        rates=rates_of(gpu),
        name=f"{nodes} x {name}" if nodes > 1 else name,
    )


def this_machine(
    machine: Machine, num_processes: int, processes_here: int, gpu: str | None = None
) -> Cluster:
    """The machine at hand, and others like it; `gpu` describes GPUs that the table lacks."""
    rates = None
    if machine.num_gpus == 0:
        name = f"{plural(num_processes, 'process')} on {machine.num_cpus} cores"
        guess = cpu_rates(machine.num_cpus, processes_here)
        rates = measured_rates(f"cpu-x{processes_here}", guess)
    else:
        name = f"{num_processes} x {machine.gpu_name}"
        found = find_gpu(machine.gpu_name) if gpu is None else known_gpu(gpu)
        if found is not None:
            limited = limited_to(found, machine.power_w)
            rates = measured_rates(str(machine.gpu_name), rates_of(limited))
    return Cluster(
        num_processes=num_processes,
        processes_a_node=processes_here,
        machine=machine,
        rates=rates,
        name=name,
    )


def lay_out_on(cluster: Cluster, config: RunConfig, mesh: dict[str, int] | None = None) -> Plan:
    """A draft for the cluster's processes (`lay_out`), with the orders that a search finds."""
    here = cluster.processes_a_node
    plan = lay_out(config, cluster.machine, cluster.num_processes, here, mesh=mesh)
    return with_orders(plan, cluster.rates)
