import json

import pytest

from distributed_training import report
from distributed_training.record import RECORD_FILE
from distributed_training.report import check_documents, main, render
from tests.unit.conftest import made_record, refused
from tests.unit.test_tables import cells

DOCUMENT = """# Results

Text before.

<!-- table: h200-x4{options} -->
<!-- end -->

Text after.
"""


@pytest.fixture
def records_dir(tmp_path, monkeypatch):
    """Three published records, named so that their order by file is not that by strategy."""
    folder = tmp_path / "records" / "h200-x4"
    folder.mkdir(parents=True)
    for file, name, size in (("a", "fsdp", 4), ("b", "zero2", 8), ("c", "zero2", 4)):
        record = made_record(strategy__name=name, batch__micro_batch_size=size)
        (folder / f"{file}.json").write_text(json.dumps(record))
    monkeypatch.setattr(report, "RECORDS_DIR", tmp_path / "records")
    return folder


def filled_rows(document):
    """Rows of a document's one table."""
    body = document.split(" -->\n")[1].removesuffix("<!-- end")
    return cells(body.strip())


def test_documents_are_filled_in_the_order_of_the_strategies(records_dir):
    text = render(DOCUMENT.format(options=""))
    assert text.startswith("# Results\n\nText before.\n\n<!-- table: h200-x4 -->\n\n| strategy")
    assert text.endswith("|\n\n<!-- end -->\n\nText after.\n")
    rows = filled_rows(text)
    order = [(row["strategy"], row["batch"]) for row in rows]
    assert order == [("zero2", "8 x 512"), ("zero2", "4 x 512"), ("fsdp", "4 x 512")]
    assert render(text) == text


def test_a_document_chooses_rows_and_columns(records_dir):
    for record in records_dir.glob("*.json"):
        values = json.loads(record.read_text())
        values["config"]["batch_size"] = values["batch"]["micro_batch_size"]
        values["config"]["strategy"] = values["strategy"]["name"]
        record.write_text(json.dumps(values))
    options = ' columns="strategy, tokens/s" where="batch_size=4, precision=bf16"'
    text = render(DOCUMENT.format(options=options))
    rows = filled_rows(text)
    assert rows == [{"strategy": name, "tokens/s": "131,072"} for name in ("zero2", "fsdp")]
    options = ' columns="strategy" where="batch_size=4, strategy!=zero2"'
    assert filled_rows(render(DOCUMENT.format(options=options))) == [{"strategy": "fsdp"}]
    with refused("no record of h200-x4 matches", "precision=fp32"):
        render(DOCUMENT.format(options=' where="precision=fp32"'))


def test_a_table_without_records_is_refused(records_dir):
    with refused("h100-x4 holds no records"):
        render(DOCUMENT.format(options="").replace("h200", "h100"))


def test_text_without_tables_stays(records_dir):
    assert render("no table <!-- a comment --> here\n") == "no table <!-- a comment --> here\n"


def test_an_edited_figure_is_detected(records_dir, tmp_path, capsys):
    document = tmp_path / "RESULTS.md"
    document.write_text(DOCUMENT.format(options=""))
    assert check_documents([document]) == [str(document)]
    assert main(["--write", str(document)]) == 0
    assert main(["--check", str(document)]) == 0
    assert capsys.readouterr().err == ""
    written = document.read_text()
    document.write_text(written.replace("131,072", "131,073", 1))
    assert main(["--check", str(document)]) == 1
    assert f"error: {document} differs from results/records" in capsys.readouterr().err
    assert main(["--write", str(document)]) == 0
    assert document.read_text() == written


def test_an_edited_record_is_detected(records_dir, tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(render(DOCUMENT.format(options="")))
    record = made_record(performance__tokens_per_s=1.0)
    (records_dir / "a.json").write_text(json.dumps(record))
    assert main(["--check", str(document)]) == 1


def test_text_around_a_table_may_change(records_dir, tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text(render(DOCUMENT.format(options="")).replace("Text after", "Other text"))
    assert main(["--check", str(document)]) == 0


def write_run(folder, record):
    folder.mkdir()
    (folder / RECORD_FILE).write_text(json.dumps(record))
    return str(folder)


def test_command_line_prints_the_comparison_and_draws(tmp_path, capsys):
    runs = [
        write_run(tmp_path / "1", made_record()),
        write_run(tmp_path / "2", made_record(finished=False, status="oom")),
    ]
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
    [([], "no paths given"), (["{tmp}"], "no run record"), (["{tmp}/x"], "does not exist")],
)
def test_mistakes_are_explained_in_one_line(arguments, words, tmp_path, capsys):
    assert main([text.replace("{tmp}", str(tmp_path)) for text in arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert words in errors[0]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: h200-x4 -->\n| 131,073 |\n",
        "<!-- table: h200-x4 -->\n| 131,073 |\n<!-- table: h200-x4 -->\n<!-- end -->\n",
        "<!-- table: h200-x4 --> <!-- end -->\n",
        '<!-- table: h200-x4 where="steps>5" -->\n<!-- end -->\n',
        "<!-- table: h200-x4 -->\n| 131,073 |\n<!-- run output -->\n<!-- end -->\n",
        '<!-- json: h200-x4/a.json key="x" columns="y" -->\n| 131,073 |\n',
    ],
)
def test_a_table_that_is_not_whole_is_refused(text, records_dir):
    """What is written before the next table's end would be lost otherwise."""
    with refused("does not begin a generated part", "h200-x4", "<!-- end -->"):
        render(text)


def test_a_table_may_begin_on_several_lines(records_dir):
    begin = '<!-- table: h200-x4\n     columns="strategy" -->\n'
    text = render(begin + "<!-- end -->\n")
    assert text.startswith(begin + "\n| strategy")
    assert render(text) == text


def test_a_document_may_hold_several_tables(records_dir):
    document = DOCUMENT.format(options=' columns="strategy"')
    text = render(document + document)
    assert text == render(document) * 2
    assert text.count("| fsdp") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (' columns="strategy, tokens"', ("column 'tokens'", "did you mean 'tokens/s'?")),
        (' where="modl=gpt2"', ("key of where 'modl'", "did you mean 'model'?")),
        (' where="model=gpt2-xl, modl=gpt2"', ("key of where 'modl'",)),
        (' where="precision"', ("no record of h200-x4 matches 'precision'",)),
        (' where="model!=gpt2-xxl"', ("'model!=gpt2-xxl' leaves nothing out",)),
        (' colums="strategy"', ("option 'colums'", "did you mean 'columns'?")),
        (" columns=strategy", ("'columns=strategy' is not understood",)),
    ],
)
def test_unknown_words_of_a_table_are_refused(options, words, records_dir):
    with refused("h200-x4", *words):
        render(DOCUMENT.format(options=options))


@pytest.fixture
def published_json(tmp_path, monkeypatch):
    """Another published file: differences from a reference, by strategy."""
    monkeypatch.setattr(report, "RECORDS_DIR", tmp_path)
    document = {
        "differences": {"dp": {"loss": 0.0, "norm": 1.25e-7}, "fsdp": {"loss": 3e-5, "norm": 0.5}},
        "tokens/s": 1.0,
        "speeds": {"one": 131072.4, "two": 100},
    }
    (tmp_path / "parity.json").write_text(json.dumps(document))


@pytest.mark.usefixtures("published_json")
def test_a_table_of_other_json():
    begin = '<!-- json: parity.json key="differences" columns="norm, loss" -->\n'
    text = render(begin + "old\n<!-- end -->\n")
    rows = "| dp | 1.2e-07 | 0 |\n| fsdp | 5.0e-01 | 3.0e-05 |\n"
    assert text == f"{begin}\n| | norm | loss |\n| --- | --- | --- |\n{rows}\n<!-- end -->\n"
    assert render(text) == text
    plain = render('<!-- json: parity.json key="speeds" columns="tokens" -->\n<!-- end -->')
    assert plain.splitlines()[2:6] == ["| | tokens |", "| --- | --- |", "| one | 131,072 |",
                                       "| two | 100 |"]  # fmt: skip


@pytest.mark.usefixtures("published_json")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('key="diferences" columns="loss"', ("key 'diferences'", "'differences'")),
        ('key="differences" columns="lost"', ("dp: the column 'lost'", "'loss'")),
        ('key="speeds" columns="one, two"', ("one: the column 'two'",)),
        ('key="differences"', ("needs two options", 'columns="..."')),
        ('key="tokens/s" columns="loss"', ("key 'tokens/s'", "known are differences, speeds")),
        ('columns="loss" where="x=1"', ("option 'where'",)),
    ],
)
def test_unknown_words_of_other_json_are_refused(options, words):
    with refused("json parity.json", *words):
        render(f"<!-- json: parity.json {options} -->\n<!-- end -->\n")


@pytest.mark.usefixtures("published_json")
def test_other_json_that_is_not_there_is_refused():
    with refused("partiy.json does not exist", "parity.json?"):
        render('<!-- json: partiy.json key="x" columns="y" -->\n<!-- end -->\n')


@pytest.mark.parametrize("option", ["--check", "--write"])
@pytest.mark.parametrize("name", ["missing.md", "."])
def test_a_document_that_is_not_there_is_explained(option, name, tmp_path, capsys):
    assert main([option, str(tmp_path / name)]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err


def test_a_document_that_is_not_text_is_explained(tmp_path, capsys):
    (tmp_path / "picture.md").write_bytes(b"\x89PNG\xff")
    assert main(["--check", str(tmp_path / "picture.md")]) == 2
    assert "picture.md cannot be read" in capsys.readouterr().err


def test_no_document_is_written_when_one_is_wrong(records_dir, tmp_path):
    text = DOCUMENT.format(options="")
    (tmp_path / "right.md").write_text(text)
    (tmp_path / "wrong.md").write_text(text.replace("<!-- end -->", ""))
    assert main(["--write", str(tmp_path / "right.md"), str(tmp_path / "wrong.md")]) == 2
    assert (tmp_path / "right.md").read_text() == text


def test_plots_in_place_of_a_file_are_explained(tmp_path, capsys):
    run = write_run(tmp_path / "run", made_record())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main([run, "--plots", str(folder)]) == 2
        out, err = capsys.readouterr()
        assert out.startswith("| strategy"), "the table is there all the same"
        assert err.startswith(f"error: plots cannot be written to {folder}; ")
