"""Whoever is frozen, hangs, or has lost its launcher is named, and nobody stays behind."""

from __future__ import annotations

import platform
import re
import time

import pytest

from tests.conftest import SMALL, assert_ok, heavy_pool, only_record, script, settings
from tests.e2e.support import (
    assert_refused,
    launcher_command,
    left_over,
    processes_with,
    run_folders,
    running,
    wait_for,
)

LONG = {**SMALL, "strategy": "dp", "num_samples": 1200, "epochs": 80, "checkpoint_every": 20}


@pytest.mark.parametrize("how", ["frozen", "hangs", "fails"])
def test_a_rank_that_stops_is_named(how, tmp_path):
    values = {**LONG, "output_dir": tmp_path, "hang_timeout_s": 60 if how == "frozen" else 10}
    job = {"how": how, "arguments": settings(values)}
    with pytest.raises(RuntimeError) as caught:
        heavy_pool().call("tests.e2e.fault_cases:with_rank_1_stopped", job, num_processes=2)
    record, said = only_record(tmp_path), str(caught.value)
    assert record["status"] == "failed"
    rank_1 = f"rank 1 on {platform.node()}"
    error, *also = {
        "frozen": (
            f"lost {rank_1} in step 5: it shows no sign of life for 10 s",
            r"exit codes \[1, -9\]",  # it is ended, too
        ),
        "hangs": (
            rf"step 5 hangs for 1\d s: waiting for {rank_1}, in step 5 at ",
            rf"note: step 5 has taken \d+ s: waiting for {rank_1}, in step 5 at ",
        ),
        "fails": ("rank 1: RuntimeError: a fault made on purpose", "Traceback"),
    }[how]
    assert re.match(error, record["error"])
    for words in (error.removeprefix("rank 1: "), *also):
        assert re.search(words, said)


def test_a_run_ends_soon_after_its_launcher_was_killed(tmp_path):
    log, output_dir = tmp_path / "log", tmp_path / "runs"
    values = {**LONG, "output_dir": output_dir, "resume": "auto"}
    with running(launcher_command("spawn", values), log, E2E_TEST=str(tmp_path)) as process:
        wait_for(lambda: list(output_dir.glob("*/checkpoints/step-*")), process, log)
        second = script(values, "--num_gpus", "2")
        assert_refused(second, "is going on", f"process {process.pid} on {platform.node()}")
        assert len(run_folders(output_dir)) == 1
        process.kill()  # and not reaped: it counts as dead all the same
        begin = time.monotonic()
        while processes_with("E2E_TEST", str(tmp_path)) and time.monotonic() < begin + 60:
            time.sleep(0.1)
        assert left_over(str(output_dir), patience_s=0) == []
        (run_dir,) = run_folders(output_dir)
        record = only_record(output_dir)
        assert record["status"] == "interrupted"
        assert (run_dir / "checkpoints" / f"step-{record['step']:08d}").is_dir()
    rest = {**values, "max_steps": -1}
    resumed = script(rest, "--num_gpus", "2", "--dry-run")
    assert_ok(resumed)
    assert f"resumes {run_dir}/checkpoints/step-{record['step']:08d}" in resumed.stdout
