"""Test that the examples in CONTRIBUTING.md work as printed."""

import re
import runpy
import textwrap
from pathlib import Path

import pytest

from distributed_training import models
from distributed_training.planner.make_plan import make_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.settings import config as config_module
from distributed_training.settings import strategies
from distributed_training.settings.keys import read_keys
from distributed_training.settings.request import build_config
from tests.conftest import assert_ok, heavy_pool
from tests.support import CPU_MACHINE, draw_model, read_model, refused, save_model

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the files of all examples. The only strategies in the folder are from
    the examples."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(strategies, "STRATEGIES_DIR", tmp_path / "strategies")
    return tmp_path


def test_section_on_the_first_step_names_existing_functions():
    section = TEXT.partition("## From CONFIG to the first step")[2].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", section)
    code = "".join((ROOT / "distributed_training" / file).read_text() for file in files)
    names = set(re.findall(r"`(_?[a-z_]+)`", section))
    assert len(names) > 20
    assert [name for name in names if f"def {name}(" not in code] == []


def test_example_of_a_strategy(folder):
    config = build_config({"strategy": "shards-of-two", "output_dir": str(folder / "runs")})
    plan = make_plan(config, local_cluster(CPU_MACHINE, 4, 4))
    assert plan.mesh == {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1}
    with refused("3"):
        make_plan(config, local_cluster(CPU_MACHINE, 3, 3))


def test_example_of_a_model(folder, monkeypatch):
    monkeypatch.setattr(models, "FAMILIES", [*models.FAMILIES, "narrow"])
    monkeypatch.setattr(
        models, "__path__", [*models.__path__, str(folder / "distributed_training/models")]
    )
    spec = models.find_model("narrow")
    model = draw_model(spec, seed=1)
    padding = (spec.size.padded_vocab_size - spec.size.vocab_size) * spec.size.hidden_size
    assert sum(p.numel() for p in model.parameters()) - padding == spec.size.num_parameters
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(spec, state, folder / "hf")
    spec.check_weights(folder / "hf")
    other = read_model(spec, folder / "hf")
    assert all((other.state_dict()[name] == state[name]).all() for name in state)


def test_example_of_a_config_key(tmp_path):
    field = EXAMPLES["distributed_training/settings/config.py"]

    file = tmp_path / "more.py"  # the help text is read from the source code
    file.write_text("class More(Config):\n" + textwrap.indent(field, "    "))
    run_config = runpy.run_path(str(file), vars(config_module))["More"]
    keys = read_keys(run_config)
    assert keys["label_smoothing"].work
    assert "all tokens" in keys["label_smoothing"].help
    assert run_config(label_smoothing=0.1).label_smoothing == 0.1
    with pytest.raises(ValueError, match="label_smoothing"):
        run_config(label_smoothing=0.7)


@pytest.mark.processes
def test_example_of_a_measurement(folder):
    file = folder / "results/lab/first_evaluation.py"
    answer = heavy_pool().script([], script=file, cwd=folder)
    assert_ok(answer)
    lines = dict(line.split() for line in answer.stdout.splitlines() if line[:2] in ("dp", "fs"))
    assert set(lines) == {"dp", "fsdp"}
    assert all(float(seconds) > 0 for seconds in lines.values())
