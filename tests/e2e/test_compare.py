"""Test `compare` as a user would type it, with an interruption and a strategy that cannot run."""

import json
import signal

from tests.conftest import SMALL, assert_ok, run_command, settings
from tests.e2e.support import remaining_processes, running, wait_for
from tests.pool import SCRIPT


def finished(out):
    records = out.glob("runs/[!l]*/record.json")
    return {
        path: path.stat().st_mtime_ns
        for path in records
        if json.loads(path.read_text())["status"] == "ok"
    }


def test_an_interrupted_comparison_continues(tmp_path):
    """Stop `compare` during the last of three runs, and then run the same command again. The
    strategy "hybrid" fails, because it needs two processes."""
    out, log = tmp_path / "out", tmp_path / "log"
    values = {**SMALL, "num_samples": 1200, "max_steps": 200, "compile": False}
    command = ["python", SCRIPT, "compare", "--num_gpus", "1", "--out", out]
    command += ["--strategies", "dp,hybrid,fsdp", *settings(values)]
    with running(command, log) as process:
        wait_for(lambda: "3/3" in log.read_text(), process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGINT
    assert "Interrupted with 1 run remaining" in log.read_text()
    assert remaining_processes(str(out)) == []
    (kept,) = finished(out).items()
    assert "1 of 3 runs" in (out / "compare.txt").read_text()
    again = run_command(command)
    assert_ok(again)
    assert "1 run already finished." in again.stdout
    assert kept in finished(out).items()
    assert len(finished(out)) == 2
    text = (out / "compare.txt").read_text()
    assert "2 of 3 runs" in text
    assert "hybrid failed: " in text


def test_a_killed_comparison_leaves_no_run(tmp_path):
    log = tmp_path / "log"
    values = {**SMALL, "max_steps": 10**6, "compile": False}
    command = ["python", SCRIPT, "compare", "--num_gpus", "1", "--out", tmp_path / "out"]
    with running([*command, "--strategies", "dp", *settings(values)], log) as process:
        wait_for(lambda: list(tmp_path.glob("out/runs/*/metrics.jsonl")), process, log)
        process.kill()
        assert remaining_processes(str(tmp_path / "out")) == []
