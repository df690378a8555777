"""Test that an error names the failed stage and that no processes are left behind."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from pipedream.errors import UserError
from pipedream.runtime.launch import WEIGHTS_DIFFER, this_rank
from pipedream_runtime import read_config
from starting import ENVIRONMENT, FAST, FOLDER, SCRIPT, last_line, no_process_is_left, run  # noqa: F401

ENDS_WITHIN_S = 25  # less than the 30 s after which torchrun kills a process

# The first case is short and reports its end. The second case takes minutes.
ENDLESS = [
    "--num_stages=3", "--schedule=pipedream", "--num_microbatches=4,4096", "--num_batches=1",
    "--warmups=0", "--check_weights=False",
]  # fmt: skip


def _start_endless(*more, start=SCRIPT):
    process = subprocess.Popen(
        [*start, *ENDLESS, *more], cwd=FOLDER, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    for line in process.stdout:
        if "pipedream, m=4:" in line:
            time.sleep(0.7)
            return process
    raise AssertionError(process.communicate()[1])


def _kill(process, rank):
    """Kill a stage and wait until all processes have ended. Return the stage's process ID, and the
    stderr output of all processes."""
    children = psutil.Process(process.pid).children(recursive=True)
    victim = sorted(child.pid for child in children)[rank]  # ranks start in order
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 1
    return victim, errors


WEIGHTS_DIFFER_SCRIPT = """
import sys
import pipedream_runtime
from pipedream.runtime import session
session._bitwise_equal = lambda *pair: False
pipedream_runtime.start(sys.argv[1:])
"""


@pytest.mark.timeout(90)
def test_weights_that_differ_from_one_process_fail_the_run():
    arguments = [
        "--num_stages=2",
        "--schedule=gpipe",
        "--num_microbatches=2",
        *FAST,
        "--check_weights=True",
    ]
    result = run(arguments, start=[sys.executable, "-c", WEIGHTS_DIFFER_SCRIPT])
    assert result.returncode == WEIGHTS_DIFFER
    assert "DIFFER" in result.stdout
    message = "The weights trained under these schedules differ from those of one process: gpipe"
    assert last_line(result.stderr) == f"error: {message}"


@pytest.mark.timeout(90)
def test_a_killed_stage_ends_the_others_and_is_named():
    victim, errors = _kill(_start_endless(), 2)
    assert last_line(errors).startswith(
        f"error: stage 2 of 3 (process {victim}) was killed by SIGKILL"
    )
    # The error is not hidden among other lines.
    assert len(errors.strip().splitlines()) <= 10, errors


@pytest.mark.timeout(90)
def test_all_stages_end_if_the_parent_is_killed(tmp_path):
    """If the parent is killed, all stages end, and the record still contains the first case."""
    record = tmp_path / "record.json"
    process = _start_endless("--record", str(record))
    end = time.monotonic() + 60
    while not record.exists():
        assert time.monotonic() < end, "no record after 60 s"
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 3
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=ENDS_WITHIN_S)
    assert not alive
    (case,) = json.loads(record.read_text())["cases"]
    assert case["num_microbatches"] == 4
    assert list(tmp_path.iterdir()) == [record]


USER_ERROR_SCRIPT = """
import time
from pipedream.errors import UserError
from pipedream.runtime.launch import launch
def body(rank):
    if rank == 0:
        raise UserError("no", "yes")
    time.sleep(60)
assert [launch(body, 4) for _ in range(20)] == [2] * 20
"""


def test_a_stage_with_an_immediate_error_ends_the_other_stages():
    """The other stages must end even if they have only just been forked."""
    result = run(["-c", USER_ERROR_SCRIPT], start=[sys.executable], limit_s=60)
    assert (result.returncode, set(result.stderr.splitlines())) == (0, {"error: no; yes"})


@pytest.mark.timeout(90)
def test_stages_listen_only_on_loopback():
    """Stages listen only on loopback, even if the host name has an address that other machines can
    reach."""
    addresses = [a.address for own in psutil.net_if_addrs().values() for a in own if a.family == 2]
    external_address = next(
        (address for address in addresses if not address.startswith("127.")), ""
    )
    rename = ["unshare", "--uts", "sh", "-c", f'hostname {external_address}; exec "$@"', "sh"]
    if not external_address or subprocess.run([*rename, "true"], check=False).returncode:
        pytest.skip("needs a network, and the right to rename the machine")
    process = _start_endless(start=[*rename, *SCRIPT])
    stages = psutil.Process(process.pid).children()
    ends = [end for stage in stages for end in stage.net_connections()]
    process.terminate()
    process.communicate()
    assert {end.laddr.ip for end in ends if end.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


@pytest.mark.timeout(90)
def test_torchrun_ends_the_others_and_names_the_killed_stage():
    """Stage 2 must also end, although the killed stage 0 is not its neighbor."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=3"]
    start = [*torchrun, "pipedream_runtime.py", "--device=cpu"]
    _, errors = _kill(_start_endless(start=start), 0)
    root_cause = errors[errors.index("Root Cause") :]  # torchrun's summary
    assert "rank      : 0 " in root_cause
    assert "exitcode  : -9" in root_cause


FAILING_STAGE_SCRIPT = """
import os, sys
import pipedream_runtime
import pipedream.train.trainer
whole = pipedream.train.trainer.StageTrainer.weight_gradient
def backward(self, microbatch):
    if os.environ["RANK"] == "1" and microbatch == 5:
        raise ValueError("boom in microbatch 5")
    whole(self, microbatch)
pipedream.train.trainer.StageTrainer.weight_gradient = backward
pipedream_runtime.start(sys.argv[1:])
"""


@pytest.mark.timeout(90)
def test_a_stage_that_raises_ends_the_others_and_is_named():
    arguments = ["--device=cpu", "--num_stages=3", "--schedule=1f1b", "--warmups=0", *FAST]
    result = run(["-c", FAILING_STAGE_SCRIPT, *arguments], start=[sys.executable])
    assert result.returncode == 1
    assert last_line(result.stderr) == (
        "error: stage 1 of 3 failed: ValueError: boom in microbatch 5. "
        "The other stages are being stopped"
    )
    assert "in backward" in result.stderr  # from the traceback before the error
    assert "stage 0" not in result.stderr
    assert "stage 2" not in result.stderr


NO_PICKLE = """
import pickle, sys
class Rejected(pickle.Unpickler):
    def __init__(self, *args, **kwargs):
        raise RuntimeError("unpickled")
pickle.Unpickler = Rejected
pickle.load = pickle.loads = Rejected
import pipedream_runtime
pipedream_runtime.start(sys.argv[1:])
"""


@pytest.mark.timeout(90)
def test_stages_unpickle_nothing(tmp_path):
    """Unpickling can execute code, so results, orders and weights are sent in other formats."""
    arguments = ["--device=cpu", "--num_stages=2", "--schedule=zb-h1,search", *FAST]
    weights = ["--num_microbatches=2", "--weights", str(tmp_path / "weights.pt")]
    result = run(["-c", NO_PICKLE, *arguments, *weights], start=[sys.executable])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--calibrate_on=5"], "calibrate_on=5 is not among num_microbatches=4,8"),
        (["--record", "/no/such/folder/x.json"], "create it first"),
        (["--record", "/tmp"], "--record /tmp is a folder; add a file's name"),
    ],
)
def test_invalid_values_are_refused_before_a_stage_starts(arguments, words):
    with pytest.raises(UserError, match=words):
        read_config(arguments)


def test_a_launcher_must_start_one_process_per_stage():
    environment = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert this_rank({}, 4) is None
    assert this_rank(environment, 3) == 1
    with pytest.raises(UserError, match="3 processes were started for num_stages=4"):
        this_rank(environment, 4)
    with pytest.raises(UserError, match="unset RANK"):
        this_rank({"RANK": "1", "WORLD_SIZE": "3"}, 3)
    with pytest.raises(UserError, match="more than one machine"):
        this_rank(environment | {"LOCAL_WORLD_SIZE": "2"}, 3)
