"""--help and --dry-run: quick, without torch, starting and creating nothing, and true."""

import json
import re
import sys

from tests.conftest import SMALL, assert_ok, run_command, settings
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


def test_dry_run_prints_config_command_and_deepspeed_json_without_torch(tmp_path):
    output_dir = tmp_path / "runs"
    values = {**SMALL, "strategy": "zero3", "grad_accum_steps": 3, "output_dir": output_dir}
    command = [sys.executable, "-c", WITHOUT_TORCH, SCRIPT, *settings(values), "--dry-run"]
    result = run_command([*command, "--num_gpus", "2"])
    assert_ok(result)
    assert result.stderr == ""
    text, _, heavy = re.sub(" +", " ", result.stdout).rpartition("HEAVY ")
    assert heavy == "[]\n"
    assert "\n strategy 'zero3'" in text
    assert not re.search(r"^ \w+ 'auto'", text, re.MULTILINE)
    assert "global 12 = 2 replicas x 3 micro-batches x 2" in text
    line = text.partition("launch command\n")[2].splitlines()[0]
    assert line.startswith(" python real_model_example.py ")
    assert line.count("--num_gpus 2") == 1, "as typed"
    document = json.loads(text.partition("DeepSpeed JSON (from ")[2].partition("\n")[2])
    assert document["zero_optimization"]["stage"] == 3
    assert document["train_micro_batch_size_per_gpu"] == 2
    assert document["gradient_accumulation_steps"] == 3
    assert "auto" not in json.dumps(document)
    assert not output_dir.exists()
