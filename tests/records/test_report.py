import json

import pytest

from distributed_training.records import report
from distributed_training.records.record import RECORD_FILE
from distributed_training.records.report import main, published_json, published_table
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
        {"": "fsdp", "norm": "5.0e-01", "loss": "3.0e-05"},
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
    folder.mkdir()
    (folder / RECORD_FILE).write_text(json.dumps(record_values(**changes)))
    return str(folder)


def test_command_line_prints_the_comparison_and_draws(tmp_path, capsys):
    runs = [write_run(tmp_path / "1"), write_run(tmp_path / "2", finished=False, status="oom")]
    (tmp_path / "3").mkdir()
    assert main([*runs, str(tmp_path / "3"), "--plots", str(tmp_path / "plots")]) == 0
    out, err = capsys.readouterr()
    rows = cells(out.split("wrote")[0].strip())
    assert [row["status"] for row in rows] == ["ok", "oom"]
    assert f"note: {tmp_path / '3'} holds no record.json" in err
    assert out.count("wrote ") == 3
    names = ["loss.png", "memory.png", "throughput.png"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "report runs/*"), (["{tmp}"], "no run record"), (["{tmp}/x"], "does not exist")],
)
def test_mistakes_are_explained_in_one_line(arguments, words, tmp_path):
    with refused(words):
        main([text.replace("{tmp}", str(tmp_path)) for text in arguments])


def test_plots_in_place_of_a_file_are_explained(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(f"plots cannot be written to {folder}; "):
            main([run, "--plots", str(folder)])
        out = capsys.readouterr().out
        assert out.startswith("| strategy"), "the table is printed all the same"
