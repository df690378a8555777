"""Type what the documents from which this project started print: their CONFIG, as it stands, under
each launcher. Pages name the replacements of commands that no longer exist."""

import re

import pytest

from tests.conftest import assert_ok, run_command
from tests.pool import ROOT, SCRIPT

CONFIG = """
CONFIG = {
    "model_name": "gpt2",            # 124M parameters
    "strategy": "%s",                # Data Parallelism
    "batch_size": 4,
    "num_epochs": 3,
    "num_samples": None,             # Use full dataset
}
"""


@pytest.mark.parametrize(
    ("strategy", "command"),
    [
        ("dp", "python SCRIPT"),
        ("zero2", "torchrun --nproc_per_node=1 SCRIPT"),
        ("zero3", "deepspeed --num_gpus=1 SCRIPT"),
        (None, "bash strategies/3_zero_stage2/run.sh"),
    ],
)
def test_a_former_config_is_planned_with_one_note(tmp_path, strategy, command):
    source = re.sub(r"\nCONFIG = \{.*?\n\}\n", CONFIG % strategy, SCRIPT.read_text(), flags=re.S)
    script = tmp_path / "real_model_example.py"
    script.write_text(source)
    words = command.replace("SCRIPT", str(script)).split()
    # Weights and text of the Hub are not available in tests.
    offline = ["--weights", "random", "--dataset", "embedded", "--tokenizer", "embedded"]
    result = run_command([*words, "--dry-run", "--explain", *offline], PYTHONPATH=str(ROOT))
    assert_ok(result)
    if strategy:
        assert result.stderr.count("note: CONFIG") == 1
        assert re.search(r"model +'gpt2'\n", result.stdout)
        assert re.search(r"epochs +3\n", result.stdout)


@pytest.mark.parametrize(
    "words", ["sbatch run_deepspeed.sh", "ds_config_stage2.json", "MASTER_README.md"]
)
def test_pages_name_what_replaced_a_former_command(words):
    assert words in (ROOT / "CLUSTER_QUICKSTART.md").read_text()
