"""How a layout cuts the sequences of one optimizer step. No torch import.

A step has batch_size x grad_accum_steps x processes sequences under every strategy. Those of a
replica are run in micro-batches:

    global_batch_size == micro_batch_size * num_microbatches * num_replicas
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from distributed_training.plan.cost import activation_share
from distributed_training.plan.schedules import Schedule
from distributed_training.records.record import Batch
from distributed_training.settings.config import AUTO, RunConfig
from distributed_training.settings.errors import UserError


def cut_batch(config: RunConfig, mesh: Mapping[str, int], schedule: Schedule) -> Batch:
    """The batch of one step, cut as CONFIG says or, where CONFIG says "auto", by one rule.

    The rule: the fewest micro-batches that the schedule takes, of which there are at least 2 x pp,
    and whose activations need no more memory than `batch_size` sequences do under dp. Where the
    batch does not allow both, memory counts first.
    """
    num_replicas = mesh["dp_replicate"] * mesh["dp_shard"]
    global_batch_size = config.batch_size * config.grad_accum_steps * math.prod(mesh.values())
    sequences = global_batch_size // num_replicas  # tp x pp divides it, so nothing is rounded
    size, count = config.micro_batch_size, config.num_microbatches
    if size == count == AUTO:
        count = _choose_count(config, mesh, schedule, sequences)
    elif count == AUTO:
        count = sequences // int(size)
    if size == AUTO:
        size = sequences // int(count)
    if int(size) * int(count) != sequences or not schedule.takes(mesh["pp"], int(count)):
        raise _refusal(config, schedule, mesh["pp"], sequences)
    return Batch(
        global_batch_size=global_batch_size,
        micro_batch_size=int(size),
        num_microbatches=int(count),
        num_replicas=num_replicas,
    )


def _choose_count(
    config: RunConfig, mesh: Mapping[str, int], schedule: Schedule, sequences: int
) -> int:
    share = activation_share(mesh["tp"], sequence_parallel=config.sequence_parallel)

    def fits(count: int) -> bool:
        size = sequences // count
        kept = size * schedule.kept(mesh["pp"], count) / mesh["pp"] * share
        # The loss is computed one micro-batch at a time, its logits divided over tp.
        return max(kept, size / mesh["tp"]) <= config.batch_size

    counts = schedule.counts(mesh["pp"], sequences)
    fitting = [count for count in counts if fits(count)] or counts[-1:]
    enough = [count for count in fitting if mesh["pp"] == 1 or count >= 2 * mesh["pp"]]
    return enough[0] if enough else fitting[-1]


def _refusal(config: RunConfig, schedule: Schedule, pp: int, sequences: int) -> UserError:
    """What does not fit, and the nearest cuts that do: there always is one, into single ones."""
    keys = ("micro_batch_size", "num_microbatches")
    asked = {key: getattr(config, key) for key in keys if getattr(config, key) != AUTO}
    wanted = asked.get("num_microbatches") or sequences / asked["micro_batch_size"]
    counts = schedule.counts(pp, sequences)
    nearest = sorted(counts, key=lambda count: abs(math.log(count / wanted)))[:3]
    cuts = [f"micro_batch_size={sequences // n} num_microbatches={n}" for n in sorted(nearest)]
    why = "micro_batch_size x num_microbatches must be that number"
    if pp > 1:
        rounds = f"works in equal rounds of about {pp}"
        rule = rounds if schedule.equal_rounds else f"needs {schedule.minimum(pp)} or more"
        why += f", and pipeline_schedule={config.pipeline_schedule!r} over pp={pp} {rule}"
    processes = sequences // (config.batch_size * config.grad_accum_steps)
    return UserError(
        f"{' with '.join(f'{key}={value}' for key, value in asked.items())} does not fit: a "
        f"replica has {sequences} sequences a step (batch_size {config.batch_size} x "
        f"grad_accum_steps {config.grad_accum_steps} x its {processes} processes)",
        why,
        f"set {'; or '.join(cuts)}; or both to auto",
    )
