"""The same training under every launcher: what is printed and left, and that the losses agree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distributed_training.models.gpt2 import SIZES
from tests.conftest import ROOT, SMALL, assert_ok, only_record, run_command
from tests.e2e.support import launcher_command, metrics
from tests.e2e.test_clean_exit import assert_clean_end

LAUNCHERS = {"python": 1, "spawn": 2, "torchrun": 2, "deepspeed": 2}
GLOBAL_BATCH = 4
PRINTED = ("296,704 parameters", "gradients torch.float32", "global 4 = ", "ms/step",
           "perplexity", "tokens/s", "sample: ", "record.json")  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """launcher -> (result, record, run folder)."""
    found = {}
    for launcher, num_processes in LAUNCHERS.items():
        output_dir = tmp_path_factory.mktemp(launcher)
        values = {
            **SMALL,
            "strategy": "zero2",
            "batch_size": GLOBAL_BATCH // num_processes,
            "num_samples": 30,  # the last step of an epoch is part empty
            "epochs": 2,
            "generate": "The",
            "output_dir": output_dir,
        }
        command = launcher_command(launcher, values)
        result = run_command(command, timeout_s=120, DS_ACCELERATOR="cpu")
        assert_clean_end(result, output_dir)
        record = only_record(output_dir)
        found[launcher] = (result, record, Path(record["run_dir"]))
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_runs_to_the_end_and_shows_the_run(launcher, runs):
    result, record, _ = runs[launcher]
    assert record["status"] == "ok"
    assert record["world_size"] == LAUNCHERS[launcher]
    assert "Traceback" not in result.stdout + result.stderr
    missing = [text for text in PRINTED if text not in result.stdout]
    assert not missing, result.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_record_says_what_ran_and_what_came_out(launcher, runs):
    _, record, run_dir = runs[launcher]
    num_processes = LAUNCHERS[launcher]
    assert record["schema_version"] == 2
    assert record["error"] is None
    assert run_dir.name.endswith(f"-zero2-gpt2-tiny-x{num_processes}")
    config = record["config"]
    assert "auto" not in config.values(), "the resolved config has no auto"
    assert config["precision"] == "fp32"
    assert record["config_requested"]["precision"] == "auto"
    document = record["deepspeed_json"]
    assert document["zero_optimization"]["stage"] == 2
    assert document["train_micro_batch_size_per_gpu"] == config["batch_size"]
    commit = run_command(["git", "rev-parse", "HEAD"]).stdout.strip()
    assert record["git_commit"].removesuffix("-dirty") == commit
    assert record["versions"]["torch"].startswith("2.")
    assert record["versions"]["deepspeed"]
    assert "real_model_example.py" in record["command"]
    assert record["started_at"] <= record["finished_at"]
    assert record["num_parameters"] == SIZES["gpt2-tiny"].num_parameters
    assert record["batch"]["global_batch_size"] == GLOBAL_BATCH
    assert [epoch["step"] for epoch in record["epochs"]] == [8, 16]
    assert [row["step"] for row in record["evaluations"]] == [0, 8, 16]
    assert record["evaluations"][-1]["perplexity"] < record["evaluations"][0]["perplexity"]
    performance = record["performance"]
    assert performance["mfu"] is None, "no GPU, so it is not known"
    assert performance["tokens_per_s"] > 0
    times = performance["step_time_s"]
    assert 0 < times["p10"] <= times["p50"] <= times["p90"] <= times["p99"]
    # The data do not fill the last step of either epoch.
    assert performance["num_warmup_steps"] + performance["num_timed_steps"] == 14
    memory = record["memory"]
    assert [rank["rank"] for rank in memory["by_rank"]] == list(range(num_processes))
    assert memory["peak_host_bytes"] == max(r["peak_host_bytes"] for r in memory["by_rank"])
    assert record["sample"].startswith("The")
    assert record["skipped_steps"] == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_metrics_have_one_line_a_step(launcher, runs):
    _, record, run_dir = runs[launcher]
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert [[row["step"], row["loss"]] for row in rows] == record["loss_curve"]
    assert {row["num_targets"] for row in rows} == {GLOBAL_BATCH * 32, 2 * 32}
    assert all(row["grad_norm"] > 0 and row["step_time_s"] > 0 for row in rows)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_agree_on_the_losses(launcher, runs):
    expected, actual = (metrics(runs[name][2]) for name in ("python", launcher))
    for theirs, ours in zip(expected, actual, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4), f"step {ours['step']}"
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_export_opens_in_transformers(runs):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    exported = [run_dir / "hf" for _, _, run_dir in runs.values()]
    models = [transformers.GPT2LMHeadModel.from_pretrained(folder) for folder in exported]
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported[0])
    ids = tokenizer("def __init__(self):", return_tensors="pt").input_ids
    assert ids.shape[1] > 3
    assert tokenizer.decode(ids[0]) == "def __init__(self):"
    first = models[0]
    assert first.config.vocab_size == 2048
    assert first.lm_head.weight is first.transformer.wte.weight
    with torch.no_grad():
        logits = [model.eval()(ids).logits for model in models]
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-3, atol=1e-4)


def test_printed_launch_command_can_be_typed(runs, tmp_path):
    """What --dry-run prints, typed as it stands, is a run."""
    import shlex

    values = {**SMALL, "strategy": "fsdp", "max_steps": 2, "output_dir": tmp_path}
    command = launcher_command("spawn", values, "--dry-run")
    lines = run_command(command).stdout.splitlines()
    typed = lines[lines.index("launch command") + 1]
    result = run_command(shlex.split(typed), timeout_s=120, cwd=ROOT)
    assert_ok(result)
    assert only_record(tmp_path)["status"] == "ok"
    assert sys.executable not in typed
