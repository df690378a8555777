"""Define what happens around the steps of the training loop: record, tracker, display,
checkpoints, best model and early stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.checkpoint import saver
from distributed_training.parallel import agree
from distributed_training.records import metrics
from distributed_training.records import record as records
from distributed_training.records.display import describe_evaluation, short_path

if TYPE_CHECKING:
    from distributed_training.train.loop import Trainer

Row = dict[str, Any]


@dataclass
class Recorder:
    """Measure the run on every rank. On rank 0, also print the results, send them to the tracker
    and write them to record.json and metrics.jsonl."""

    record: records.RunRecord | None
    tracker: metrics.Tracker
    # Seconds of each step that this process ran
    step_times: list[float] = field(default_factory=list)

    def add_steps(self, trainer: Trainer, rows: list[Row]) -> None:
        """Add new rows of metrics.jsonl."""
        for row in rows:
            self.step_times.append(row["step_time_s"])
            self.tracker.log("train", row)
        if self.record is not None:
            records.append_metrics(trainer.plan.run_dir, rows)
        trainer.display.progress(rows, trainer.results.first_step, trainer.num_steps)

    def add_evaluation(self, trainer: Trainer, row: Row) -> None:
        """Print and track the latest entry of the history's `evaluations`."""
        trainer.say(f"validation {describe_evaluation(row)}")
        self.tracker.log("eval", row)

    def store(self, history: records.History) -> None:
        """Write the history to the record, so that it survives the end of this process."""
        if self.record is not None:
            self.record.update(**vars(history))

    def collect_results(self, trainer: Trainer) -> dict[str, Any]:
        """Return the values that are added to a record at the end of a run: history, performance,
        memory per rank, and sample. All ranks must call this method."""
        plan = trainer.plan
        config = plan.config
        sampler = trainer.sampler
        samples = min(sampler.global_batch_size, sampler.num_samples)
        performance = metrics.summarize_performance(
            self.step_times,
            tokens_per_step=samples * config.max_length * trainer.data.train.real_share,
            flops_per_token=plan.size.flops_per_token(
                plan.attention_span, frozen=config.lora_rank > 0
            ),
            world_size=plan.num_processes,
            device_name=plan.machine.gpu_name,
        )
        peaks = trainer.peak_memory.as_dict()
        ranks = agree.gather({"rank": trainer.topology.rank, **peaks})
        memory = {
            name: None if mine is None else max(rank[name] for rank in ranks)
            for name, mine in peaks.items()
        }
        return {
            **vars(trainer.history),
            "performance": performance,
            "memory": memory | {"by_rank": ranks},
            "sample": trainer.sample,
        }


def keep_best(trainer: Trainer, row: Row) -> None:
    """With `keep_best`, export the model if the evaluation `row` has the lowest loss so far."""
    history = trainer.history
    lowest = math.inf
    if history.best and history.best.get("num_targets") == row.get("num_targets"):
        lowest = history.best["loss"]
    loss = row["loss"]  # None if it is not finite and was read from a record
    is_best = trainer.step > 0 and loss is not None and loss < lowest
    if trainer.plan.config.keep_best is True and is_best:
        trainer.checkpoints.finish(trainer)
        activity = f"the export after step {trainer.step}"
        trainer.export(trainer.plan.run_dir / records.BEST, activity)
        history.best = row
        trainer.recorder.store(history)


def stop_early(trainer: Trainer) -> None:
    """End the run if the last `stop_after` evaluations have not lowered the validation loss."""
    config = trainer.plan.config
    lowest = trainer.history.describe_plateau(config.stop_after)
    if lowest and trainer.step < trainer.num_steps:
        why = f"the last {config.stop_after} evaluations (stop_after) did not improve"
        trainer.say(f"stopping early: {why} on the loss of {lowest}")
        trainer.num_steps = trainer.step


@dataclass
class Checkpoints:
    """Save and load the checkpoints of a run. All ranks must call each method."""

    saver: saver.Saver
    saved_step: int = 0  # step of the last checkpoint that was saved or loaded

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether to save a checkpoint after this step."""
        every = trainer.plan.config.checkpoint_every
        if every == 0 or self.saved_step == trainer.step:
            return False
        if trainer.stop_signum or every == "signal":
            return trainer.stop_signum > 0
        if every is None:
            return trainer.epoch_ends
        return trainer.step == trainer.num_steps or trainer.step % every == 0

    def save_if_due(self, trainer: Trainer) -> None:
        """Wait for the previous save, then begin to save a checkpoint if one is due."""
        if not self.is_due(trainer):
            return
        self.finish(trainer)
        trainer.set_activity(f"the save after step {trainer.step}")
        # A run that resumes from this checkpoint needs the history up to this step.
        trainer.recorder.store(trainer.history)
        self.saver.begin(
            trainer.engine, step=trainer.step, data_fingerprint=trainer.data.fingerprint
        )
        self.saved_step = trainer.step
        if self.saver.memory is None:
            self.finish(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Wait for the save in progress, if there is one, and add the save to the history. If the
        save failed, raise an error with the cause."""
        if self.saver.pending_write is None:
            return
        try:
            folder, row = self.saver.finish(partial(trainer.wait_for_disk, "the end of a save"))
        except FloatingPointError as error:
            what = f"step {self.saved_step} was not saved: {error}"
            raise trainer.results.build_error(what) from None
        waited_before = not all(save["copied"] for save in trainer.history.saves)
        trainer.history.saves.append(row)
        trainer.recorder.store(trainer.history)
        trainer.display.say(f"saved {folder.parent.name}/{folder.name}")
        if not (row["copied"] or waited_before):
            trainer.display.note(
                "training waits during saves, because a copy of the state does not fit in RAM"
            )

    def restore(self, trainer: Trainer, folder: Path) -> None:
        """Continue the run from a checkpoint: restore engine, random numbers, history, record and
        metrics."""
        plan = trainer.plan
        history = trainer.history
        step = saver.load_checkpoint(folder, trainer.engine, plan, trainer.topology, trainer.data)
        self.saved_step = step
        history.truncate(step)
        trainer.recorder.store(trainer.history)
        if trainer.topology.rank == 0:
            records.truncate_metrics(plan.run_dir, step)
        trainer.display.say(f"resumed from {short_path(folder)}")
        num_targets = int(trainer.data.validation.num_targets.sum())
        if history.evaluations and history.evaluations[-1]["num_targets"] != num_targets:
            text = "the validation samples are not those of the earlier evaluations (eval_samples)"
            trainer.display.note(f"{text}, so best/ and stop_after start again")
