"""What a layout costs a process in memory. Estimates, pure arithmetic. No torch import.

Bytes on the wire are in plan/traffic.py, idle time in plan/schedules.py, FLOPs with the model's
size. Refusals, the header, the advice when memory runs out and the documents all ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributed_training.models import ModelSize
from distributed_training.settings.config import RunConfig
from distributed_training.settings.strategies import Strategy

# Bytes a token and unit of hidden size that a block keeps for its backward pass, in 2-byte
# arithmetic with attention that keeps no scores (Korthikanti et al., 2205.05198, section 4: 34 with
# the masks of dropout): 10 of them lie between the layers that tp divides.
BLOCK_BYTES, UNDIVIDED_BLOCK_BYTES = 34, 10
# Of a block that is recomputed its input is kept; "selective" keeps what matrix products give.
RECOMPUTED_BLOCK_BYTES = {"full": 2, "selective": 18}
LOGIT_BYTES = 10  # a logit in the arithmetic's precision, in fp32, and its fp32 gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of model state of one process, without activations."""

    parameters: int
    gradients: int
    optimizer: int
    host: int
    """What offload keeps in RAM; `disk` in files."""
    disk: int

    @property
    def on_device(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def estimate_state_bytes(
    strategy: Strategy, num_parameters: int, precision: str, mesh: Mapping[str, int]
) -> StateBytes:
    """Bytes of model state of the process that holds `num_parameters`, its stage's part under tp.

    With rounded weights (ZeRO paper, section 3.1): parameters 2, gradients 2, fp32 master copy and
    both Adam moments 12 bytes a parameter. Else fp32 parameters (4), gradients (4) and moments (8),
    and of a pipeline's stages also what they gather, or round, for all micro-batches of a step.
    """
    width, shards, stage = 4 if precision == "fp32" else 2, mesh["dp_shard"], strategy.zero_stage
    each = {"parameters": 4 / shards, "gradients": 4 / shards, "optimizer": 8 / shards}
    if strategy.traits.rounded_weights:
        each["parameters"] = width / (shards if stage >= 3 else 1)
        each["gradients"] = width / (shards if stage >= 2 else 1)
        each["optimizer"] = 12 / (shards if stage >= 1 else 1)
    elif mesh["pp"] > 1:
        gathers = mesh["dp_replicate"] * shards > 1 or precision != "fp32"
        each |= {"parameters": 4 / shards + width * gathers, "gradients": 4}
    each |= {"host": 0, "disk": 0}
    for what, part in (("optimizer", "optimizer"), ("param", "parameters")):
        device = strategy.offload_device(what)
        if device != "none":
            each["disk" if device == "nvme" else "host"] += each[part]
            each[part] = 0
    if strategy.steps_on_host:  # gradients wait in RAM, in fp32, for the optimizer step
        each |= {"host": each["host"] + 4 / shards, "gradients": 0}
    return StateBytes(**{part: round(size * num_parameters) for part, size in each.items()})


def activation_share(tp: int, *, sequence_parallel: bool) -> float:
    """Share of a block's activations that each of `tp` processes keeps."""
    if sequence_parallel:
        return 1 / tp
    return (UNDIVIDED_BLOCK_BYTES + (BLOCK_BYTES - UNDIVIDED_BLOCK_BYTES) / tp) / BLOCK_BYTES


def estimate_activation_bytes(
    config: RunConfig, size: ModelSize, mesh: Mapping[str, int], sequences: int, kept: float
) -> int:
    """Bytes of activations of the fullest process: the blocks of `kept` micro-batches of so many
    `sequences` each, and the logits of one.
    """
    width = 2 if config.precision == "fp32" else 1  # of 2-byte values
    tokens = sequences * config.max_length
    share = activation_share(mesh["tp"], sequence_parallel=config.sequence_parallel)
    unit = tokens * size.hidden_size * share * width
    num_blocks = -(-size.num_layers // mesh["pp"])
    mode = config.activation_checkpointing
    blocks = kept * num_blocks * RECOMPUTED_BLOCK_BYTES.get(mode, BLOCK_BYTES) * unit
    if mode != "none":  # in the backward pass one block at a time is there whole
        blocks += BLOCK_BYTES * unit
    logits = tokens * size.padded_vocab_size * LOGIT_BYTES / mesh["tp"]
    return round(blocks + logits)
