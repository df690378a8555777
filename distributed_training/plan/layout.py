"""Define pipeline stages, the division of a batch into micro-batches, the amount of work, and the
text form of a mesh. This module does not import torch."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from distributed_training.settings.config import DraftConfig
from distributed_training.settings.files import plural


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Stages of a pipeline. Without a pipeline, a single stage contains all blocks."""

    blocks_per_stage: tuple[int, ...]  # number of blocks per stage, in the model's order
    ranks: tuple[int, ...]  # pipeline rank that holds each stage

    @property
    def block_ranges(self) -> tuple[range, ...]:
        """Range of block indices in each stage."""
        bounds = itertools.accumulate(self.blocks_per_stage, initial=0)
        return tuple(itertools.starmap(range, itertools.pairwise(bounds)))


class Batch(BaseModel, extra="allow", frozen=True):  # unknown keys are kept
    """Division of one optimizer step's sequences over replicas and micro-batches."""

    global_batch_size: int  # sequences per step, the product of the other three
    micro_batch_size: int  # sequences per replica and forward pass
    num_microbatches: int  # micro-batches per replica and step
    num_replicas: int  # replicas with different data: dp_replicate x dp_shard

    def describe(self) -> str:
        """Format the batch as text such as "global 32 = 1 replica x 8 micro-batches x 4"."""
        replicas = plural(self.num_replicas, "replica")
        micro_batches = plural(self.num_microbatches, "micro-batch")
        total = f"global {self.global_batch_size}"
        return f"{total} = {replicas} x {micro_batches} x {self.micro_batch_size}"


# With expert parallelism: number of rows in a rank's buffers, in multiples of the mean over ranks
EXPERT_ROWS = 1.25


def expert_row_factor(config: DraftConfig, num_ranks: int) -> float:
    """Return the number of rows in the buffers of each of `num_ranks` ranks that share experts, in
    multiples of the mean over ranks. A step that cannot be repeated exactly has buffers for all
    tokens."""
    is_repeatable = config.precision != "fp16" and not (config.dropout or config.lora_dropout)
    return min(EXPERT_ROWS, num_ranks) if is_repeatable else num_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """Amount of work in a run: samples, passes over them, and steps."""

    num_samples: int  # samples that an epoch trains on; 0 if unknown
    unit: str  # name of the samples, such as "chats" (see `summarize`)
    epochs: float
    num_steps: int
    error: float = 0.0  # relative uncertainty of both numbers; 0 if the samples were counted


def format_axes(axes: Mapping[str, int]) -> str:
    """Format a mesh as text such as "dp_shard 2 x tp 2". Axes of size 1 are left out unless all
    sizes are 1."""
    displayed_axes = {axis: size for axis, size in axes.items() if size != 1}
    return " x ".join(f"{axis} {size}" for axis, size in (displayed_axes or axes).items())
