"""Handle non-finite losses and gradients: find the cause and choose the checkpoint to restore."""

import math
from pathlib import Path

from distributed_training.engines.base import Engine, StepResult
from distributed_training.parallel.agree import from_rank_0, gather
from distributed_training.plan.plan import Plan
from distributed_training.records.folder import list_checkpoints, name_of
from distributed_training.records.record import History
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import RunError
from distributed_training.supervise.process import numbered

# With on_nonfinite=skip, a run stops if more than this many steps in a row are skipped, because the
# cause is then not a single batch.
SKIPS_IN_A_ROW = 10


class NonFiniteError(RunError):
    """Raised for a step with a non-finite loss or gradient. `saved` contains the earlier
    checkpoints of the run. `passed_over` is the step that a rollback has already skipped (0 if
    there is none)."""

    def __init__(self, step: int, what: str, saved: list[Path], passed_over: int) -> None:
        fix = "the run has no earlier checkpoint. Lower learning_rate, or look for a bad sample"
        if passed_over:
            what += f", after step {passed_over} was skipped"
            fix = "lower learning_rate"
        elif saved:
            fix = f"to continue from {saved[-1].name} and skip this batch, repeat the command with "
            fix += "--resume auto --on_nonfinite rollback"
        super().__init__(what, fix=fix)
        self.step = step
        self.what = what
        self.rolls_back_to = None if passed_over or not saved else saved[-1]


def has_fault(result: StepResult, config: RunConfig) -> bool:
    """Return whether a step has non-finite gradients, according to this rank's result.

    An overflow in fp16 is not a fault, because the engine then skips the update and lowers the loss
    scale. For non-finite gradients, an engine may report a norm of -1."""
    if result.skipped:
        return config.precision != "fp16"
    return result.grad_norm is not None and not 0 <= float(result.grad_norm) < math.inf


class Faults:
    """Find the cause of non-finite steps, and remember the step that a rollback skips."""

    def __init__(self, plan: Plan, history: History, engine: Engine) -> None:
        self.on_nonfinite = plan.config.on_nonfinite
        self.run_dir = plan.run_dir
        self.history = history
        self.engine = engine
        self.passed_over = 0  # step whose batch is skipped after a rollback; 0 if there is none

    def describe(self, step: int, result: StepResult) -> str | None:
        """Name the ranks with a non-finite loss, and the first non-finite gradient in model order.
        Return None if on_nonfinite=skip has skipped the step and the run can continue. The run
        stops if more than SKIPS_IN_A_ROW steps in a row are skipped. All ranks must call this
        method."""
        skips = self.on_nonfinite == "skip"
        skipped = set(self.history.skipped_steps)
        too_many = skipped.issuperset(range(step - SKIPS_IN_A_ROW, step))
        if skips and step in skipped and not too_many:
            return None
        name = None
        if result.param_grad_norms is not None and not result.param_grad_norms.isfinite().all():
            first = result.param_grad_norms.isfinite().logical_not().nonzero()[0]
            name = self.engine.gradient_names[int(first)]
        ranks = gather((math.isfinite(float(result.loss_sum)), name))
        faults = []
        if losses := [rank for rank, (finite, _) in enumerate(ranks) if not finite]:
            faults.append(f"the loss is not finite on {numbered('rank', losses)}")
        if names := [name for _, name in ranks if name is not None]:
            holders = [rank for rank, (_, name) in enumerate(ranks) if name == names[0]]
            where = f"{names[0]} on {numbered('rank', holders)}"
            faults.append(f"the first non-finite gradient is {where}")
        what = f"step {step}: {' and '.join(faults) or 'the gradients are not finite'}"
        if skips and too_many:
            what += f", as in the previous {SKIPS_IN_A_ROW} steps"
        return what

    def error(self, step: int, what: str) -> NonFiniteError:
        """Return the error for a non-finite step. All ranks must call this method."""
        # All ranks use rank 0's list. If the run was resumed from an earlier checkpoint, the list
        # may contain later checkpoints, which remain until the next save.
        folders = from_rank_0(list(map(str, list_checkpoints(self.run_dir))))
        saved = [Path(folder) for folder in folders if Path(folder).name <= name_of(step)]
        return NonFiniteError(step, what, saved, self.passed_over)

    def checkpoint_to_return_to(self, error: NonFiniteError) -> Path:
        """Return the checkpoint to restore, and remember to skip the failed step. Raises `error` if
        `on_nonfinite` is not "rollback", if there is no checkpoint, or if a rollback has already
        skipped a step."""
        if self.on_nonfinite != "rollback" or error.rolls_back_to is None:
            raise error
        self.passed_over = error.step
        return error.rolls_back_to
