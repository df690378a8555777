"""Test `compare` as a user would type it, with an interruption and a strategy that cannot run."""

import json
import signal

import pytest

from tests.conftest import SMALL, assert_ok, light_pool, run_command
from tests.e2e.support import assert_refused, remaining_processes, running, wait_for
from tests.pool import ROOT, SCRIPT
from tests.support import small_text


def command(out, *words):
    values = {**SMALL, "num_samples": 16, "compile": False}
    keys = [f"{key}={value}" for key, value in values.items()]
    start = ["python", SCRIPT, "compare", "--num_gpus", "1", "--out", out]
    return [*start, *words, "--set", *keys]


def finished(out):
    return {path: path.stat().st_mtime_ns for path in out.glob("gpt2-tiny-*.json")}


def test_an_interrupted_comparison_continues(tmp_path):
    """Stop `compare` during the last of three runs, and then run the same command again. The
    strategy "hybrid" fails, because it needs two processes."""
    out, log = tmp_path / "out", tmp_path / "log"
    words = "--strategies", "dp,hybrid,fsdp"
    with running([*command(out, *words), "max_steps=200", "num_samples=1200"], log) as process:
        wait_for(lambda: "3/3" in log.read_text(), process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGINT
    assert "Interrupted with 1 run remaining" in log.read_text()
    assert remaining_processes(str(out)) == []
    (kept,) = finished(out).items()
    assert "1 of 3 runs" in (out / "compare.md").read_text()
    again = run_command([*command(out, *words), "max_steps=200", "num_samples=1200"])
    assert_ok(again)
    assert "1 run already finished." in again.stdout
    assert kept in finished(out).items()
    assert len(finished(out)) == 2
    page = (out / "compare.md").read_text()
    assert "2 of 3 runs" in page
    assert "hybrid failed: " in page
    for path in finished(out):
        record = json.loads(path.read_text())
        assert len(record["loss_seconds"]) == len(record["loss_curve"]) == 200
        assert record["loss_seconds"] == sorted(record["loss_seconds"])
    assert (out / "loss-by-time.png").stat().st_size > 5000
    assert "![loss-by-time](loss-by-time.png)" in page
    html = (out / "compare.html").read_text()
    assert html.count("<img") == 3
    assert page.count("\n### ") == html.count("<h3>") == 3


def test_a_published_plan_is_accepted_as_input(tmp_path):
    words = "results/plans/h200-x4.json", "--out", tmp_path, "--dry-run", "--lr", "0.5"
    shown = light_pool().script(["compare", *words, "--seeds", "2"])
    assert_ok(shown)
    first, *runs = shown.stdout.splitlines()
    names = [run["strategy"] for run in json.loads((ROOT / words[0]).read_text())["runs"]]
    assert first.startswith(f"The comparison has {2 * len(names)} runs with 4 processes each.")
    assert [line.split("strategy=")[1].split()[0] for line in runs] == names * 2
    assert all("learning_rate=0.5 " in line for line in runs)
    count = len(names)
    assert [line.endswith("seed=43") for line in runs] == [False] * count + [True] * count


def test_a_typed_key_reaches_the_strategies_that_use_it():
    def rows(strategies, *typed):
        words = "--strategies", strategies, "--model", "gpt2-tiny-4-blocks", "--num_gpus", "2"
        return light_pool().script(["compare", *words, *typed, "--dry-run"])

    shown = rows("fsdp,pp,zero2", "--pipeline_schedule", "gpipe", "--fsdp_prefetch", "2")
    assert_ok(shown)
    fsdp, pp, zero2 = shown.stdout.splitlines()[1:]
    assert ("fsdp_prefetch=2" in fsdp, "gpipe" in fsdp) == (True, False)
    assert ("fsdp_prefetch=2" in pp, "gpipe" in pp) == (False, True)
    assert ("fsdp_prefetch=2" in zero2, "gpipe" in zero2) == (False, False)
    # A key that no strategy uses is passed to every run, which then rejects the key.
    assert rows("dp,fsdp", "--pipeline_schedule", "gpipe").stdout.count("gpipe") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "dp,fspd"], ["strategy='fspd' is not known", "Did you mean 'fsdp'"]),
        ([], ["either a plan or --strategies"]),
        (["--strategies", "dp", "--seeds", "0"], ["--seeds", "'0' is not"]),
        (["--strategies", "dp", "--batch_size", "auto"], ["needs a fixed batch_size"]),
        (["--strategies", "dp", "--cluster", "8xH100"], ["compare cannot use it"]),
        ([str(small_text())], ["JSON"]),
    ],
)
def test_invalid_comparisons_give_a_one_line_error(words, said):
    assert_refused(light_pool().script(["compare", *words]), *said)
