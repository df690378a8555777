"""Run the training loop. The loop calls an `Engine` and does not depend on the strategy."""

import math
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.checkpoint import export, saver
from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import Engine, StepResult
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.records import metrics
from distributed_training.records import record as records
from distributed_training.records.display import Display, describe_evaluation, short_path
from distributed_training.settings.config import RunConfig
from distributed_training.supervise.process import STOP_SIGNALS, Startup, handle_signals
from distributed_training.train.nonfinite import (
    NonFiniteError,
    NonFiniteHandler,
    has_nonfinite_gradients,
)
from distributed_training.train.profiling import Profile, steps_to_trace
from distributed_training.train.sample import generate_sample

FLUSH_EVERY_S = 1.0
IGNORE_SIGNALS_S = 10.0  # Signals within this time after the first one are ignored.


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """Return the learning rate for step `step` (0-based) of a run with `num_steps` steps. A linear
    warm-up is followed by the schedule `lr_schedule`."""
    peak = float(config.learning_rate)
    warmup = config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.lr_schedule]


@dataclass
class Trainer:
    """Training loop with evaluation, logging and checkpoints between the steps of the engine.

    The history is the same on every rank, except for times. Rank 0 also writes the history to the
    record, prints it and sends it to the tracker."""

    engine: Engine
    plan: Plan
    topology: Topology
    data: Data
    sampler: Sampler
    display: Display
    history: records.History = field(default_factory=records.History)
    record: records.RunRecord | None = None  # on rank 0 only
    tracker: metrics.Tracker = field(default_factory=metrics.Tracker)
    # Function that reports the current activity (start/progress.py)
    set_activity: Callable[..., None] = lambda activity, **_: None
    startup: Startup = field(default_factory=Startup)

    def __post_init__(self) -> None:
        assert self.plan.num_steps is not None, "the launching process counts the steps"
        self.num_steps = self.plan.num_steps
        self.timer = metrics.StepTimer(self.topology.device)
        self.peak_memory = metrics.PeakMemory(self.topology.device)
        # (step, seconds) of each step that this process ran
        self.step_times: list[tuple[int, float]] = []
        # Bytes read and written during training; empty if they are not counted
        self.disk_traffic: dict[str, int] = {}
        self.sample: str | None = None  # text that the trained model generated
        self.profile: Profile | None = None
        self.saver = saver.Saver(self.plan, self.topology)
        # Steps whose losses are still on the device
        self._pending: list[tuple[dict[str, Any], StepResult]] = []
        self._signum = 0  # number of the first signal, or 0
        self._signaled_at = 0.0
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._first_step = 0  # first step of this process, which includes compilation
        # True if the save in progress is the last save of the run and should be reported
        self._reports_save = False
        self._noted_waiting = False
        self._saved_step = 0  # step of the last checkpoint that was saved or loaded
        self._num_bytes: int | None = None  # size of the validation text; None until counted
        self.nonfinite = NonFiniteHandler(self.plan, self.history, self.engine)

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.history.step

    def run(self) -> int:
        """Train to the end or until a signal arrives. Return the number of the signal that stopped
        the run, or 0 if there is none. All ranks must call this method."""
        if self.step == 0:
            sample = generate_sample(self.engine, self.plan, self.data, self.display, "before")
            self.history.sample_before = sample
        bytes_before = metrics.disk_bytes()
        stop_signum = 0
        if self.plan.config.profile:
            if steps := steps_to_trace(self.plan, self.step):
                self.profile = Profile(self.plan, self.topology, self.step, steps)
            else:
                self.display.note(
                    "profile traces no steps, because the first step is never traced and no other "
                    "step remains"
                )
        try:
            with handle_signals(
                dict.fromkeys(STOP_SIGNALS, self._handle_signal)
            ) as self._previous_handlers:
                # Before the first step, and where the resumed run was killed before it evaluated
                self._evaluate_if_due()
                self.startup.end("sample")
                self.display.start(self.step, self.num_steps, bool(self.plan.config.compile))
                self._begin_measuring()
                while self.step < self.num_steps and not stop_signum:
                    try:
                        stop_signum = self._train_one_step()
                    except NonFiniteError as error:
                        self._roll_back(error)
                self.peak_memory.end()
                bytes_after = metrics.disk_bytes()
                self.disk_traffic = {
                    name: total - bytes_before[name] for name, total in bytes_after.items()
                }
                if self.step == self.num_steps:
                    self._export_and_sample()
                self._finish_saving()
        finally:
            self.display.stop()
        if self.profile is not None:
            self.profile.stop()
        return stop_signum if self.step < self.num_steps else 0

    def _train_one_step(self) -> int:
        """Run one step, then perform the tasks that are due: save a checkpoint, evaluate and end
        the epoch. Return the number of the signal that stops the run, or 0 if there is none. All
        ranks return the same number. All ranks must call this method."""
        config = self.plan.config
        if self.step + 1 == self.nonfinite.skipped_step:
            self._flush()
            self.peak_memory.end()
            self.history.step += 1
            self.history.skipped_steps.append(self.step)
            self._say("skipped")
            self._begin_measuring()
        else:
            self._run_step()
        stop_signum, flush = self._agree_on_stop_and_flush()
        last = self.step == self.num_steps
        evaluate = self._is_evaluation_due
        save_interval = config.checkpoint_every
        save = bool(stop_signum) and save_interval != 0
        if save_interval is None:
            save = save or self._epoch_ends
        elif isinstance(save_interval, int) and save_interval > 0:
            save = save or last or self.step % save_interval == 0
        if flush or stop_signum or evaluate or save:
            self._flush()
        if evaluate or save:
            self.peak_memory.end()
            # Save before evaluating, so that a run that is killed in the evaluation loses no step.
            if save:
                if not (evaluate or stop_signum or last):
                    self._say("saving")
                self._save(reports_save=bool(stop_signum) or last)
            if last or not stop_signum:  # a resumed run evaluates first
                self._evaluate_if_due()
            if stop_signum:
                self._finish_saving()
            self._begin_measuring()
        return stop_signum

    @property
    def _epoch_ends(self) -> bool:
        return self.step == self.num_steps or self.step % self.sampler.steps_per_epoch == 0

    @property
    def _is_evaluation_due(self) -> bool:
        eval_every = self.plan.config.eval_every
        is_due = self._epoch_ends or (eval_every > 0 and self.step % eval_every == 0)
        return is_due and self.step not in [row["step"] for row in self.history.evaluations]

    def _evaluate_if_due(self) -> None:
        """Evaluate the model if an evaluation is due at this step and not yet in the history. If
        the loss has stopped falling, end the run at this step and save a checkpoint. All ranks must
        call this method."""
        config = self.plan.config
        if self._is_evaluation_due:
            self._evaluate()
        # The run may also have been killed after its last evaluation, such as during the export.
        lowest = self.history.describe_plateau(config.stop_after)
        stops = self.step < self.num_steps and lowest != ""
        stops = stops and self.history.evaluations[-1]["step"] == self.step
        if stops:
            why = f"the last {config.stop_after} evaluations (stop_after) did not improve"
            self._say(f"stopping early: {why} on the loss of {lowest}")
            self.num_steps = self.step
        if stops and self._saved_step != self.step and config.checkpoint_every != 0:
            self._save(reports_save=True)

    def _run_step(self) -> None:
        """Run one optimizer step. The results of the step stay on the device until `_flush`."""
        self.set_activity(f"step {self.step + 1}", is_step=True)
        rate = learning_rate(self.plan.config, self.step, self.num_steps)
        self.engine.set_learning_rate(rate)
        batch = self.sampler.step_batch(self.data.train, self.step)
        row = {"epoch": self.step // self.sampler.steps_per_epoch, "learning_rate": rate}
        row |= {"num_tokens": batch.num_tokens, "num_targets": batch.num_targets}
        self._pending.append(({"step": self.step + 1, **row}, self.engine.train_step(batch)))
        self.timer.mark()
        if self.profile is not None:
            self.profile.on_step_end()
        self.history.step += 1
        if not self._first_step:
            self._first_step = self.step
            self.startup.end("first_step")
            self.saver.preallocate(self.engine)

    def _agree_on_stop_and_flush(self) -> tuple[int, bool]:
        """Agree with the other ranks after a step. Return the number of the signal that stops the
        run (0 if there is none), and whether to call `_flush`.

        Signals may reach ranks at different steps, and only rank 0's clock decides when to flush.
        The exchanged integers are on the CPU, so GPUs do not wait for the exchange. If a save has
        ended on any rank, all ranks finish the save. All ranks must call this method."""
        waited_s = time.monotonic() - self._flushed_at
        flush_due = self.topology.rank == 0 and (
            self.step == self._first_step or waited_s >= FLUSH_EVERY_S
        )
        save_ended = self.saver.pending_write is not None and self.saver.pending_write.done()
        votes = torch.tensor([self._signum, int(flush_due), int(save_ended)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        if votes[2]:
            self._finish_saving()
        return int(votes[0]), bool(votes[1])

    def _flush(self) -> None:
        """Sum the pending losses over the ranks, and write, print and track the results. All ranks
        must call this method.

        Raises NonFiniteError on all ranks at the first step with a non-finite loss or gradient,
        unless `on_nonfinite` allows the step to be skipped. This method is called before
        each evaluation and each save, so that no bad step is evaluated or saved."""
        self._flushed_at = time.monotonic()
        config = self.plan.config
        pending = self._pending
        self._pending = []
        if not pending:
            return
        losses = torch.stack([result.loss_sum for _, result in pending]).double().cpu()
        nonfinite = torch.tensor([has_nonfinite_gradients(result, config) for _, result in pending])
        sums = torch.stack([losses, nonfinite.double()])
        dist.all_reduce(sums)
        rows = []
        error = None
        for (row, result), (loss_sum, num_nonfinite), seconds in zip(
            pending, sums.T.tolist(), self.timer.durations_s(), strict=True
        ):
            engine_skipped = bool(result.skipped)
            grad_norm = None if engine_skipped else result.grad_norm
            row |= {
                "skipped": engine_skipped or bool(num_nonfinite and config.on_nonfinite == "skip"),
                "loss": loss_sum / row["num_targets"],
                "grad_norm": None if grad_norm is None else float(grad_norm),
                "step_time_s": seconds,
                # The clock of a virtual machine may not advance between two readings.
                "tokens_per_s": row["num_tokens"] / seconds if seconds > 0 else None,
            }
            if row["skipped"]:
                self.history.skipped_steps.append(row["step"])
            if num_nonfinite or not math.isfinite(loss_sum):
                what = self.nonfinite.describe(row["step"], result)
                if what is not None:
                    self._finish_saving()
                    error = self.nonfinite.build_error(row["step"], what)
            rows.append(row)
            self.history.loss_curve.append((row["step"], row["loss"]))
            self.step_times.append((row["step"], seconds))
            self.tracker.log_step(row)
            if error is not None:
                break  # The later steps ran on corrupted weights.
        if self.record is not None:
            records.append_metrics(self.plan.run_dir, rows)
        if error is not None:
            self.history.truncate(error.step)
            self.write_record()
            raise error
        self.display.progress(rows, self._first_step)

    def _evaluate(self) -> None:
        """Compute loss, perplexity and bits per byte on the validation samples, and print the
        results on one line. With `keep_best`, export the model if its loss is the lowest so far.
        All ranks must call this method."""
        samples = self.data.validation
        total = torch.zeros((), dtype=torch.float64)
        for indices in self.sampler.eval_indices(len(samples)):
            self.set_activity(f"the evaluation after step {self.step}")
            total += self.engine.eval_step(*samples.batch(indices)).double().cpu()
        dist.all_reduce(total)
        if self._num_bytes is None:
            self._num_bytes = samples.count_bytes(self.data.bytes_per_token)
        num_targets = int(samples.num_targets.sum())
        row = {"step": self.step, **metrics.evaluation(float(total), num_targets, self._num_bytes)}
        loss = row["loss"]
        suffix = "; saving" if self.step and self.saver.step == self.step else ""
        self._say(f"validation {describe_evaluation(row)}{suffix}")
        self.tracker.log_evaluation(row, self.peak_memory.as_dict())
        lowest = self.history.best["loss"] if self.history.best else math.inf
        if self.plan.config.keep_best and self.step and loss < lowest:  # False if the loss is NaN
            self._finish_saving()
            self.set_activity(f"the export after step {self.step}")
            if export_future := self._export(self.plan.run_dir / records.BEST, {}):
                export_future.result()
            self.history.best = row
        # A run that is killed during the export evaluates again when it is resumed.
        self.history.evaluations.append(row)

    def _save(self, *, reports_save: bool) -> None:
        """Wait for the previous save, then begin to save a checkpoint. If `reports_save` is set,
        print a line when the new save has ended. All ranks must call this method."""
        self._finish_saving()
        self._reports_save = reports_save
        self.set_activity(f"the save after step {self.step}")
        # The checkpoint stores the record, so the record must be complete before the save begins.
        self.write_record()
        self.saver.begin(self.engine, step=self.step, data_fingerprint=self.data.fingerprint)
        self._saved_step = self.step
        if self.saver.memory is None:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for the save in progress, if there is one, and add the save to the history. If the
        save failed, raise an error with the cause. All ranks must call this method."""
        if self.saver.pending_write is None:
            return
        self.set_activity("the end of a save")
        try:
            folder, row = self.saver.finish()
        except FloatingPointError as error:
            step = self.saver.step
            what = f"step {step} was not saved: {error}"
            raise self.nonfinite.build_error(step, what) from None
        self.history.saves.append(row)
        self.write_record()
        if self._reports_save:
            self.display.say(f"saved {folder.parent.name}/{folder.name}")
        if not (row["copied"] or self._noted_waiting):
            self._noted_waiting = True
            self.display.note(
                "training waits during saves, because a copy of the state does not fit in RAM"
            )

    def _export_and_sample(self) -> None:
        """Export the model while the last checkpoint is being written, and generate a sample. All
        ranks must call this method."""
        self.set_activity("the export")
        last = self.plan.run_dir / records.LAST
        export_future: Future[None] | None = None
        if self.plan.config.export:
            export_future = self._export(last, self.saver.weights(self.step))
        self.sample = generate_sample(self.engine, self.plan, self.data, self.display, "after")
        if export_future is not None:
            export_future.result()
            self.display.say(f"exported {short_path(last)} (Hugging Face format)")

    def _export(self, folder: Path, weights: dict[str, torch.Tensor]) -> Future[None] | None:
        """Begin to write the model to `folder` in a thread. If `weights` is empty, gather the
        weights first. Return a future for the thread, or None on ranks that have nothing to write.
        All ranks must call this method."""
        state = weights or self.engine.full_state()
        if state is None:  # Only rank 0 holds the weights.
            return None
        metadata = (self.engine.base_fingerprint, self.plan, self.data.tokenizer, self.data.is_chat)
        return export.submit_in_thread(export.write_folder, state, *metadata, folder)

    def _roll_back(self, error: NonFiniteError) -> None:
        """Restore the last checkpoint, and skip the failed batch when training reaches it again.
        Raises `error` if a rollback is not possible. All ranks must call this method."""
        checkpoint = self.nonfinite.choose_rollback_checkpoint(error)
        self._pending = []  # If a save found non-finite values, later steps may be pending.
        self.peak_memory.end()
        self.restore(checkpoint)
        self.display.note(
            f"{error.what}. Training returned to step {self.step} and will skip that batch"
        )
        self._begin_measuring()

    def restore(self, folder: Path) -> None:
        """Restore the run from a checkpoint: engine, random numbers, history, record and metrics.
        All ranks must call this method."""
        started_at = time.monotonic()
        step = saver.load_checkpoint(folder, self.engine, self.plan, self.topology, self.data)
        self._saved_step = step
        self.history.truncate(step)
        self.history.loads.append({"step": step, "load_s": time.monotonic() - started_at})
        # Write the record now, so that it contains this resumption even if the run is killed before
        # the next save.
        self.write_record()
        if self.topology.rank == 0:
            records.truncate_metrics(self.plan.run_dir, step)
            if self.history.best is None:  # best/ may contain the model from a later step.
                shutil.rmtree(self.plan.run_dir / records.BEST, ignore_errors=True)

    def _begin_measuring(self) -> None:
        self.peak_memory.begin()
        self.timer.restart()
        self._flushed_at = time.monotonic()

    def _handle_signal(self, signum: int, _frame: Any) -> None:
        """Remember the first signal. If another signal arrives more than IGNORE_SIGNALS_S seconds
        later, leave it to the handler that was set before training.

        Launchers forward Ctrl-C and then send SIGTERM immediately. Therefore, only a later signal
        means that the user does not want to wait."""
        now = time.monotonic()
        if not self._signum:
            self._signum = signum
            self._signaled_at = now
            at_end = self.step >= self.num_steps
            when = "once the model is written" if at_end else "after this step"
            self.display.say(f"received {signal.Signals(signum).name}; stopping {when}")
        elif now - self._signaled_at > IGNORE_SIGNALS_S:
            signal.signal(signum, self._previous_handlers[signal.Signals(signum)])
            signal.raise_signal(signum)

    def write_record(self) -> None:
        """On rank 0, write the history to the record."""
        if self.record is not None:
            self.record.update(**vars(self.history), startup_s=self.startup.seconds)

    def _say(self, text: str) -> None:
        self.display.say(f"step {self.step:>6}/{self.num_steps}  {text}")
