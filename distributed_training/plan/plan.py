"""A run, planned once: everything that will happen, as plain data in <run>/plan.json. No torch.

A dry run prints it, every process reads it, the record repeats it. Nothing is decided again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from distributed_training.data.corpus import read_corpus
from distributed_training.data.samples import Data, prepare_data
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.models import ModelSpec, find_model
from distributed_training.models.size import ModelSize
from distributed_training.plan.batch import Batch, cut_batch
from distributed_training.plan.checks import run_checks
from distributed_training.plan.cost import (
    StateBytes,
    estimate_activation_bytes,
    estimate_state_bytes,
)
from distributed_training.plan.deepspeed_json import fill_deepspeed_json
from distributed_training.plan.layouts import Layout, build_layout
from distributed_training.plan.machine import Machine
from distributed_training.plan.resolve import choose_model, choose_settings, find_sources
from distributed_training.plan.resume import find_resume
from distributed_training.plan.schedules import Schedule, schedule_of
from distributed_training.plan.topology import fill_mesh, show_axes
from distributed_training.records.record import new_run_dir
from distributed_training.settings.config import RunConfig, describe_work
from distributed_training.settings.config import replace as with_values
from distributed_training.settings.files import user_path
from distributed_training.settings.strategies import Strategy, load_strategy

PLAN_FILE = "plan.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run that has passed every check which needs no process group."""

    requested: RunConfig
    """As merged from CONFIG, preset and --set; `config` is the same without "auto"."""
    config: RunConfig
    strategy: Strategy
    machine: Machine
    num_processes: int
    processes_here: int
    """Those on this machine."""
    mesh: dict[str, int]
    """Sizes of the axes, the slowest with the rank first; their product is `num_processes`."""
    batch: Batch
    layout: Layout
    state: StateBytes
    activation_bytes: int
    """Estimated like `state`, of the fullest process."""
    output_dir: Path
    run_dir: Path
    """This run's folder; before `reserve_run_dir` only a name."""
    offload_dir: Path | None
    """This run's own folder for state that is kept on disk; None without such."""
    work: dict[str, Any]
    """What must agree before two runs may be compared."""
    notes: list[str]
    """Choices that were made for the user and why, one sentence each."""
    deepspeed_json: dict[str, Any] | None = None
    tokenizer_dir: Path = field(default=Path())
    weights_dir: Path | None = None
    """Hugging Face folder with the initial weights; None for random ones."""
    checkpoint: Path | None = None
    """Where to resume from; None to start afresh."""

    @property
    def model(self) -> ModelSpec:
        """The model to train."""
        return find_model(self.config.model)

    @property
    def size(self) -> ModelSize:
        """The model's shape."""
        return self.model.size

    @property
    def schedule(self) -> Schedule:
        """The pipeline's; one micro-batch after the other where there is none."""
        return schedule_of(self.config, self.strategy, self.mesh["pp"])

    @property
    def identity(self) -> dict[str, Any]:
        """What must agree between a checkpoint and the run that resumes it."""
        return {
            "strategy": self.strategy.name,
            "num_processes": self.num_processes,
            "mesh": show_axes(self.mesh),
            "stages": [[blocks.start, blocks.stop] for blocks in self.layout.stages],
            "sequence_parallel": self.config.sequence_parallel and self.mesh["tp"] > 1,
            **self.work,
        }

    @property
    def cache_dir(self) -> Path:
        """Where tokenised corpora are kept."""
        return self.output_dir / ".cache" / "tokens"


def make_plan(
    config: RunConfig,
    machine: Machine,
    *,
    num_processes: int,
    processes_here: int,
    run_dir: Path | None = None,
) -> Plan:
    """Decide and check everything about a run; raise UserError at the first obstacle.

    What may have to be downloaded comes last. `run_dir` fixes the run's folder; None picks a new
    one (or, resuming, the old one).
    """
    plan = draft_plan(config, machine, num_processes, processes_here, run_dir)
    run_checks(plan)
    sources = find_sources(plan.config, plan.notes)
    if sources.weights_dir is not None:
        plan.model.check_weights(sources.weights_dir)
    plan = replace(
        plan,
        config=sources.config,
        tokenizer_dir=sources.tokenizer_dir,
        weights_dir=sources.weights_dir,
        work=describe_work(sources.config, plan.batch.global_batch_size),
    )
    found = find_resume(plan.config.resume, plan.output_dir, plan.identity)
    if found is not None:
        plan = replace(plan, run_dir=found[0], checkpoint=found[1])
    return _with_deepspeed_json(plan)


def draft_plan(
    config: RunConfig,
    machine: Machine,
    num_processes: int,
    processes_here: int,
    run_dir: Path | None = None,
) -> Plan:
    """Decide what follows from CONFIG and the machine; check only that the layout exists."""
    requested, notes = config, list[str]()
    strategy = load_strategy(config)
    config = choose_model(config, machine, notes)
    model = find_model(config.model)
    mesh = fill_mesh(strategy, num_processes, config)
    config = choose_settings(config, machine, strategy, mesh, notes)
    layout = build_layout(config, strategy, model.size, mesh)
    schedule = schedule_of(config, strategy, mesh["pp"])
    batch = cut_batch(config, mesh, schedule)
    config = with_values(
        config, micro_batch_size=batch.micro_batch_size, num_microbatches=batch.num_microbatches
    )
    kept, tp = schedule.kept(mesh["pp"], batch.num_microbatches), mesh["tp"]
    if processes_here % tp:
        notes.append(
            f"tp={tp} reaches across machines ({processes_here} processes on this one): every "
            f"layer waits for the network four times; give tp a divisor of {processes_here} and "
            "the rest to another axis"
        )
    output_dir = user_path("output_dir", config.output_dir)
    run_dir = run_dir or new_run_dir(output_dir, strategy.name, model.label, num_processes)
    offload = output_dir / ".offload"
    if config.offload_dir is not None and strategy.swaps_to_disk:
        offload = user_path("offload_dir", config.offload_dir)
    return Plan(
        requested=requested,
        config=config,
        strategy=strategy,
        machine=machine,
        num_processes=num_processes,
        processes_here=processes_here,
        mesh=mesh,
        batch=batch,
        layout=layout,
        state=estimate_state_bytes(strategy, layout.num_parameters, config.precision, mesh),
        activation_bytes=estimate_activation_bytes(config, model.size, mesh, batch, kept),
        output_dir=output_dir,
        run_dir=run_dir,
        offload_dir=offload.absolute() / run_dir.name if strategy.swaps_to_disk else None,
        work=describe_work(config, batch.global_batch_size),
        notes=notes,
    )


def _with_deepspeed_json(plan: Plan) -> Plan:
    if not plan.strategy.traits.takes_deepspeed_json:
        return plan
    offload_dir = str(plan.offload_dir or "")
    document = fill_deepspeed_json(plan.strategy, plan.config, plan.batch, offload_dir=offload_dir)
    return replace(plan, deepspeed_json=document)


def reserve_run_dir(plan: Plan) -> Plan:
    """Make the run's folder, under the next free name where another run was quicker, and write
    the plan into it.
    """
    while plan.checkpoint is None:
        try:
            plan.run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            label, count = plan.model.label, plan.num_processes
            run_dir = new_run_dir(plan.output_dir, plan.strategy.name, label, count)
            offload_dir = plan.offload_dir and plan.offload_dir.with_name(run_dir.name)
            plan = replace(plan, run_dir=run_dir, offload_dir=offload_dir)
            plan = _with_deepspeed_json(plan)
    (plan.run_dir / PLAN_FILE).write_text(dump_plan(plan), encoding="utf-8")
    return plan


def dump_plan(plan: Plan) -> str:
    """The plan as JSON text."""
    return TypeAdapter(Plan).dump_json(plan, indent=2).decode() + "\n"


def parse_plan(text: str) -> Plan:
    """What `dump_plan` wrote."""
    return TypeAdapter(Plan).validate_json(text)


def load_plan(run_dir: Path) -> Plan:
    """The plan that the launching process wrote for this run."""
    return parse_plan((run_dir / PLAN_FILE).read_text(encoding="utf-8"))


def load_plan_data(plan: Plan) -> tuple[Data, Tokenizer]:
    """Read, tokenise (or find in the cache) and cut the corpus that the plan names."""
    tokenizer = Tokenizer(plan.tokenizer_dir)
    corpus = read_corpus(plan.config.dataset)
    return prepare_data(corpus, tokenizer, plan.config, plan.cache_dir), tokenizer
