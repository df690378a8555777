"""The drawings of what lies where, against what each strategy divides."""

from __future__ import annotations

import pytest

from results.lab.pages.drawing import drawing
from results.lab.pages.laws import GIB

N = 1_557_611_200  # parameters of gpt2-xl
ALL, QUARTERS = ["████████"] * 4, ["██······", "··██····", "····██··", "······██"]


def rows(strategy):
    """Label without its size -> (size, cells by rank), and the words of the last two rows."""
    lines = [line for line in drawing(strategy).splitlines()[3:] if not line.startswith("```")]
    cells = {line[:34].strip(): line[34:].split() for line in lines if line}
    *state, blocks, samples = cells.items()
    sized = {label.rpartition(" ")[0]: (label.rpartition(" ")[2], bars) for label, bars in state}
    return sized, blocks[1], samples[1]


def gib(bytes_a_parameter):
    return f"{bytes_a_parameter * N / GIB:.1f}"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("dp", {"parameters": (4, ALL), "gradients": (4, ALL), "optimizer": (8, ALL)}),
        ("zero2", {"parameters": (2, ALL), "gradients": (0.5, QUARTERS),
                   "optimizer": (3, QUARTERS)}),
        ("offload", {"parameters": (2, ALL), "RAM: optimizer, gradients": (4, QUARTERS)}),
        ("infinity", {"RAM: gradients": (1, QUARTERS),
                      "files: parameters, optimizer": (3.5, QUARTERS)}),
    ],
)  # fmt: skip
def test_state_where_processes_see_other_samples(strategy, expected):
    """Bytes a parameter by the laws of the strategies' pages."""
    found, blocks, samples = rows(strategy)
    assert found == {label: (gib(size), bars) for label, (size, bars) in expected.items()}
    assert (blocks, samples) == (["48"] * 4, ["1/4"] * 4)
