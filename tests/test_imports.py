"""What import-linter (pyproject.toml) cannot say: what the loop may name, what imports no torch."""

import ast
import re
import subprocess
import sys

from distributed_training.settings.files import ROOT
from distributed_training.settings.strategies import list_strategies

# What is imported before processes start, and by --help, --dry-run and every refusal.
TORCH_FREE = (
    "settings.config", "settings.strategies", "models", "models.gpt2",
    "data.hub", "data.corpus", "data.tokenizer", "data.samples", "records.record",
    "records.display", "records.tables", "plan.plan",
    "predict.traffic", "advise.make", "run.launch",
)  # fmt: skip


def test_the_loop_names_no_strategy():
    text = (ROOT / "distributed_training/run/loop.py").read_text().lower()
    names = [*list_strategies(), "ddp", "zero", "deepspeed", "native", "zero_stage"]
    assert [name for name in names if re.search(rf"\b{name}\b", text)] == []
    attributes = {
        node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)
    }
    assert not attributes & {"strategy", "deepspeed_json", "sharded", "mesh", "dp_shard"}


def test_planning_imports_no_torch():
    script = f"""
import importlib, sys
for name in {TORCH_FREE!r}:
    importlib.import_module("distributed_training." + name)
    heavy = {{"torch", "transformers", "deepspeed", "datasets"}} & set(sys.modules)
    if heavy:
        sys.exit(f"importing {{name}} imports {{heavy}}")
import real_model_example
if "torch" in sys.modules or "distributed_training.run.worker" in sys.modules:
    sys.exit("real_model_example imports torch")
"""
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
