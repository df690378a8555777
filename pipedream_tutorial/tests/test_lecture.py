"""lecture.ipynb: its outputs are those of a run, and its checks tell right answers from wrong ones.

After a change of the notebook, in its folder: jupyter execute --inplace lecture.ipynb
"""

import ast
import re
import runpy
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from pipedream.config import FOLDER
from pipedream.draw.animations import ANIMATIONS, between, stack
from pipedream.draw.grid import draw_grid
from pipedream.draw.page import new_figure
from pipedream.draw.stashing import versions_at, weight_stashing
from pipedream.lecture import gradients, orders
from pipedream.lecture.verdict import Verdict
from pipedream.schedules.ops import repeat
from pipedream.schedules.orders import gpipe, naive, one_f_one_b
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.measures import times_of

SOLUTIONS = sorted((FOLDER / "solutions").glob("*.py"))
CHECKS = {
    "1_idle_share": orders.check_idle_share,
    "2_swapped_receive": gradients.check_run_batch,
    "3_averaged_twice": gradients.check_batch_gradient,
    "4_1f1b": orders.check_one_f_one_b,
    "5_missing_flush": orders.check_batches,
    "6_in_place_update": gradients.check_update,
    "7_two_halves": gradients.check_halves,
    "8_place_w": orders.check_zero_bubble,
}


def notebook() -> Any:
    return nbformat.read(FOLDER / "lecture.ipynb", as_version=4)


def texts(cell: Any) -> list[str]:
    """What a cell printed, and the text of what it showed."""
    printed = "".join(out["text"] for out in cell.outputs if out.output_type == "stream")
    shown = [out["data"]["text/plain"] for out in cell.outputs if "data" in out]
    if "measured" in cell.metadata.get("tags", ()):
        lines = [line.split() for line in printed.splitlines()]
        return [f"{line[0]} {line[-1]}" for line in lines if line[-1:] == ["equal"]]
    return [printed, *shown]


def test_outputs_are_those_of_a_run_and_solutions_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As committed, with no exercise solved; then, in the same kernel, the exercises with their
    solutions filled in."""
    shipped, book = notebook(), notebook()
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))  # not the user's own kernels and settings
    patience = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), 240)
    client = NotebookClient(book, resources={"metadata": {"path": str(FOLDER)}}, **patience)
    solutions = {path.stem: path.read_text() for path in SOLUTIONS}
    with client.setup_kernel():
        for index, cell in enumerate(book.cells):
            client.execute_cell(cell, index)
            if cell.cell_type == "code":
                assert texts(cell) == texts(shipped.cells[index])
        for index, cell in enumerate(book.cells):
            if "exercise" in cell.metadata:
                cell.source = solutions[cell.metadata["exercise"]]
            if {"exercise", "check"} & cell.metadata.keys():
                client.execute_cell(cell, index)
    checked = {c.metadata["check"]: texts(c)[-1] for c in book.cells if "check" in c.metadata}
    assert checked.keys() == solutions.keys() == CHECKS.keys()
    assert all(text.startswith("Right: ") for text in checked.values()), checked


def test_every_exercise_is_shipped_unsolved_and_said_to_be() -> None:
    cells = [cell for cell in notebook().cells if cell.cell_type == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    found = {c.metadata["check"]: texts(c)[-1] for c in cells if "check" in c.metadata}
    assert found.keys() == CHECKS.keys()
    assert all(text.startswith("Not solved yet: ") for text in found.values())
    for path in SOLUTIONS:
        (cell,) = (c for c in cells if c.metadata.get("exercise") == path.stem)
        asked, solved = (
            [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
            for text in (cell.source, path.read_text())
        )
        signatures = [[(f.name, ast.dump(f.args)) for f in fs] for fs in (asked, solved)]
        assert signatures[0] == signatures[1], path
        assert ast.dump(asked[-1]) != ast.dump(solved[-1]), path


def test_the_measured_run_is_shown() -> None:
    (cell,) = (c for c in notebook().cells if "measured" in c.metadata.get("tags", ()))
    assert texts(cell) == ["1f1b* equal", "zb-h1 equal"]


def test_the_lecture_is_short_and_plain() -> None:
    for cell in notebook().cells:
        assert len(cell.source.splitlines()) <= 30, cell.source
        assert cell.source.isascii()
        assert all(len(line) <= 105 for line in cell.source.splitlines()), cell.source


def solution(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"solutions/{name}.py"))


def solved_order(name: str) -> Any:
    return solution(name)["order_of_1f1b" if name == "4_1f1b" else "zero_bubble_order"]


def late_weights(p: int, m: int, r: int) -> list[str]:
    """All W at the end: short, but nothing is freed."""
    order = [one for one in solved_order("8_place_w")(p, m, r) if one[0] != "W"]
    return order + [f"W{i}" for i in range(m)]


def weight_first(op: str) -> bool:
    return op[0] != "W"


def pipeline(order: Any = range, scale: int = 1, last: Any = range) -> Any:
    """The program of exercise 2 with other orders of the backward passes."""

    def run_batch(stages: Any, microbatches: Any) -> None:
        there, back = gradients.Channel(), gradients.Channel()
        m, outputs, inputs, losses = len(microbatches), [], [], []
        for x, _ in microbatches:
            outputs.append(stages[0](x))
            there.send(outputs[-1])
        for _, target in microbatches:
            inputs.append(there.receive())
            losses.append(torch.nn.functional.cross_entropy(stages[1](inputs[-1]), target))
        for i in last(m):
            (losses[i] * scale / m).backward()
            back.send(inputs[i].grad)
        for i in order(m):
            outputs[i].backward(back.receive())

    return run_batch


def backwards(m: int) -> Any:
    return reversed(range(m))


def accumulated(scale: Any) -> Any:
    def batch_gradient(model: Any, microbatches: Any) -> list[torch.Tensor]:
        found = solution("3_averaged_twice")["batch_gradient"](model, microbatches)
        return [scale(len(microbatches)) * gradient for gradient in found]

    return batch_gradient


def last_one_only(model: Any, microbatches: Any) -> list[torch.Tensor]:
    return gradients.gradient_on_one_gpu(model, microbatches[-1:])


def sub_in_place(weights: Any, steps: Any, rate: float) -> Any:
    with torch.no_grad():
        for name, step in steps.items():
            weights[name].sub_(rate * step)
    return weights


def new_data(weights: Any, steps: Any, rate: float) -> Any:
    for name, step in steps.items():
        weights[name].data = weights[name].data - rate * step
    return weights


def uphill(weights: Any, steps: Any, rate: float) -> Any:
    return {name: weights[name].detach() + rate * steps[name] for name in weights}


WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("1_idle_share", (lambda p, m: (p - 1) / m,), "divided idle time by working time"),
    ("1_idle_share", (lambda p, m: m / (m + p - 1),), "share of time in which a rank works"),
    ("1_idle_share", (lambda p, m: (p - 1) / (m + p),), "first microbatch"),
    ("1_idle_share", (lambda p, m: p / (m + p - 1),), "Rank 0 starts at once"),
    ("1_idle_share", (lambda p, m: 1 / p,), "the simulator says 3/11"),
    ("1_idle_share", (lambda p, m: None,), "returns nothing"),
    ("1_idle_share", (lambda p, m: "3/11",), "'3/11', which is no number"),
    ("2_swapped_receive", (pipeline(order=backwards),), "0% on stage 1"),
    ("2_swapped_receive", (pipeline(last=backwards),), "0% on stage 1"),
    ("2_swapped_receive", (pipeline(scale=2),), "100% on stage 0 and by 100%"),
    ("2_swapped_receive", (lambda stages, batch: None,), "stage 0 has no gradient"),
    ("2_swapped_receive", (pipeline(order=lambda m: range(m + 1)),), "out of range"),
    ("2_swapped_receive", (pipeline(last=lambda m: range(m - 1)),), "waits for ever"),
    ("3_averaged_twice", (accumulated(lambda m: 1 / m),), "0.25 times as long"),
    ("3_averaged_twice", (accumulated(lambda m: m),), "4 times as long"),
    ("3_averaged_twice", (last_one_only,), "in its direction, too"),
    ("3_averaged_twice", (lambda model, batch: None,), "returns nothing"),
    ("4_1f1b", (lambda p, m, r: [f"{k}{i}" for k in "FB" for i in range(m)],), "holds 8"),
    ("4_1f1b", (lambda p, m, r: [f"{k}{i}" for i in range(m) for k in "FB"],), "33 would do"),
    ("4_1f1b", (lambda p, m, r: [f"{k}{i}" for k in "BF" for i in range(m)],), "cannot run"),
    ("4_1f1b", (lambda p, m, r: solved_order("4_1f1b")(p, m, r)[:-1],), "lacks B7"),
    ("4_1f1b", (lambda p, m, r: solved_order("4_1f1b")(p, m, p - 1 - r),), "holds|cannot"),
    ("4_1f1b", (lambda p, m, r: ["forward"],), "'forward' is no operation; write such as F0"),
    ("4_1f1b", (lambda p, m, r: None,), "returns nothing"),
    ("5_missing_flush", (lambda p, m, n: one_f_one_b(p, m * n),), "stage 0 runs F4, of batch 1"),
    ("5_missing_flush", (lambda p, m, n: repeat(gpipe(p, m), 1),), "are 8 microbatches"),
    ("5_missing_flush", (lambda p, m, n: naive(p, m * n),), "right weights, but the run takes"),
    ("5_missing_flush", (lambda p, m, n: None,), "has to return a Schedule"),
    ("6_in_place_update", (sub_in_place,), "autograd refuses"),
    ("6_in_place_update", (new_data,), "other weights than their forward"),
    ("6_in_place_update", (uphill,), "the step is another one"),
    ("6_in_place_update", (lambda w, g, rate: None,), "has to return a dict"),
    ("7_two_halves", (lambda dy, w: w @ dy, lambda x, dy: x.T @ dy), "your code raises"),
    ("7_two_halves", (lambda dy, w: dy @ w.T, lambda x, dy: dy.T @ x), r"shape \[4, 3\]"),
    ("7_two_halves", (lambda dy, w: 2 * dy @ w.T, lambda x, dy: x.T @ dy), "off by 100%"),
    ("7_two_halves", (lambda dy, w: dy @ w.T, lambda x, dy: None), "for dW returns nothing"),
    ("8_place_w", (late_weights,), "holds 8 microbatches, more than 4"),
    ("8_place_w", (lambda p, m, r: late_weights(p, m, r)[:-1],), "lacks W7"),
    ("8_place_w", (lambda p, m, r: solved_order("8_place_w")(p, m, 0),), "holds|27 would do"),
    ("8_place_w", (lambda p, m, r: sorted(late_weights(p, m, r), key=weight_first),), "cannot run"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answers", "said"), WRONG)
def test_typical_wrong_answers_are_refused(name: str, answers: tuple[Any, ...], said: str) -> None:
    verdict = CHECKS[name](*answers)
    assert isinstance(verdict, Verdict)
    assert not verdict.solved
    assert repr(verdict).startswith("Not solved yet: ")
    assert re.search(said, verdict.text), verdict.text


def test_both_cures_of_the_swapped_receive_are_right() -> None:
    assert gradients.check_run_batch(pipeline()).solved
    assert gradients.check_run_batch(pipeline(order=backwards, last=backwards)).solved


def test_versions_in_the_moving_picture_are_those_that_are_kept() -> None:
    (timeline,) = weight_stashing().timelines
    use = weight_use(timeline.schedule, POLICIES["stash"], timeline.schedule.num_microbatches)
    times = times_of(timeline)
    for stage, one in use.items():
        for op, count in one.live:
            kept = versions_at(timeline, use, times[op][1])[stage]
            begun = {i for ran in kept.values() for i in ran}
            just_begun = {i for i in begun if times[op._replace(kind="F", microbatch=i)][0]
                          == times[op][1]}  # fmt: skip
            old = [v for v, ran in kept.items() if set(ran) - just_begun or v == max(kept)]
            assert len(old) == count, op


@pytest.mark.parametrize("name", ANIMATIONS)
def test_moving_pictures_are_small_and_shown(name: str) -> None:
    """That they are up to date is tested with the other pictures, in test_documents.py."""
    assert (FOLDER / f"figures/{name}.gif").stat().st_size < 400_000
    assert f"](figures/{name}.gif)" in "".join(cell.source for cell in notebook().cells)


@pytest.mark.parametrize("name", ["lecture_1f1b", "lecture_zero_bubble"])
def test_what_moves_goes_from_one_timeline_to_the_next(name: str) -> None:
    timelines = ANIMATIONS[name]().timelines
    moves = [(a, b) for a, b in pairwise(timelines) if times_of(a).keys() == times_of(b).keys()]
    assert len(moves) >= 2
    for before, after in moves:
        for share, expected in ((0, before), (1, after)):
            assert times_of(between(before, after, Fraction(share))) == times_of(expected)
        halfway = times_of(between(before, after, Fraction(1, 2)))
        old, new = times_of(before), times_of(after)
        assert all(2 * halfway[op][0] == old[op][0] + new[op][0] for op in new)


def test_a_number_stays_on_its_cell_while_cells_pass_each_other() -> None:
    before, after = ANIMATIONS["lecture_1f1b"]().timelines[:2]
    timeline = between(before, after, Fraction(1, 2))
    _, (ax,) = new_figure("cells", [1.5])
    draw_grid(ax, timeline)
    stack(ax)
    cells = {str(cell.get_gid()): cell for cell in ax.patches}
    found = 0
    for op in timeline.schedule.ops():
        cell = cells[str(op)]
        x, y = cell.get_x() + cell.get_width() / 2, cell.get_y() + cell.get_height() / 2
        heights = [t.get_zorder() for t in ax.texts if t.get_position() == (x, y)]
        found += sum(0 < height - cell.get_zorder() < 1 / 1000 for height in heights)
    assert found == len(ax.texts) == 64
