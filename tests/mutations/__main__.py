"""Break important lines one at a time and see whether the tests notice. Not part of CI.

    python -m tests.mutations                        # all of mutations.toml
    python -m tests.mutations NAME ... --jobs 2 --json found.json
    python -m tests.mutations --check                # in seconds: which no longer apply

Each mutation is put into a copy of the checkout, where the narrowest tests that should catch it run
until the first fails. They have to pass there without it, or "caught" would mean nothing. The exit
code is 1 where a mutation survives or no longer applies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.toml")
CLEAN_LIMIT_S = 600.0
# A mutation that makes processes wait for one another is caught by the time limit.
SLOWER, PATIENCE_S = 4.0, 60.0
PASSED, FAILED = 0, 1  # pytest's exit codes
CAUGHT, SURVIVED = "caught", "survived"
STALE = "no longer applies"
DIRTY = "tests fail without it"
BROKEN = "tests could not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One change that the tests must notice."""

    name: str
    breaks: str  # in one sentence
    file: str  # from the repository's root
    old: str  # is in the file exactly once
    new: str
    tests: list[str]  # names of sets in the list's [tests]

    def text(self, root: Path) -> str | None:
        """The file with the change; None where it no longer applies."""
        path = root / self.file
        if not path.is_file():
            return None
        before = path.read_text()
        if before.count(self.old) != 1:
            return None
        return before.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What became of a mutation."""

    name: str
    breaks: str
    outcome: str
    seconds: float = 0.0
    said: str = ""  # the first test that failed, or why there is no answer


@dataclass(slots=True)
class CleanRuns:
    """Whether tests pass without any change, and how long they take; each set is run once."""

    found: dict[tuple[str, ...], tuple[int, float, str]] = field(default_factory=dict)
    locks: dict[tuple[str, ...], threading.Lock] = field(default_factory=dict)

    def of(self, tests: tuple[str, ...], checkout: Path) -> tuple[int, float, str]:
        """(exit code, seconds, what was said)."""
        with self.locks.setdefault(tests, threading.Lock()):
            if tests not in self.found:
                self.found[tests] = run_tests(tests, checkout, CLEAN_LIMIT_S)
            return self.found[tests]


def read_list(path: Path = LIST) -> tuple[dict[str, list[str]], list[Mutation]]:
    """(tests by the names of their sets, mutations)."""
    values = tomllib.loads(path.read_text())
    mutations = [Mutation(**entry) for entry in values["mutation"]]
    names = [mutation.name for mutation in mutations]
    assert len(set(names)) == len(names), "two mutations have one name"
    return values["tests"], mutations


def find_stale(mutation: Mutation, sets: dict[str, list[str]], root: Path = ROOT) -> str:
    """Why a mutation cannot be tried, or ""."""
    if mutation.text(root) is None:
        where = ", ".join(files_with(mutation.old, root)) or "nowhere"
        return f"its old text is not in {mutation.file} exactly once; once in: {where}"
    for test in tests_of(mutation, sets):
        file, _, function = test.partition("::")
        function = function.partition("[")[0]
        if not (root / file).is_file():
            return f"{file} is not there"
        if function and f"def {function}(" not in (root / file).read_text():
            return f"{file} has no {function}"
    return ""


def files_with(text: str, root: Path) -> list[str]:
    """Where a line has gone that was moved."""
    files = [*root.glob("distributed_training/**/*.py"), *root.glob("strategies/**/*.py")]
    return [str(file.relative_to(root)) for file in files if file.read_text().count(text) == 1]


def tests_of(mutation: Mutation, sets: dict[str, list[str]]) -> tuple[str, ...]:
    """Node ids for pytest."""
    return tuple(test for name in mutation.tests for test in sets[name])


def run_tests(tests: tuple[str, ...], checkout: Path, limit_s: float) -> tuple[int, float, str]:
    """(pytest's exit code, seconds, the first test that failed or the end of what was said). A run
    past the limit counts as failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            late = ""
        except subprocess.TimeoutExpired:
            code = FAILED
            late = f"ran past {limit_s:.0f} s"
        finally:
            end_processes(process)
        output.seek(0)
        lines = output.read().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    said = late or (failed or lines or [""])[0 if failed else -1]
    return code, time.monotonic() - began, said


def end_processes(process: subprocess.Popen[bytes]) -> None:
    """A test run with whatever it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    process.wait()


@contextlib.contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """A file with another text. Its bytecode goes: Python tells it by seconds and size alone."""
    before = path.read_text()
    _write(path, text)
    try:
        yield
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def copy_checkout(to: Path) -> Path:
    """The tracked files as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, to / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return to


def try_out(
    mutation: Mutation, sets: dict[str, list[str]], checkout: Path, clean: CleanRuns
) -> Finding:
    """Run a mutation's tests without it and with it."""
    about = {"name": mutation.name, "breaks": mutation.breaks}
    if why := find_stale(mutation, sets, checkout):
        return Finding(**about, outcome=STALE, said=why)
    tests = tests_of(mutation, sets)
    code, seconds, said = clean.of(tests, checkout)
    if code != PASSED:
        return Finding(**about, outcome=DIRTY, seconds=seconds, said=said)
    text = mutation.text(checkout)
    assert text is not None
    with changed(checkout / mutation.file, text):
        code, seconds, said = run_tests(tests, checkout, SLOWER * seconds + PATIENCE_S)
    outcome = {PASSED: SURVIVED, FAILED: CAUGHT}.get(code, BROKEN)
    return Finding(**about, outcome=outcome, seconds=seconds, said=said)


def try_all(
    mutations: list[Mutation], sets: dict[str, list[str]], num_jobs: int
) -> Iterator[Finding]:
    """What became of each, as it is known."""
    clean = CleanRuns()
    checkouts: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for number in range(num_jobs):
            checkouts.put(copy_checkout(Path(folder, f"job-{number}")))

        def work(mutation: Mutation) -> Finding:
            checkout = checkouts.get()
            try:
                return try_out(mutation, sets, checkout, clean)
            finally:
                checkouts.put(checkout)

        with ThreadPoolExecutor(num_jobs) as pool:
            yield from pool.map(work, mutations)


def show(finding: Finding) -> None:
    said = "" if finding.outcome == SURVIVED else finding.said
    print(f"{finding.outcome:<21} {finding.seconds:5.0f} s  {finding.name:<36} {said}", flush=True)


def summarise(findings: list[Finding]) -> int:
    """Print the share caught and what was not; the exit code."""
    caught = sum(finding.outcome == CAUGHT for finding in findings)
    print(f"\n{caught} of {len(findings)} caught ({caught / max(1, len(findings)):.1%})")
    for finding in findings:
        if finding.outcome != CAUGHT:
            print(f"{finding.outcome}: {finding.name}: {finding.breaks}")
    return int(caught < len(findings))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="those to try; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at a time")
    parser.add_argument("--json", type=Path, help="a file for what was found")
    parser.add_argument("--check", action="store_true", help="only say which no longer apply")
    arguments = parser.parse_args()
    sets, mutations = read_list()
    if unknown := set(arguments.names) - {mutation.name for mutation in mutations}:
        parser.error(f"mutations.toml has no {', '.join(sorted(unknown))}")
    chosen = [m for m in mutations if m.name in arguments.names or not arguments.names]
    if arguments.check:
        stale = {mutation.name: find_stale(mutation, sets) for mutation in chosen}
        for name, why in stale.items():
            if why:
                print(f"{STALE}: {name}: {why}")
        print(f"{sum(not why for why in stale.values())} of {len(stale)} apply")
        return int(any(stale.values()))
    findings = []
    for finding in try_all(chosen, sets, arguments.jobs):
        show(finding)
        findings.append(finding)
        if arguments.json is not None:
            rows = [asdict(each) for each in findings]
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return summarise(findings)


if __name__ == "__main__":
    raise SystemExit(main())
