"""Define the plan of a run: all decisions about the run, as plain data in <run>/plan.json. The
module planner/make_plan.py makes the plan once. A dry run prints the plan, and every process reads
it. The run's record repeats most of the plan. This module does not import torch."""

import contextlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from distributed_training.models import ModelSpec
from distributed_training.models.size import ModelSize
from distributed_training.plan.layout import Amount, Batch, Stages, format_axes
from distributed_training.plan.schedules import Schedule, find_schedule
from distributed_training.settings.config import KEYS, DraftConfig, Request, RunConfig
from distributed_training.settings.errors import UserError, describe
from distributed_training.settings.files import JsonObject, load_object
from distributed_training.settings.machine import Machine
from distributed_training.settings.strategies import Strategy

PLAN_FILE = "plan.json"
FORMAT = 7  # version of plan.json


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Statistics about packed records."""

    # Maximum number of documents in any micro-batch; padding counts as one document per sample
    max_documents: int
    # Mean over all tokens of the length, in tokens, of the document that contains the token
    mean_length: float


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Part of a plan that can be determined from CONFIG and the machine before any file is read.
    Predictions need only this part."""

    requested: Request  # merged from CONFIG, preset and command line
    config: DraftConfig  # its type says which values are still open
    strategy: Strategy
    model: ModelSpec
    machine: Machine
    num_processes: int
    processes_here: int  # processes on this machine
    mesh: dict[str, int]  # axis sizes, from the outermost to the innermost axis
    batch: Batch
    stages: Stages
    only_copies: bool  # whether each process holds the whole model
    uses_ddp: bool  # whether full replicas are averaged, by PyTorch's DDP or by the engine itself
    uses_fsdp: bool  # whether FSDP shards state over dp_shard or averages replicated parts
    output_dir: Path
    run_dir: Path  # proposed folder of this run; `reserve_run_dir` chooses the final folder
    # This run's folder for state that is kept on disk; None if no state is kept on disk
    offload_dir: Path | None
    engine_options: JsonObject  # values of the keys that the strategy's engine adds
    # Number of steps between parameter synchronizations (settings/keys.py: Options); None if
    # gradients are averaged in every step
    steps_between_exchanges: int | None = None
    engine_bytes_per_parameter: float = 0  # bytes of state that the strategy's engine adds
    packing: Packing | None = None  # None if records are not packed, or not read yet
    tokenized: bool = False  # whether the run tokenizes nothing, neither samples nor chats' prompts

    def with_config(self, **values: Any) -> "Draft":
        """Return a copy with other values of CONFIG's keys."""
        return replace(self, config=self.config.model_copy(update=values))

    @property
    def size(self) -> ModelSize:
        return self.model.size

    @property
    def embeds_from_host(self) -> bool:
        """Return whether the frozen embedding stays in host memory, so that a GPU reads only the
        rows that it needs (parallel/lora.py). A tied embedding is needed as a whole."""
        is_frozen = self.config.lora_rank > 0 and not self.size.tied
        on_gpu = self.machine.num_gpus > 0 and not self.strategy.traits.has_parameter_hooks
        return is_frozen and on_gpu and self.only_copies

    @property
    def fuses_gated_mlps(self) -> bool:
        """Return whether Triton kernels compute those MLPs that `BlockKind.fused_mlps` returns
        (parallel/gated_mlp.py). The tiles of the adapters' factors must fit in registers and in
        99 KiB of shared memory, or 64 KiB on GPUs before compute capability 8.0."""
        config = self.config
        max_rank = 64 if self.machine.compute_capability >= (8, 0) else 32
        on_gpu = self.machine.num_gpus > 0 and not self.strategy.traits.has_parameter_hooks
        is_plain = config.precision != "fp32" and not config.lora_dropout and self.mesh["tp"] == 1
        return on_gpu and is_plain and 0 < config.lora_rank <= max_rank

    @property
    def keeps_outer_weights_gathered(self) -> bool:
        """Return whether FSDP gathers the weights outside the blocks only once, because LoRA never
        changes them. Other runs gather them in each step, and keep them until its end."""
        return self.uses_fsdp and self.config.lora_rank > 0 and self.mesh["pp"] == 1

    @property
    def shares_frozen_shards(self) -> bool:
        """Return whether FSDP copies frozen weights from GPU to GPU (parallel/private.py), which
        needs all shards of a weight on one machine."""
        ranks = self.mesh["dp_shard"] * self.mesh["cp"]
        is_here = self.processes_here % (ranks * self.mesh["tp"]) == 0
        is_frozen = self.keeps_outer_weights_gathered
        return is_frozen and is_here and ranks > 1 and self.machine.num_gpus > 0

    @property
    def attention_span(self) -> int:
        """Number of tokens that a token's attention spans: the sample length or, if records are
        packed, the mean record length."""
        return round(self.packing.mean_length) if self.packing else self.config.max_length

    @property
    def settings(self) -> JsonObject:
        """Resolved values of CONFIG's keys, followed by the values of the engine's own options."""
        return self.config.to_key_values() | self.engine_options

    @property
    def schedule(self) -> Schedule:
        return find_schedule(self.config.pipeline_schedule, self.mesh)

    @property
    def tp_parts(self) -> tuple[int, int]:
        """Numbers of parts (along samples, along tokens) into which sequence parallelism divides a
        micro-batch's activations.

        If the number of samples is divisible by tp, activations are divided by sample, otherwise by
        token. Samples are contiguous in memory, so whole samples need no copy after they are
        gathered."""
        tp = self.mesh["tp"]
        return (tp, 1) if self.batch.micro_batch_size % tp == 0 else (1, tp)

    @property
    def has_node_local_files(self) -> bool:
        """True if each node has only the files that its own ranks write."""
        return not self.config.shared_disk and self.num_processes > self.processes_here

    def ranks_on_disk(self, rank: int) -> range:
        """Return the ranks whose files are on the same disk as the files of `rank`."""
        if not self.has_node_local_files:
            return range(self.num_processes)
        first = rank // self.processes_here * self.processes_here
        return range(first, first + self.processes_here)

    @property
    def layout_fingerprint(self) -> JsonObject:
        """Values that determine how state is sharded and summed. If a checkpoint has the same
        values, a run that resumes from the checkpoint continues with bit-identical results."""
        return {
            "strategy": self.strategy.name,
            "num_processes": self.num_processes,
            "mesh": format_axes(self.mesh),
            "stages": [[blocks.start, blocks.stop] for blocks in self.stages.block_ranges],
            "sequence_parallel": self.mesh["tp"] > 1,
            "device": "cuda" if self.machine.num_gpus else "cpu",
        } | ({"expert_parallel": True} if self.config.expert_parallel else {})


@dataclass(frozen=True, kw_only=True)
class Plan(Draft):
    """Plan of a run, after all checks that need no process group have passed."""

    __pydantic_config__ = ConfigDict(defer_build=True)  # only runs need the schema
    config: RunConfig
    notes: tuple[str, ...]  # choices that were made for the user, with reasons, one sentence each
    command: str = ""  # as typed, without the launcher's arguments; set by `reserve_run_dir`
    deepspeed_json: JsonObject | None = None
    # Dotted path -> value of settings in `deepspeed_json` that may change the results
    deepspeed_changes: JsonObject = field(default_factory=dict)
    tokenizer_dir: Path
    # Hugging Face folder with the initial weights; None for random weights
    weights_dir: Path | None
    adapters_dir: Path | None  # PEFT folder with the adapters that training continues
    checkpoint: Path | None = None  # checkpoint to resume from; None for a new run
    # Name of the samples' folder in the token cache; None if the plan was made without cutting the
    # text into samples
    cache: str | None = None
    # Fingerprint of the samples (data/samples.py); "" if there are no samples yet
    data_fingerprint: str = ""
    # Memory and time per step, predicted before the run (predict/predict.py)
    prediction: JsonObject = field(default_factory=dict)
    # One sentence with the run's work, machine, layout, time and memory
    verdict: str = ""
    # Size in bytes per process of each part of the training state
    state_bytes: dict[str, int] = field(default_factory=dict)
    # Fraction of a step's time that ranks of the pipeline wait if all stages take equally long
    ideal_bubble: float = 0.0
    # Predicted end in seconds of each operation, by pipeline rank and in the rank's order, by which
    # ranks sort their messages; () unless the schedule is V-shaped. The plan stores these times,
    # because ranks with different orders of messages would deadlock.
    operation_ends: tuple[tuple[float, ...], ...] = ()
    # Settings that are predicted to need clearly less GPU memory; "" without a GPU
    lighter_settings: str = ""
    amount: Amount | None = None  # None if there are no samples yet
    form: str = ""  # form of the training text (data/pieces.py); "" if there are no samples yet
    # Number of optimizer steps; None if the samples were not counted
    num_steps: int | None = None
    # Names the run in its folder's owner file. The attempts of one torchrun continue the run with
    # the same id. Set by `reserve_run_dir`.
    run_id: str = ""
    attempt_id: str = ""  # new whenever the run starts; repeated in its record and checkpoints
    format: int = FORMAT

    @property
    def work(self) -> JsonObject:
        """Keys and values on which two runs must agree to be comparable."""
        names = {name for name, key in KEYS.items() if key.work}.union(self.strategy.work_options)
        work = {name: value for name, value in self.settings.items() if name in names}
        if self.deepspeed_changes:
            work["deepspeed_json"] = self.deepspeed_changes
        return {**work, "global_batch_size": self.batch.global_batch_size}


PLAN_AS_JSON = TypeAdapter(Plan)


def load_plan(run_dir: Path) -> Plan:
    """Return the plan that the launching process wrote. Raises UserError if the file cannot be read
    or is not a plan that this version supports."""
    file = run_dir / PLAN_FILE
    try:
        document = load_object(file, "plan")
        if document.get("format") != FORMAT:
            raise ValueError(f"its format is {document.get('format')} instead of {FORMAT}")
        document["run_dir"] = str(run_dir.resolve())  # the folder may have been copied or moved
        return PLAN_AS_JSON.validate_json(json.dumps(document))
    except (UserError, TypeError, ValueError) as error:
        what = f"{file} is not a plan that this version can read"
        fix = "to continue its run without this file, use --resume auto and the run's settings"
        raise UserError(what, describe(error), fix) from None


def is_copy(run_dir: Path) -> bool:
    """Return whether a run's folder was copied from another folder, which is still beside it."""
    with contextlib.suppress(UserError):
        original = Path(str(load_object(run_dir / PLAN_FILE, "plan").get("run_dir"))).name
        return original != run_dir.name and (run_dir.parent / original).is_dir()
    return False
