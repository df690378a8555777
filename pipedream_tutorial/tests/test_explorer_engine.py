"""Compare the explorer's JavaScript engine with the Python engine, cell by cell.

A Node.js process (explorer_cells.mjs) computes the JavaScript answers, and this file computes the
Python answers."""

import json
import os
import random
import re
import shutil
import subprocess
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from pipedream.config import FOLDER
from pipedream.errors import UserError
from pipedream.schedules.ops import save_csv
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.schedules.policies import weight_use
from pipedream.simulate.comparison import measure
from pipedream.simulate.measures import peak_activations
from pipedream.simulate.simulator import DeadlockError, build_costs, simulate

# V-Half and V-Min reach the explorer as CSV files.
NAMES = [name for name in SCHEDULES if name not in ("v-half", "v-min")]

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None and "CI" not in os.environ,
    reason="node, which runs the engine, is not installed",
)


def run_explorer(questions):
    command = ["node", Path(__file__).with_name("explorer_cells.mjs")]
    text = subprocess.check_output(command, input=json.dumps(questions), text=True, timeout=60)
    return json.loads(text)


def explorer_settings(p=4, m=8, v=2, n=1, durations=(1, 1, 1, 0), scale=(), saving=0):
    names = dict(zip("FIWc", map(str, durations), strict=True))
    return names | {
        "p": p, "m": m, "v": v, "n": n, "scale": [*map(str, scale)], "saving": str(saving), "K": 0,
    }  # fmt: skip


def grid():
    """Return cases for every schedule. Cases with fixed sizes have equal or random durations, and
    in one case per schedule, W takes no time."""
    rng = random.Random(0)
    durations = ["1/4", "1/3", "1/2", "1", "3/2", "2.25", "3"]
    found = []
    for name in NAMES:
        for p, m in [(1, 1), (1, 5), (2, 8), (3, 6), (4, 8), (4, 12), (5, 3), (8, 16)]:
            for even in (True, False):
                given = [1, 1, 1, 0] if even else rng.choices(durations, k=4)
                factors = ["1/2", "1", "1.5", "2"]
                scale = [] if even else rng.choices(factors, k=p * rng.choice([1, 2, 3]))
                saving = 0 if even else rng.choice(["0", "1/2", "1"])
                v, n = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
                found.append((name, explorer_settings(p, m, v, n, given, scale, saving)))
        found.append((name, explorer_settings(4, 8, durations=(1, 1, 0, 1))))
    return found


def in_python(name, c):
    """Compute in Python the answer that explorer_cells.mjs should give to a "run" request."""
    sizes = {"num_stages": "p", "num_microbatches": "m", "num_batches": "n", "chunks": "v"}
    durations = {
        "forward": "F", "input_gradient": "I", "weight_gradient": "W", "communication": "c",
        "overlap_saving": "saving",
    }  # fmt: skip
    config = {name: c[key] for name, key in sizes.items()}
    config |= {name: Fraction(c[key]) for name, key in durations.items()}
    config["stage_scale"] = [*map(Fraction, c["scale"])] or None
    row = measure(name, config)
    timeline, found = row.stream, row.stream_idle
    use = weight_use(timeline.schedule, row.policy, c["m"])
    floats = [*found.makespan, *found.span, found.makespan_fraction, found.span_fraction]
    return {
        "tick": float(timeline.tick),
        "c": config["communication"] / timeline.tick,
        "cells": [",".join(map(str, order)) for order in timeline.schedule.orders],
        "starts": [[*line] for line in timeline.starts],
        "ends": [[*line] for line in timeline.ends],
        "floats": pytest.approx([*map(float, (*floats, *row.peak_activations))], abs=1e-9),
        "versions": [*row.peak_versions],
        "staleness": [*row.staleness],
        "mixed": row.mixes_versions,
        "forward": [[*map(list, use[stage].forward.items())] for stage in sorted(use)],
    }


def test_every_cell_matches_the_python_simulator():
    cases = grid()
    refused = 0
    answers = run_explorer([{"ask": "run", "name": name, "chosen": c} for name, c in cases])
    for (name, c), found in zip(cases, answers, strict=True):
        try:
            expected = in_python(name, c)
        except UserError as error:
            expected = {"error": str(error)}
            refused += 1
        path = found.pop("path", None)
        assert found == expected, (name, c)
        if path:
            assert_critical(path, found)
    assert refused < len(cases) / 4


def assert_critical(path, found):
    """Check that the critical path leads from time 0 to the end of the last operation. Each
    operation on the path must begin when the operation before it on the path has ended or when that
    operation's result has arrived."""
    times = {
        cell: (rank, found["starts"][rank][k], found["ends"][rank][k])
        for rank, line in enumerate(found["cells"])
        for k, cell in enumerate(line.split(","))
    }
    steps = [times[cell] for cell in path]
    assert steps[0][1] == 0
    assert steps[-1][2] == max(end for _, _, end in times.values())
    for (before, _, end), (after, start, _) in pairwise(steps):
        assert start == end + (0 if before == after else found["c"])


def test_idle_time_formulas_match_the_simulator():
    """Every schedule's formula equals the simulated idle time at the tested sizes for which the
    formula is valid. Each schedule has at least one such size."""
    sizes = [(2, 6), (3, 6), (3, 9), (4, 4), (4, 8), (4, 16), (6, 12)]
    durations = [(1, 1, 1, 0), (2, 2, 1, 0), (1, 2, 1, 0), (3, 2, 2, 0)]
    cases = [
        {"ask": "idle", "name": name, "chosen": explorer_settings(p, m, durations=d)}
        for name in NAMES
        for p, m in sizes
        for d in durations
    ]
    held = set()
    for case, answer in zip(cases, run_explorer(cases), strict=True):
        if answer and "error" not in answer:
            formula, simulated = answer
            assert simulated == [pytest.approx(formula)] * len(simulated), case
            held.add(case["name"])
    assert held == {*NAMES}


def test_explorer_links_in_the_readme_are_accepted():
    links = re.findall(r"\(explorer\.html(#[^)]*)\)", (FOLDER / "README.md").read_text())
    assert len(links) >= 8
    assert run_explorer([{"ask": "hash", "hash": link} for link in links]) == [[]] * len(links)


def test_stashing_pays_where_the_readme_links_to():
    """At the learning rate of README.md's link, the loss ends higher without stashing."""
    page = (FOLDER / "README.md").read_text()
    rate = re.search(r"#schedule=pipedream-no-stash&p=8&gradients=1&rate=(\d+)\)", page)[1]
    names = "pipedream", "pipedream-no-stash"
    chosen = explorer_settings(p=8, n=4)
    questions = [
        {"ask": "train", "name": name, "chosen": chosen, "learningRate": int(rate)}
        for name in names
    ]
    ends = [sum(found["losses"][-8:]) / 8 for found in run_explorer(questions)]
    assert all(f"{end:.2f}" in page for end in ends)
    assert ends[0] < ends[1]


def test_csv_round_trips_and_errors_are_reported(tmp_path):
    good = [
        build_schedule(name, 4, 8)
        for name in ("1f1b", "zb-v", "dualpipe-v", "interleaved", "v-half")
    ]
    texts = []
    for schedule in good:
        save_csv(schedule, tmp_path / "it.csv")
        texts.append((tmp_path / "it.csv").read_bytes().decode())
    bad = ["", "0F0,oops", "0F0,1B0\n1F0,0B0", "5F0,5B0", "0B0,0F0", "0F0", "0F1,0B1"]
    found = run_explorer([{"ask": "csv", "text": text} for text in texts + bad])
    for schedule, text, answer in zip(good, texts, found, strict=False):
        assert answer == {"again": text, "stagesPerRank": schedule.stages_per_rank}
    for text, answer in zip(bad, found[len(good) :], strict=True):
        assert answer.keys() == {"error"}, text


def test_verdicts_on_moved_operations_match_the_simulator():
    """Move each operation of rank 1 by up to three places. For every move, the explorer's verdict
    agrees with the simulator."""
    schedule = build_schedule("zb-h1", 3, 4)
    costs = build_costs(schedule, communication="1/2")
    c = explorer_settings(p=3, m=4, durations=(1, 1, 1, "1/2"))
    order, memory = schedule.orders[1], 3
    moves = [
        {"rank": 1, "from": a, "to": b}
        for a in range(len(order))
        for b in range(max(0, a - 3), min(len(order), a + 4))
    ]
    question = {"ask": "move", "name": "zb-h1", "chosen": c, "memory": memory}
    answers = run_explorer([question | {"move": move} for move in moves])
    old, verdicts = simulate(schedule, costs).makespan, set()
    for move, answer in zip(moves, answers, strict=True):
        line = [*order]
        line.insert(move["to"], line.pop(move["from"]))
        changed = replace(schedule, orders=(schedule.orders[0], tuple(line), schedule.orders[2]))
        held = peak_activations(changed)[1] * changed.stages_per_rank
        try:
            new = simulate(changed, costs).makespan
        except DeadlockError:
            new = None
        if new is None or held > memory:
            expected = "illegal"
        else:
            expected = "same" if new == old else "longer" if new > old else "shorter"
        assert answer["verdict"] == expected, (move, answer)
        verdicts.add(expected)
    assert verdicts >= {"illegal", "same", "longer"}


def test_gradients_match_autograd():
    (found,) = run_explorer([{"ask": "exact", "numStages": 3, "microbatch": 5, "batchSize": 4}])
    rows, width = found["sizes"]["ROWS"], found["sizes"]["WIDTH"]
    shapes = {"U": (width, -1), "V": (-1, width)}

    def tensor(values, *shape):
        return torch.tensor(values, dtype=torch.float64).reshape(*shape)

    weights = [
        {n: tensor(own[n], *shapes[n]).requires_grad_() for n in own} for own in found["weights"]
    ]
    x = tensor(found["x"], rows, width)
    for own in weights:
        x = x + torch.tanh(x @ own["U"]) @ own["V"]
    loss = torch.nn.functional.mse_loss(x, tensor(found["wanted"], rows, width))
    (loss / 4).backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
    for own, theirs in zip(weights, found["gradients"], strict=True):
        for name, weight in own.items():
            gradient = tensor(theirs[name], *shapes[name])
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-10, atol=1e-15)


def test_only_stashing_makes_the_gradient_valid():
    rates = (0.001, 0.01)
    names = ("1f1b", "pipedream", "pipedream-vertical", "pipedream-2bw", "pipedream-no-stash")
    questions = [
        {"ask": "train", "name": name, "chosen": explorer_settings(n=4), "learningRate": rate}
        for name in names
        for rate in rates
    ]
    found = run_explorer(questions)
    for question, answer in zip(questions, found, strict=True):
        if question["name"] != "pipedream-no-stash":
            assert answer["perStage"] == [0, 0, 0, 0], question
            assert (answer["newest"] == 0) == (question["name"] == "1f1b")
    low_rate, high_rate = found[-2:]
    assert low_rate["perStage"][-1] == high_rate["perStage"][-1] == 0
    for a, b in zip(low_rate["perStage"][:-1], high_rate["perStage"][:-1], strict=True):
        assert 0 < a < b
        assert b / a == pytest.approx(10, rel=0.1)  # linear for small learning rates
    assert all(sum(f["losses"][-8:]) < sum(f["losses"][:8]) for f in found[1::2])
