"""Test the text form of operations, the CSV form of orders, and consecutive batches."""

from pathlib import Path

import pytest
from pipedream.errors import UserError
from pipedream.schedules.ops import Schedule, load_csv, save_csv
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.simulate.measures import peak_activations

SIZES = {"dualpipe-v": (3, 7)}


def built(name: str) -> Schedule:
    return build_schedule(name, *SIZES.get(name, (3, 6)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_saved_order_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    saved = built(name)
    save_csv(saved, tmp_path / f"{saved.name}.csv")
    loaded = load_csv(tmp_path / f"{saved.name}.csv")
    assert loaded == saved


def test_trailing_blank_lines_are_not_ranks(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n\n\n")
    loaded = load_csv(path)
    assert loaded.num_ranks == 2
    assert peak_activations(loaded) == (1, 1)
    path.write_text("0F0,0B0\n\n1F0,1B0\n")  # rank 1 is idle
    assert peak_activations(load_csv(path)) == (1, 0, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0,0B0\n1F0,oops\n", "line 2: 'oops' is not an operation; write it as 2F0, 2B0, 2I0"),
        (b"(0F1;0F0)OVERLAP_F_B\n", "line 1: .* is not an operation"),
        (b"\n,\n", "has no operations; write cells such as 0F0 and 0B0"),
        (b"0F0,1B0\n1F0,0B0\n", "runs stage 1 on ranks 0 and 1; write all operations of a stage"),
        (b"999999999F0\n", "has a stage 999999999 but no stage 0; number the stages from 0"),
        (b"0F0,0B0\n2F0,2B0\n", "has a stage 2 but no stage 1; number"),
        (bytes(range(256)), "is not a CSV file; use one written by --csv or torch"),
        (b"0F" + b"1" * 9_000 + b"\n", "line 1: '0F1111"),
    ],
)
def test_invalid_orders_are_refused_with_their_location(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_csv(path)
