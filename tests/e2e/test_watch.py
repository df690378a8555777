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


@pytest.mark.parametrize("how", ["frozen", "hangs"])
def test_a_rank_that_stops_is_named(how, tmp_path):
    values = {**LONG, "output_dir": tmp_path}
    limit = 60 if how == "frozen" else 10
    job = {"how": how, "arguments": settings({**values, "hang_timeout_s": limit})}
    with pytest.raises(RuntimeError) as caught:
        heavy_pool().call("tests.e2e.fault_cases:with_rank_1_stopped", job, num_processes=2)
    record, host = only_record(tmp_path), platform.node()
    assert record["status"] == "failed"
    if how == "frozen":
        assert "exit codes [1, -9]" in str(caught.value), "the frozen one is ended, too"
        expected = f"lost rank 1 on {host} in step 5: it shows no sign of life for 10 s"
    else:
        late = f"waiting for rank 1 on {host}, in step 5 at "
        assert re.search(rf"note: step 5 has taken \d+ s: {late}", str(caught.value))
        expected = rf"step 5 hangs for 1\d s: {late}"
    assert re.match(expected, record["error"])
    assert re.search(f"error: {expected}", str(caught.value))


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
