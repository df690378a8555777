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


@pytest.mark.parametrize("processes_per_node", [4, 2])
def test_the_slowest_link_is_printed_and_is_the_networks_if_there_are_nodes(processes_per_node):
    output = heavy_pool().call("tests.tools.test_links:check", processes_per_node, num_processes=4)
    distance = 1 if processes_per_node == 4 else 2
    pattern = r"The slowest of 4 links is rank (\d) \(\S+\) to rank (\d): (\S+) Gbit/s"
    ((sender, receiver, speed),) = re.findall(pattern, output)
    assert int(receiver) == (int(sender) + distance) % 4
    network = re.findall(r"--network_gbit (\S+)", output)
    assert network == ([speed] if processes_per_node == 2 else [])
