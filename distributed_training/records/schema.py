"""What this code reads of a run's record; REAL_MODELS_GUIDE.md describes all. No torch import."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field

SCHEMA_VERSION = 2
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
# Axis -> size. The earliest records have no tp and pp.
Mesh = Annotated[dict[str, int], AfterValidator(lambda mesh: {**dict.fromkeys(AXES, 1), **mesh})]


class Section(BaseModel):
    """Part of a record. What is not named is kept; a field's other names are version 1's."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)


class StrategySection(Section):
    """What ran."""

    name: str  # CONFIG's strategy
    sharding: str  # what it divides over processes, in words


class Batch(Section):
    """How the sequences of one optimizer step are cut."""

    global_batch_size: int  # sequences per step: the product of the other three
    micro_batch_size: int  # sequences of one replica in one forward pass
    num_microbatches: int = Field(  # micro-batches of one replica in a step
        validation_alias=AliasChoices("num_microbatches", "grad_accum_steps")
    )
    num_replicas: int = Field(  # replicas that see different data: dp_replicate x dp_shard
        validation_alias=AliasChoices("num_replicas", "dp_size")
    )

    def describe(self) -> str:
        """ "global 32 = 1 replica x 8 micro-batches x 4"."""
        replicas = f"{self.num_replicas} replica" + "s" * (self.num_replicas != 1)
        cuts = f"{self.num_microbatches} micro-batch" + "es" * (self.num_microbatches != 1)
        return f"global {self.global_batch_size} = {replicas} x {cuts} x {self.micro_batch_size}"


class Pipeline(Section):
    """Schedule and cut of a pipeline."""

    schedule: str  # CONFIG's pipeline_schedule
    num_microbatches: int  # that pass through it in a step
    blocks_per_stage: list[int] = []  # transformer blocks
    ideal_bubble: float | None = None  # idle share with equal stages; None: no formula is known


class RunState(Section):
    """Where a run stands: all that resuming and the launcher need of its record."""

    schema_version: Literal[1, 2]
    status: Literal["running", "ok", "oom", "failed", "interrupted"]
    error: str | None = None  # why it failed, in a line
    started_at: str  # UTC, ISO 8601, as is finished_at
    finished_at: str | None = None
    hostname: str | None = None  # of the process that writes the record
    pid: int | None = None  # of that process
    step: int = 0  # optimizer steps done
    loss_curve: list[tuple[int, float | None]] = []  # (step, training loss); None: not finite
    evaluations: list[dict[str, Any]] = []  # step, loss, perplexity; None: not finite
    epochs: list[dict[str, Any]] = []  # mean and validation loss of each
    skipped_steps: list[int] = []  # not applied, because fp16 gradients overflowed


class Record(RunState):
    """The whole record of a run."""

    run_dir: str  # empty where the run left no folder
    config: dict[str, Any]  # CONFIG as resolved: no "auto" left
    from_strategy_defaults: list[str] = []  # CONFIG keys that the strategy decided
    strategy: StrategySection
    work: dict[str, Any]  # equal for runs that can be compared
    world_size: int
    mesh: Mesh = Field(validation_alias=AliasChoices("mesh", "topology"))
    pipeline: Pipeline | None = None
    machine: dict[str, Any]  # of rank 0: gpu_name (None: CPU only), num_gpus, num_cpus
    num_parameters: int  # of the whole model
    dtypes: dict[str, str] | None = None  # of what -> format; None until the engine is built
    estimated_state_bytes: dict[str, int] = {}  # part -> bytes per process
    batch: Batch
    data: dict[str, Any]  # numbers of samples, share of real tokens, steps an epoch
    num_steps: int  # planned
    # Step time (step_time_s has p10, p50, p90, p99) and what follows from its median.
    performance: dict[str, Any] = {}
    # Peaks while training, the highest rank's, and by_rank; None: not measured.
    memory: dict[str, Any] = {}
    disk: dict[str, int] | None = None  # read_bytes, write_bytes of all ranks in num_steps
    bubble: dict[str, Any] | None = None  # idle_share of the pipeline phase, mean over ranks

    @property
    def has_results(self) -> bool:
        """Whether the run got far enough to be measured."""
        return bool(self.performance)
