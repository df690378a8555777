"""Run the commands on the pages, and compare their output with the output that the pages show.

A ```bash block is run unchanged, and its output must contain the lines of the following ```text
block, in which "..." stands for omitted lines. In a block marked ```text trained, each number may
differ by 1%, because sums differ between processors. In a block marked ```text measured, numbers
differ from run to run, so only the words are compared.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from pipedream.config import FOLDER

_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)

PAGES = ("README.md", "ADVANCED.md", "QUICKSTART.md", "TEST_RESULTS.md")

# (pattern, replacement) pairs that shorten long commands. The output is still compared.
SHORTER = [
    (r"^(python -m pipedream(?= |$)(?!.*steps=0).*)$", r"\1 --set steps=1"),
    (r"^(python pipedream_runtime.py.*)$", r"\1 --set forward_ms=0 --set backward_ms=0"),
]


class Block(NamedTuple):
    """A command, and the (kind, text) pairs that its output must contain."""

    command: str
    texts: tuple[tuple[str, str], ...]


def blocks_of(page: str) -> list[Block]:
    """Return a page's ```bash blocks in order, each with the ```text blocks that follow it."""
    found: list[Block] = []
    for fence in _FENCE.finditer((FOLDER / page).read_text()):
        kind, body = fence["kind"], fence["body"]
        if kind == "bash":
            found.append(Block(body.replace("\\\n", ""), ()))
        elif kind.startswith("text"):
            texts = (*found[-1].texts, (kind.removeprefix("text").strip(), body))
            found[-1] = found[-1]._replace(texts=texts)
    return found


def mask_numbers(line: str) -> str:
    """Return `line` with "#" in place of each number, and with single spaces."""
    return " ".join(re.sub(r"[+-]?\d[\d.,e+-]*|\bdiverged\b", "#", line).split())


def numbers_of(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", line)]


def differences(output: str, kind: str, text: str) -> list[str]:
    """Return the parts of `text` that `output` does not contain."""
    if kind:
        assert kind in ("trained", "measured"), kind
        output_numbers: dict[str, list[list[float]]] = {}
        for line in output.splitlines():
            output_numbers.setdefault(mask_numbers(line), []).append(numbers_of(line))
        close = partial(pytest.approx, rel=0.01)
        return [
            line
            for line in text.splitlines()
            if line != "..."
            and not any(
                kind == "measured" or numbers_of(line) == close(found)
                for found in output_numbers.get(mask_numbers(line), [])
            )
        ]
    parts, missing, end = re.split(r"^\.\.\.\n", text, flags=re.MULTILINE), [], 0
    for part in parts:
        index = ("\n" + output).find("\n" + part, end)
        if index < 0:
            missing.append(part)
        else:
            end = index + len(part)
    return missing


def run_block(block: Block, folder: Path) -> list[str]:
    """Run a block in `folder`, and describe each mismatch."""
    command = block.command
    if not any(kind == "trained" for kind, _ in block.texts):
        for pattern, replacement in SHORTER:
            command = re.sub(pattern, replacement, command, flags=re.MULTILINE)
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command], cwd=folder, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=540,
    )  # fmt: skip
    mismatches = [
        f"{block.command}does not print\n{part}"
        for kind, text in block.texts
        for part in differences(done.stdout, kind, text)
    ]
    fails = any(re.search("(?m)^(error|[a-zA-Z.]+Error): ", text) for _, text in block.texts)
    if (done.returncode != 0) != fails:
        mismatches.append(f"{block.command}ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return mismatches


@pytest.mark.timeout(600)
def test_commands_run_and_print_what_the_pages_say(tmp_path: Path) -> None:
    for path in FOLDER.iterdir():  # link all files into a writable folder
        if path.name not in ("figures", ".venv") and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    blocks = [block for page in PAGES for block in blocks_of(page)]
    assert len(blocks) >= 14
    assert sum(len(block.texts) for block in blocks) >= 13

    known: dict[str, Block] = {}
    for block in blocks:  # a command that occurs in several blocks runs once
        before = known.get(block.command, Block(block.command, ()))
        known[block.command] = before._replace(texts=(*before.texts, *block.texts))
    # A block that uses a file must follow the block that writes the file. The order of other blocks
    # does not matter.
    chains = [[b for b in known.values() if ".csv" in b.command]]
    chains += [[b] for b in known.values() if ".csv" not in b.command]
    # Commands that train in full come first, because they take the longest.
    chains.sort(key=lambda chain: not any(kind == "trained" for kind, _ in chain[0].texts))

    def run_chain(chain: list[Block]) -> list[str]:
        return [text for block in chain for text in run_block(block, tmp_path)]

    with ThreadPoolExecutor(2) as pool:
        wrong = [text for found in pool.map(run_chain, chains) for text in found]
    assert not wrong, "\n\n".join(wrong)
