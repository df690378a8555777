"""Test that a stopped and resumed run is bitwise equal to an uninterrupted run."""

import functools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from distributed_training.checkpoint.resume import read_meta
from distributed_training.plan.plan import load_plan
from distributed_training.predict.mechanism import pipeline_ranks
from distributed_training.predict.memory import checkpoint_copy_bytes
from distributed_training.records.folder import list_checkpoints
from tests.conftest import SMALL, assert_ok, heavy_pool, script, train
from tests.e2e.support import (
    assert_refused,
    final_weights,
    launcher_command,
    metrics,
    remaining_processes,
    run_folders,
    running,
    wait_for,
)

EVERY, KEEP = 10, 2
VALUES = {**SMALL, "epochs": 2, "dropout": 0.1, "checkpoint_every": EVERY}
# Strategy -> (steps per run, steps per epoch). The long runs end in their second epoch and leave
# time for a signal. The short run saves after two thirds of its steps, in its first epoch.
LENGTHS = {"dp": (90, 70), "fsdp": (90, 70), "zero2": (15, 11)}
GLOBAL_BATCH = 4


def processes_of(strategy: str) -> int:
    return 1 if strategy == "dp" else 2


def values_for(strategy: str, output_dir: Path, **changes: object) -> dict[str, object]:
    num_steps, steps_per_epoch = LENGTHS[strategy]
    return {
        **VALUES,
        "strategy": strategy,
        "batch_size": GLOBAL_BATCH // processes_of(strategy),
        "num_samples": GLOBAL_BATCH * steps_per_epoch,
        "max_steps": num_steps,
        "checkpoint_every": EVERY if num_steps > 2 * EVERY else EVERY // 2,
        "keep_checkpoints": KEEP,
        "output_dir": output_dir,
        **changes,
    }


def checkpoints(output_dir: Path) -> list[str]:
    """Return the sorted names of all entries, including hidden ones, in the checkpoints folder of
    the only run in `output_dir`."""
    return sorted(path.name for path in output_dir.glob("*-gpt2-tiny-x*/checkpoints/*"))


def load_record(run_dir: Path) -> dict:
    return json.loads((run_dir / "record.json").read_text())


def stop(command: list[str], output_dir: Path, signum: signal.Signals, *, after: int) -> int:
    """Start a run, send it a signal once the checkpoint for step `after` is published, and return
    its exit code."""
    log = output_dir.parent / f"{output_dir.name}.log"
    # The uninterrupted runs have one thread, and sums depend on the number of threads.
    with running(command, log, OMP_NUM_THREADS="1") as process:
        wait_for(lambda: f"step-{after:08d}" in checkpoints(output_dir), process, log)
        if signum == signal.SIGINT:  # Ctrl-C reaches the whole foreground group of a terminal
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
        code = process.wait(timeout=60)
        assert remaining_processes(str(output_dir)) == []
    return code


def assert_same_run(actual: Path, expected: Path) -> None:
    """Check that two runs have exactly equal losses, gradient norms, evaluations and weights."""
    record, theirs = load_record(actual), load_record(expected)
    assert record["status"] == theirs["status"] == "ok"
    rows = metrics(actual)
    assert [row["step"] for row in rows] == list(range(1, theirs["num_steps"] + 1))
    for row, other in zip(rows, metrics(expected), strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "epoch", "num_targets"):
            assert row[key] == other[key], f"{key} of step {row['step']}"
    for key in ("loss_curve", "evaluations", "step", "work"):
        assert record[key] == theirs[key], key
    assert final_weights(actual) == final_weights(expected), "final weights differ"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that maps a strategy to the folder of an uninterrupted run, with all its
    checkpoints."""

    @functools.cache
    def run(strategy: str) -> Path:
        output_dir = tmp_path_factory.mktemp(f"whole-{strategy}")
        values = values_for(strategy, output_dir, keep_checkpoints=100)
        assert_ok(train(values, num_processes=processes_of(strategy)))
        (run_dir,) = run_folders(output_dir)
        return run_dir

    return run


@pytest.mark.parametrize("strategy", LENGTHS)
def test_checkpoint_copy_is_as_large_as_predicted(strategy, uninterrupted):
    plan = load_plan(uninterrupted(strategy))
    *_, newest = list_checkpoints(plan.run_dir)
    fullest = max(read_meta(newest).files.values())  # including headers and generator states
    assert checkpoint_copy_bytes(plan, pipeline_ranks(plan)) == pytest.approx(fullest, rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "launcher", "signum"),
    [("fsdp", "spawn", signal.SIGINT), ("dp", "python", signal.SIGHUP)],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_run(
    strategy, launcher, signum, uninterrupted, tmp_path
):
    """A run that is stopped by a signal and resumed ends with the same results as the uninterrupted
    run. The dp run is also killed without time to save, and is resumed twice."""
    output_dir = tmp_path / "runs"
    values = values_for(strategy, output_dir)
    command = launcher_command(launcher, values)
    assert stop(command, output_dir, signum, after=2 * EVERY) == 128 + signum
    (run_dir,) = run_folders(output_dir)
    step = load_record(run_dir)["step"]
    assert load_record(run_dir)["status"] == "interrupted"
    assert 2 * EVERY <= step < 70, "in the middle of an epoch"
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, step + 1))
    names = checkpoints(output_dir)
    assert (names[-1], len(names)) == (f"step-{step:08d}", KEEP)
    last = run_dir / "checkpoints" / names[-1]
    if strategy == "dp":
        log = tmp_path / "second.log"
        with running([*command, "--resume", "auto"], log, OMP_NUM_THREADS="1") as process:
            wait_for(lambda: f"resumed from {last}" in log.read_text(), process, log)
            process.kill()
        writing = run_dir / "checkpoints" / ".writing-00000070"
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()  # a kill during a save leaves such files
        (writing / "rank-00000.safetensors").write_bytes(b"half")
    resumed = train({**values, "resume": "auto"}, num_processes=processes_of(strategy))
    assert_ok(resumed)
    assert run_folders(output_dir) == [run_dir], "the run continues in its own folder"
    assert_same_run(run_dir, uninterrupted(strategy))
    assert checkpoints(output_dir) == ["step-00000080", "step-00000090"]
    if strategy == "fsdp":
        assert f"resumed from {last}" in resumed.stdout
        record = load_record(run_dir)
        assert record["resumed_from"] == str(last)


def test_resuming_from_any_checkpoint_gives_the_same_result(uninterrupted, tmp_path):
    """Copy an uninterrupted DeepSpeed run, remove its last checkpoint, and resume from step 10."""
    whole = uninterrupted("zero2")
    run_dir = tmp_path / "runs" / whole.name
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "hf")
    shutil.rmtree(run_dir / "checkpoints" / "step-00000015")
    resumed = train(values_for("zero2", tmp_path / "runs", resume=str(run_dir)), num_processes=2)
    assert_ok(resumed)
    assert "step-00000010" in resumed.stdout
    note = f"note: {whole.name} has finished. Steps 11 to 15 will be repeated"
    assert note in " ".join(resumed.stdout.split())
    assert_same_run(run_dir, whole)
    assert checkpoints(tmp_path / "runs") == ["step-00000010", "step-00000015"]


def test_plan_and_checkpoints_suffice_to_resume_and_to_export(uninterrupted, tmp_path):
    whole = uninterrupted("zero2")
    run_dir = shutil.copytree(whole, tmp_path / "runs" / whole.name)
    shutil.rmtree(run_dir / "hf")
    (run_dir / "record.json").write_bytes(b"")
    assert_ok(heavy_pool().script(["export", run_dir]))
    assert final_weights(run_dir) == final_weights(whole)
    shutil.rmtree(run_dir / "checkpoints/step-00000015")
    resumed = train(values_for("zero2", tmp_path / "runs", resume=str(run_dir)), num_processes=2)
    assert_ok(resumed)
    assert final_weights(run_dir) == final_weights(whole)
    record = load_record(run_dir)
    assert (record["status"], record["loss_curve"][0][0]) == ("ok", 11)


def test_a_finished_run_ends_at_once_and_a_resumed_run_keeps_its_settings_and_best_weights(
    tmp_path,
):
    """A job that is queued again after its end succeeds without training. A run that is named
    without its options trains as far as planned, and keeps best/ until it has a better model."""
    output_dir = tmp_path / "runs"
    values = {**SMALL, "strategy": "dp", "max_steps": 30, "eval_every": 5, "checkpoint_every": 10}
    values |= {"keep_checkpoints": 9, "keep_best": True, "output_dir": output_dir}
    assert_ok(train(values))
    (run_dir,) = run_folders(output_dir)
    weights, best = final_weights(run_dir), load_record(run_dir)["best"]
    assert best["step"] > 10
    again = {**values, "resume": "auto"}
    halved = {**again, "batch_size": 1}
    for result in (train(again), script(halved, "--num_gpus", "2"), train(halved, num_processes=2)):
        assert_ok(result)
        assert f"{run_dir.name} has finished this work after 30 steps" in result.stderr
        assert "--resume None" in result.stderr
    assert run_folders(output_dir) == [run_dir]
    named = {"output_dir": output_dir, "resume": run_dir / "checkpoints/step-00000010"}
    log = tmp_path / "log"
    with running(launcher_command("python", named), log) as process:
        wait_for(lambda: "resumed from" in log.read_text(), process, log)
        process.kill()
    assert load_record(run_dir)["best"] == best
    assert (run_dir / "best" / "model.safetensors").is_file()
    shutil.rmtree(run_dir / "hf")
    resumed = train({**SMALL, **named, "eval_samples": 1})
    assert_ok(resumed)
    assert "(eval_samples)" in resumed.stdout
    assert final_weights(run_dir) == weights
    assert load_record(run_dir)["best"]["num_targets"] < best["num_targets"]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_moved_model_is_named_anew(lora_rank, tmp_path):
    """A run continues if the weights in the folder are the same. Others are refused."""
    model, moved, other = (tmp_path / name for name in ("model", "moved", "other"))
    base = {**SMALL, "strategy": "dp", "max_steps": 1, "output_dir": tmp_path / "bases"}
    for seed, folder in ((1, model), (2, other)):
        assert_ok(train({**base, "seed": seed}))
        run_folders(tmp_path / "bases")[-1].joinpath("hf").rename(folder)
    values = {**base, "model": model, "lora_rank": lora_rank, "checkpoint_every": 1}
    values["output_dir"] = tmp_path / "runs"
    assert_ok(train(values))
    model.rename(moved)
    (run_dir,) = run_folders(tmp_path / "runs")
    named = {"output_dir": tmp_path / "runs", "resume": run_dir, "max_steps": 2}
    assert_refused(script(named), str(model), "--model")
    refused = train({**SMALL, **named, "model": other})
    assert refused.returncode != 0
    assert str(other) in refused.stderr
    assert_ok(train({**SMALL, **named, "model": moved}))
    assert load_record(run_dir)["step"] == 2


def test_deepspeeds_launcher_lets_a_stopped_run_save(tmp_path):
    """After Ctrl-C, the launcher sends its workers a second signal, which must not end them."""
    output_dir = tmp_path / "runs"
    values = {**VALUES, "strategy": "zero2", "num_samples": 1200, "epochs": 20}
    values |= {"max_steps": -1, "output_dir": output_dir}
    command = launcher_command("deepspeed", values)
    assert stop(command, output_dir, signal.SIGINT, after=EVERY) != 0
    (run_dir,) = run_folders(output_dir)
    record = load_record(run_dir)
    assert record["status"] == "interrupted", record["error"]
    assert checkpoints(output_dir)[-1] == f"step-{record['step']:08d}"
