"""The training loop. It talks to an Engine and knows no strategy."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from distributed_training import checkpoint
from distributed_training.config import RunConfig
from distributed_training.data import Data, Sampler, Samples
from distributed_training.display import Display
from distributed_training.engines.base import Engine
from distributed_training.metrics import PeakMemory, StepTimer
from distributed_training.plan import Plan
from distributed_training.record import RunRecord, append_metrics
from distributed_training.topology import Topology
from distributed_training.trackers import Tracker

FLUSH_EVERY_S = 1.0
PATIENCE_S = 10.0  # after a signal, further ones count only when this has passed


class InterruptedRun(Exception):
    """The user asked to stop; everything has been saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """Rate of step `step` (0-based) of `num_steps`: linear warm-up, then the schedule."""
    peak = float(config.learning_rate)
    if step < config.num_warmup_steps:
        return peak * (step + 1) / config.num_warmup_steps
    decay_steps = max(1, num_steps - config.num_warmup_steps)
    progress = min(1.0, (step - config.num_warmup_steps) / decay_steps)
    if config.lr_schedule == "linear":
        return peak * (1.0 - progress)
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak


@dataclass
class Trainer:
    """One run: the engine's steps, with evaluation, logging, checkpoints around them."""

    engine: Engine
    plan: Plan
    topology: Topology
    data: Data
    sampler: Sampler
    num_steps: int
    display: Display
    record: RunRecord | None
    """On rank 0 only."""
    tracker: Tracker
    step: int = 0
    """Optimizer steps done."""
    loss_curve: list[list[float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.plan.config
        self.timer = StepTimer(self.topology.device)
        self.memory = PeakMemory(self.topology.device)
        self._pending: list[tuple[dict[str, Any], torch.Tensor, Any]] = []
        self._flushed_at = time.monotonic()
        self._signum = 0
        self._signalled_at = 0.0
        self._saved_at = -1

    def run(self) -> None:
        """Train to the end; raise InterruptedRun after saving when a signal says stop."""
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self.step == 0:
                self.evaluate()
            self.display.start(self.step, self.num_steps)
            self._begin_training()
            while self.step < self.num_steps:
                self._train_one_step()
            self._flush()
        finally:
            self.display.stop()
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _train_one_step(self) -> None:
        rate = learning_rate(self.config, self.step, self.num_steps)
        self.engine.set_learning_rate(rate)
        batch = self.sampler.step_batch(self.data.train, self.step)
        result = self.engine.train_step(batch)
        self.timer.mark()
        epoch = self.step // self.sampler.steps_per_epoch
        self.step += 1
        if result.skipped:
            self.skipped_steps.append(self.step)
        row = {
            "step": self.step,
            "epoch": epoch,
            "learning_rate": rate,
            "num_targets": batch.num_targets,
            "skipped": result.skipped,
        }
        self._pending.append((row, result.loss_sum, result.grad_norm))
        stop, flush = self._agree()
        epoch_ends = self.step % self.sampler.steps_per_epoch == 0 or self.step == self.num_steps
        save = self._checkpoint_is_due(epoch_ends, bool(stop))
        every = self.config.eval_every
        evaluate = epoch_ends or (every > 0 and self.step % every == 0)
        if flush or stop or evaluate or save:
            self._flush()
        pauses = [
            *([self.evaluate] if evaluate else []),
            *([self._finish_epoch] if epoch_ends else []),
            *([self.save] if save else []),
        ]
        if pauses:
            self.memory.end()
            for pause in pauses:
                pause()
            self._begin_training()
        if stop and self.step < self.num_steps:
            raise InterruptedRun(stop)

    def evaluate(self) -> None:
        """Loss and perplexity over the validation samples, normalised by real tokens."""
        samples: Samples = self.data.validation
        sampler = Sampler(
            num_samples=len(samples),
            micro_batch_size=self.config.micro_batch_size,
            grad_accum_steps=1,
            dp_size=self.topology.dp_size,
            dp_rank=self.topology.dp_rank,
            seed=self.config.seed,
        )
        total = torch.zeros((), dtype=torch.float64)
        for indices in sampler.eval_indices():
            total += self.engine.eval_step(*samples.batch(indices)).double().cpu()
        dist.all_reduce(total)
        num_targets = int(samples.lengths.sum())
        loss = float(total) / num_targets
        self.evaluations.append(
            {
                "step": self.step,
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "num_targets": num_targets,
            }
        )
        self.display.say(
            f"step {self.step:>6}/{self.num_steps}  validation loss {loss:.4f}  perplexity "
            f"{self.evaluations[-1]['perplexity']:.2f}"
        )
        self.tracker.log({"validation_loss": loss}, self.step)

    def save(self) -> None:
        """Publish a checkpoint of this moment."""
        if self._saved_at == self.step:
            return
        self._saved_at = self.step
        self._update_record()  # first: what a checkpoint's record lacks, a kill loses for good
        folder = checkpoint.save_checkpoint(
            self.engine,
            self.plan.run_dir,
            self.topology,
            step=self.step,
            keep=self.config.keep_checkpoints,
            identity=self.plan.identity,
            data_fingerprint=self.data.fingerprint,
        )
        self.display.say(f"step {self.step:>6}/{self.num_steps}  saved {folder}")

    def resume(self, folder: Any, history: dict[str, Any]) -> None:
        """Continue from a checkpoint, keeping what its record says of the steps before it."""
        self.step = checkpoint.load_checkpoint(self.engine, folder, self.topology)
        self.loss_curve = [row for row in history["loss_curve"] if row[0] <= self.step]
        self.evaluations = [row for row in history["evaluations"] if row["step"] <= self.step]
        self.epochs = [row for row in history["epochs"] if row["step"] <= self.step]
        self.skipped_steps = [
            step for step in history.get("skipped_steps", []) if step <= self.step
        ]
        self._update_record()  # so that a kill before the next save does not lose it

    def _checkpoint_is_due(self, epoch_ends: bool, stopping: bool) -> bool:
        """Never for `checkpoint_every` 0, not even when stopping."""
        every = self.config.checkpoint_every
        if every == 0:
            return False
        if stopping or self.step == self.num_steps:
            return True
        return epoch_ends if every is None else self.step % every == 0

    def _finish_epoch(self) -> None:
        epoch = (self.step - 1) // self.sampler.steps_per_epoch
        first = epoch * self.sampler.steps_per_epoch
        losses = [loss for step, loss in self.loss_curve if step > first and loss is not None]
        self.epochs.append(
            {
                "epoch": epoch + 1,
                "step": self.step,
                "mean_step_loss": sum(losses) / len(losses) if losses else None,
                "validation_loss": self.evaluations[-1]["loss"],
                "validation_perplexity": self.evaluations[-1]["perplexity"],
            }
        )
        self._update_record()

    def _begin_training(self) -> None:
        self.memory.begin()
        self.timer.restart()
        self._flushed_at = time.monotonic()

    def _agree(self) -> tuple[int, bool]:
        """(signal to stop for, whether to flush), the same on every rank.

        Signals reach ranks at different steps, and only rank 0's clock decides on output, so one
        small all-reduce of CPU integers a step settles both. GPUs do not wait for it.
        """
        due = time.monotonic() - self._flushed_at >= FLUSH_EVERY_S
        votes = torch.tensor([self._signum, int(due and self.topology.rank == 0)])
        if self.topology.world_size > 1:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return int(votes[0]), bool(votes[1])

    def _flush(self) -> None:
        """Sum pending losses over ranks; write, show and track them."""
        if not self._pending:
            return
        sums = torch.stack([loss for _, loss, _ in self._pending]).double().cpu()
        dist.all_reduce(sums)
        count = len(self._pending)
        durations = self.timer.durations_s()[-count:]
        rows = []
        for (row, _, norm), loss_sum, seconds in zip(
            self._pending, sums.tolist(), durations, strict=True
        ):
            loss = loss_sum / row["num_targets"]
            rows.append(
                {
                    **row,
                    "loss": loss,
                    "grad_norm": None if norm is None else float(norm),
                    "step_time_s": seconds,
                    "tokens_per_s": row["num_targets"] / seconds,
                }
            )
            self.loss_curve.append([row["step"], loss])
        self._pending = []
        if self.record is not None:
            append_metrics(self.plan.run_dir, rows)
        for row in rows:
            self.tracker.log(row, row["step"])
        seconds = sum(durations)
        self.display.progress(
            self.step,
            loss=rows[-1]["loss"],
            tokens_per_s=sum(row["num_targets"] for row in rows) / seconds,
            step_time_s=seconds / count,
        )
        self._flushed_at = time.monotonic()

    def _update_record(self) -> None:
        if self.record is not None:
            self.record.update(
                step=self.step,
                loss_curve=self.loss_curve,
                evaluations=self.evaluations,
                epochs=self.epochs,
                skipped_steps=self.skipped_steps,
                num_skipped_steps=len(self.skipped_steps),
            )

    def _on_signal(self, signum: int, _frame: Any) -> None:
        """Stop after this step. Launchers pass a terminal's Ctrl-C on and follow it with SIGTERM,
        so only a signal that comes later means that the user will not wait.
        """
        now = time.monotonic()
        if self._signum and now - self._signalled_at > PATIENCE_S:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        if self._signum:
            return
        self._signum, self._signalled_at = signum, now
        self.display.say(f"{signal.Signals(signum).name}: stopping after this step")


@torch.no_grad()
def generate(
    engine: Engine, prompt_ids: list[int], *, num_tokens: int, context: int, eos_id: int, seed: int
) -> list[int]:
    """Continue `prompt_ids` by sampling from the 40 likeliest tokens. Collective.

    Rank 0 chooses: sharded engines gather parameters at each step, so all must take one path.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        window = torch.tensor([ids[-context:]])
        logits = engine.logits(window)[0, -1].float().cpu()
        values, candidates = torch.topk(logits, min(40, len(logits)))
        choice = candidates[torch.multinomial(values.softmax(0), 1, generator=generator)]
        dist.broadcast(choice, src=0)
        ids.append(int(choice))
        if ids[-1] == eos_id:
            break
    return ids
