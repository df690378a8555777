"""When one rank fails, all end soon, and the record says why."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time

import pytest

from tests.conftest import SMALL, assert_ok, only_record, run_command, settings, train
from tests.e2e.support import (
    launcher_command,
    left_over,
    metrics,
    processes_with,
    run_folders,
    running,
    wait_for,
)
from tests.pool import ROOT, SCRIPT
from tests.ports import free_port

LIMIT_S = 150  # of a hang; alone on a machine it takes a tenth
LONG = {**SMALL, "num_samples": 1200, "epochs": 80}
# The script, with a fault in one rank's third step.
FAULTY_SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
import real_model_example
real_model_example.__file__ = __file__  # --num_gpus starts this script
from distributed_training.engines import native

right, steps = native.NativeEngine.train_step, []

def train_step(self, batch):
    steps.append(batch)
    if os.environ["RANK"] == "1" and len(steps) == 3:
        raise RuntimeError("a fault made on purpose")
    return right(self, batch)

native.NativeEngine.train_step = train_step
raise SystemExit(real_model_example.main())
"""


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_exception_on_one_rank_ends_all_and_is_recorded(strategy, tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY_SCRIPT.format(root=str(ROOT)))
    values = {**LONG, "strategy": strategy, "output_dir": tmp_path / "runs"}
    start = ["torchrun", "--standalone", "--nproc_per_node=2", script]
    if strategy == "pp":
        values["grad_accum_steps"] = 4
        start = [sys.executable, script, "--num_gpus", "2"]
    command = [*start, *settings(values)]
    begin = time.monotonic()
    result = run_command(command, timeout_s=2 * LIMIT_S)
    assert time.monotonic() - begin < LIMIT_S
    assert result.returncode != 0
    record = only_record(tmp_path / "runs")
    assert record["status"] == "failed"
    assert record["error"] == "rank 1: RuntimeError: a fault made on purpose"
    assert record["finished_at"]
    said = result.stderr.strip().splitlines()
    if strategy == "pp":
        assert said[-1] == f"failed: {record['error']}"
    else:  # torchrun's last words are a frame around the first failure
        assert "RuntimeError: a fault made on purpose" in "".join(said[-3:])
    assert left_over(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("pp", ["1"]), ("zero2", ["0", "1"])], ids=["one stage", "all ranks"]
)
def test_killed_rank_is_recorded_by_the_parent(strategy, ranks, tmp_path):
    """Under torchrun, which --num_gpus uses, native and DeepSpeed's engines."""
    log, output_dir = tmp_path / "log", tmp_path / "runs"
    values = {**LONG, "strategy": strategy, "grad_accum_steps": 2, "output_dir": output_dir}
    with running(launcher_command("spawn", values), log, E2E_TEST=str(tmp_path)) as process:
        wait_for(lambda: list(output_dir.glob("*/metrics.jsonl")), process, log)
        workers = {
            worker.environ().get("RANK"): worker
            for worker in processes_with("E2E_TEST", str(tmp_path))
        }
        for rank in ranks:
            workers[rank].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        code = process.wait(timeout=2 * LIMIT_S)
        assert time.monotonic() - begin < LIMIT_S
        assert left_over(str(output_dir)) == []
    assert code == 1
    (run_dir,) = run_folders(output_dir)
    record = json.loads((run_dir / "record.json").read_text())
    assert record["status"] == "failed"
    assert record["finished_at"]
    reason = record["error"]
    assert log.read_text().splitlines()[-1] == f"failed: {reason}", "said last, not buried"
    who, _, why = reason.partition(": ")
    assert why == "killed by SIGKILL; most often memory ran out"
    assert set(who.removeprefix("rank ").split(", ")) <= set(ranks), "not who lost it"
    assert not (run_dir / ".killed").exists()
    assert metrics(run_dir), "what was measured before is kept"


def test_nodes_train_on_the_text_of_the_first(tmp_path):
    """Two nodes (folders of this machine) hold different files under the same relative name, and
    share `output_dir`, where the first one's text is tokenised for both."""
    values = {**SMALL, "dataset": "text.txt", "strategy": "dp", "output_dir": tmp_path / "runs"}
    port, logs = free_port(), [tmp_path / "node0.log", tmp_path / "node1.log"]
    with contextlib.ExitStack() as stack:
        nodes = []
        for rank, log in enumerate(logs):
            folder = tmp_path / f"node{rank}"
            folder.mkdir()
            (folder / "text.txt").write_text(f"The text of node {rank}, word after word.\n" * 2000)
            node = ["--nnodes=2", f"--node_rank={rank}", f"--master_port={port}"]
            start = ["env", "-C", folder, "torchrun", "--nproc_per_node=1", *node]
            command = [*start, "--master_addr=127.0.0.1", SCRIPT, *settings(values)]
            nodes.append(stack.enter_context(running(command, log)))
        for node, log in zip(nodes, logs, strict=True):
            assert node.wait(timeout=LIMIT_S) == 0, log.read_text()
    record = only_record(tmp_path / "runs")
    assert (record["status"], record["world_size"]) == ("ok", 2)
    assert len(list((tmp_path / "runs/.cache/tokens").glob("*/meta.json"))) == 1


def test_a_run_starts_again_by_itself_and_ends_as_if_nothing_had_been(tmp_path):
    """With --max_restarts a process that is killed costs the steps since the last checkpoint."""
    log, output_dir = tmp_path / "log", tmp_path / "runs"
    values = {**SMALL, "strategy": "dp", "num_samples": 1200, "max_steps": 150}
    values["checkpoint_every"] = 50
    command = launcher_command("spawn", {**values, "output_dir": output_dir}, "--max_restarts", "1")
    with running(command, log, E2E_TEST=str(tmp_path)) as process:
        wait_for(lambda: list(output_dir.glob("*/checkpoints/step-*")), process, log)
        (worker,) = (
            worker
            for worker in processes_with("E2E_TEST", str(tmp_path))
            if worker.environ().get("RANK") == "1"
        )
        worker.send_signal(signal.SIGKILL)
        assert process.wait(timeout=2 * LIMIT_S) == 0, log.read_text()
    assert "note: started again (1), from step-000" in log.read_text()
    (run_dir,) = run_folders(output_dir)
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 151))
    assert_ok(train({**values, "output_dir": tmp_path / "whole"}, num_processes=2))
    (whole,) = run_folders(tmp_path / "whole")
    ours, theirs = ((run / "hf" / "model.safetensors").read_bytes() for run in (run_dir, whole))
    assert ours == theirs
