"""Nodes that are network namespaces: each with an address, a host name and a disk of its own.

Nothing has a name outside: namespaces, links and mounts go when the last process in them ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# What a node does before it waits: its disk, and its own name at loopback as on Debian.
_SET_UP = """
set -e
mount --make-rprivate /
mount -t tmpfs own "$1"
mount --bind "$2" /etc/hosts
hostname "$3"
echo ready
exec cat
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine of a cluster; `own` is a folder with other files on each of them."""

    name: str
    pid: int  # of the process that keeps its namespaces
    switch: int  # of the one that keeps the switch's
    own: Path

    def command(self, command: Sequence[object]) -> list[str]:
        """The same, typed on this node."""
        own = [f"TMPDIR={self.own}", f"HOME={self.own}"]
        return [*_inside(self.pid, "--net", "--mount", "--uts"), "env", *own, *map(str, command)]

    def outside(self, path: Path) -> Path:
        """The same file or folder for a process that is not on this node."""
        return Path(f"/proc/{self.pid}/root{path}")

    def unplug(self) -> None:
        """Pull its cable out of the switch."""
        _run(*_inside(self.switch, "--net"), "ip", "link", "set", self.name, "down")


def _inside(pid: int, *namespaces: str) -> list[str]:
    return ["nsenter", "--target", str(pid), *namespaces, "--"]


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def cluster(folder: Path, count: int = 2) -> Iterator[list[Node]]:
    """So many nodes on one switch, named node0, node1, ...; `folder` is shared but for own/."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    own = folder / "own"
    own.mkdir()
    with contextlib.ExitStack() as ends:

        def keep(*command: object) -> int:
            """The process id of a command that says a line and stays until its input ends."""
            process = subprocess.Popen(
                [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE, text=True,
            )  # fmt: skip
            ends.callback(process.wait)
            ends.callback(process.kill)
            assert process.stdout is not None
            said = process.stdout.readline().strip()
            if said != "ready":
                raise OSError(said)
            return process.pid

        try:
            if missing:
                raise OSError(f"{missing[0]} is not installed")
            shell = ("sh", "-c", "echo ready; exec cat")
            switch = keep("unshare", "--net", *shell)
            inside = _inside(switch, "--net")
            _run(*inside, "ip", "link", "add", "switch", "type", "bridge")
            _run(*inside, "ip", "link", "set", "switch", "up")
            nodes = []
            for place in range(count):
                hosts = [f"{'127.0.1.1' if i == place else f'10.0.0.{i + 1}'} node{i}"
                         for i in range(count)]  # fmt: skip
                file = folder / f"hosts{place}"
                file.write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
                unshare = ("unshare", "--net", "--mount", "--uts", "sh", "-c", _SET_UP, "sh")
                pid = keep(*_inside(switch, "--net"), *unshare, own, file, f"node{place}")
                node = Node(name=f"node{place}", pid=pid, switch=switch, own=own)
                peer = ("peer", "name", "eth0", "netns", pid)
                _run(*inside, "ip", "link", "add", node.name, "type", "veth", *peer)
                _run(*inside, "ip", "link", "set", node.name, "master", "switch", "up")
                address = ("ip", "addr", "add", f"10.0.0.{place + 1}/24", "dev", "eth0")
                for command in (address, ("ip", "link", "set", "eth0", "up"),
                                ("ip", "link", "set", "lo", "up")):  # fmt: skip
                    _run(*_inside(pid, "--net"), *command)
                nodes.append(node)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"no network namespaces here: {getattr(error, 'stderr', None) or error}"
            assert "CI" not in os.environ, reason
            pytest.skip(reason)
        yield nodes
