import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training.records import report
from distributed_training.records.record import RECORD_FILE
from distributed_training.records.report import find_records, main, published_json, published_table
from distributed_training.settings.files import ROOT
from tests.records.test_tables import cells
from tests.support import record_values, refused

IMPORTS = (
    "<!-- [[[cog\nfrom distributed_training.records.report import *\n]]] -->\n<!-- [[[end]]] -->\n"
)
BEGIN, END = '<!-- [[[cog cog.outl(published_table("h200-x4")) ]]] -->\n', "<!-- [[[end]]] -->\n"
DOCUMENT = f"# Results\n{IMPORTS}\nText before.\n\n{BEGIN}{END}\nText after.\n"


@pytest.fixture
def records_dir(tmp_path, monkeypatch):
    """Three published records, named so that their order by file is not that by strategy, and
    another published file: differences from a reference, by strategy."""
    folder = tmp_path / "records" / "h200-x4"
    folder.mkdir(parents=True)
    for file, name, size in (("a", "fsdp", 4), ("b", "zero2", 8), ("c", "zero2", 4)):
        values = record_values(strategy__name=name, batch__micro_batch_size=size)
        values["config"] |= {"strategy": name, "batch_size": size}
        (folder / f"{file}.json").write_text(json.dumps(values))
    parity = {
        "differences": {"dp": {"loss": 0.0, "norm": 1.25e-7}, "fsdp": {"loss": 3e-5, "norm": 0.5}},
        "tokens/s": 1.0,
        "speeds": {"one": 131072.4, "two": 100},
    }
    (folder.parent / "parity.json").write_text(json.dumps(parity))
    monkeypatch.setattr(report, "RECORDS_DIR", folder.parent)
    return folder


@pytest.fixture
def document(records_dir, tmp_path):
    """A document whose table is not filled."""
    path = tmp_path / "RESULTS.md"
    path.write_text(DOCUMENT)
    return path


def rows_of(*arguments, **options):
    return cells(published_table(*arguments, **options).strip())


@pytest.mark.usefixtures("records_dir")
def test_a_table_chooses_rows_and_columns_in_the_order_of_the_strategies():
    order = [(row["strategy"], row["batch"]) for row in rows_of("h200-x4")]
    assert order == [("zero2", "8 x 512"), ("zero2", "4 x 512"), ("fsdp", "4 x 512")]
    where = {"batch_size": 4, "precision": "bf16"}
    rows = rows_of("h200-x4", "strategy, tokens/s", where=where)
    assert rows == [{"strategy": name, "tokens/s": "131,072"} for name in ("zero2", "fsdp")]
    rows = rows_of("h200-x4", "strategy", where=where, without={"strategy": "zero2"})
    assert rows == [{"strategy": "fsdp"}]


@pytest.mark.usefixtures("records_dir")
def test_a_table_of_other_json():
    rows = cells(published_json("parity.json", "differences", "norm, loss").strip())
    assert rows == [
        {"": "dp", "norm": "1.2e-07", "loss": "0"},
        {"": "fsdp", "norm": "0.500", "loss": "3.0e-05"},
    ]
    rows = cells(published_json("parity.json", "speeds", "tokens").strip())
    assert rows == [{"": "one", "tokens": "131,072"}, {"": "two", "tokens": "100"}]


@pytest.mark.usefixtures("records_dir")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: published_table("h100-x4"), ("h100-x4 holds no records",)),
        (lambda: published_table("h200-x4", "strategy, tokens"), ("'tokens'", "'tokens/s'?")),
        (lambda: published_table("h200-x4", where={"modl": "gpt2"}), ("'modl'", "'model'?")),
        (lambda: published_table("h200-x4", where={"precision": "fp32"}), ("h200-x4", "fp32")),
        (lambda: published_table("h200-x4", without={"model": "x"}), ("h200-x4", "model='x'")),
        (lambda: published_json("partiy.json", "x", "y"), ("does not exist", "mean parity.json?")),
        (lambda: published_json("parity.json", "speed", "x"), ("'speed'", "'speeds'?")),
        (lambda: published_json("parity.json", "tokens/s", "x"), ("differences, speeds",)),
        (lambda: published_json("parity.json", "speeds", "one, two"), ("one: the column 'two'",)),
        (lambda: published_json("parity.json", "differences", "lost"), ("dp: the column 'lost'",)),
    ],
)
def test_words_that_select_nothing_are_refused(make, words):
    with refused(*words):
        make()


def test_a_document_is_filled_and_stays_so(document):
    with refused("documents differ", f"report --write {document}"):
        main(["--check", str(document)])
    assert main(["--write", str(document)]) == 0
    text = document.read_text()
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    assert before + BEGIN + END + after == DOCUMENT
    assert table == published_table("h200-x4") + "\n"
    assert main(["--check", str(document)]) == main(["--write", str(document)]) == 0
    assert document.read_text() == text


def test_an_edited_figure_and_an_edited_record_are_detected(document, records_dir):
    main(["--write", str(document)])
    text = document.read_text()
    document.write_text(text.replace("Text after", "Other text"))
    assert main(["--check", str(document)]) == 0, "text around a table may change"
    document.write_text(text.replace("131,072", "131,073", 1))
    with refused("differ"):
        main(["--check", str(document)])
    document.write_text(text)
    values = record_values(performance__tokens_per_s=1.0)
    (records_dir / "a.json").write_text(json.dumps(values))
    with refused("differ"):
        main(["--check", str(document)])


@pytest.mark.usefixtures("records_dir")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "missing.md"),
        (b"\x89PNG\xff", "cannot be read"),
        ((IMPORTS + BEGIN).encode(), "Missing '[[[end]]]'"),
        ((IMPORTS + BEGIN.replace("x4", "x5") + END).encode(), "h200-x5 holds no records"),
        ((IMPORTS + BEGIN.replace('4"', '4", colums=""') + END).encode(), "argument 'colums'"),
    ],
)
@pytest.mark.parametrize("option", ["--check", "--write"])
def test_a_document_that_cannot_be_filled_is_explained(content, words, option, tmp_path):
    path = tmp_path / "missing.md"
    if content is not None:
        path.write_bytes(content)
    with refused(words):
        main([option, str(path)])
    assert content is None or path.read_bytes() == content


def write_run(folder, **changes):
    folder.mkdir(parents=True)
    (folder / RECORD_FILE).write_text(json.dumps(record_values(**changes)))
    return str(folder)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder of three runs, one of which failed, and a link to the newest; one stands beside."""
    folder = tmp_path / "runs"
    write_run(folder / "20260101-000001-zero2-x")
    write_run(folder / "20260101-000002-dp-x", strategy__name="dp")
    failed = {"finished": False, "status": "oom", "error": "rank 1 ran out", "step": 3}
    write_run(folder / "20260101-000003-fsdp-x", strategy__name="fsdp", **failed)
    (folder / ".cache").mkdir()
    (folder / "latest").symlink_to("20260101-000003-fsdp-x")
    monkeypatch.chdir(tmp_path)
    return folder


def printed(capsys, *arguments, output_dir=None):
    """The lines that `report` prints."""
    assert main(list(map(str, arguments)), *filter(None, [output_dir])) == 0
    return capsys.readouterr().out.splitlines()


def test_without_arguments_the_runs_of_config_are_shown_once_each(runs, tmp_path, capsys):
    lines = printed(capsys, output_dir=runs)
    assert lines[0] == "3 runs: runs/20260101-<run>..."
    rows = [line.split() for line in lines if line[:6].isdecimal()]
    assert [(row[0], row[1]) for row in rows] == [
        ("000001", "zero2"), ("000002", "dp"), ("000003", "fsdp"), ("000003", "oom:"),
    ]  # fmt: skip
    assert "131,072" in rows[0]
    assert rows[2][-2:] == ["oom", "3/64"]
    assert "000003 oom: rank 1 ran out" in lines
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "wrote report/loss.png, throughput.png, memory.png"
    assert len(list((tmp_path / "report").iterdir())) == 3


def test_a_run_is_counted_once_however_it_is_named(runs, capsys):
    found = find_records([runs, runs / "latest", runs / "20260101-000001-zero2-x" / RECORD_FILE])
    assert len(found) == 3
    (latest,) = find_records([runs / "latest"])
    assert latest.run_dir == str(runs / "20260101-000003-fsdp-x")
    assert printed(capsys, *sorted(runs.iterdir())) == printed(capsys, output_dir=runs)


def test_published_records_are_named_by_their_files(capsys, tmp_path):
    folder = ROOT / "results" / "records" / "h200-x1"
    found = find_records([Path("results/records/h200-x1")])
    assert [r.run_dir for r in found] == [
        str(file.with_suffix("")) for file in sorted(folder.glob("*.json"))
    ]


def test_what_holds_no_record_is_left_out_with_a_note(runs, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert main([str(runs), str(tmp_path / "empty"), "--plots", str(tmp_path / "plots")]) == 0
    assert capsys.readouterr().err == f"note: {tmp_path / 'empty'} holds no record.json; left out\n"


def test_three_tables_are_shown_unless_all_are_asked_for(runs, tmp_path, capsys):
    for seed in range(4):
        write_run(runs / f"20260102-00000{seed}-dp-x", work__seed=seed)
    lines = printed(capsys, runs)
    titles = [line for line in lines if line.startswith("model ")]
    assert len(titles) == 3
    assert "left out: 4 older runs of other work; --all shows them" in lines
    plots = [line for line in lines if line.startswith("wrote")]
    assert [line.split("/")[1] for line in plots] == ["1", "2", "3"]
    lines = printed(capsys, runs, "--all")
    assert len([line for line in lines if line.startswith("model ")]) == 5
    assert "left out" not in "".join(lines)


def test_a_reader_that_leaves_early_gets_no_traceback(runs):
    """As under `| head -1`, with more to say than a pipe holds."""
    script, names = ROOT / "real_model_example.py", [runs / "latest"]
    write_run(runs / "20260102-000000-dp-x", error="x" * 10)
    with subprocess.Popen(
        [sys.executable, script, "report", *names, "--plots", runs.parent / "p"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no run record in runs; train first"),
        (["{tmp}"], "no run record"),
        (["{tmp}/x"], "does not exist"),
    ],
)
def test_mistakes_are_explained_in_one_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(words):
        main([text.replace("{tmp}", str(tmp_path)) for text in arguments])


def test_plots_in_place_of_a_file_are_explained(runs, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(f"{folder} cannot be written; ", "--plots"):
            main([str(runs), "--plots", str(folder)])
        assert "131,072" in capsys.readouterr().out, "the table is printed all the same"
