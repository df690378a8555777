"""Test that lecture.ipynb runs as committed, and that its checks distinguish right from wrong
answers."""

import re
import runpy
from fractions import Fraction
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient
from pipedream.config import FOLDER
from pipedream.lecture import checks
from pipedream.lecture.pictures import agree
from pipedream.schedules.ops import repeat
from pipedream.schedules.orders import build_schedule

CHECKS = {  # the other solution, 9_order.py, belongs to pipeline_by_hand.py
    "1_enough_microbatches": checks.check_microbatches,
    "2_swapped_receive": checks.check_run_batch,
    "3_averaged_twice": checks.check_batch_gradient,
    "4_1f1b": checks.check_one_f_one_b,
    "5_missing_flush": checks.check_batches,
    "6_in_place_update": checks.check_update,
    "7_two_halves": checks.check_halves,
    "8_place_w": checks.check_zero_bubble,
}


def cell_text(cell: Any) -> str:
    """Return the text that a cell printed and displayed."""
    printed = [out["text"] for out in cell.outputs if out.output_type == "stream"]
    shown = [out["data"]["text/plain"] for out in cell.outputs if "data" in out]
    return "".join(printed + shown)


def test_notebook_shows_answers_after_guesses_and_accepts_the_solutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the notebook as committed, without answers or solutions. Then run the notebook again in
    the same kernel, with guesses and solutions."""
    book = nbformat.read(FOLDER / "lecture.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))  # instead of the user's kernels and settings
    timeouts = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), 240)
    client = NotebookClient(book, resources={"metadata": {"path": str(FOLDER)}}, **timeouts)
    solutions = {name: (FOLDER / f"solutions/{name}.py").read_text() for name in CHECKS}
    question_cells = [cell for cell in book.cells if "\nguess = None" in "\n" + cell.source]
    assert len(question_cells) == 10
    with client.setup_kernel():
        for index, cell in enumerate(book.cells):
            client.execute_cell(cell, index)
            if cell in question_cells:
                assert cell_text(cell).endswith(
                    "write your guess instead of None, and run this cell again\n"
                )
            if "check" in cell.metadata:
                assert cell_text(cell).startswith("Not solved yet: ")
            if "measured" in cell.metadata.get("tags", ()):
                rows = [line.split() for line in cell_text(cell).splitlines()]
                equal = [row[0] for row in rows if row[-1:] == ["equal"]]
                assert equal == ["1f1b*", "zb-h1"]
        for index, cell in enumerate(book.cells):
            if "exercise" in cell.metadata:
                cell.source = solutions[cell.metadata["exercise"]]
            if cell in question_cells:
                cell.source = cell.source.replace("guess = None", "guess = 42")
            if {"exercise", "check"} & cell.metadata.keys() or cell in question_cells:
                client.execute_cell(cell, index)
    assert all("(your guess: 42, not right)" in cell_text(cell) for cell in question_cells)
    pictures = [
        out for cell in question_cells for out in cell.outputs if "image/png" in out.get("data", {})
    ]
    assert len(pictures) == 4
    checked = {c.metadata["check"]: cell_text(c) for c in book.cells if "check" in c.metadata}
    assert checked.keys() == CHECKS.keys()
    assert all(text.startswith("Right: ") for text in checked.values()), checked


def solution(name: str, function: str) -> Any:
    return runpy.run_path(str(FOLDER / f"solutions/{name}.py"))[function]


ORDER = solution("8_place_w", "zero_bubble_order")
I_HALF = solution("7_two_halves", "input_gradient")


def late_weights(p: int, m: int, r: int) -> list[str]:
    """Return an order with every W at the end. Its makespan is short, but it frees no memory before
    the first W."""
    return [op for op in ORDER(p, m, r) if op[0] != "W"] + [f"W{i}" for i in range(m)]


def two_stages(scale: int = 1, forget: int = 0, order: Any = range) -> Any:
    """Return a program for exercise 2. The arguments scale the loss, omit the last backward passes,
    or change the order of stage 0's backward passes."""

    def run_batch(stages: Any, microbatches: Any) -> None:
        there, back = checks.Channel(), checks.Channel()
        m, outputs, inputs, losses = len(microbatches), [], [], []
        for x, target in microbatches:
            outputs.append(stages[0](x))
            there.send(outputs[-1])
            inputs.append(there.receive())
            losses.append(torch.nn.functional.cross_entropy(stages[1](inputs[-1]), target))
        for i in range(m - forget):
            (losses[i] * scale / m).backward()
            back.send(inputs[i].grad)
        for i in order(m):
            outputs[i].backward(back.receive())

    return run_batch


def averaged_twice(model: Any, microbatches: Any) -> list[torch.Tensor]:
    found = solution("3_averaged_twice", "batch_gradient")(model, microbatches)
    return [gradient / len(microbatches) for gradient in found]


def sub_in_place(weights: Any, steps: Any, rate: float) -> Any:
    with torch.no_grad():
        for name, step in steps.items():
            weights[name].sub_(rate * step)
    return weights


def new_data(weights: Any, steps: Any, rate: float) -> Any:
    for name, step in steps.items():
        weights[name].data = weights[name].data - rate * step
    return weights


def test_checks_accept_numpy_numbers_and_dicts_updated_in_place() -> None:
    right = solution("1_enough_microbatches", "microbatches_needed")
    for kind in (np.float32, np.int64, float, Fraction):
        assert checks.check_microbatches(lambda p, x, kind=kind: kind(right(p, x))).solved
    update = lambda w, g, rate: w.update({k: w[k] - rate * g[k] for k in g}) or w  # noqa: E731
    assert checks.check_update(update).solved


WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("1_enough_microbatches", (lambda p, percent: p * percent,), "enough, but so is a smaller"),
    ("1_enough_microbatches", (lambda p, percent: 1,), "Then 75.0% of the time is idle"),
    ("1_enough_microbatches", (lambda p, percent: "3",), "'3', which is not a whole"),
    ("2_swapped_receive", (two_stages(order=lambda m: reversed(range(m))),), "0% on stage 1"),
    ("2_swapped_receive", (two_stages(scale=2),), "100% on stage 0 and by 100%"),
    ("2_swapped_receive", (two_stages(forget=1),), "waits forever"),
    ("3_averaged_twice", (averaged_twice,), "0.25 times as long"),
    ("4_1f1b", (lambda p, m, r: [f"{k}{i}" for k in "FB" for i in range(m)],), "holds 8"),
    ("4_1f1b", (lambda p, m, r: [f"{k}{i}" for i in range(m) for k in "FB"],), "33 is possible"),
    ("4_1f1b", (lambda p, m, r: [f"{k}{i}" for k in "BF" for i in range(m)],), "cannot run"),
    ("4_1f1b", (lambda p, m, r: ["forward"],), "'forward' is not an operation"),
    ("5_missing_flush", (lambda p, m, n: build_schedule("1f1b", p, m * n),), "runs F4, of batch 1"),
    ("5_missing_flush", (lambda p, m, n: build_schedule("naive", p, m * n),), "right weights, but"),
    ("5_missing_flush", (lambda p, m, n: repeat(build_schedule("gpipe", p, m), n),), "hold more"),
    ("6_in_place_update", (sub_in_place,), "autograd rejects"),
    ("6_in_place_update", (new_data,), "different weights from their forward"),
    ("6_in_place_update", (lambda w, g, rate: None,), "must return a dict"),
    ("7_two_halves", (lambda dy, y, w: (w @ dy, dy), lambda x, dz: x.T @ dz), "your code raises"),
    ("7_two_halves", (I_HALF, lambda x, dz: dz.T @ x), r"shape \[4, 3\]"),
    ("7_two_halves", (lambda dy, y, w: (dy @ w.T, dy), lambda x, dz: x.T @ dz), "between Y and"),
    ("8_place_w", (late_weights,), "holds 8 microbatches, more than 4"),
    ("8_place_w", (lambda p, m, r: ORDER(p, m, 0),), "holds|27 is possible"),
]  # fmt: skip


LAST = "stage 3, the last one"


@pytest.mark.parametrize(
    ("guess", "found", "right"),
    [
        *((guess, Fraction(3, 4), True) for guess in (0.75, 75, "75%", "3/4")),
        (0.25, Fraction(3, 4), False), (33, Fraction(33), True), (32, Fraction(33), False),
        ("the same", "the same", True), ("same", "the same", True), ("close", "the same", False),
        ([8, 4], [8, 4], True), ("8 and 4", [8, 4], True), ([4, 8], [8, 4], False),
        ([27, 0.6], ["27.0%", "0.6%"], True), ([0, 0], ["5.9%", "0.0%"], False), (3, 3, True),
        ([27, 5], [27], False), ("about 240", 240, True),
        *((guess, LAST, True) for guess in (3, "last", "the last one", "stage 3")),
        (0, LAST, False), ("first", LAST, False), ("", 3, False),
    ],
)  # fmt: skip
def test_guesses_are_compared_with_the_result(guess: object, found: object, right: bool) -> None:
    assert agree(guess, found) == right


@pytest.mark.parametrize(("name", "answers", "said"), WRONG)
def test_typical_wrong_answers_are_refused(name: str, answers: tuple[Any, ...], said: str) -> None:
    verdict = CHECKS[name](*answers)
    assert not verdict.solved
    assert repr(verdict).startswith("Not solved yet: ")
    assert re.search(said, verdict.text), verdict.text
