import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distributed_training
from distributed_training.strategy import list_strategies

PACKAGE = Path(distributed_training.__file__).parent
# A module imports from rows above its own only.
ORDER = (
    ("errors", "sizes", "display", "metrics", "trackers", "torchrun"),
    ("files", "machine"),
    ("config", "hub", "tables"),
    ("strategy", "corpus", "hf_format", "model", "plots"),
    ("layout_rules",),
    ("topology", "deepspeed_json", "tokenizer", "record", "preflight", "hf_checkpoint"),
    ("layout", "gradients"),
    ("data", "resolve", "report"),
    ("parallel",),
    ("engines.base",),
    ("engines",),
    ("engines.deepspeed_pipeline",),
    ("checkpoint",),
    ("plan",),
    ("launch", "train", "assemble"),
    ("outcome",),
    ("worker",),
)
# What is imported before processes start, and by --help, --dry-run and every refusal.
TORCH_FREE = (
    "errors", "sizes", "machine", "files", "config", "hub", "strategy", "deepspeed_json",
    "corpus", "hf_format", "topology", "tokenizer", "record", "preflight", "data", "resolve",
    "layout_rules", "layout", "display", "trackers", "checkpoint", "plan", "launch",
)  # fmt: skip


def name_of(path):
    """The dotted name below the package; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def row_of(module):
    """The row of a module, or of the folder that holds it."""
    rows = {name: row for row, names in enumerate(ORDER) for name in names}
    return rows.get(module, rows.get(module.split(".")[0]))


def imports_of(source):
    """Names below the package that a source imports, inside functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                below = f"{node.module}.{alias.name}".removeprefix("distributed_training.")
                found.add(f"{node.module}.{alias.name}" if below in MODULES else node.module)
    prefix = "distributed_training."
    return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}


def wrong_imports(module, source):
    return {other for other in imports_of(source) if row_of(other) >= row_of(module)}


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_imports_go_one_way(module):
    assert row_of(module) is not None, f"give {module} a place in ORDER"
    assert wrong_imports(module, MODULES[module].read_text()) == set()


def test_the_walk_sees_every_form_of_import():
    source = """
import distributed_training.worker
def f():
    from distributed_training import plan
    from distributed_training.train import Trainer
    from distributed_training.engines.base import Engine
"""
    assert imports_of(source) == {"worker", "plan", "train", "engines.base"}
    assert wrong_imports("plan", source) == {"worker", "plan", "train"}
    assert wrong_imports("config", source) == {"worker", "plan", "train", "engines.base"}
    assert wrong_imports("engines.native", "import distributed_training.engines.deepspeed") == {
        "engines.deepspeed"
    }


def test_the_principle_of_the_design():
    """CONFIG -> Topology -> Engine -> train: the rows of ORDER may be refined, not turned."""
    chain = [
        "config",
        "strategy",
        "topology",
        "layout",
        "engines.base",
        "engines",
        "train",
        "worker",
    ]
    rows = [row_of(module) for module in chain]
    assert rows == sorted(set(rows))


def test_the_model_knows_nothing_of_parallelism():
    assert imports_of(MODULES["model"].read_text()) == {"sizes"}


def test_the_mechanisms_of_parallel_know_nothing_of_each_other():
    for module, path in MODULES.items():
        if module.startswith("parallel."):
            assert not [name for name in imports_of(path.read_text()) if "parallel" in name]


def test_the_loop_names_no_strategy():
    text = MODULES["train"].read_text().lower()
    names = [*list_strategies(), "ddp", "zero", "deepspeed", "native", "zero_stage"]
    assert [name for name in names if re.search(rf"\b{name}\b", text)] == []
    attributes = {
        node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)
    }
    assert not attributes & {"strategy", "deepspeed_json", "sharded", "mesh", "dp_shard"}


def test_every_word_of_the_torch_free_list_is_a_module():
    assert set(TORCH_FREE) <= set(MODULES)


def test_planning_imports_no_torch():
    script = f"""
import importlib, sys
for name in {TORCH_FREE!r}:
    importlib.import_module("distributed_training." + name)
    heavy = {{"torch", "transformers", "deepspeed", "datasets"}} & set(sys.modules)
    if heavy:
        sys.exit(f"importing {{name}} imports {{heavy}}")
import real_model_example
if "torch" in sys.modules or "distributed_training.worker" in sys.modules:
    sys.exit("real_model_example imports torch")
"""
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
