"""Find what is not finite in a step, and where training goes back to."""

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

SKIPS_IN_A_ROW = 10  # with on_nonfinite=skip; if more follow, no single batch is at fault


class NonFiniteError(RunError):
    """A step whose loss or gradients are not finite, in a run that has `saved` these checkpoints.
    `passed_over` is the step that it has left out before, or 0."""

    def __init__(self, step: int, what: str, saved: list[Path], passed_over: int) -> None:
        fix = "nothing was saved before; lower learning_rate, or look for a bad sample"
        if passed_over:
            what += f", after step {passed_over} was passed over"
            fix = "lower learning_rate"
        elif saved:
            fix = f"{saved[-1].name} is whole; to pass the batch over, go on from there with"
            fix += " --resume auto --on_nonfinite rollback"
        super().__init__(what, fix=fix)
        self.step = step
        self.what = what
        self.rolls_back_to = None if passed_over or not saved else saved[-1]


def has_fault(result: StepResult, config: RunConfig) -> bool:
    """Whether this rank's gradients are not finite. Overflow of fp16, after which the loss scale
    falls, is none; an engine may give -1 for such a norm and leave the update out."""
    if result.skipped:
        return config.precision != "fp16"
    return result.grad_norm is not None and not 0 <= float(result.grad_norm) < math.inf


class Faults:
    """Find what is not finite in a step, and remember the step that a rollback passes over."""

    def __init__(self, plan: Plan, history: History, engine: Engine) -> None:
        self.on_nonfinite = plan.config.on_nonfinite
        self.run_dir = plan.run_dir
        self.history = history
        self.engine = engine
        self.passed_over = 0  # step whose batch is left out after a rollback

    def describe(self, step: int, result: StepResult) -> str | None:
        """Name the ranks whose loss is not finite, and the first such gradient in the model's
        order. Return None if the update was left out, as on_nonfinite=skip asks, and if it is not
        one of many in a row. Collective."""
        skips = self.on_nonfinite == "skip"
        skipped = set(self.history.skipped_steps)
        too_many = skipped.issuperset(range(step - SKIPS_IN_A_ROW, step))
        if skips and step in skipped and not too_many:
            return None
        name = None
        if result.gradients is not None and not result.gradients.isfinite().all():
            first = result.gradients.isfinite().logical_not().nonzero()[0]
            name = self.engine.gradient_names[int(first)]
        ranks = gather((math.isfinite(float(result.loss_sum)), name))
        said = []
        if losses := [rank for rank, (finite, _) in enumerate(ranks) if not finite]:
            said.append(f"the loss is not finite on {numbered('rank', losses)}")
        if found := [name for _, name in ranks if name is not None]:
            holders = [rank for rank, (_, name) in enumerate(ranks) if name == found[0]]
            where = f"{found[0]} on {numbered('rank', holders)}"
            said.append(f"the first gradient that is not finite is of {where}")
        what = f"step {step}: {' and '.join(said) or 'the gradients are not finite'}"
        if skips and too_many:
            what += f", as in the {SKIPS_IN_A_ROW} steps before"
        return what

    def error(self, step: int, what: str) -> NonFiniteError:
        """Return the error for a step that is not finite. Collective."""
        # Checkpoints as rank 0 sees them. Later ones stay until the next save if the run was
        # resumed from an earlier one.
        folders = from_rank_0(list(map(str, list_checkpoints(self.run_dir))))
        saved = [Path(folder) for folder in folders if Path(folder).name <= name_of(step)]
        return NonFiniteError(step, what, saved, self.passed_over)

    def checkpoint_to_return_to(self, error: NonFiniteError) -> Path:
        """Return the checkpoint to go back to, and pass the step over from then on. Raise the error
        if `on_nonfinite` is not "rollback", or if a step was passed over before."""
        if self.on_nonfinite != "rollback" or error.rolls_back_to is None:
            raise error
        self.passed_over = error.step
        return error.rolls_back_to
