"""The plan of a run: every decision about it, as plain data in <run>/plan.json. It is made once
(planner/make_plan.py). A dry run prints it, every process reads it, and the record repeats it. No
torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from distributed_training.models import ModelSize, ModelSpec, find_model
from distributed_training.plan.layout import Batch, Layout, show_axes
from distributed_training.plan.schedules import FoundOrders, Schedule, find_schedule
from distributed_training.settings.config import KEYS, Request, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_json, read_small
from distributed_training.settings.machine import Machine
from distributed_training.settings.strategies import Strategy

PLAN_FILE = "plan.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Facts about records that are packed into blocks."""

    max_documents: int  # most in a training block, plus one for padding
    mean_length: float  # of the document that a token is in, on average, in tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The part of a plan that follows from CONFIG and the machine, before any file is read. It is
    all that predictions need."""

    requested: Request  # as merged from CONFIG, preset and --set; `config` has no "auto"
    config: RunConfig
    strategy: Strategy
    model: ModelSpec
    machine: Machine
    num_processes: int
    processes_here: int  # processes on this machine
    mesh: dict[str, int]  # sizes of the axes, the slowest with the rank first
    batch: Batch
    layout: Layout
    only_copies: bool  # each process holds the whole model
    uses_ddp: bool  # whole copies are averaged: by PyTorch's DDP, or an engine's own way
    uses_fsdp: bool  # state is sharded over dp_shard, or copies of parts are averaged, by FSDP
    output_dir: Path
    run_dir: Path  # this run's folder; before `reserve_run_dir` only a name
    offload_dir: Path | None  # this run's own, for state that is kept on disk; None without such
    from_defaults: tuple[str, ...]  # keys left open that the strategy's defaults decided
    engine_options: dict[str, Any]  # values of the keys that the strategy's own engine adds
    steps_between_exchanges: int | None = None  # of that engine (settings/keys.py: Options)
    engine_bytes_per_parameter: float = 0  # of state that the strategy's own engine adds
    orders: FoundOrders | None = None  # if they depend on durations (plan/orders.py)
    packing: Packing | None = None  # of records; None if they are not packed, or not read yet

    @property
    def size(self) -> ModelSize:
        return self.model.size

    @property
    def attended(self) -> int:
        """Length of the text that a token attends to: a sample, or on average a packed record."""
        return round(self.packing.mean_length) if self.packing else self.config.max_length

    @property
    def work(self) -> dict[str, Any]:
        """Values of keys that must agree before two runs may be compared."""
        names = {name for name, key in KEYS.items() if key.work}.union(self.strategy.work_options)
        work = {name: value for name, value in self.settings.items() if name in names}
        return {**work, "global_batch_size": self.batch.global_batch_size}

    @property
    def settings(self) -> dict[str, Any]:
        """Decided values under CONFIG's keys, then the engine's own options."""
        return self.config.to_user_words() | self.engine_options

    @property
    def schedule(self) -> Schedule:
        return find_schedule(self.config.pipeline_schedule, self.mesh)

    @property
    def tp_parts(self) -> tuple[int, int]:
        """Number of parts that samples of a micro-batch, and tokens of each sample, are divided
        into over tp between split layers. Samples are contiguous in memory, so whole samples
        need no copy after they are gathered."""
        if not self.config.sequence_parallel:
            return 1, 1
        tp = self.mesh["tp"]
        return (tp, 1) if self.batch.micro_batch_size % tp == 0 else (1, tp)

    @property
    def own_disks(self) -> bool:
        """True if each node keeps the files of its own processes."""
        return not self.config.shared_disk and self.num_processes > self.processes_here

    @property
    def spread(self) -> dict[str, Any]:
        """Layout of the run. If a checkpoint has the same one, a run resumes bit for bit."""
        return {
            "strategy": self.strategy.name,
            "num_processes": self.num_processes,
            "mesh": show_axes(self.mesh),
            "stages": [[blocks.start, blocks.stop] for blocks in self.layout.stages],
            "sequence_parallel": self.config.sequence_parallel and self.mesh["tp"] > 1,
            "device": "cuda" if self.machine.num_gpus else "cpu",
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Draft):
    """A run that has passed every check which needs no process group."""

    notes: tuple[str, ...]  # choices that were made for the user and why, one sentence each
    command: str = ""  # as typed, without a launcher's words; known to `reserve_run_dir`
    deepspeed_json: dict[str, Any] | None = None
    tokenizer_dir: Path
    weights_dir: Path | None  # Hugging Face folder of the initial weights; None: random
    adapters_dir: Path | None  # PEFT folder with the adapters that training continues
    checkpoint: Path | None = None  # where to resume from; None to start afresh
    cache: str | None = None  # name of the samples' folder in the token cache; None as below
    # Key -> what tells the files that `weights` and `model` name from others, wherever they are
    sources: dict[str, str] = field(default_factory=dict)
    data_fingerprint: str = ""  # of the samples (data/samples.py); "" as below
    # Memory and time of a step before it ran (predict/predict.py)
    prediction: dict[str, Any] | None = None
    # Agents of torchrun that started the processes: a run that one of them started is continued.
    launchers: list[str] = field(default_factory=list)
    num_steps: int | None = None  # of the optimizer; None if the text was not cut for the plan


PLAN_AS_JSON = TypeAdapter(Plan)


def _as_today(text: bytes) -> dict[str, Any]:
    """Return plan.json as this release writes it. Earlier releases left out the model's shape, had
    keys that are gone, and had the engine's options beside CONFIG's keys."""
    document: dict[str, Any] = parse_json(text.decode())
    if "model" not in document:
        spec = find_model(document["config"]["model"])
        document["model"] = TypeAdapter(ModelSpec).dump_python(spec, mode="json")
    config = document["config"]
    if "from_defaults" in config:
        document |= {key: config[key] for key in ("from_defaults", "engine_options")}
        document["strategy"]["work_options"] = config["engine_work"]
        request = document["requested"]
        request["set_by"] = dict.fromkeys(config["typed"], "command line")
        request["preset"] = "an earlier preset" if request["has_preset"] else None
    for name, model in (("config", RunConfig), ("requested", Request)):
        values = document[name]
        document[name] = {key: values[key] for key in model.model_fields if key in values}
    return document


def load_plan(run_dir: Path) -> Plan:
    """Read the plan that the launching process wrote. Raises UserError if it is damaged."""
    file = run_dir / PLAN_FILE
    try:
        document = _as_today(read_small(file))
        document["run_dir"] = str(run_dir.resolve())  # the folder may have been copied or moved
        return PLAN_AS_JSON.validate_json(json.dumps(document))
    except OSError as error:
        why = str(error.strerror)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))} {first['msg']}"
    except (KeyError, TypeError, ValueError):
        why = "it is not the JSON that a run writes"
    raise UserError(f"{file} is not a plan that this code reads", why)
