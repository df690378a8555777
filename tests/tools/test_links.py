"""Test `doctor --nodes`."""

import contextlib
import io
import os
import re

import pytest

from tests.conftest import heavy_pool


def check(processes_per_node):
    """Run `doctor --nodes` on nodes of this size, and return rank 0's output."""
    from distributed_training.start import rendezvous
    from distributed_training.start.ranks import LOOPBACK_INTERFACES
    from distributed_training.tools.links import check_nodes

    # The nodes of this test share the loopback interface.
    rendezvous._use_interface = lambda *arguments: os.environ.update(LOOPBACK_INTERFACES)
    local_rank = int(os.environ["RANK"]) % processes_per_node
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(processes_per_node))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert check_nodes() == 0
    return output.getvalue()


@pytest.mark.parametrize(
    ("processes_per_node", "receivers"), [(4, [1, 2, 3, 0]), (2, [2, 3, 0, 1])]
)
def test_each_process_sends_to_the_next_node(processes_per_node, receivers):
    output = heavy_pool().call("tests.tools.test_links:check", processes_per_node, num_processes=4)
    found = re.findall(r"rank (\d) \(\S+\) to (\d) \(\S+\): (\S+) Gbit/s", output)
    assert [(int(sender), int(receiver)) for sender, receiver, _ in found] == [
        *enumerate(receivers)
    ]
    speeds = [float(speed) for _, _, speed in found]
    network = re.findall(r"--network_gbit (\S+)", output)
    assert list(map(float, network)) == ([min(speeds)] if processes_per_node == 2 else [])
