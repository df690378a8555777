import itertools
import math
import os
import signal
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from distributed_training.checkpoint import saver
from distributed_training.data.samples import Data, Sampler, Samples
from distributed_training.engines.base import StepResult
from distributed_training.records.display import Display
from distributed_training.records.metrics import Tracker
from distributed_training.records.record import History
from distributed_training.settings.errors import RunError
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import load_strategy
from distributed_training.train import around_steps, loop
from distributed_training.train.around_steps import Recorder
from distributed_training.train.loop import Trainer, learning_rate
from tests.checkpoint.test_checkpoint import TOPOLOGY


@pytest.mark.parametrize("warmup", [0, 4, 30])
def test_learning_rate_warms_up_and_follows_the_schedule(warmup):
    for schedule, after_warmup in {
        "constant": lambda progress: 1.0,
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
    }.items():
        values = {"learning_rate": 2.0, "lr_schedule": schedule, "warmup_steps": warmup}
        rates = [learning_rate(build_config(values), step, 20) for step in (*range(21), 500)]
        rising = [2.0 * (step + 1) / warmup for step in range(warmup)]
        falling = [2.0 * after_warmup(step / (20 - warmup)) for step in range(21 - warmup)]
        expected = [*(rising + falling)[:21], 2.0 * after_warmup(1.0)]
        assert rates == pytest.approx(expected, abs=1e-12)


NUM_STEPS, STEPS_PER_EPOCH = 12, 5  # epochs end after steps 5 and 10; the last is cut short at 12


class CountingEngine:
    """Engine that has no model and returns the given losses. Each step calls `at_step`."""

    def __init__(self, losses=None, at_step=lambda step: None):
        self.losses = losses or [2.0] * NUM_STEPS
        self.at_step = at_step
        self.step = 0
        self.model = torch.nn.Module()

    def set_learning_rate(self, rate):
        pass

    def train_step(self, batch):
        self.step += 1
        self.at_step(self.step)
        loss = torch.tensor(self.losses[self.step - 1]) * batch.num_targets
        return StepResult(loss, None, False)

    def eval_step(self, inputs, targets):
        return torch.tensor(1.0)


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(autouse=True)
def saved_steps(monkeypatch):
    """Replace the saving of checkpoints with a stub. Return the list in which the stub records the
    step of each checkpoint."""
    steps = []
    monkeypatch.setattr(saver.Saver, "begin", lambda *_, step, **__: steps.append(step))
    return steps


@pytest.fixture
def exported_steps(monkeypatch):
    """Replace the export of weights with a stub. Return the list in which the stub records the step
    of each export."""
    steps = []

    monkeypatch.setattr(Trainer, "export", lambda trainer, *_: steps.append(trainer.step))
    return steps


def make_trainer(engine=None, record=None, **config):
    lengths = np.full(STEPS_PER_EPOCH, 2)
    samples = Samples(
        np.arange(100), np.arange(STEPS_PER_EPOCH), lengths, 2, 0, lengths.copy(), lengths * 0
    )
    values = {"batch_size": 1, "learning_rate": 0.1, "export": False, "generate": None}
    values["strategy"] = "dp"
    config = build_config({**values, **config})
    return Trainer(
        engine=engine or CountingEngine(),
        plan=SimpleNamespace(
            size=SimpleNamespace(kinds=(), num_layers=0),
            config=config,
            strategy=load_strategy(config),
            run_dir=Path("x"),
            ranks_on_disk=lambda rank: [0],
            num_steps=NUM_STEPS,
            weights_dir=None,
        ),
        topology=TOPOLOGY,
        data=Data(
            samples,
            samples.select(slice(2)),
            "",
            SimpleNamespace(is_chat_form=lambda form: False),
            "",
            "",
            True,
            np.ones(100, np.int32),
        ),
        sampler=Sampler(
            num_samples=STEPS_PER_EPOCH,
            global_batch_size=1,
            micro_batch_size=1,
            num_microbatches=1,
            num_replicas=1,
            replica=0,
            seed=0,
        ),
        display=Display(enabled=True),
        recorder=Recorder(record, Tracker()),
        history=History(),
        set_activity=lambda name: None,
    )


def test_a_save_that_finds_non_finite_state_ends_the_run(monkeypatch):
    def finish(saver, _):
        raise FloatingPointError("weight/w has non-finite values on rank 0")

    monkeypatch.setattr(saver.Saver, "finish", finish)
    trainer = make_trainer(checkpoint_every=4)
    trainer.checkpoints.saver.pending_write, trainer.checkpoints.saved_step = Future(), 4
    with pytest.raises(RunError, match=r"step 4 .*weight/w"):
        trainer.run()


@pytest.mark.parametrize(
    ("every", "steps"), [(None, [5, 10, 12]), (0, []), ("signal", []), (4, [4, 8, 12])]
)
def test_checkpoints_are_saved_when_due_and_after_the_record(every, steps, monkeypatch):
    """Before a checkpoint is saved, the record must contain all steps up to the checkpoint.
    Otherwise, a kill after the save would permanently lose the metrics of these steps."""
    monkeypatch.setattr(around_steps.records, "append_metrics", lambda *_: None)
    values, curves = {"skipped_steps": []}, []
    record = SimpleNamespace(update=lambda **new: values.update(new))
    trainer = make_trainer(record=record, checkpoint_every=every)

    def publish(*_, step, **__):
        curves.append((step, [row[0] for row in values["loss_curve"]], values["step"]))

    monkeypatch.setattr(saver.Saver, "begin", publish)
    trainer.run()
    assert curves == [(step, list(range(1, step + 1)), step) for step in steps]


def test_a_save_waits_for_the_previous_checkpoint(monkeypatch):
    events = []
    row = {"copied": True}
    monkeypatch.setattr(saver.Saver, "begin", lambda *_, step, **__: events.append(step))
    monkeypatch.setattr(
        saver.Saver, "finish", lambda *_: events.append("finished") or (Path("x"), row)
    )
    engine = CountingEngine(at_step=lambda step: events.append(step) if step == 5 else None)
    engine.eval_step = lambda *_: torch.tensor(1.0 / (1 + engine.step))
    trainer = make_trainer(engine, checkpoint_every=4, keep_best=True)
    trainer.checkpoints.saver.pending_write = Future()
    monkeypatch.setattr(Trainer, "export", lambda *_: events.append("best"))
    trainer.run()
    preceding = [before for before, after in itertools.pairwise(events) if after != "finished"]
    assert [what for what in events if what != "finished"] == [4, 5, "best", 8, "best", 12, "best"]
    assert set(preceding) == {"finished"}
    assert events[-1] == "finished"


@pytest.mark.parametrize(
    ("signum", "every", "steps"),
    [
        (signal.SIGINT, "signal", [7]),
        (signal.SIGTERM, 0, []),
        (signal.SIGUSR1, None, [5, 7]),
        (signal.SIGUSR2, 100, [7]),
        (signal.SIGXCPU, 100, [7]),
        (signal.SIGQUIT, 100, [7]),
    ],
)
def test_a_signal_stops_after_the_step_and_saves_unless_saving_is_off(
    signum, every, steps, saved_steps
):
    engine = CountingEngine(at_step=lambda step: step == 7 and os.kill(os.getpid(), signum))
    before = signal.getsignal(signum)
    assert make_trainer(engine, checkpoint_every=every).run() == signum
    assert engine.step == 7
    assert saved_steps == steps
    assert signal.getsignal(signum) == before


@pytest.mark.parametrize(
    ("step", "every", "saved", "signum"),
    [
        (0, None, [], signal.SIGTERM),  # there is nothing to save yet
        (3, 100, [3], signal.SIGTERM),
        (5, None, [5], signal.SIGTERM),  # saved before the evaluation, and not a second time
        (6, 0, [], signal.SIGTERM),
        (12, None, [5, 10, 12], signal.SIGTERM),  # a resumed run evaluates and exports
        (12, 0, [], 0),  # the model would be lost, so the run continues to its end
    ],
)
def test_a_signal_in_an_evaluation_saves_and_stops_at_once(
    step, every, saved, signum, saved_steps, exported_steps
):
    engine = CountingEngine()

    def eval_step(*_):
        if engine.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.tensor(1.0)

    engine.eval_step = eval_step
    trainer = make_trainer(engine, checkpoint_every=every, eval_every=3, export=True)
    assert trainer.run() == signum
    assert (engine.step, saved_steps) == (step, saved)
    assert (step in [row["step"] for row in trainer.history.evaluations]) == (signum == 0)
    assert exported_steps == ([] if signum else [NUM_STEPS])


@pytest.mark.parametrize(
    ("losses", "stop_after", "steps"),
    [
        ([5, 4, 3, 2, 1, 0, 0], 1, 12),
        ([5, 4, 4, 3, 3.5, 3, 2], 2, 10),  # an equal loss does not count as an improvement
        ([5, 4, 4, 3, 3.5, 3, 2], 1, 4),
        ([5, 4, math.nan, math.nan, 1, 1, 1], 2, 6),
        ([5, 6, 7, 8, 9, 9, 9], 12, 12),
    ],
)
def test_a_run_stops_when_the_loss_stops_falling(losses, stop_after, steps, saved_steps):
    engine = CountingEngine()
    trainer = make_trainer(engine, eval_every=2, checkpoint_every=3, stop_after=stop_after)
    values = iter(loss for loss in losses for _ in range(len(trainer.data.validation)))
    engine.eval_step = lambda inputs, targets: torch.tensor(next(values) * targets.size)
    trainer.sampler = SimpleNamespace(
        steps_per_epoch=100,
        step_batch=trainer.sampler.step_batch,
        eval_indices=trainer.sampler.eval_indices,
    )
    assert trainer.run() == 0
    assert (trainer.step, trainer.num_steps) == (steps, steps)
    assert saved_steps[-1] == steps


@pytest.mark.parametrize("killed_in", ["evaluation", "export"])
@pytest.mark.parametrize(("stop_after", "end"), [(0, NUM_STEPS), (2, 5)])
def test_a_resumed_run_evaluates_and_stops_where_the_killed_run_would_have(
    killed_in, stop_after, end, saved_steps
):
    trainer = make_trainer(CountingEngine(), stop_after=stop_after, eval_every=2)
    trainer.engine.step = trainer.history.step = trainer.checkpoints.saved_step = 5
    row = {
        "loss": 0.1,
        "perplexity": None,
        "num_targets": trainer.data.validation.num_targets.sum(),
    }
    rows = [{**row, "step": step} for step in (0, 2, 4, 5)]
    trainer.history.evaluations = rows if killed_in == "export" else rows[:3]
    trainer.history.loss_curve = [(step, 2.0) for step in range(1, 6)]
    assert trainer.run() == 0
    assert trainer.step == trainer.num_steps == end
    steps = [row["step"] for row in trainer.history.evaluations]
    assert steps == [0, 2, 4, 5] + ([] if stop_after else [6, 8, 10, 12])
    assert saved_steps == ([] if stop_after else [10, 12])


@pytest.mark.parametrize(
    ("best_loss", "loss", "steps"), [(0.5, 0.1, [5]), (0.1, 0.1, []), (0.5, None, [])]
)
def test_best_weights_whose_export_was_interrupted_are_exported_again(
    best_loss, loss, steps, exported_steps
):
    """The record already contains the evaluation, because a save may end before the export."""
    trainer = make_trainer(CountingEngine(), keep_best=True)
    trainer.engine.step = trainer.history.step = trainer.num_steps = 5
    trainer.history.evaluations = [{"step": 5, "loss": loss, "perplexity": None}]
    trainer.history.best = {"step": 2, "loss": best_loss}
    trainer.run()
    assert exported_steps == steps


def test_a_signal_that_interrupts_printing_is_kept(monkeypatch, capfd):
    busy = Mock(spec=[])  # like a stream that the signal interrupted, it has no usable method
    monkeypatch.setattr(sys, "stdout", busy)
    stop_signal = loop.StopSignal(Display(enabled=True))
    stop_signal.handle(signal.SIGTERM, None)
    assert stop_signal.number == signal.SIGTERM
    assert "SIGTERM" in capfd.readouterr().out


def test_a_later_signal_goes_to_the_handler_from_before_training(monkeypatch):
    clock, calls, stop_signal = [1000.0], [], loop.StopSignal(Display(enabled=False))
    stop_signal.previous_handlers = {signal.SIGTERM: "end the run"}
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(signal, "signal", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(signal, "raise_signal", lambda signum: calls.append(signum))
    for seconds, expected in (
        (0.0, []),
        (loop.IGNORE_SIGNALS_S, []),
        (0.1, [(signal.SIGTERM, "end the run"), signal.SIGTERM]),
    ):
        clock[0] += seconds
        stop_signal.handle(signal.SIGTERM, None)
        assert calls == expected


def test_a_resumed_run_keeps_the_history_up_to_its_checkpoint():
    rows = [{"step": step} for step in (0, 3, 6)]
    curve = [[step, 1.0] for step in range(1, 7)]
    values = {"step": 6, "loss_curve": curve, "evaluations": rows}
    history = History(**values, skipped_steps=[2, 5], best={"step": 4})
    history.truncate(4)
    expected = {"step": 4, "loss_curve": curve[:4], "evaluations": rows[:2]}
    assert history == History(**expected, skipped_steps=[2], best={"step": 4})
    history.truncate(3)
    assert history.best == {"step": 4}, "best/ is kept until a better model is written"


def test_losses_on_other_samples_are_not_compared():
    """A run that is resumed with another value of eval_samples starts its best weights and early
    stopping again."""
    rows = [{"step": step, "loss": step, "num_targets": 33} for step in range(4)]
    history = History(evaluations=rows)
    assert history.describe_plateau(3) == "0.0000 at step 0"
    history.evaluations += [{**row, "step": row["step"] + 4, "num_targets": 2} for row in rows]
    assert history.describe_plateau(4) == ""
    assert history.describe_plateau(3) == "0.0000 at step 4"


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        # Evaluations after steps 0, 3, 5, 6, 9, 10 and 12; the untrained model does not count.
        ([1.0, 4.0, 3.0, 3.0, 2.0, 5.0, 1.5], [3, 5, 9, 12]),
        ([9.0, float("nan"), 3.0, 5.0, 4.0, 3.0, 6.0], [5]),
    ],
)
def test_best_weights_are_saved_at_each_evaluation_that_improves(losses, steps, exported_steps):
    engine = CountingEngine(losses=[*range(NUM_STEPS)])
    trainer = make_trainer(engine, keep_best=True, eval_every=3)
    values = iter(loss for loss in losses for _ in range(len(trainer.data.validation)))
    engine.eval_step = lambda inputs, targets: torch.tensor(next(values) * len(targets) * 2.0)
    trainer.run()
    assert exported_steps == steps
    assert trainer.history.best["step"] == steps[-1]


def test_steps_are_numbered_and_their_losses_are_means_over_real_targets(monkeypatch):
    rows, batches = [], []
    monkeypatch.setattr(around_steps.records, "append_metrics", lambda _, new: rows.extend(new))
    results = [
        StepResult(torch.tensor(1.5), torch.tensor(0.5), False),
        StepResult(torch.tensor(4.5), None, True),
    ]
    engine = CountingEngine()
    engine.train_step = lambda batch: batches.append(batch) or results[len(batches) - 1]
    record = SimpleNamespace(update=lambda **_: None)
    trainer = make_trainer(engine, record, precision="fp16")
    trainer.num_steps, trainer.history.step = 3, 1
    trainer.data.train.num_targets[:] = 1  # num_targets is 1 and num_tokens is 2
    monkeypatch.setattr(
        trainer.results.timer, "durations_s", lambda: [[0.5], [0.25]][len(batches) - 1]
    )
    trainer.run()
    values = [(r["step"], r["loss"], r["grad_norm"], r["tokens_per_s"], r["skipped"]) for r in rows]
    assert [batch.num_tokens for batch in batches] == [2, 2]
    assert values == [(2, 1.5, 0.5, 4.0, False), (3, 4.5, None, 8.0, True)]
    assert trainer.history.loss_curve == [(2, 1.5), (3, 4.5)]
    assert trainer.recorder.step_times == [0.5, 0.25]
    assert trainer.history.skipped_steps == [3]


def test_a_sample_asks_what_the_first_dataset_holds_out():
    ids, two = np.arange(20), np.full(2, 9)
    held_out = Samples(ids, ids[::10], two, 9, 0, two, np.array([1, 0]), ids % 10 > 2)
    data = SimpleNamespace(tokenizer=None, validation=held_out, is_chat=False)
    config = SimpleNamespace(generate="The")
    plan = SimpleNamespace(config=config, requested=SimpleNamespace(is_set=lambda key: False))
    prompts = Trainer._encode_prompts(SimpleNamespace(data=data, plan=plan))
    assert prompts == [[10, 11, 12]]
