"""The training loop and the history it keeps. It talks to an Engine and knows no strategy."""

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
from distributed_training.parallel.agree import from_rank_0
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.records import metrics
from distributed_training.records import record as records
from distributed_training.records.display import Display, short_path
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.supervise.process import Startup, handling
from distributed_training.train.nonfinite import Faults, NonFiniteError, has_fault
from distributed_training.train.profiling import Profile, steps_to_trace

FLUSH_EVERY_S = 1.0
# Signals that stop a run
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PATIENCE_S = 10.0  # after the first, further ones count only when this has passed


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """Rate of step `step` (0-based) of `num_steps`: linear warm-up, then the schedule."""
    peak = float(config.learning_rate)
    warmup = config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.lr_schedule]


@dataclass
class Trainer:
    """One run: the engine's steps, with evaluation, logging and checkpoints around them. The
    history is the same on every rank, but for seconds; rank 0 also writes, shows and tracks it."""

    engine: Engine
    plan: Plan
    topology: Topology
    data: Data
    sampler: Sampler
    display: Display
    history: records.History = field(default_factory=records.History)
    record: records.RunRecord | None = None  # on rank 0 only
    tracker: metrics.Tracker = field(default_factory=metrics.Tracker)
    at: Callable[..., None] = lambda place, **_: None  # told where training is
    startup: Startup = field(default_factory=Startup)

    def __post_init__(self) -> None:
        assert self.plan.num_steps is not None, "the launching process cut the data"
        self.num_steps = self.plan.num_steps
        self.timer = metrics.StepTimer(self.topology.device)
        self.memory = metrics.PeakMemory(self.topology.device)
        self.timed: list[tuple[int, float]] = []  # the steps that this process took, their seconds
        self.disk: dict[str, int] = {}  # its traffic while training; empty: not counted
        self.sample: str | None = None  # text of the trained model
        self.profile: Profile | None = None
        self.saver = saver.Saver(self.plan, self.topology)
        self._chat = self.data.tokenizer.talks(self.data.form)
        self._pending: list[tuple[dict[str, Any], StepResult]] = []  # losses still on the device
        self._signum = 0  # of the first signal; 0: none came
        self._signalled_at = 0.0
        self._first = 0  # step that this process took first, and that compiled
        self._says_saved = False  # of the save under way: it is the last one
        self._said_waiting = False
        self._num_bytes: int | None = None  # of the text that validates, once it is counted
        self.faults = Faults(self.plan, self.history, self.engine)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.history.step

    def run(self) -> int:
        """Train to the end, or until a signal, whose number is given; else 0. Collective."""
        if self.step == 0:
            self.history.sample_before = self._sample("before")
        before = metrics.disk_bytes()
        stop = 0
        if self.plan.config.profile:
            if steps := steps_to_trace(self.plan, self.step):
                self.profile = Profile(self.plan, self.topology, self.step, steps)
            else:
                self.display.note("nothing is traced: no step is left after a warm-up")
        try:
            with handling(dict.fromkeys(SIGNALS, self._receive)):
                if self.step == 0:
                    self._evaluate()
                self.startup.end("sample")
                self.display.start(self.step, self.num_steps, bool(self.plan.config.compile))
                self._begin_training()
                while self.step < self.num_steps and not stop:
                    try:
                        stop = self._train_one_step()
                    except NonFiniteError as error:
                        self._roll_back(error)
                self.memory.end()
                traffic = metrics.disk_bytes()
                self.disk = {name: now - before[name] for name, now in traffic.items()}
                if self.step == self.num_steps:
                    self._leave()
                self._finish_saving()
        finally:
            self.display.stop()
        if self.profile is not None:
            self.profile.stop()
        return stop if self.step < self.num_steps else 0

    def _receive(self, signum: int, _frame: Any) -> None:
        """Launchers pass a terminal's Ctrl-C on and follow it with SIGTERM, so only a signal that
        comes later means that the user will not wait."""
        now = time.monotonic()
        if not self._signum:
            self._signum = signum
            self._signalled_at = now
            when = "after this step" if self.step < self.num_steps else "once the model is written"
            self.display.say(f"{signal.Signals(signum).name}: stopping {when}")
        elif now - self._signalled_at > PATIENCE_S:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def _begin_training(self) -> None:
        self.memory.begin()
        self.timer.restart()
        self._flushed_at = time.monotonic()

    def _train_one_step(self) -> int:
        """One step and what is due after it; the signal to stop for, the same on every rank."""
        config = self.plan.config
        if self.step + 1 == self.faults.passed_over:
            self._flush()
            self.memory.end()
            self.history.step += 1
            self.history.skipped_steps.append(self.step)
            self._say("passed over")
            self._begin_training()
        else:
            self._update()
        stop, flush = self._agree()
        last = self.step == self.num_steps
        epoch_ends = last or self.step % self.sampler.steps_per_epoch == 0
        evaluate = epoch_ends or (config.eval_every > 0 and self.step % config.eval_every == 0)
        every = config.checkpoint_every
        save = bool(stop) and every != 0
        if every is None:
            save = save or epoch_ends
        elif isinstance(every, int) and every > 0:
            save = save or last or self.step % every == 0
        if flush or stop or evaluate or save:
            self._flush()
        if evaluate or save:
            self.memory.end()
            if evaluate:
                self._evaluate("; saving" if save else "")
                if self._stops_early() and not last:
                    self.num_steps = self.step
                    epoch_ends = True
                    save = every != 0
            if epoch_ends:
                self._end_epoch()
            if save:
                if not (evaluate or stop or last):
                    self._say("saving")
                self._save(says_saved=bool(stop) or last)
            if stop:
                self._finish_saving()
            self._begin_training()
        return stop

    def _update(self) -> None:
        """One optimizer step; what came of it is still on the device."""
        self.at(f"step {self.step + 1}", is_step=True)
        rate = learning_rate(self.plan.config, self.step, self.num_steps)
        self.engine.set_learning_rate(rate)
        batch = self.sampler.step_batch(self.data.train, self.step)
        row = {"epoch": self.step // self.sampler.steps_per_epoch, "learning_rate": rate}
        row |= {"num_tokens": batch.num_tokens, "num_targets": batch.num_targets}
        self._pending.append(({"step": self.step + 1, **row}, self.engine.train_step(batch)))
        self.timer.mark()
        if self.profile is not None:
            self.profile.step_ended()
        self.history.step += 1
        if not self._first:
            self._first = self.step
            self.startup.end("first_step")
            self.saver.prepare(self.engine)

    def _agree(self) -> tuple[int, bool]:
        """(signal to stop for, whether to flush): signals reach ranks at different steps, and only
        rank 0's clock decides on output. GPUs do not wait for these CPU integers. All ranks take
        note of a save that has ended. Collective."""
        waited_s = time.monotonic() - self._flushed_at
        due = self.topology.rank == 0 and (self.step == self._first or waited_s >= FLUSH_EVERY_S)
        saved = self.saver.ending is not None and self.saver.ending.done()
        votes = torch.tensor([self._signum, int(due), int(saved)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        if votes[2]:
            self._finish_saving()
        return int(votes[0]), bool(votes[1])

    def _flush(self) -> None:
        """Sum pending losses over ranks; write, show and track them. Raises NonFiniteError, on all
        ranks, at the first step that is not finite: nothing is evaluated or saved before its step
        has been looked at here. Collective."""
        self._flushed_at = time.monotonic()
        config = self.plan.config
        pending = self._pending
        self._pending = []
        if not pending:
            return
        losses = torch.stack([result.loss_sum for _, result in pending]).double().cpu()
        faults = torch.tensor([has_fault(result, config) for _, result in pending])
        sums = torch.stack([losses, faults.double()])
        dist.all_reduce(sums)
        rows = []
        error = None
        for (row, result), (loss_sum, fault), seconds in zip(
            pending, sums.T.tolist(), self.timer.durations_s(), strict=True
        ):
            left_out = bool(result.skipped)
            norm = None if left_out else result.grad_norm
            row |= {
                "skipped": left_out or bool(fault and config.on_nonfinite == "skip"),
                "loss": loss_sum / row["num_targets"],
                "grad_norm": None if norm is None else float(norm),
                "step_time_s": seconds,
                # A virtual machine's clock may stand still.
                "tokens_per_s": row["num_tokens"] / seconds if seconds > 0 else None,
            }
            if row["skipped"]:
                self.history.skipped_steps.append(row["step"])
            if fault or not math.isfinite(loss_sum):
                what = self.faults.describe(row["step"], result)
                if what is not None:
                    self._finish_saving()
                    error = self.faults.error(row["step"], what)
            rows.append(row)
            self.history.loss_curve.append((row["step"], row["loss"]))
            self.timed.append((row["step"], seconds))
            self.tracker.log_step(row)
            if error is not None:
                break  # the steps after it were done on what it left
        if self.record is not None:
            records.append_metrics(self.plan.run_dir, rows)
        if error is not None:
            self.history.cut(error.step)
            self.write_record()
            raise error
        self.display.progress(rows, self._first)

    def _evaluate(self, then: str = "") -> None:
        """Loss, perplexity and bits per byte over the validation samples; `then`: what the line
        about them adds."""
        samples = self.data.validation
        total = torch.zeros((), dtype=torch.float64)
        for indices in self.sampler.eval_indices(len(samples)):
            self.at(f"the evaluation after step {self.step}")
            total += self.engine.eval_step(*samples.batch(indices)).double().cpu()
        dist.all_reduce(total)
        if self._num_bytes is None:
            self._num_bytes = samples.count_bytes(self.data.bytes_of)
        found = metrics.evaluation(float(total), int(samples.num_targets.sum()), self._num_bytes)
        row = {"step": self.step, **found}
        loss = row["loss"]
        self.history.evaluations.append(row)
        self._say(f"validation {metrics.describe_evaluation(row)}{then}")
        self.tracker.log_evaluation(row, self.memory.as_dict())
        lowest = self.history.best["loss"] if self.history.best else math.inf
        if self.plan.config.keep_best and self.step and loss < lowest:  # NaN is below nothing
            self.history.best = row
            self._finish_saving()
            self.at(f"exporting step {self.step}")
            if written := self._export(self.plan.run_dir / records.BEST, {}):
                written.result()

    def _stops_early(self) -> bool:
        """Return whether the last `stop_after` evaluations were not below those before them."""
        count = self.plan.config.stop_after
        losses = [row["loss"] for row in self.history.evaluations]
        losses = [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]
        if not count or len(losses) <= count or min(losses[-count:]) < min(losses[:-count]):
            return False
        lowest = min(losses)
        best = self.history.evaluations[losses.index(lowest)]["step"]
        self._say(f"stopping early: no loss below the {lowest:.4f} of step {best} (stop_after)")
        return True

    def _end_epoch(self) -> None:
        """The epoch of the last step is over and has been evaluated."""
        epoch = (self.step - 1) // self.sampler.steps_per_epoch
        first = epoch * self.sampler.steps_per_epoch
        curve = self.history.loss_curve
        numbers = [loss for step, loss in curve if step > first and loss is not None]
        losses = [*filter(math.isfinite, numbers)]  # what is NaN here is None after a resume
        last = self.history.evaluations[-1]
        row = {
            "epoch": epoch + 1, "step": self.step,
            "mean_step_loss": sum(losses) / len(losses) if losses else None,
            "validation_loss": last["loss"], "validation_perplexity": last["perplexity"],
        }  # fmt: skip
        self.history.epochs.append(row)
        self.write_record()

    def _save(self, *, says_saved: bool) -> None:
        """Begin to save, once the save before has ended."""
        self._finish_saving()
        self._says_saved = says_saved
        self.at(f"saving step {self.step}")
        self.write_record()  # first: what a checkpoint's record lacks, a kill loses for good
        self.saver.begin(self.engine, step=self.step, data_fingerprint=self.data.fingerprint)
        if self.saver.memory is None:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for a save that is under way; raises what failed in it. Collective."""
        if self.saver.ending is None:
            return
        self.at("the end of a save", thread=self.saver.thread)
        try:
            folder, row = self.saver.finish()
        except FloatingPointError as error:
            step = self.saver.step
            what = f"step {step} is not saved: {error}"
            raise self.faults.error(step, what) from None
        self.history.saves.append(row)
        self.write_record()
        if self._says_saved:
            self.display.say(f"saved {folder.parent.name}/{folder.name}")
        if not (row["copied"] or self._said_waiting):
            self._said_waiting = True
            self.display.note("training waits for saves: memory has no room for a copy")

    def _leave(self) -> None:
        """Write the model, beside the last save, and draw a sample."""
        self.at("the export")
        config = self.plan.config
        last = self.plan.run_dir / records.LAST
        best = self.history.best
        written: Future[None] | None = None
        if config.export and best and best["step"] == self.step:  # gathered already
            if self.topology.rank == 0:
                made = self.plan.run_dir / records.BEST
                written = export.in_thread(export.copy_folder, made, last)
        elif config.export:
            written = self._export(last, self.saver.weights(self.step))
        self.sample = self._sample("after")
        if written is not None:
            written.result()
            self.display.say(f"exported {short_path(last)} (Hugging Face's format)")

    def _export(self, folder: Path, weights: dict[str, torch.Tensor]) -> Future[None] | None:
        """Begin to write the model, gathered here where no `weights` are given. Collective."""
        state = weights or self.engine.full_state()
        if state is None:  # rank 0 has it
            return None
        about = (self.engine.base_fingerprint, self.plan, self.data.tokenizer, self._chat)
        return export.in_thread(export.write_folder, state, *about, folder)

    def _sample(self, when: str) -> str | None:
        """The text after CONFIG's prompt, also shown; None where it has none. Of conversations the
        prompt is what a user says. Collective."""
        config = self.plan.config
        tokenizer = self.data.tokenizer
        if config.generate is None:
            return None
        # One process tokenizes: for many tokenizers that imports transformers.
        asked: tuple[list[int], list[int]] | None = None
        if self.topology.rank == 0:
            try:
                asked = self._prompt(config.generate)
            except UserError as error:  # a template that takes no question without more
                self.display.note(f"no sample: {error}")
        asked = from_rank_0(asked)
        if asked is None:
            return None
        prompt, eos_ids = asked
        # The split of a window over processes may append tokens, which need positions, too.
        context = self.plan.size.num_positions // self.topology.tp * self.topology.tp
        # Rank 0 chooses: sharded engines gather parameters at each step, so all take one path.
        ids = export.continuation(
            self.engine.logits, prompt, num_tokens=60, context=context, seed=config.seed,
            eos_ids=eos_ids, past=self.engine.past(),
            agree=lambda choice: dist.broadcast(choice, src=0),
        )  # fmt: skip
        said = [*prompt, *ids]
        sample = str(from_rank_0(tokenizer.decode(said) if self.topology.rank == 0 else ""))
        self.display.sample(f"sample {when} training:", sample)
        return sample

    def _prompt(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of what a sample begins with, and the tokens that end it."""
        tokenizer = self.data.tokenizer
        ends = tokenizer.ends_of(chat=self._chat)
        if self._chat:
            return tokenizer.ask([{"role": "user", "content": text}]), ends
        return tokenizer.begin(text), ends

    def _roll_back(self, error: NonFiniteError) -> None:
        """Go back to the last checkpoint if `on_nonfinite` says so, else raise the error. The batch
        of the step that failed is left out afterwards. Collective."""
        checkpoint = self.faults.checkpoint_to_return_to(error)
        self._pending = []  # if a save found the fault
        self.memory.end()
        self.restore(checkpoint)
        self.display.note(f"{error.what}; back at step {self.step}, to pass that batch over")
        self._begin_training()

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint: engine, random numbers, history, record, metrics. Collective."""
        began = time.monotonic()
        whose = (self.engine, self.plan, self.topology, self.data.fingerprint)
        step = saver.load_checkpoint(folder, *whose)
        self.history.cut(step)
        self.history.loads.append({"step": step, "load_s": time.monotonic() - began})
        self.write_record()  # so that a kill before the next save does not lose it
        if self.topology.rank == 0:
            records.truncate_metrics(self.plan.run_dir, step)
            if self.history.best is None:  # or of a step that is done again
                shutil.rmtree(self.plan.run_dir / records.BEST, ignore_errors=True)

    def write_record(self) -> None:
        if self.record is not None:
            self.record.update(**vars(self.history), startup_s=self.startup.seconds)

    def _say(self, text: str) -> None:
        self.display.say(f"step {self.step:>6}/{self.num_steps}  {text}")
