"""The drawings of what lies where, against what each strategy divides."""

import pytest

from results.lab.pages.drawing import drawing
from results.lab.pages.laws import GIB

N = 1_557_611_200  # parameters of gpt2-xl
ALL, QUARTERS = ["████████"] * 4, ["██······", "··██····", "····██··", "······██"]


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
    rows = [f"{label} {gib(size)} {' '.join(bars)}" for label, (size, bars) in expected.items()]
    text = " ".join(drawing(strategy).split())
    for row in (*rows, " 48 48 48 48 ", " 1/4 1/4 1/4 1/4"):
        assert row in text
