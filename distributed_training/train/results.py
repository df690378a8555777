"""Collect the results of the steps from the device. If they are not finite, find the cause and
choose the checkpoint to restore."""

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.engines.base import Engine, StepResult
from distributed_training.parallel.agree import broadcast_from_rank_0, gather
from distributed_training.plan.plan import Plan
from distributed_training.records.folder import CHECKPOINTS, checkpoint_name, list_checkpoints
from distributed_training.records.metrics import StepTimer
from distributed_training.records.record import History
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import RunError

FLUSH_EVERY_S = 1.0
# With on_nonfinite=skip, a run stops if more than this many steps in a row are skipped, because the
# cause is then not a single batch.
MAX_CONSECUTIVE_SKIPS = 10


def _format_ranks(ranks: list[int]) -> str:
    """Return a string such as "rank 3" or "ranks 1, 4"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class NonFiniteError(RunError):
    """Raised when a step has a non-finite loss or gradient. `checkpoint` is the run's last earlier
    checkpoint. `skipped_step` is the step that a rollback has already skipped (0 if there is
    none)."""

    def __init__(self, step: int, what: str, checkpoint: Path | None, skipped_step: int) -> None:
        fix = "the run has no earlier checkpoint. Lower learning_rate, or look for a bad sample"
        if skipped_step:
            what += f", after step {skipped_step} was skipped"
            fix = "lower learning_rate"
        elif checkpoint:
            fix = f"to continue from {checkpoint.name} and skip this batch, repeat the command "
            fix += "with --resume auto --on_nonfinite rollback"
        super().__init__(what, fix=fix)
        self.step = step
        self.what = what
        self.rollback_checkpoint = None if skipped_step else checkpoint


def has_nonfinite_gradients(result: StepResult, config: RunConfig) -> bool:
    """Return whether a step has non-finite gradients, according to this rank's result.

    An fp16 overflow does not count, because the engine skips the update and lowers the loss scale.
    If gradients are non-finite, an engine may report a norm of -1."""
    if result.skipped:
        return config.precision != "fp16"
    return result.grad_norm is not None and not 0 <= float(result.grad_norm) < math.inf


class StepResults:
    """Results of steps, which stay on the device until `flush`, so that the host does not wait for
    each step. All ranks must call each method that is not a property."""

    def __init__(self, plan: Plan, history: History, engine: Engine, device: torch.device) -> None:
        self.config = plan.config
        self.run_dir = plan.run_dir
        self.history = history
        self.engine = engine
        self.first_step = 0  # first step of this process, which includes compilation
        self.skipped_step = 0  # step whose batch is skipped after a rollback; 0 if there is none
        self.timer = StepTimer(device)
        self._pending: list[tuple[dict[str, Any], StepResult]] = []
        self._flushed_at = 0.0

    @property
    def flush_is_due(self) -> bool:
        """Whether to call `flush` after this step, according to this rank's clock."""
        waited_s = time.monotonic() - self._flushed_at
        return self.history.step == self.first_step or waited_s >= FLUSH_EVERY_S

    def restart(self) -> None:
        """Begin the next step now. The time since the last step is not attributed to any step."""
        self._pending = []  # If a save found non-finite values, later steps may be pending.
        self.timer.restart()
        self._flushed_at = time.monotonic()

    def add(self, row: dict[str, Any], result: StepResult) -> None:
        """Keep the result of a step that has just ended. `row` is the beginning of its row in
        metrics.jsonl."""
        self._pending.append((row, result))
        self.timer.mark()
        self.first_step = self.first_step or row["step"]

    def flush(self) -> tuple[list[dict[str, Any]], str | None]:
        """Sum the pending losses over the ranks, and add them to the history. Return the new rows
        of metrics.jsonl, and a description of the last row if its loss or a gradient is not finite
        and `on_nonfinite` does not allow the step to be skipped."""
        self._flushed_at = time.monotonic()
        pending = self._pending
        self._pending = []
        if not pending:
            return [], None
        losses = torch.stack([result.loss_sum for _, result in pending]).double().cpu()
        nonfinite = torch.tensor(
            [has_nonfinite_gradients(result, self.config) for _, result in pending]
        )
        sums = torch.stack([losses, nonfinite.double()])
        dist.all_reduce(sums)
        rows = []
        fault = None
        for (row, result), (loss_sum, num_nonfinite), seconds in zip(
            pending, sums.T.tolist(), self.timer.durations_s(), strict=True
        ):
            engine_skipped = bool(result.skipped)
            may_skip = self.config.on_nonfinite == "skip"
            grad_norm = None if engine_skipped else result.grad_norm
            row |= {
                "skipped": engine_skipped or bool(num_nonfinite and may_skip),
                "loss": loss_sum / row["num_targets"],
                "grad_norm": None if grad_norm is None else float(grad_norm),
                "step_time_s": seconds,
                # The clock of a virtual machine may not advance between two readings.
                "tokens_per_s": row["num_tokens"] / seconds if seconds > 0 else None,
            }
            if row["skipped"]:
                self.history.skipped_steps.append(row["step"])
            rows.append(row)
            self.history.loss_curve.append((row["step"], row["loss"]))
            if num_nonfinite or not math.isfinite(loss_sum):
                fault = self.describe(row["step"], result)
                if fault is not None:
                    break  # The later steps ran on corrupted weights.
        return rows, fault

    def describe(self, step: int, result: StepResult) -> str | None:
        """Return text that names the ranks with a non-finite loss and the first non-finite gradient
        in model order. Return None if the step was skipped (`on_nonfinite=skip`) and the run can
        continue. The run stops if more than MAX_CONSECUTIVE_SKIPS consecutive steps are skipped.
        All ranks must call this method."""
        may_skip = self.config.on_nonfinite == "skip"
        skipped = set(self.history.skipped_steps)
        too_many = skipped.issuperset(range(step - MAX_CONSECUTIVE_SKIPS, step))
        if may_skip and step in skipped and not too_many:
            return None
        faults = []
        if not math.isfinite(float(result.loss_sum)):
            faults.append("the loss is not finite")
        if result.param_grad_norms is not None and not result.param_grad_norms.isfinite().all():
            first_index = result.param_grad_norms.isfinite().logical_not().nonzero()[0]
            name = self.engine.gradient_names[int(first_index)]
            faults.append(f"the first non-finite gradient is {name}")
        ranks_by_fault: dict[str, list[int]] = {}
        for rank, faults_of_rank in enumerate(gather(faults)):
            for fault in faults_of_rank:
                ranks_by_fault.setdefault(fault, []).append(rank)
        reasons = [f"{fault} on {_format_ranks(ranks)}" for fault, ranks in ranks_by_fault.items()]
        what = f"step {step}: {', and '.join(reasons) or 'the gradients are not finite'}"
        if may_skip and too_many:
            what += f", as in the previous {MAX_CONSECUTIVE_SKIPS} steps"
        return what

    def build_error(self, step: int, what: str) -> NonFiniteError:
        """Return a NonFiniteError for `step`, with a message that begins with `what`. All ranks
        must call this method."""
        # All ranks use rank 0's list. If the run was resumed from an earlier checkpoint, the list
        # may contain later checkpoints, which remain until the next save.
        names = broadcast_from_rank_0([folder.name for folder in list_checkpoints(self.run_dir)])
        earlier = [name for name in names if name <= checkpoint_name(step)]
        checkpoint = self.run_dir / CHECKPOINTS / earlier[-1] if earlier else None
        return NonFiniteError(step, what, checkpoint, self.skipped_step)
