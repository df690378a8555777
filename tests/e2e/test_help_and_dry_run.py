"""--help and --dry-run: quick, without torch, starting and creating nothing, and true."""

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import HIDDEN_GPUS, SMALL, assert_ok, run_command, script, settings
from tests.e2e.support import H200, T4_8GIB, fake_nvidia_smi
from tests.pool import SCRIPT

# Runs the script like `python SCRIPT ...`, then says whether torch came in.
WITHOUT_TORCH = """
import atexit, runpy, sys
heavy = {"torch", "deepspeed", "transformers", "datasets"}
atexit.register(lambda: print("HEAVY", sorted(heavy & set(sys.modules))))
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def deepspeed_json(text: str) -> dict:
    """The JSON at the end of --dry-run's output."""
    _, _, rest = text.partition("DeepSpeed JSON (from ")
    return json.loads(rest.partition("\n")[2])


def said_by(result: subprocess.CompletedProcess[str]) -> str:
    """Output of --dry-run, blanks as one, without what a key was before."""
    assert_ok(result)
    assert result.stderr == ""
    return re.sub(" +", " ", re.sub(r" +\(was .*\)", "", result.stdout))


def test_dry_run_prints_config_command_and_deepspeed_json_without_torch(tmp_path):
    output_dir = tmp_path / "runs"
    values = {**SMALL, "strategy": "zero3", "grad_accum_steps": 3, "output_dir": output_dir}
    command = [sys.executable, "-c", WITHOUT_TORCH, SCRIPT, *settings(values), "--dry-run"]
    text, _, heavy = said_by(run_command([*command, "--num_gpus", "2"])).rpartition("HEAVY ")
    assert heavy == "[]\n"
    assert "\n strategy 'zero3'\n" in text
    assert not re.search(r"^ \w+ 'auto'", text, re.MULTILINE)
    assert "global 12 = 2 replicas x 3 micro-batches x 2" in text
    line = text.partition("launch command\n")[2].splitlines()[0]
    assert line.startswith(" python real_model_example.py ")
    assert line.count("--num_gpus 2") == 1, "as typed"
    document = deepspeed_json(text)
    assert document["zero_optimization"]["stage"] == 3
    assert document["train_micro_batch_size_per_gpu"] == 2
    assert document["gradient_accumulation_steps"] == 3
    assert "auto" not in json.dumps(document)
    assert not output_dir.exists()


@pytest.mark.parametrize(
    ("gpus", "model", "precision", "compiled"),
    [([H200, T4_8GIB], "gpt2", "fp16", True), ([], "gpt2-tiny", "fp32", False)],
)
def test_auto_becomes_what_the_machine_can_do(gpus, model, precision, compiled, tmp_path):
    options = {"HF_HOME": str(tmp_path)}
    if gpus:
        options |= {"PATH": fake_nvidia_smi(tmp_path / "bin", *gpus), "unset": (HIDDEN_GPUS,)}
    values = {"strategy": "zero2", "output_dir": tmp_path / "runs"}
    text = said_by(script(values, "--num_gpus", "all", "--dry-run", **options))
    for key, value in {"model": model, "precision": precision, "compile": compiled}.items():
        assert f"\n {key} {value!r}\n" in text
    assert "= 2 replicas x " in text, "without GPUs two processes stand in"
    assert ("note: no GPU found" in text) == (not gpus)
    assert ("note: the GPU has less than 12 GiB" in text) == bool(gpus)
    if gpus:
        assert deepspeed_json(text)[precision]["enabled"] is True
