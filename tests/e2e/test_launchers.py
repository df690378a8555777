"""The same training under every launcher and several strategies: what is printed and left, that the
losses agree, and that every run ends with exit code 0 and leaves no process and no shared memory.

EXIT_RUNS=30 runs each launcher 30 times.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed_training.models.gpt2 import SIZES
from tests.conftest import SMALL, assert_ok, only_record, run_command, script
from tests.e2e.support import launcher_command, left_over, metrics

NUM_RUNS = int(os.environ.get("EXIT_RUNS", "1"))
# "spawn" is --num_gpus 2, as in every run.sh.
LAUNCHERS = {
    "python": ("dp", 1), "spawn": ("zero2", 2), "torchrun": ("fsdp", 2), "deepspeed": ("zero3", 2),
}  # fmt: skip
GLOBAL_BATCH = 4
PRINTED = ("0.3M parameters", "fp32", "global 4 = ", " left", "perplexity", "tok/s",
           "sample before", "sample after",
           "record.json")  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """launcher -> (result, record, run folder, how often nvidia-smi was asked)."""
    return {launcher: run(launcher, tmp_path_factory.mktemp(launcher)) for launcher in LAUNCHERS}


def run(launcher: str, folder: Path) -> tuple:
    strategy, num_processes = LAUNCHERS[launcher]
    looks, program = folder / "looks", folder / "bin" / "nvidia-smi"
    values = {
        **SMALL,
        "strategy": strategy,
        "batch_size": GLOBAL_BATCH // num_processes,
        "num_samples": 30,  # the last step of an epoch is part empty
        "epochs": 2,
        "generate": "The",
    }
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho asked >> {looks}\nexit 9\n")  # it finds no GPU
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    before = shared_memory()
    for number in range(NUM_RUNS):
        looks.write_text("")
        output_dir = folder / f"runs-{number}"
        command = typed_command(launcher, {**values, "output_dir": output_dir})
        # With the number of threads that the script chooses.
        command = ["env", "-u", "OMP_NUM_THREADS", *command]
        # Threads that wait sleep: others' processes need the cores.
        around = {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "PASSIVE", "PATH": path}
        result = run_command(command, timeout_s=120, **around)
        assert_clean_end(result, output_dir)
    end = time.monotonic() + 10  # for buffers of tests that run at the same time
    while not shared_memory() <= before and time.monotonic() < end:
        time.sleep(0.1)
    assert shared_memory() <= before, "DeepSpeed's reduction buffers stay until the next restart"
    record = only_record(output_dir)
    return result, record, Path(record["run_dir"]), len(looks.read_text().splitlines())


def typed_command(launcher: str, values: dict[str, object]) -> list[str]:
    """--num_gpus is typed as --dry-run prints it."""
    if launcher != "spawn":
        return launcher_command(launcher, values)
    lines = script(values, "--num_gpus", "2", "--dry-run").stdout.splitlines()
    command = lines[lines.index("launch command") + 1]
    assert command.strip().startswith("python real_model_example.py --num_gpus 2 "), command
    return shlex.split(command)


def assert_clean_end(result: subprocess.CompletedProcess[str], output_dir: Path) -> None:
    """Exit code 0, no abort at the interpreter's end, no process left."""
    assert_ok(result)
    assert "terminate called" not in result.stderr, result.stderr
    assert left_over(str(output_dir)) == []


def shared_memory() -> set[Path]:
    """DeepSpeed's buffers that have a name."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_runs_to_the_end_and_shows_the_run(launcher, runs):
    result, record, _, looks = runs[launcher]
    assert record["status"] == "ok"
    assert record["world_size"] == LAUNCHERS[launcher][1]
    assert looks == 1, "the machine is looked at once, however many processes run"
    assert "Traceback" not in result.stdout + result.stderr
    missing = [text for text in PRINTED if text not in result.stdout]
    assert not missing, result.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_record_says_what_ran_and_what_came_out(launcher, runs):
    _, record, run_dir, _ = runs[launcher]
    strategy, num_processes = LAUNCHERS[launcher]
    assert record["schema_version"] == 2
    assert record["error"] is None
    assert run_dir.name.endswith(f"-{strategy}-gpt2-tiny-x{num_processes}")
    config = record["config"]
    assert "auto" not in config.values(), "the resolved config has no auto"
    assert config["precision"] == "fp32"
    assert record["config_requested"]["precision"] == "auto"
    if document := record["deepspeed_json"]:
        assert f"zero{document['zero_optimization']['stage']}" == strategy
        assert document["train_micro_batch_size_per_gpu"] == config["batch_size"]
        assert record["versions"]["deepspeed"]
    commit = run_command(["git", "rev-parse", "HEAD"]).stdout.strip()
    assert record["git_commit"].removesuffix("-dirty") == commit
    assert record["versions"]["torch"].startswith("2.")
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
    _, record, run_dir, _ = runs[launcher]
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
    exported = [run_dir / "hf" for _, _, run_dir, _ in runs.values()]
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
