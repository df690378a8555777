"""Simulate nodes as network namespaces, each with its own address, host name and disk. The kernel
removes the namespaces, links and mounts when the last process inside them ends, because nothing
outside refers to them."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_WAIT_SCRIPT = "echo ready; exec cat"
_SWITCH_SCRIPT = f"ip link add switch type bridge; ip link set switch up; {_WAIT_SCRIPT}"
# Mount the node's disk, and map its name to loopback as on Debian.
_NODE_SCRIPT = f"""
mount --make-rprivate /
mount -t tmpfs own "$1"
mount --bind "$2" /etc/hosts
hostname "$3"
{_WAIT_SCRIPT}
"""
_LINK_SCRIPT = "ip addr add {} dev eth0; ip link set eth0 up; ip link set lo up"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine in a cluster. `private_folder` is not shared with the other nodes."""

    name: str
    pid: int  # id of the process that keeps the node's namespaces alive
    switch: int  # id of the process that keeps the switch's namespace alive
    private_folder: Path

    def outside(self, path: Path) -> Path:
        """Return the path at which processes outside this node see the node's `path`."""
        return Path(f"/proc/{self.pid}/root{path}")


def unplug(switch: int, name: str) -> None:
    """Disconnect a node from the switch."""
    _run(*_inside(switch, "--net"), "ip", "link", "set", name, "down")


def _inside(pid: int, *namespaces: str) -> list[str]:
    return ["nsenter", "--target", str(pid), *namespaces, "--"]


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def cluster(folder: Path, count: int = 2) -> Iterator[list[Node]]:
    """Start `count` nodes that are connected to one switch and are named node0, node1, and so on.
    The nodes share `folder`, except for its subfolder own/."""
    private_folder = folder / "own"
    private_folder.mkdir()
    with contextlib.ExitStack() as cleanup:

        def start_holder(*command: object) -> int:
            """Start a command that prints "ready" and then waits until its input ends. Return its
            process ID."""
            process = subprocess.Popen(
                [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE, text=True,
            )  # fmt: skip
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            assert process.stdout is not None
            first_line = process.stdout.readline().strip()
            if first_line != "ready":
                raise OSError(first_line)
            return process.pid

        try:
            switch = start_holder("unshare", "--net", "sh", "-ec", _SWITCH_SCRIPT)
            nodes = []
            for index in range(count):
                addresses = [f"10.0.0.{node + 1}" for node in range(count)]
                link = _LINK_SCRIPT.format(f"{addresses[index]}/24")
                addresses[index] = "127.0.1.1"
                lines = [f"{address} node{node}" for node, address in enumerate(addresses)]
                hosts = folder / f"hosts{index}"
                hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
                name = f"node{index}"
                in_switch = _inside(switch, "--net")
                spaces = ("unshare", "--net", "--mount", "--uts")
                pid = start_holder(
                    *in_switch,
                    *spaces,
                    "sh",
                    "-ec",
                    _NODE_SCRIPT,
                    "sh",
                    private_folder,
                    hosts,
                    name,
                )
                peer = ("peer", "name", "eth0", "netns", pid)
                _run(*in_switch, "ip", "link", "add", name, "type", "veth", *peer)
                _run(*in_switch, "ip", "link", "set", name, "master", "switch", "up")
                _run(*_inside(pid, "--net"), "sh", "-ec", link)
                nodes.append(Node(name=name, pid=pid, switch=switch, private_folder=private_folder))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"no network namespaces here: {getattr(error, 'stderr', None) or error}"
            assert "CI" not in os.environ, reason
            pytest.skip(reason)
        yield nodes
