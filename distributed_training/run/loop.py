"""The training loop and the history it keeps. It talks to an Engine and knows no strategy."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import Engine, StepResult
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology
from distributed_training.records.display import Display
from distributed_training.records.metrics import PeakMemory, StepTimer, disk_bytes
from distributed_training.records.record import RunRecord, append_metrics
from distributed_training.records.trackers import Tracker, perplexity
from distributed_training.run import checkpoint
from distributed_training.settings.config import RunConfig

FLUSH_EVERY_S = 1.0
PATIENCE_S = 10.0  # after a signal, further ones count only when this has passed


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """Rate of step `step` (0-based) of `num_steps`: linear warm-up, then the schedule."""
    peak, warmup = float(config.learning_rate), config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.lr_schedule]


@dataclass
class History:
    """The part of a record that grows while a run trains, and that a resumed run takes over."""

    step: int = 0  # optimizer steps done
    # [step, mean loss]; None stands for what was not finite in a record that was read back
    loss_curve: list[Any] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    best: dict[str, Any] | None = None  # the evaluation whose weights keep_best has kept
    sample_before: str | None = None  # text of the untrained model

    def cut(self, step: int) -> None:
        """Forget what came after `step`."""
        self.step = step
        self.loss_curve = [row for row in self.loss_curve if row[0] <= step]
        for rows in (self.evaluations, self.epochs):
            rows[:] = [row for row in rows if row["step"] <= step]
        self.skipped_steps = [skipped for skipped in self.skipped_steps if skipped <= step]
        if self.best and self.best["step"] > step:  # the steps after this one find it again
            self.best = None


@dataclass
class Trainer:
    """One run: the engine's steps, with evaluation, logging and checkpoints around them.

    The history is the same on every rank; rank 0 also writes, shows and tracks it.
    """

    engine: Engine
    plan: Plan
    topology: Topology
    data: Data
    sampler: Sampler
    num_steps: int
    display: Display
    history: History = field(default_factory=History)
    record: RunRecord | None = None  # on rank 0 only
    tracker: Tracker = field(default_factory=Tracker)
    save_best: Callable[[], None] = lambda: None  # collective

    def __post_init__(self) -> None:
        self.timer = StepTimer(self.topology.device)
        self.memory = PeakMemory(self.topology.device)
        self.disk_before: dict[str, int] | None = None
        self._pending: list[tuple[dict[str, Any], StepResult]] = []  # losses still on the device
        self._flushed_at = time.monotonic()
        self._signum, self._signalled_at = 0, 0.0

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.history.step

    def run(self) -> int:
        """Train to the end, or until a signal says stop: then save and return its number, else 0.
        Collective.
        """
        self.disk_before, stop = disk_bytes(), 0
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = {signum: signal.signal(signum, self._on_signal) for signum in signals}
        try:
            if self.step == 0:
                self._evaluate()
            self.display.start(self.step, self.num_steps)
            self._begin_training()
            while self.step < self.num_steps and not stop:
                stop = self._train_one_step()
            self._flush()
        finally:
            self.display.stop()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        return stop if self.step < self.num_steps else 0

    def _train_one_step(self) -> int:
        """One step and what is due after it; the signal to stop for, the same on every rank."""
        config, steps_per_epoch = self.plan.config, self.sampler.steps_per_epoch
        rate = learning_rate(config, self.step, self.num_steps)
        self.engine.set_learning_rate(rate)
        batch = self.sampler.step_batch(self.data.train, self.step)
        row = {"epoch": self.step // steps_per_epoch, "learning_rate": rate}
        row["num_tokens"] = batch.num_tokens
        result = self.engine.train_step(batch)
        self.timer.mark()
        self.history.step += 1
        if result.skipped:
            self.history.skipped_steps.append(self.step)
        self._pending.append(({"step": self.step, **row}, result))
        stop, flush = self._agree()
        last = self.step == self.num_steps
        epoch_ends = last or self.step % steps_per_epoch == 0
        evaluate = epoch_ends or (config.eval_every > 0 and self.step % config.eval_every == 0)
        every = config.checkpoint_every
        due = epoch_ends if every is None else every > 0 and (last or self.step % every == 0)
        save = due or (bool(stop) and every != 0)
        if flush or stop or evaluate or save:
            self._flush()
        if evaluate or save:
            self.memory.end()
            if evaluate:
                self._evaluate()
            if epoch_ends:
                self._end_epoch()
            if save:
                self._save()
            self._begin_training()
        return stop

    def _flush(self) -> None:
        """Sum pending losses over ranks; write, show and track them. Collective."""
        self._flushed_at = time.monotonic()
        pending, self._pending = self._pending, []
        if not pending:
            return
        durations_s = self.timer.durations_s()[-len(pending) :]
        sums = torch.stack([result.loss_sum for _, result in pending]).double().cpu()
        dist.all_reduce(sums)
        rows = []
        for (row, result), loss_sum, seconds in zip(
            pending, sums.tolist(), durations_s, strict=True
        ):
            row |= {
                "num_targets": result.num_targets,
                "skipped": result.skipped,
                "loss": loss_sum / result.num_targets,
                "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
                "step_time_s": seconds,
                "tokens_per_s": row["num_tokens"] / seconds,
            }
            rows.append(row)
            self.history.loss_curve.append([row["step"], row["loss"]])
            self.tracker.log_step(row)
        if self.record is not None:
            append_metrics(self.plan.run_dir, rows)
        self.display.progress(
            self.step,
            epoch=rows[-1]["epoch"] + 1,
            loss=rows[-1]["loss"],
            rate=rows[-1]["learning_rate"],
            tokens_per_s=sum(row["num_tokens"] for row in rows) / sum(durations_s),
            left_s=(self.num_steps - self.step) * sum(durations_s) / len(rows),
        )

    def _evaluate(self) -> None:
        """Loss and perplexity over the validation samples, normalised by real tokens."""
        samples = self.data.validation
        total = torch.zeros((), dtype=torch.float64)
        for indices in self.sampler.eval_indices(len(samples)):
            total += self.engine.eval_step(*samples.batch(indices)).double().cpu()
        dist.all_reduce(total)
        num_targets = int(samples.num_targets.sum())
        loss = float(total) / num_targets
        row = {"step": self.step, "loss": loss, "perplexity": perplexity(loss)}
        self.history.evaluations.append({**row, "num_targets": num_targets})
        self._say(f"validation loss {loss:.4f}  perplexity {row['perplexity']:.2f}")
        self.tracker.log_evaluation(row, self.memory.as_dict())
        lowest = self.history.best["loss"] if self.history.best else math.inf
        if self.plan.config.keep_best and self.step and loss < lowest:  # NaN is below nothing
            self.history.best = row
            self.save_best()

    def _end_epoch(self) -> None:
        """The epoch of the last step is over and has been evaluated."""
        steps_per_epoch, last = self.sampler.steps_per_epoch, self.history.evaluations[-1]
        epoch = (self.step - 1) // steps_per_epoch
        first, curve = epoch * steps_per_epoch, self.history.loss_curve
        losses = [loss for step, loss in curve if step > first and loss is not None]
        self.history.epochs.append(
            {
                "epoch": epoch + 1,
                "step": self.step,
                "mean_step_loss": sum(losses) / len(losses) if losses else None,
                "validation_loss": last["loss"],
                "validation_perplexity": last["perplexity"],
            }
        )
        self.write_record()

    def write_record(self) -> None:
        """Put the history so far into the record."""
        if self.record is not None:
            self.record.update(**vars(self.history))

    def _save(self) -> None:
        self.write_record()  # first: what a checkpoint's record lacks, a kill loses for good
        folder = checkpoint.save_checkpoint(
            self.engine, self.plan, self.topology,
            step=self.step, data_fingerprint=self.data.fingerprint,
        )  # fmt: skip
        self._say(f"saved {folder.parent.name}/{folder.name}")

    def _say(self, text: str) -> None:
        self.display.say(f"step {self.step:>6}/{self.num_steps}  {text}")

    def _begin_training(self) -> None:
        self.memory.begin()
        self.timer.restart()
        self._flushed_at = time.monotonic()

    def _agree(self) -> tuple[int, bool]:
        """(signal to stop for, whether to flush): signals reach ranks at different steps, and only
        rank 0's clock decides on output. GPUs do not wait for these CPU integers. Collective.
        """
        due = time.monotonic() - self._flushed_at >= FLUSH_EVERY_S
        votes = torch.tensor([self._signum, int(due and self.topology.rank == 0)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return int(votes[0]), bool(votes[1])

    def _on_signal(self, signum: int, _frame: Any) -> None:
        """Stop after this step. Launchers pass a terminal's Ctrl-C on and follow it with SIGTERM,
        so only a signal that comes later means that the user will not wait.
        """
        now = time.monotonic()
        if not self._signum:
            self._signum, self._signalled_at = signum, now
            self.display.say(f"{signal.Signals(signum).name}: stopping after this step")
        elif now - self._signalled_at > PATIENCE_S:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
