"""Break important lines one at a time and check whether the tests notice. CI does
not run this program.

    python -m tests.mutations                        # all of mutations.toml
    python -m tests.mutations NAME ... --jobs 2
    python -m tests.mutations --check                # lists mutations that no longer apply (fast)

Each mutation is applied to a copy of the checkout. The narrowest tests that should catch the
mutation then run on this copy until the first failure. The tests must pass without the mutation,
because otherwise "caught" would mean nothing. The exit code is 1 if a mutation survives or no
longer applies."""

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.support import clone

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.toml")
CLEAN_LIMIT_S = 600.0
# The time limit catches mutations that make processes wait for one another.
TIME_LIMIT_FACTOR, EXTRA_TIME_S = 4.0, 60.0
PASSED, FAILED = 0, 1  # pytest's exit codes
CAUGHT, ALREADY_FAILING = "caught", "tests already fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """A change to the code that the tests must catch."""

    name: str
    breaks: str  # description of the fault in one sentence
    file: str  # path from the repository's root
    old: str  # text that the file contains exactly once
    new: str
    tests: tuple[str, ...]  # pytest node ids; mutations.toml has names of sets of ids


def read_list() -> list[Mutation]:
    values = tomllib.loads(LIST.read_text())
    mutations = []
    for entry in values["mutation"]:
        tests = tuple(test for name in entry["tests"] for test in values["tests"][name])
        mutations.append(Mutation(**{**entry, "tests": tests}))
    names = [mutation.name for mutation in mutations]
    assert len(set(names)) == len(names), "two mutations have the same name"
    return mutations


def find_stale(mutation: Mutation) -> str:
    """Return why a mutation cannot be applied, or "" if it can."""
    path = ROOT / mutation.file
    if not path.is_file() or path.read_text().count(mutation.old) != 1:
        return f"its old text is not in {mutation.file} exactly once"
    for test in mutation.tests:
        file, _, function = test.partition("::")
        function = function.partition("[")[0]
        if not (ROOT / file).is_file():
            return f"{file} does not exist"
        if function and f"def {function}(" not in (ROOT / file).read_text():
            return f"{file} has no {function}"
    return ""


def run_tests(tests: tuple[str, ...], checkout: Path, limit_s: float) -> tuple[int, float, str]:
    """Return pytest's exit code, the duration in seconds, and a reason. The reason is the first
    failed test or, if no test failed, the last line of the output. A run that exceeds the time
    limit counts as failed."""
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
    reason = late or (failed or lines or [""])[0 if failed else -1]
    return code, time.monotonic() - began, reason


def end_processes(process: subprocess.Popen[bytes]) -> None:
    """Kill a test run and all processes that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    process.wait()


def write(path: Path, text: str) -> None:
    """Write a file and remove its bytecode. Python would use the old bytecode if the file's size
    and its modification time in whole seconds were unchanged."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_group(mutations: list[Mutation]) -> list[str]:
    """Run the tests that these mutations share, first without a mutation. If the tests pass, run
    them with each mutation. Return one line per mutation that is not caught."""
    tests = mutations[0].tests
    missed = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        checkout = clone(Path(folder))
        clean, clean_seconds, reason = run_tests(tests, checkout, CLEAN_LIMIT_S)
        for mutation in mutations:
            outcome = ALREADY_FAILING
            seconds = clean_seconds
            if clean == PASSED:
                path = checkout / mutation.file
                before = path.read_text()
                write(path, before.replace(mutation.old, mutation.new))
                limit_s = TIME_LIMIT_FACTOR * clean_seconds + EXTRA_TIME_S
                code, seconds, reason = run_tests(tests, checkout, limit_s)
                write(path, before)
                outcome = {PASSED: "survived", FAILED: CAUGHT}.get(code, "tests could not run")
            if outcome != CAUGHT:
                missed.append(f"{outcome}: {mutation.name}: {mutation.breaks}")
            print(f"{outcome:<21} {seconds:5.0f} s  {mutation.name:<36} {reason}", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to test (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of test runs at the same time (default: 1)"
    )
    parser.add_argument(
        "--check", action="store_true", help="only list the mutations that no longer apply"
    )
    arguments = parser.parse_args()
    mutations = read_list()
    if unknown := set(arguments.names) - {mutation.name for mutation in mutations}:
        parser.error(f"mutations.toml has no {', '.join(sorted(unknown))}")
    chosen = [m for m in mutations if m.name in arguments.names or not arguments.names]
    groups: dict[tuple[str, ...], list[Mutation]] = {}
    stale = 0
    for mutation in chosen:
        if why := find_stale(mutation):
            print(f"no longer applies: {mutation.name}: {why}")
            stale += 1
        else:
            groups.setdefault(mutation.tests, []).append(mutation)
    print(f"{len(chosen) - stale} of {len(chosen)} apply")
    if arguments.check:
        return int(stale > 0)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        missed = [line for lines in pool.map(run_group, groups.values()) for line in lines]
    print(f"\n{len(chosen) - stale - len(missed)} of {len(chosen)} caught", *missed, sep="\n")
    return int(bool(missed) or stale > 0)


if __name__ == "__main__":
    raise SystemExit(main())
