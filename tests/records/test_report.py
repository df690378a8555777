"""Test `report`, its tables and its plot."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training import cli
from distributed_training.records.record import RECORD_FILE
from distributed_training.records.report import compare_runs, find_records, render
from distributed_training.settings.files import ROOT
from tests.support import made_record, record_values, refused


def write_run(folder, **changes):
    folder.mkdir(parents=True)
    (folder / RECORD_FILE).write_text(json.dumps(record_values(**changes)))
    return str(folder)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return a folder with three runs (one failed), a cache folder and a link to the newest run."""
    folder = tmp_path / "runs"
    write_run(folder / "20260101-000001-zero2-x")
    write_run(folder / "20260101-000002-dp-x", strategy__name="dp")
    failed = {"finished": False, "status": "oom", "error": "rank 1 ran out", "step": 3}
    write_run(folder / "20260101-000003-fsdp-x", strategy__name="fsdp", **failed)
    (folder / ".cache").mkdir()
    (folder / "latest").symlink_to("20260101-000003-fsdp-x")
    monkeypatch.chdir(tmp_path)
    return folder


def main(argv, output_dir=Path("runs")):
    """Call `report` with these arguments, and return the exit code."""
    script = ROOT / "real_model_example.py"
    program = cli.Program(
        config={}, script=script, description="", output_dir=output_dir, argv=tuple(argv)
    )
    return cli.run_command("report", program)


def printed(capsys, *arguments, output_dir=None):
    """Return the lines that `report` prints."""
    assert main(list(map(str, arguments)), *filter(None, [output_dir])) == 0
    return capsys.readouterr().out.splitlines()


def test_without_arguments_report_shows_each_run_in_output_dir_once(runs, tmp_path, capsys):
    lines = printed(capsys, output_dir=runs)
    assert lines[0] == "3 runs in runs"
    rows = [line.split() for line in lines if line.startswith("20260101-")]
    assert [row[0] for row in rows] == [
        f"20260101-{name}-x" for name in ("000001-zero2", "000002-dp", "000003-fsdp", "000003-fsdp")
    ]
    assert "131,072" in rows[0]
    assert rows[2][-2:] == ["oom", "3/64"]
    assert "20260101-000003-fsdp-x fsdp oom: rank 1 ran out" in lines
    assert max(map(len, lines)) <= 80
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_run_is_counted_once_however_it_is_named(runs, capsys):
    file = runs / "20260101-000001-zero2-x" / RECORD_FILE
    assert len(find_records([runs, runs / "latest", file, runs / ".cache"])) == 3
    assert capsys.readouterr().err == ""
    (latest,) = find_records([runs / "latest"])
    assert latest.run_dir == str(runs / "20260101-000003-fsdp-x")
    assert printed(capsys, *sorted(runs.iterdir())) == printed(capsys, output_dir=runs)


def test_a_bad_record_hides_only_itself(runs, capsys):
    # `data` is read to compare several runs.
    bad = {name: runs / name / RECORD_FILE for name in ("deep", "pipe", "machine", "data")}
    for name, file in bad.items():
        file.parent.mkdir()
        if name in ("machine", "data"):
            file.write_text(json.dumps(record_values(**{name: {}})))
    bad["deep"].write_text("[" * 2000 + "]" * 2000)
    os.mkfifo(bad["pipe"])
    assert len(find_records([runs])) == 3
    notes = capsys.readouterr().err
    assert [name for name in bad if f"/{name}/" not in notes] == []


@pytest.mark.processes
def test_a_closed_output_pipe_gives_no_traceback(runs):
    """`report` prints no traceback if its reader closes the pipe before all output has been
    written, as `| head -1` does."""
    with subprocess.Popen(
        [sys.executable, ROOT / "real_model_example.py", "report", runs / "latest"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_mistakes_are_explained_in_one_line(runs, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for typed, path in (([], "runs"), (["."], "report FOLDER"), (["./x"], "x")):
        with refused(path):
            main(typed, tmp_path / "empty" / "runs")


def test_a_table_fits_a_terminal():
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 2}
    pipeline = {"schedule": "1f1b", "num_microbatches": 8, "ideal_bubble": 0.1}
    records = [
        made_record(mesh=mesh, pipeline=pipeline, run_dir="runs/1-a"),
        made_record(status="interrupted", step=50, run_dir="runs/2-b", error="x " * 10**6),
        made_record(status="failed", run_dir="runs/3-c", error="\x1b[2Jgone"),
    ]
    text = render("", compare_runs(records))
    assert max(map(len, text.splitlines())) <= 80
    assert len(text) < 3000
    assert "MFU" not in text
    assert "interrupted 50/64" in text
    assert "failed: \\x1b[2Jgone" in text
