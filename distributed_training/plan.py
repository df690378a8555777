"""Everything about a run that is settled before processes start. No torch import."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.checkpoint import find_resume
from distributed_training.config import RunConfig, describe_work
from distributed_training.corpus import read_corpus
from distributed_training.data import Data, prepare_data
from distributed_training.deepspeed_json import fill_deepspeed_json
from distributed_training.files import user_path
from distributed_training.hf_format import check_hf_folder
from distributed_training.layout import Layout, build_layout
from distributed_training.machine import Machine
from distributed_training.preflight import Situation, run_checks
from distributed_training.record import new_run_dir
from distributed_training.resolve import Resolved, fetch, settle, with_model
from distributed_training.sizes import SIZES, ModelSize
from distributed_training.strategy import Strategy, load_strategy
from distributed_training.tokenizer import Tokenizer
from distributed_training.topology import build_topology, show_axes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run that has passed every check which needs no process group."""

    requested: RunConfig
    """As merged from CONFIG, preset and --set; may say "auto"."""
    resolved: Resolved
    strategy: Strategy
    machine: Machine
    size: ModelSize
    num_processes: int
    axes: dict[str, int]
    """Sizes of the mesh's axes; their product is `num_processes`."""
    layout: Layout
    deepspeed_json: dict[str, Any] | None
    run_dir: Path
    checkpoint: Path | None
    """Where to resume from; None to start afresh."""
    work: dict[str, Any]
    offload_dir: Path | None
    """This run's own folder for state that is kept on disk; None without such."""

    @property
    def config(self) -> RunConfig:
        """The configuration without "auto"."""
        return self.resolved.config

    @property
    def identity(self) -> dict[str, Any]:
        """What must agree between a checkpoint and the run that resumes it."""
        return _identity(self.strategy, self.config, self.axes, self.layout, self.work)

    @property
    def dp_size(self) -> int:
        """Processes that work on different samples."""
        return self.axes["dp_replicate"] * self.axes["dp_shard"]

    @property
    def cache_dir(self) -> Path:
        """Where tokenised corpora are kept."""
        return user_path("output_dir", self.config.output_dir) / ".cache" / "tokens"


def make_plan(
    config: RunConfig,
    machine: Machine,
    *,
    num_processes: int,
    processes_here: int,
    run_dir: Path | None = None,
) -> Plan:
    """Resolve and check `config` for `num_processes`; raise UserError at the first obstacle.

    `run_dir` fixes the run's folder; None picks a new one (or, resuming, the old one).
    """
    strategy = load_strategy(config)
    topology = build_topology(
        strategy,
        world_size=num_processes,
        rank=0,
        local_rank=0,
        device_type="cpu",
        config=with_model(config, machine),
    )
    settled = settle(config, machine, strategy, topology, processes_here=processes_here)
    config_here = settled.config
    size = SIZES[config_here.model]
    layout = build_layout(config_here, strategy, size, topology)
    output_dir = user_path("output_dir", config_here.output_dir)
    offload_dir = _offload_dir(config_here, output_dir)
    run_checks(
        Situation(
            config=config_here,
            strategy=strategy,
            machine=machine,
            size=size,
            num_parameters_here=layout.num_parameters,
            dp_size=topology.dp_size,
            processes_here=processes_here,
            offload_dir=offload_dir,
        )
    )
    resolved = fetch(settled)  # what the network may have to bring comes after all other checks
    config_here = resolved.config
    if resolved.weights_dir is not None:
        check_hf_folder(resolved.weights_dir, size)
    global_batch = config_here.micro_batch_size * config_here.grad_accum_steps * topology.dp_size
    work = describe_work(config_here, global_batch)
    identity = _identity(strategy, config_here, topology.axes, layout, work)
    found = find_resume(config_here.resume, output_dir, identity)
    fresh = run_dir or new_run_dir(output_dir, strategy.name, config_here.model, num_processes)
    offload_here = offload_dir.absolute() / fresh.name
    return Plan(
        requested=config,
        resolved=resolved,
        strategy=strategy,
        machine=machine,
        size=size,
        num_processes=num_processes,
        axes=topology.axes,
        layout=layout,
        deepspeed_json=fill_deepspeed_json(
            strategy, config_here, dp_size=topology.dp_size, offload_dir=str(offload_here)
        )
        if strategy.engine == "deepspeed"
        else None,
        run_dir=found[0] if found else fresh,
        checkpoint=found[1] if found else None,
        work=work,
        offload_dir=offload_here if strategy.needs_async_io else None,
    )


def _offload_dir(config: RunConfig, output_dir: Path) -> Path:
    """The folder under which runs keep state on disk, each in one of its own."""
    if config.offload_dir is None:
        return output_dir / ".offload"
    return user_path("offload_dir", config.offload_dir)


def _identity(
    strategy: Strategy,
    config: RunConfig,
    axes: dict[str, int],
    layout: Layout,
    work: dict[str, Any],
) -> dict[str, Any]:
    """What a checkpoint is of: strategy, layout and work."""
    stages = [[blocks.start, blocks.stop] for blocks in layout.stages]
    sequence_parallel = config.sequence_parallel and axes["tp"] > 1
    return {
        "strategy": strategy.name,
        "num_processes": math.prod(axes.values()),
        "mesh": show_axes(axes),
        "stages": stages,
        "sequence_parallel": sequence_parallel,
        **work,
    }


def reserve_run_dir(plan: Plan) -> Plan:
    """Make the run's folder, under the next free name where another run was quicker."""
    if plan.checkpoint is not None:
        return plan
    output_dir, run_dir = plan.run_dir.parent, plan.run_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            run_dir.mkdir()
            break
        except FileExistsError:
            run_dir = new_run_dir(
                output_dir, plan.strategy.name, plan.config.model, plan.num_processes
            )
    return plan if run_dir == plan.run_dir else _moved(plan, run_dir)


def _moved(plan: Plan, run_dir: Path) -> Plan:
    """The same plan in another folder, which names its folder for offloaded state, too."""
    if plan.offload_dir is None:
        return dataclasses.replace(plan, run_dir=run_dir)
    offload_dir = plan.offload_dir.parent / run_dir.name
    document = fill_deepspeed_json(
        plan.strategy, plan.config, dp_size=plan.dp_size, offload_dir=str(offload_dir)
    )
    return dataclasses.replace(
        plan, run_dir=run_dir, offload_dir=offload_dir, deepspeed_json=document
    )


def load_plan_data(plan: Plan) -> tuple[Data, Tokenizer]:
    """Read, tokenise (or find in the cache) and cut the corpus that the plan names."""
    tokenizer = Tokenizer(plan.resolved.tokenizer_dir)
    corpus = read_corpus(plan.config.dataset)
    return prepare_data(corpus, tokenizer, plan.config, plan.cache_dir), tokenizer
