"""Pages and what they are about agree: links, commands and their output, tables, pictures.

In README.md and QUICKSTART.md a ```bash block is run as it stands, and what the ```text block after
it says has to be in its output: line for line, "..." standing for lines left out. In a block marked
```text trained each number may be off by a hundredth, as sums of another processor are; in one
marked ```text measured, whose numbers differ from run to run, only the words are compared.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from pipedream.errors import UserError
from pipedream.results import pages as results
from pipedream.results.pages import FOLDER, drawn_from, fill, load_records, pages, stale, tables
from pipedream.results.text import checked, makespan_error, points_error, render_page
from pipedream.schedules.catalogue import SCHEDULES
from pipedream.schedules.closed_forms import CLOSED_FORMS

PAGES = ["README.md", "QUICKSTART.md", "COMPARISON.md", "TEST_RESULTS.md"]
_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)]+)\)")

# Long commands are run with less to do; what is compared stays the same.
SHORTER = [
    (r"^(python pipedream_simple.py(?!.*steps=0).*)$", r"\1 --set steps=3"),
    (r"^(python pipedream_runtime.py.*)$", r"\1 --set forward_ms=0 --set backward_ms=0"),
    (r"^(python pipedream_visual.py)$", r"\1 --only naive_pipeline"),
    (r"results --write$", "results --check"),
]


class Block(NamedTuple):
    """A command, and the texts that its output has to hold: (kind, lines)."""

    command: str
    texts: tuple[tuple[str, str], ...]


def blocks_of(page: str) -> list[Block]:
    """A page's ```bash blocks in order, each with the ```text blocks that follow it."""
    found: list[Block] = []
    for fence in _FENCE.finditer((FOLDER / page).read_text()):
        kind, body = fence["kind"], fence["body"]
        if kind == "bash":
            found.append(Block(body.replace("\\\n", ""), ()))
        elif kind.startswith("text"):
            texts = (*found[-1].texts, (kind.removeprefix("text").strip(), body))
            found[-1] = found[-1]._replace(texts=texts)
    return found


def shorter(command: str) -> str:
    for pattern, replacement in SHORTER:
        command = re.sub(pattern, replacement, command, flags=re.MULTILINE)
    return command


def squeezed(line: str) -> str:
    """A line without its numbers, and with single blanks."""
    return " ".join(re.sub(r"[+-]?\d[\d.,e+-]*|\bdiverged\b", "#", line).split())


def numbers_of(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", line)]


def differences(output: str, kind: str, text: str) -> list[str]:
    """What of a text is not in the output."""
    if kind:
        assert kind in ("trained", "measured"), kind
        there: dict[str, list[list[float]]] = {}
        for line in output.splitlines():
            there.setdefault(squeezed(line), []).append(numbers_of(line))
        close = partial(pytest.approx, rel=0.01)
        return [
            line
            for line in text.splitlines()
            if not any(
                kind == "measured" or numbers_of(line) == close(found)
                for found in there.get(squeezed(line), [])
            )
        ]
    parts, missing, at = re.split(r"^\.\.\.\n", text, flags=re.MULTILINE), [], 0
    for part in parts:
        place = ("\n" + output).find("\n" + part, at)
        if place < 0:
            missing.append(part)
        else:
            at = place + len(part)
    return missing


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything linked in, where files may be written."""
    folder = tmp_path_factory.mktemp("tutorial")
    for path in FOLDER.iterdir():
        if path.name not in ("figures", ".venv") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    tools = folder / "tools"
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    # run.sh is tested in test_run_sh.py; here it must not set up anything.
    (tools / "bash").write_text(f'#!{shutil.which("bash")}\nexec {sys.executable} "${{@/run.sh/'
                                'pipedream_simple.py}" --set steps=0\n')  # fmt: skip
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return folder


def run_block(block: Block, folder: Path) -> list[str]:
    """What is wrong with a block, run in the folder."""
    trained = any(kind == "trained" for kind, _ in block.texts)
    command = block.command if trained else shorter(block.command)
    inherited = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder,
        env={
            **inherited,
            "PATH": f"{folder / 'tools'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    wrong = [
        f"{block.command}does not print\n{part}"
        for kind, text in block.texts
        for part in differences(done.stdout, kind, text)
    ]
    fails = any(re.search("(?m)^(error|[a-zA-Z.]+Error): ", text) for _, text in block.texts)
    if (done.returncode != 0) != fails:
        wrong.append(f"{block.command}ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return wrong


@pytest.mark.timeout(300)
def test_commands_run_and_print_what_the_pages_say(copy: Path) -> None:
    readme, quickstart = blocks_of("README.md"), blocks_of("QUICKSTART.md")
    assert len(readme) >= 25
    assert len(quickstart) >= 7
    assert sum(len(block.texts) for block in readme) >= 22

    known: dict[str, Block] = {}
    for block in (*readme, *quickstart):  # a command that both have runs once
        before = known.get(block.command, Block(block.command, ()))
        known[block.command] = before._replace(texts=(*before.texts, *block.texts))
    # A block that uses a file has to come after the one that writes it; the others do not matter.
    chains = [[b for b in known.values() if ".csv" in b.command]]
    chains += [[b] for b in known.values() if ".csv" not in b.command]

    def run_chain(chain: list[Block]) -> list[str]:
        return [text for block in chain for text in run_block(block, copy)]

    with ThreadPoolExecutor(2) as pool:
        wrong = [text for found in pool.map(run_chain, chains) for text in found]
    assert not wrong, "\n\n".join(wrong)


def test_what_a_page_says_is_compared() -> None:
    """The comparison itself: a figure that is off, a line that is missing, an order that is not."""
    output = "a 1\nb 2.5\nc 3\n"
    assert not differences(output, "", "a 1\nb 2.5\n")
    assert not differences(output, "", "a 1\n...\nc 3\n")
    assert differences(output, "", "b 2.6\n") == ["b 2.6\n"]
    assert differences(output, "", "c 3\n...\na 1\n") == ["a 1\n"]
    assert differences(output, "", "2.5\n") == ["2.5\n"]
    assert not differences(output, "measured", "b   7\n")
    assert differences(output, "measured", "d 7\n") == ["d 7"]
    assert not differences(output, "trained", "b  2.501\n")
    assert differences(output, "trained", "b 2.6\nd 2.5\n") == ["b 2.6", "d 2.5"]


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(_FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    text = (FOLDER / page).read_text()
    seen = 0
    for link in _LINK.finditer(re.sub(_FENCE, "", text)):
        target, _, anchor = link["target"].partition("#")
        if target.startswith("https://"):
            continue
        path = FOLDER / target if target else FOLDER / page
        assert path.exists(), link[0]
        assert not anchor or anchor in anchors(path.read_text()), link[0]
        seen += 1
    assert seen >= 2


def test_every_picture_is_shown_and_every_file_is_on_the_map() -> None:
    text = (FOLDER / "README.md").read_text()
    shown = text + (FOLDER / "lecture.ipynb").read_text()
    for picture in (FOLDER / "figures").iterdir():
        assert f"](figures/{picture.name})" in shown, picture.name
    section = text.partition("## What is in this folder")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)/` \|(.*)$", section, re.M))
    for file in (FOLDER / "pipedream").glob("*/*.py"):
        there = f"`{file.stem}`" in rows[file.parent.name]
        assert there or file.stem in ("__init__", "__main__"), file
    for file in (*(FOLDER / "pipedream").glob("*.py"), *FOLDER.glob("*.py"), FOLDER / "run.sh"):
        assert f"`{file.name}`" in section or file.name == "__init__.py", file


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_wrapped_and_plain(page: str) -> None:
    text = (FOLDER / page).read_text()
    for line in re.sub(_FENCE, "", text).splitlines():
        assert len(line) <= 100 or line.startswith(("|", "- command:", "  python")), line
        assert line.isascii(), line


def test_pages_and_pictures_are_those_of_the_records() -> None:
    assert stale(FOLDER) == []


def test_a_page_that_disagrees_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A digit in a page, a record that has changed, a picture that is gone: each is named."""
    for name in PAGES:
        shutil.copy(FOLDER / name, tmp_path)
    for name in ("records", "figures"):
        shutil.copytree(FOLDER / name, tmp_path / name)
    assert stale(tmp_path) == []
    page = tmp_path / "COMPARISON.md"
    page.write_text(page.read_text().replace("| ZeRO-1 | 0.66 |", "| ZeRO-1 | 0.65 |"))
    (tmp_path / "figures/zero_bubble.png").unlink()
    record = next((tmp_path / "records").glob("cpu-runtime*.json"))
    record.write_text(record.read_text().replace('"utilisation": 0.', '"utilisation": 0.1'))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["results", "--check"])
    with pytest.raises(SystemExit) as ended:
        results.main()
    assert ended.value.code == 1
    named = [
        "COMPARISON.md",
        "TEST_RESULTS.md",
        "figures/prediction.png",
        "figures/zero_bubble.png",
    ]
    error = capsys.readouterr().err
    assert error.startswith("error: not up to date: ")
    assert all(name in error for name in named)
    assert "figures/plan.png" not in error
    monkeypatch.setattr("sys.argv", ["results", "--write"])
    results.main()
    assert stale(tmp_path) == []
    assert drawn_from(tmp_path / "figures/prediction.png") != drawn_from(
        FOLDER / "figures/prediction.png"
    )


def test_results_say_what_the_records_say() -> None:
    records = load_records(FOLDER / "records")
    assert records
    text = pages(FOLDER)["TEST_RESULTS.md"]
    for name, record in records.items():
        assert f"`{record['command']}`" in text
        assert name in text
        for case in record["cases"]:
            assert f"| {case['measured']['makespan_ms']:,.1f} |" in text
        cases = checked(record)
        assert len(cases) < len(record["cases"])
        worst = (
            max(abs(makespan_error(case)) for case in cases),
            max(abs(points_error(case)) for case in cases),
        )
        assert f"`{name}`) | {len(cases)} | {worst[0]:.1f}% | {worst[1]:.1f} points |" in text
        assert ("The device is emulated" in text) or not record["emulated_ms"]["forward"]


def test_a_gpu_record_is_shown_as_measured() -> None:
    """The CPU's record, made to look like one of four GPUs that the goal is missed on."""
    records = load_records(FOLDER / "records")
    record = next(iter(records.values()))
    case = dict(next(case for case in record["cases"] if not case["calibrated_on"]))
    case["measured"] = case["measured"] | {"utilisation": 0.5, "peak_memory_mib": [1.5, 20.0]}
    case["predicted"] = case["predicted"] | {"utilisation": 0.5391}
    alone = dict(case, predicted=None, schedule="zb-h1")
    gpu = record | {
        "machine": record["machine"] | {"device": "NVIDIA H200", "gpus": 4},
        "emulated_ms": {"forward": 0, "backward": 0},
        "cases": [case, alone],
    }
    study = results._load(FOLDER / "records/cpu-staleness.json")
    text = render_page({**records, "h200-p4.json": gpu}, study)
    assert "Nothing is emulated: the times are those" in text
    assert "| 3.9 points | 3 points: not met |" in text
    assert "| 2 20 |" in text
    assert "| ZB-H1 |" in text


def test_tables_on_the_pages_are_known_and_all_are_used() -> None:
    used = [
        name
        for page in results.PAGES
        for name in re.findall(r"<!-- table: (.*?) -->", (FOLDER / page).read_text())
    ]
    assert set(used) == set(tables(FOLDER))
    with pytest.raises(UserError, match="no table 'idle tim'; did you mean 'idle time'"):
        fill("<!-- table: idle tim -->\n<!-- end -->", tables(FOLDER))


def test_the_tables_of_laws_have_every_schedule() -> None:
    for name in ("idle time", "memory"):
        lines = tables(FOLDER)[name]().splitlines()[2:]
        assert [line.split(" | ")[0].strip("| ") for line in lines] == [
            SCHEDULES[schedule].title for schedule in CLOSED_FORMS
        ]
        columns = {"idle time": 3, "memory": 4}[name]
        assert all(len(re.split(r"(?<!\\)\|", line)) == columns + 2 for line in lines)


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu-runtime.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match=r"cpu-runtime.json is no record of format 1; make it anew"):
        load_records(tmp_path)
    (tmp_path / "cpu-runtime.json").write_text("{")
    with pytest.raises(UserError, match="is no JSON"):
        load_records(tmp_path)


def test_files_and_functions_stay_short() -> None:
    """320 lines and 50: what can be read at one go."""
    for file in (*(FOLDER / "pipedream").rglob("*.py"), *FOLDER.glob("*.py")):
        text = file.read_text()
        assert len(text.splitlines()) <= 320, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 50, (file, node.name)
