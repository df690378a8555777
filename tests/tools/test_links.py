"""Test `doctor --nodes`."""

import re

from tests.conftest import assert_ok, heavy_pool


def test_each_process_measures_the_link_to_the_next():
    result = heavy_pool().script(["doctor", "--nodes"], num_processes=3)
    assert_ok(result)
    links = result.stdout.splitlines()[:2]
    found = [re.match(r"rank (\d) \(\S+\) to (\d) \(\S+\): ([\d,]+) us, ([\d.e+]+) Gbit/s", line)
             for line in links]  # fmt: skip
    assert [(int(match[1]), int(match[2])) for match in found] == [(0, 1), (1, 2)]
    assert all(float(match[4]) > 0.01 for match in found)
