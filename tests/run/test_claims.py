"""Who has a run's folder."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time

import psutil
import pytest

from distributed_training.run.saving import claims
from tests.support import refused

IDENTITY = {"strategy": "dp", "seed": 1}


@pytest.fixture
def other():
    """Another process of this host."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def claim_as(run_dir, **changes):
    run_dir.mkdir(exist_ok=True)
    claims.claim(run_dir, IDENTITY)
    file = run_dir / claims.OWNER_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_run_belongs_to_who_took_it_while_that_process_lives(tmp_path, other):
    run_dir = tmp_path / "a"
    claim_as(run_dir, pid=other.pid)
    here = f"process {other.pid} on {platform.node()}"
    for refuse in (
        lambda: claims.refuse_held(run_dir),
        lambda: claims.claim(run_dir, IDENTITY),
        lambda: claims.refuse_doubling(tmp_path, IDENTITY),
    ):
        with refused("is going on", here, "resume=None"):
            refuse()
    claims.refuse_doubling(tmp_path, {**IDENTITY, "seed": 2})
    other.kill()
    while psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    claims.refuse_doubling(tmp_path, IDENTITY)  # dead, though nobody has reaped it
    claims.claim(run_dir, IDENTITY)
    assert json.loads((run_dir / claims.OWNER_FILE).read_text())["pid"] == os.getpid()
    claims.refuse_held(run_dir)  # one's own


def test_a_reused_number_and_a_broken_file_hold_nothing(tmp_path, other):
    claim_as(tmp_path / "a", pid=other.pid, claimed_at=time.time() - 3600)
    claims.refuse_held(tmp_path / "a")
    (tmp_path / "a" / claims.OWNER_FILE).write_text("{")
    claims.refuse_held(tmp_path / "a")
    claims.claim(tmp_path / "a", IDENTITY)
    assert json.loads((tmp_path / "a" / claims.OWNER_FILE).read_text())["pid"] == os.getpid()
    claims.release(tmp_path / "a")
    claims.release(tmp_path / "a")
    assert not (tmp_path / "a" / claims.OWNER_FILE).exists()


@pytest.mark.parametrize("end", ["renewed", "released", "silent"])
def test_on_another_host_it_is_renewed_or_nobodys(end, tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "RENEWED_S", 2.0)
    claim_as(tmp_path / "a", hostname="another-host")
    does = {"renewed": claims.renew, "released": claims.release, "silent": lambda _: None}[end]
    timer = threading.Timer(0.3, does, [tmp_path / "a"])
    timer.start()
    if end == "renewed":
        with refused("is going on", "on another-host"):
            claims.refuse_held(tmp_path / "a")
    else:
        claims.refuse_held(tmp_path / "a")
    timer.join()
