"""Test the command lines of pipedream_simple.py and of the package. Compare the results of both,
and compare the rows of the package's table with separately computed values."""

import random
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pipedream_simple as simple
import pytest
from pipedream import __main__ as command
from pipedream.draw.terminal import draw
from pipedream.errors import UserError
from pipedream.schedules.ops import Op, load_csv, repeat
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.comparison import Refused, compare, measure
from pipedream.simulate.measures import idle, peak_activations
from pipedream.simulate.simulator import build_costs, simulate

BASE_CONFIG = command.CONFIG | {"num_batches": 3, "input_gradient": 2}


def call(capsys, monkeypatch, *arguments: str) -> str:
    """Run the command in this process, which is faster than starting another process. Return its
    output."""
    monkeypatch.setattr(sys, "argv", ["pipedream", *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    command.show(command.read_config(command.CONFIG))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", simple.SCHEDULES)
def test_script_computes_the_same_as_the_package(name):
    """For many sizes and durations, pipedream_simple.py and the package give the same orders,
    times, idle shares and activations. With one stage per rank, they also give the same versions
    and staleness."""
    rng = random.Random(name)
    for p, m, v, count in ((1, 1, 1, 2), (2, 4, 2, 3), (3, 3, 3, 2), (4, 8, 2, 4), (5, 10, 1, 3),
                           (4, 3, 2, 2), (8, 16, 3, 3)):  # fmt: skip
        for _ in range(4):
            drawn = [Fraction(rng.randint(1, 12), rng.randint(1, 4)) for _ in range(4)]
            durations = dict(zip(simple.DURATIONS, drawn, strict=True))
            sizes = {"num_stages": p, "num_microbatches": m, "chunks": v, "num_batches": count}
            case = BASE_CONFIG | sizes | durations
            found, row = simple.measure(name, case), measure(name, case)
            timeline = row.stream if name == "pipedream" else row.batch
            assert [tuple(map(Op._make, order)) for order in found.orders] == [
                *timeline.schedule.orders
            ]
            for event in timeline.events:
                ticks = event.start * found.ticks, event.end * found.ticks
                assert found.times[tuple(event.item)] == ticks
            assert found[3:8] == (
                row.batch.makespan, row.batch_idle.makespan_fraction, row.batch_idle.span_fraction,
                row.stream.makespan, row.stream_idle.makespan_fraction,
            )  # fmt: skip
            assert tuple(found.activations) == row.peak_activations
            if row.batch.schedule.stages_per_rank == 1:
                assert tuple(found.versions) == row.peak_versions
                assert tuple(found.staleness) == row.staleness


@pytest.mark.parametrize("name", simple.SCHEDULES)
def test_script_draws_the_same_as_the_package(name):
    case = BASE_CONFIG | {"forward": Fraction(1, 2)}
    row = measure(name, case)
    timeline = row.stream if name == "pipedream" else row.batch
    assert simple.draw([*simple.cells(simple.measure(name, case))], 90) == draw(timeline, 90)


def test_script_passes_unknown_arguments_to_the_package(tmp_path, capsys, monkeypatch):
    path = tmp_path / "order.csv"
    arguments = ["--set", "schedule=v-half", "--steps=0", "--csv", str(path)]
    monkeypatch.setattr(sys, "argv", ["pipedream_simple.py", *arguments])
    with pytest.raises(SystemExit, match="0"):
        command.run_script(simple.main, simple.CONFIG)
    assert "V-Half" in capsys.readouterr().out
    assert load_csv(path).orders == build_schedule("v-half", 4, 4).orders


@pytest.mark.parametrize("name", SCHEDULES)
def test_table_rows_match_a_full_simulation(name):
    """The values of a table row equal the values from a full simulation. If the schedule has a
    flush, the row's times for consecutive batches are computed from a single simulated batch."""
    row, entry = measure(name, BASE_CONFIG), SCHEDULES[name]
    batch = build_schedule(name, 4, 8)
    stream = repeat(batch, 3) if entry.policy == "flush" else build_schedule(name, 4, 24)
    for shown, schedule, shares in (
        (row.batch, batch, row.batch_idle),
        (row.stream, stream, row.stream_idle),
    ):
        expected = simulate(schedule, build_costs(schedule, forward=1, input_gradient=2))
        assert shown.events == expected.events
        assert shares == idle(expected)
    use = weight_use(stream, POLICIES[entry.policy], 8)
    assert row.peak_activations == peak_activations(stream)
    assert row.peak_versions == tuple(use[stage].peak_versions for stage in sorted(use))
    assert row.staleness == tuple(max(use[s].staleness.values()) for s in sorted(use))
    assert row.mixes_versions == (name == "pipedream-no-stash")


def test_chunks_may_be_uneven():
    """A schedule with two chunks per rank uses one factor per chunk. A schedule with one stage per
    rank uses the mean of two factors, which describes the same model."""
    scale = [*map(Fraction, ("1/2", 1, 1, 1, 1, 1, 1, "3/2"))]
    case = BASE_CONFIG | {"stage_scale": scale}
    rows = {row.name: row for row in compare(case)}
    for name in ("interleaved", "zb-v", "v-min", "dualpipe-v"):
        assert rows[name].batch.costs.forward == tuple(factor / 2 for factor in scale)
    assert rows["1f1b"].batch.costs.forward == (Fraction(3, 4), 1, 1, Fraction(5, 4))
    for row in rows.values():
        assert sum(event.end - event.start for event in row.batch.events) == 8 * 4 * 4
    whole = BASE_CONFIG | {"stage_scale": [Fraction(3, 4), 1, 1, Fraction(5, 4)]}
    assert measure("1f1b", case).batch.ends == measure("1f1b", whole).batch.ends


def test_schedules_that_are_not_possible_are_listed_with_the_reason(capsys, monkeypatch):
    text = call(
        capsys, monkeypatch, "--num_stages=3", "--num_microbatches=4", "--steps=0", "--verbose=no"
    )
    rows = compare(BASE_CONFIG | {"num_stages": 3, "num_microbatches": 4})
    refused = [row for row in rows if isinstance(row, Refused)]
    assert [row.title for row in refused] == ["DualPipeV"]
    words = " ".join(text.split())
    for row in refused:
        assert f"{row.title} not possible: {row.reason}" in words


BASE = {"num_stages": "2", "num_microbatches": "4", "verbose": "no", "steps": "0"}
TRAINING = {**BASE, "layers_per_stage": "1", "steps": "2", "schedule": "pipedream"}
OTHER = {
    "num_stages": "3",
    "num_microbatches": "2",
    "layers_per_stage": "2",
    "verbose": "yes",
    "schedule": "gpipe",
    "forward": "1/2",
    "input_gradient": "2",
    "weight_gradient": "1/3",
    "communication": "0.25",
    "overlap_saving": "0.5",
    "stage_scale": "1,2",
    "chunks": "3",
    "columns": "time,bubble",
    "num_batches": "3",
    "learning_rate": "0.1",
    "steps": "3",
    "seed": "1",
}


def test_every_key_can_be_set_and_changes_what_is_printed(capsys, monkeypatch):
    others = {"memory", "csv"}
    assert set(OTHER) | others == set(command.CONFIG) == set(command.RULES)

    def output(values: dict[str, str]) -> str:
        return call(capsys, monkeypatch, *[f"--set={k}={v}" for k, v in values.items()])

    searched = {"schedule": "search", "communication": "1", "steps": "0"}
    assert output(searched) != output({**searched, "memory": "7"})
    for key, value in OTHER.items():
        base = TRAINING if key in ("layers_per_stage", "learning_rate", "steps", "seed") else BASE
        assert output({**base, key: value}) != output(base), key
    assert output(TRAINING) == output(TRAINING)


def test_an_order_round_trips_through_csv(tmp_path, capsys, monkeypatch):
    path = tmp_path / "order.csv"
    first = call(capsys, monkeypatch, "--schedule", "zb-h1", "--steps", "0", "--csv", str(path))
    again = call(capsys, monkeypatch, "--schedule", str(path), "--steps", "1")
    assert load_csv(path).orders == build_schedule("zb-h1", 4, 8).orders
    for line in ("rank 2 ....F0F1..I0F2I1", "  one batch    time 27, ", "  4 batches    time 108,"):
        assert line in first
        assert line in again
    assert "Not trained. To train" in again


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("0F0,0B0\n1B0,1F0\n", "deadlock: "),
        ("0F0,0B0\n1F0\n", "stage 1 needs either 1B0 or both 1I0 and 1W0 for"),
        ("0F0\n1F0\n", "it has no backward pass"),
        ("0F0,0F0,0B0\n", "0F0 appears twice in the orders"),
        ("0F1,0B1,0F2,0B2\n", "its 2 microbatches are not numbered from 0 to 1"),
    ],
)
def test_orders_that_cannot_run_give_a_one_line_error(tmp_path, order, problem):
    path = tmp_path / "bad.csv"
    path.write_text(order)
    with pytest.raises(UserError, match=re.escape(problem)) as caught:
        measure(str(path), BASE_CONFIG)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--set", "schedule=gpip"], "schedule=gpip is not accepted; did you mean 'gpipe'?"),
        (
            ["--set", "stage_scale=1,2"],
            "stage_scale has 2 factors for 4 ranks; give 4 values, such as "
            "stage_scale=1,1,1,1, or one value per chunk",
        ),
        (
            ["--schedule=pipedream-2bw", "--csv", "a.csv"],
            "pipedream-2bw does not flush, and a CSV file cannot contain weight updates; add "
            "--set schedule=1f1b, the same order with a flush",
        ),
        (
            ["--schedule=pipedream-2bw", "--num_stages=8", "--num_microbatches=4"],
            "microbatch 8 would run with version 1, which does not exist yet; "
            "use 7 microbatches per batch or more",
        ),
        (
            ["--set", "schedule=1f1b", "chunks=4"],
            "1f1b does not use chunks; leave it out, or set schedule=interleaved",
        ),
        (["--set", "memory=4"], "all does not use memory; leave it out, or set schedule=search"),
        (
            ["--schedule=1f1b", "--csv", "/missing/a.csv"],
            "/missing/a.csv: No such file or directory; use a path that can be read or written",
        ),
    ],
)
def test_errors_are_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipedream_simple.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.run_script(simple.main, simple.CONFIG)
    shown = capsys.readouterr()
    assert (stopped.value.code, shown.out, shown.err) == (2, "", f"error: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_script_runs_without_the_package(tmp_path):
    path = shutil.copy(simple.__file__, tmp_path)

    def typed(*arguments):
        command = [sys.executable, path, "--set", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    done = typed("schedule=zb-v", "num_microbatches=8", "weight_gradient=2", "columns=time,activ.")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nZB-V                      34.5      4\n" in done.stdout
    assert typed("--help").stdout.strip() == simple.__doc__.strip()
    for wrong, fix in (
        ("num_stages=0", "a whole number above 0"), ("forward=x", "a number above 0"),
        ("communication=-1", "a number of at least 0"), ("forward=1/0", "a number above 0"),
        ("schedule=v-half", "all, naive, gpipe, 1f1b, pipedream, interleaved, zb-h1, zb-h2, zb-v"),
        ("columns=span,tim", ", ".join(simple.COLUMNS)), ("steps=3", "0"),
    ):  # fmt: skip
        done = typed(wrong)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"error: {wrong} is not accepted; use {fix}\n"


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ('"layers_per_stage": 3, "verbose": True', "F = 3, I = 3, W = 3"),
        ('"verbose": True', "\nGPipe\ntime  "),
        ('"columns": "time,bubble"', "  time bubble\n"),
        ('"columns": ["time", "bubble"]', "  time bubble\n"),
        ('"num_stage": 4', "error: CONFIG has no key num_stage; write --set KEY=VALUE with one of"),
        ('"num_microbatches": 0', "error: num_microbatches=0 is not accepted"),
        ('"verbose": 3', "error: verbose=3 is not accepted"),
    ],
)
def test_an_edited_config_without_some_keys_is_read_or_refused(tmp_path, lines, shown):
    source = Path(simple.__file__).read_text()
    config = f'CONFIG = {{"num_stages": 4, {lines}}}'
    path = tmp_path / "pipedream_simple.py"
    path.write_text(re.sub(r"CONFIG: dict.*?\n}", config, source, count=1, flags=re.DOTALL))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert shown in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_output_pipe_is_no_error():
    line = f"{sys.executable} {simple.__file__} --steps 0 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("p = 4 ranks")
