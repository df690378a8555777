"""Test which runs `compare` starts, with which settings, and what it keeps of them."""

import argparse
import json
import sys

import pytest

from distributed_training.records.record import LOST_PEER
from distributed_training.settings.request import build_config
from distributed_training.tools import compare
from tests.conftest import assert_ok, light_pool
from tests.e2e.support import assert_refused
from tests.pool import ROOT
from tests.support import made_record, small_text


def test_names_hold_the_keys_that_a_plan_sets_for_a_run(tmp_path):
    plan = {
        "common": {"max_length": 64},
        "runs": [{"strategy": "dp"}, {"strategy": "dp", "bucket_cap_mb": 1}, {"max_length": 0}],
    }
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    arguments = argparse.Namespace(
        plan=str(file), strategies=None, overrides={"learning_rate": "0.5"}, num_gpus=2,
        preset=None, force=False, out=str(tmp_path),
    )  # fmt: skip

    def build(overrides):
        config = {"batch_size": 2, "model": "gpt2-tiny", "dataset": "embedded"}
        return build_config(config, overrides=overrides)

    runs, _ = compare.build_runs(arguments, build, ROOT / "script.py", compare.QUIET_DEFAULTS)
    plain, bucket, refused = runs
    names = ["dp", "dp bucket_cap_mb=1"]
    assert [run.name for run in (plain, bucket)] == names
    assert (bucket.values["max_length"], bucket.values["learning_rate"]) == (64, "0.5")
    assert (refused.status, plain.status) == ("failed", "not run yet")
    assert "max_length" in refused.why


def run_stub(tmp_path, code):
    """Run `code` as the training script of a comparison, and return the run."""
    script = tmp_path / "script.py"
    script.write_text(code)
    run = compare.Run(
        values={"strategy": "dp"}, command=[sys.executable, str(script)], num_processes=1
    )
    compare.train(run, tmp_path)
    return run


def test_a_run_that_does_not_start_gives_its_error(tmp_path):
    code = "print('error: no GPU. To see, run:\\n  ls\\nnote'); raise SystemExit(2)"
    run = run_stub(tmp_path, code)
    assert (run.status, run.exit_code, run.why) == ("failed", 2, "no GPU. To see, run: ls")
    assert run_stub(tmp_path, "").why == "exit code 0"
    lost = f"ninja: stopped\nrank 1 {LOST_PEER}: closed"
    assert run_stub(tmp_path, f"print({lost!r})").why == "ninja: stopped"


@pytest.mark.parametrize("status", ["ok", "oom"])
def test_a_record_is_kept_and_reused_only_if_the_run_succeeded(status, tmp_path):
    config = build_config({"batch_size": 2, "output_dir": "elsewhere"})
    requested = json.loads(json.dumps(config.to_key_values(), default=str))
    record = made_record(status=status, world_size=1, config_requested=requested)
    code = f"""
import pathlib
folder = pathlib.Path({str(tmp_path)!r}, "runs", "gpt2-1")
folder.mkdir(parents=True)
(folder / "record.json").write_text({record.model_dump_json()!r})
"""
    run = run_stub(tmp_path, code)
    assert (run.status, run.why[:3]) == {"ok": ("ok", ""), "oom": ("failed", "oom")}[status]
    again = compare.Run(values={}, command=[], num_processes=1, config=config)
    more = compare.Run(values={}, command=[], num_processes=2, config=config)
    compare.attach_finished_records([again, more], tmp_path)
    assert [(again.record is not None), (more.record is not None)] == [status == "ok", False]


def test_a_published_plan_is_accepted_as_input(tmp_path):
    words = "results/plans/h200-x4.json", "--out", tmp_path, "--dry-run", "--learning_rate", "0.5"
    shown = light_pool().script(["compare", *words])
    assert_ok(shown)
    first, *runs = shown.stdout.splitlines()
    names = [run["strategy"] for run in json.loads((ROOT / words[0]).read_text())["runs"]]
    assert first.startswith(f"The comparison has {len(names)} runs with 4 processes each.")
    assert [line.split("strategy=")[1].split()[0] for line in runs] == names
    assert all("learning_rate=0.5 " in line for line in runs)


def test_a_typed_option_of_an_engine_reaches_only_its_strategy():
    words = "--strategies", "dp,local_sgd", "--local_steps", "4", "--bucket_cap_mb", "2"
    shown = light_pool().script(["compare", *words, "--num_gpus", "2", "--dry-run"])
    assert_ok(shown)
    _, _, *runs = shown.stdout.splitlines()
    assert ["local_steps=4" in run for run in runs] == [False, True]
    assert ["bucket_cap_mb=2" in run for run in runs] == [True, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "dp,fspd"], ["strategy='fspd'", "fsdp"]),
        ([], ["--strategies"]),
        (["--strategies", "dp,fsdp", "--strategy", "tp"], ["no --strategy"]),
        (["--strategies", "dp", "--batch_size", "auto"], ["batch_size"]),
        (["--strategies", "dp", "--cluster", "8xH100"], ["--cluster"]),
        ([str(small_text())], ["JSON"]),
    ],
)
def test_invalid_comparisons_give_a_one_line_error(words, said):
    assert_refused(light_pool().script(["compare", *words]), *said)
