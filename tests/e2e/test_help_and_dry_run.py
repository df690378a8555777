"""--help and --dry-run: quick, without torch, starting and creating nothing, and true."""

from __future__ import annotations

import json
import sys

import pytest

from tests.conftest import HIDDEN_GPUS, SMALL, assert_ok, run_command, script
from tests.e2e.support import H200, T4_8GIB, fake_nvidia_smi
from tests.pool import SCRIPT

# Runs the script like `python SCRIPT ...`, then says whether torch came in.
WITHOUT_TORCH = """
import runpy, sys
script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
code = 0
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    code = end.code
heavy = {"torch", "deepspeed", "transformers", "datasets"} & set(sys.modules)
print("HEAVY", sorted(heavy))
sys.exit(code)
"""


def resolved(text: str) -> dict[str, str]:
    """key -> the value's text, of the part headed "resolved CONFIG"."""
    values = {}
    for line in text.splitlines()[1:]:
        if not line.startswith("  ") or line.startswith("  batch: "):
            break
        key, _, value = line.strip().partition(" ")
        values[key] = value.strip().partition("    (was ")[0]
    return values


def deepspeed_json(text: str) -> dict:
    """The JSON at the end of --dry-run's output."""
    _, _, rest = text.partition("DeepSpeed JSON (from ")
    return json.loads(rest.partition("\n")[2])


def replicas(count: int) -> str:
    """As the line that says how the batch is cut has it."""
    return f"{count} replica{'s' * (count > 1)}"


def launch_line(text: str) -> str:
    """The command under "launch command"."""
    lines = text.splitlines()
    return lines[lines.index("launch command") + 1].strip()


def dry_run(values: dict, *arguments: str, path: str | None = None, **environment: str) -> str:
    """Output of --dry-run; with `path`, on the machine that its nvidia-smi describes."""
    unset = () if path is None else (HIDDEN_GPUS,)
    if path is not None:
        environment["PATH"] = path
    result = script(values, *arguments, "--dry-run", unset=unset, **environment)
    assert_ok(result)
    assert result.stderr == ""
    return result.stdout


def test_torch_is_not_imported(tmp_path):
    passed = ["--set", f"output_dir={tmp_path}", "--set", "dataset=embedded", "--num_gpus", "2"]
    command = [sys.executable, "-c", WITHOUT_TORCH, SCRIPT, *passed, "--dry-run"]
    result = run_command(command, timeout_s=60)
    assert_ok(result)
    assert result.stdout.splitlines()[-1] == "HEAVY []"


def test_dry_run_prints_config_command_and_deepspeed_json(tmp_path):
    output_dir = tmp_path / "runs"
    values = {**SMALL, "strategy": "zero3", "grad_accum_steps": 3, "output_dir": output_dir}
    text = dry_run(values, "--num_gpus", "2")
    config = resolved(text)
    assert config["strategy"] == "'zero3'"
    assert config["precision"] == "'fp32'"
    assert "'auto'" not in config.values()
    assert "global 12 = 2 replicas x 3 micro-batches x 2" in text
    assert launch_line(text).startswith("python real_model_example.py --num_gpus 2 ")
    document = deepspeed_json(text)
    assert document["zero_optimization"]["stage"] == 3
    assert document["train_micro_batch_size_per_gpu"] == 2
    assert document["gradient_accumulation_steps"] == 3
    assert "auto" not in json.dumps(document)
    assert not output_dir.exists()


def test_set_wins_over_preset_and_preset_over_config(tmp_path):
    preset = tmp_path / "preset.json"
    preset.write_text(
        json.dumps({"_comment": "a note", "batch_size": 3, "epochs": 7, "strategy": "dp"})
    )
    values = {"epochs": 5, "strategy": "zero1", "output_dir": tmp_path / "runs"}
    text = dry_run(values, "--preset", str(preset), "--strategy", "zero3")
    config = resolved(text)
    assert config["seed"] == "42", "from CONFIG"
    assert config["batch_size"] == "3", "from the preset, over CONFIG's 4"
    assert config["epochs"] == "5", "from --set, over the preset's 7"
    assert config["strategy"] == "'zero3'", "from the short form, over --set"


MACHINES = {
    # nvidia-smi, arguments -> model, precision, compile, processes
    "four H200": ([H200] * 4, ["--num_gpus", "all"], ("gpt2-medium", "bf16", "True", 4)),
    "H200 and T4": ([H200, T4_8GIB], ["--num_gpus", "all"], ("gpt2", "fp16", "True", 2)),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_auto_becomes_what_the_machine_can_do(machine, tmp_path):
    gpus, arguments, (model, precision, compiled, count) = MACHINES[machine]
    path = fake_nvidia_smi(tmp_path / "bin", *gpus)
    values = {"strategy": "zero2", "output_dir": tmp_path / "runs"}
    text = dry_run(values, *arguments, path=path, HF_HOME=str(tmp_path / "hf"))
    config = resolved(text)
    assert (config["model"], config["precision"]) == (repr(model), repr(precision))
    assert config["compile"] == compiled
    assert f"= {replicas(count)} x " in text
    assert deepspeed_json(text)[precision]["enabled"] is True
    assert ("note: the GPU has less than 12 GiB" in text) == (model == "gpt2")
    # Without Hub and cache, what a fine-tuning would start from is missing, and that is said.
    assert config["dataset"] == "'embedded'"
    assert "note: WikiText-2 is not available" in text
    assert "note: GPT-2's tokenizer is not available" in text
    assert "note: weights are random" in text


def test_no_gpu_is_a_rehearsal_on_the_cpu(tmp_path):
    text = dry_run({"output_dir": tmp_path / "runs"}, "--num_gpus", "all", HF_HOME=str(tmp_path))
    config = resolved(text)
    assert config["model"] == "'gpt2-tiny'"
    assert (config["precision"], config["compile"]) == ("'fp32'", "False")
    assert f"= {replicas(2)} x " in text, "two processes stand in for GPUs"
    assert "note: no GPU found" in text
