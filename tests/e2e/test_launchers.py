"""Launch training with torchrun and with DeepSpeed's launcher. Each run must end with exit code 0,
leave no processes behind, build no extensions, and match the results of a single process."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL, assert_ok, only_record, run_command, train
from tests.e2e.support import launcher_command, metrics, remaining_processes

LAUNCHERS = {"torchrun": "fsdp", "deepspeed": "hybrid"}
GLOBAL_BATCH = 4
VALUES = {
    **SMALL,
    "num_samples": 30,  # the last batch of an epoch is smaller
    "epochs": 2,
    "generate": "The",
}


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """Return the record of a run in which one process trains on the whole batch."""
    folder = tmp_path_factory.mktemp("one")
    values = {**VALUES, "strategy": "dp", "batch_size": GLOBAL_BATCH, "output_dir": folder}
    assert_ok(train(values))
    return only_record(folder)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_under_a_launcher_equals_one_process(launcher, on_one, tmp_path):
    looks = tmp_path / "looks"
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho asked >> {looks}\nexit 9\n")  # reports no GPU
    program.chmod(0o755)
    built = tmp_path / "extensions"
    around = {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(built),
        "OMP_WAIT_POLICY": "PASSIVE",  # the processes of other tests need the cores
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
    }
    output_dir = tmp_path / "runs"
    values = {**VALUES, "strategy": LAUNCHERS[launcher], "output_dir": output_dir}
    # Let the script choose the number of threads, and start it from another folder.
    command = ["env", "-u", "OMP_NUM_THREADS", *launcher_command(launcher, values)]
    result = run_command(command, cwd=tmp_path, **around)
    assert_ok(result)
    assert "terminate called" not in result.stderr, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert remaining_processes(str(output_dir)) == []
    assert not list(built.glob("*")), "extensions were compiled"
    assert looks.read_text() == "asked\n"

    record = only_record(output_dir)
    assert (record["status"], record["world_size"]) == ("ok", 2)
    assert record["strategy"]["name"] == LAUNCHERS[launcher]
    assert f"output_dir={output_dir}" in record["command"]
    assert len(record["memory"]["by_rank"]) == 2
    if LAUNCHERS[launcher] != "hybrid":  # its pipeline splits the model
        assert record["sample"].startswith("The")
    ours, theirs = (metrics(Path(found["run_dir"])) for found in (record, on_one))
    assert [row["step"] for row in ours] == list(range(1, 17))
    for row, expected in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4), f"step {row['step']}"
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
