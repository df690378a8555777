"""Test that a job whose machines disappear continues from its mirror, and only from checkpoints
that are complete there."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from distributed_training.checkpoint.resume import Meta, rank_file_name, write_meta
from distributed_training.records.folder import CHECKPOINTS, checkpoint_name, list_checkpoints
from distributed_training.records.record import RECORD_FILE
from distributed_training.tools import mirror
from tests.conftest import SMALL, assert_ok, clean_environment, run_command, settings
from tests.e2e.support import metrics, run_folders, running, wait_for
from tests.pool import SCRIPT

CONTENT = b"weights"
RUN = "20260101-000001-dp-x"


def save(runs, step, ranks):
    """Write the files that the node of `ranks` has of a checkpoint by two ranks."""
    folder = runs / RUN / CHECKPOINTS / checkpoint_name(step)
    folder.mkdir(parents=True)
    files = dict.fromkeys(map(rank_file_name, range(2)), len(CONTENT))
    write_meta(folder, Meta(step=step, work={}, spread={}, counters={}, files=files, checksums={}))
    for rank in ranks:
        (folder / rank_file_name(rank)).write_bytes(CONTENT)


def saved_steps(folder):
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / RUN)]


def make_nodes(tmp_path):
    """Return the mirror and the runs of two nodes. The first node has the record."""
    bucket, *nodes = folders = [tmp_path / name for name in ("bucket", "node-0", "node-1")]
    for folder in folders:
        folder.mkdir()
    (nodes[0] / RUN).mkdir()
    (nodes[0] / RUN / RECORD_FILE).write_text(json.dumps({"step": 10}))
    (nodes[0] / "latest").symlink_to(RUN)
    return bucket, nodes


def test_a_checkpoint_of_two_nodes_replaces_an_older_one_once_it_is_complete(tmp_path):
    bucket, nodes = make_nodes(tmp_path)
    for step in (10, 20):
        for rank, node in enumerate(nodes):
            save(node, step, [rank])
            assert mirror.find_complete(bucket / RUN) is None or step == 20
            mirror.push(node, bucket, "*" if rank == 0 else None)
            if rank == 0 and step == 20:
                assert saved_steps(bucket) == [10, 20]
                assert mirror.find_complete(bucket / RUN).name == checkpoint_name(10)
    assert saved_steps(bucket) == [20]
    assert {path.name for path in bucket.iterdir()} == {RUN}
    assert (bucket / RUN / RECORD_FILE).read_text() == (nodes[0] / RUN / RECORD_FILE).read_text()


def test_an_empty_machine_gets_only_the_newest_complete_checkpoint(tmp_path):
    bucket, nodes = make_nodes(tmp_path)
    save(bucket, 10, [0, 1])
    save(bucket, 20, [0, 1])
    save(bucket, 30, [1])
    shutil.copy(nodes[0] / RUN / RECORD_FILE, bucket / RUN)
    for runs in (tmp_path / "new-0", tmp_path / "new-1"):
        runs.mkdir()
        mirror.fetch(runs, bucket)
        assert saved_steps(runs) == saved_steps(bucket) == [20]
        assert mirror.find_complete(runs / RUN) is not None
        assert [path.name for path in runs.iterdir()] == [RUN]
    save(tmp_path / "new-0", 40, [0, 1])
    mirror.fetch(tmp_path / "new-0", bucket)
    assert saved_steps(tmp_path / "new-0") == [20, 40], "a machine that stays keeps its runs"


def test_a_file_that_is_only_partly_in_the_mirror_is_copied_again(tmp_path):
    bucket, nodes = make_nodes(tmp_path)
    save(nodes[0], 10, [0, 1])
    save(bucket, 10, [0, 1])
    (list_checkpoints(bucket / RUN)[0] / rank_file_name(1)).write_bytes(b"weig")
    mirror.push(nodes[0], bucket, None)
    assert mirror.find_complete(bucket / RUN) is not None


def test_a_mirror_that_is_never_complete_stays_small(tmp_path):
    """Each node saves between the copies of the other, and keeps one checkpoint."""
    bucket, nodes = make_nodes(tmp_path)
    for step in range(10, 60, 10):
        for rank, node in enumerate(nodes):
            shutil.rmtree(node / RUN / CHECKPOINTS, ignore_errors=True)
            save(node, step + 5 * rank, [rank])
            mirror.push(node, bucket, None)
    assert saved_steps(bucket) == [50, 55]


MIRROR = """
import sys
from pathlib import Path
from distributed_training.tools import mirror

_, runs, bucket, *command = sys.argv
sys.exit(mirror.main("0", Path(runs), Path(bucket), command, interval_s=0.1))
"""
# A job in whose course the mirror is a file instead of a folder, and then a folder again
JOB = """
import os, shutil, sys, time
from pathlib import Path

bucket, log, end = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
shutil.rmtree(bucket)
bucket.touch()
while "the mirror is incomplete" not in log.read_text():
    time.sleep(0.01)
if end:
    bucket.unlink()
    while not list(bucket.glob("*/checkpoints/step-*/*")):
        time.sleep(0.01)
    exec(end)
"""


@pytest.mark.parametrize(
    ("end", "expected"),
    [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 256 - 9), ("", 1)],
)
def test_a_broken_mirror_does_not_end_the_command(end, expected, tmp_path):
    """Files are copied while the command runs, as soon as the mirror can be written. If it cannot
    be written at the end, the job fails."""
    bucket, (runs, _) = make_nodes(tmp_path)
    save(runs, 10, [0, 1])
    log = tmp_path / "log"
    command = [sys.executable, "-c", MIRROR, runs, bucket]
    command += [sys.executable, "-c", JOB, bucket, log, end]
    with log.open("w") as file:
        done = subprocess.run(command, stderr=file, env=clean_environment(), timeout=60)
    assert done.returncode == expected
    if end:
        assert mirror.find_complete(bucket / RUN).name == checkpoint_name(10)


def test_a_stopped_job_continues_on_an_empty_machine(tmp_path):
    """The mirror passes SIGTERM on, so that the run saves. Without the machine's folder, the same
    command continues the run. After its end, the mirror has the model."""
    runs, bucket = tmp_path / "runs", tmp_path / "bucket"
    bucket.mkdir()
    values = {**SMALL, "num_samples": 1000, "max_steps": 60, "checkpoint_every": 10}
    values |= {"output_dir": runs, "resume": "auto"}
    command = [sys.executable, "-m", "distributed_training.tools.mirror", "0", str(runs)]
    command += [str(bucket), sys.executable, str(SCRIPT), *settings(values)]
    log = tmp_path / "log"
    with running(command, log) as process:
        wait_for(lambda: [*runs.glob("*/checkpoints/step-*")], process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    (stopped,) = run_folders(bucket)
    assert len(list_checkpoints(stopped)) == 1
    shutil.rmtree(runs)
    found = run_command(command)
    assert_ok(found)
    assert f"Fetched {stopped.name}" in found.stdout
    (run_dir,) = run_folders(bucket)
    assert run_dir == stopped
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 61))
    assert (run_dir / "hf" / "config.json").is_file()
    assert json.loads((run_dir / RECORD_FILE).read_text())["resumed_from"] is not None
