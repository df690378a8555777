"""Test that a run on one machine listens only on loopback and never executes data that it
receives."""

import ipaddress
import os
import pickle
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import SMALL
from tests.e2e.support import launcher_command, run_folders, running, wait_for

LONG = {**SMALL, "num_samples": 1200, "epochs": 80, "checkpoint_every": 0}


@dataclass
class Trap:
    """Creates a folder at the path `file` when unpickled."""

    file: Path

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_a_run_listens_only_on_loopback_and_executes_no_received_data(tmp_path):
    log, output_dir, sprung = tmp_path / "log", tmp_path / "runs", tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung))
    pickle.loads(trap)
    sprung.rmdir()
    values = {**LONG, "strategy": "zero2", "output_dir": output_dir}
    with running(launcher_command("spawn", values), log) as launcher:

        def num_rows():
            files = list(output_dir.glob("*/metrics.jsonl"))
            return len(files[0].read_text().splitlines()) if files else 0

        wait_for(num_rows, launcher, log)
        tree = psutil.Process(launcher.pid)
        ranks = tree.children(recursive=True)
        open_at = [
            end.laddr
            for process in (tree, *ranks)
            for end in process.net_connections("inet")
            if end.status == psutil.CONN_LISTEN
        ]
        assert open_at, "gloo connects the ranks"
        assert all(ipaddress.ip_address(end.ip).is_loopback for end in open_at), open_at
        for end in set(open_at):
            with socket.create_connection((end.ip, end.port), 30) as connection:
                connection.sendall(trap)
        seen = num_rows()
        wait_for(lambda: num_rows() > seen, launcher, log)
        launcher.terminate()
        assert launcher.wait(timeout=120) == 143, log.read_text()
    assert len(run_folders(output_dir)) == 1
    assert not sprung.exists()
