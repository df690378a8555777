"""Test a strategy's DeepSpeed configuration: values filled in from CONFIG, and conflicts with
CONFIG."""

import json
from types import SimpleNamespace

import pytest

from distributed_training.plan.layout import Batch
from distributed_training.planner.deepspeed_json import (
    FP16_LOSS_SCALING,
    fill_deepspeed_json,
    other_settings,
)
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import load_strategy
from tests.planner.helpers import NAMES, plan_for
from tests.support import deepspeed_json, named_strategy, refused

DEEPSPEED = [name for name in NAMES if named_strategy(name).traits.uses_zero]
# CONFIG values and the batch for the tests below. DECIDED maps each filled-in path of the DeepSpeed
# configuration to its CONFIG key and its required value.
CONFIG = {"max_grad_norm": 0.5, "precision": "bf16", "learning_rate": 2e-4, "weight_decay": 0.1}
BATCH = Batch(global_batch_size=60, micro_batch_size=3, num_microbatches=5, num_replicas=4)
DECIDED = {
    "train_batch_size": ("global_batch_size", 60),
    "train_micro_batch_size_per_gpu": ("micro_batch_size", 3),
    "gradient_accumulation_steps": ("num_microbatches", 5),
    "gradient_clipping": ("max_grad_norm", 0.5),
    "bf16.enabled": ("precision", True),
    "fp16.enabled": ("precision", False),
}


def fill(tmp_path, document, strategy="zero2", **config):
    """Return the DeepSpeed configuration `document` with values filled in from CONFIG."""
    path = tmp_path / "given.json"
    path.write_text(json.dumps(document))
    given = {**CONFIG, "strategy": strategy, "deepspeed_config": str(path), **config}
    built = build_config(given)
    return fill_strategy(load_strategy(built), built)


def fill_strategy(strategy, config):
    plan_fields = {"strategy": strategy, "config": config, "batch": BATCH}
    return fill_deepspeed_json(SimpleNamespace(offload_dir="/fast/disk", **plan_fields))


def value_at(document, path):
    for part in path.split("."):
        document = document[part]
    return document


@pytest.mark.parametrize("name", DEEPSPEED)
def test_every_auto_is_filled_in_from_config(name):
    strategy = named_strategy(name)
    before = json.dumps(strategy.document)
    filled = fill_strategy(strategy, build_config({**CONFIG, "strategy": name}))
    assert '"auto"' in before
    assert '"auto"' not in json.dumps(filled)
    assert [value_at(filled, path) for path in DECIDED] == [value for _, value in DECIDED.values()]
    assert filled["zero_optimization"]["stage"] == strategy.zero.stage
    assert other_settings(filled) == {}
    assert json.dumps(strategy.document) == before


def test_offload_folder_is_filled_in_if_the_json_says_auto(tmp_path):
    path = "zero_optimization.offload_param.nvme_path"
    filled = fill(tmp_path, deepspeed_json("infinity", **{path: "/own"}), "infinity")
    assert value_at(filled, path) == "/own"
    assert value_at(filled, path.replace("param", "optimizer")) == "/fast/disk"


def test_equal_values_are_accepted_and_missing_sections_are_added(tmp_path):
    document = deepspeed_json(
        **{path: value for path, (_, value) in DECIDED.items()},
        optimizer={"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8}},
        scheduler={},
    )
    filled = fill(tmp_path, document)
    assert filled == fill(tmp_path, deepspeed_json())
    assert not {"optimizer", "scheduler"} & set(filled)
    bare = fill(tmp_path, {"zero_optimization": {"stage": 2}}, precision="fp16")
    assert (bare["fp16"], bare["bf16"]) == (
        {**FP16_LOSS_SCALING, "enabled": True},
        {"enabled": False},
    )


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"train_micro_batch_size_per_gpu": "3"}, ("gpu='3'", "change micro_batch_size", "=3")),
        ({"fp16.enabled": True}, ("fp16.enabled=True", "change precision", "'bf16'")),
        ({"gradient_clipping": 1.0}, ("gradient_clipping=1.0", "change max_grad_norm", "=0.5")),
        ({"train_batch_size": 64}, ("train_batch_size=64", "60")),
        ({"optimizer": {"type": "Adam"}}, ("optimizer.type='Adam'", "AdamW")),
        ({"optimizer": {"params": {"lr": 1.0}}}, ("params.lr=1.0", "learning_rate")),
        ({"optimizer": {"params": {"eps": 1e-6}}}, ("optimizer.params.eps=1e-06",)),
        ({"optimizer": None}, ("optimizer",)),
        ({"scheduler": {"type": "WarmupLR"}}, ("scheduler", "lr_schedule", "warmup_steps")),
    ],
    ids=str,
)
def test_json_values_that_contradict_config_are_refused(changes, messages, tmp_path):
    with refused("given.json", *messages):
        fill(tmp_path, deepspeed_json(**changes))


def test_other_sections_are_passed_on_and_belong_to_the_work(tmp_path):
    changes = {
        "communication_data_type": "fp16",
        "zero_optimisation": {"stage": 3},
        "offload_optimizer": {"device": "cpu"},
        "zero_optimization.zero_quantized_weights": True,
        "pipeline": {"partition": "uniform"},
    }
    off = {"wandb": {"enabled": False, "project": "p"}, "data_types": {}}
    document = deepspeed_json(**changes, **off, wall_clock_breakdown=True, aio={"block_size": 1})
    filled = fill(tmp_path, document)
    assert filled.items() >= {**off, "communication_data_type": "fp16"}.items()
    assert other_settings(filled) == {
        **{path: value for path, value in changes.items() if path != "pipeline"},
        "pipeline.partition": "uniform",
    }
    given = {"strategy": "zero2", "deepspeed_config": str(tmp_path / "given.json")}
    plan = plan_for(tmp_path, **given)
    assert plan.work["deepspeed_json"] == plan.deepspeed_changes == other_settings(filled)
    assert any("given.json" in note and "zero_optimisation" in note for note in plan.notes)
    assert "deepspeed_json" not in plan_for(tmp_path, strategy="zero2").work


def test_other_loss_scale_settings_count_only_with_fp16(tmp_path):
    document = deepspeed_json(**{"fp16.loss_scale": 128, "fp16.hysteresis": 2})
    assert other_settings(fill(tmp_path, document)) == {}
    changes = other_settings(fill(tmp_path, document, precision="fp16"))
    assert changes == {"fp16.loss_scale": 128, "fp16.hysteresis": 2}


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "offload"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "offload"),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}, "infinity"),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, "zero2"),
    ],
)
def test_a_json_runs_only_under_its_strategy_and_others_name_it(zero, strategy, tmp_path):
    path = tmp_path / "given.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    given = {"deepspeed_config": str(path), "model": "gpt2-tiny"}
    assert load_strategy(build_config({**given, "strategy": strategy})).zero.stage == zero["stage"]
    other = "zero3" if zero["stage"] < 3 else "zero2"
    with refused("given.json", f"strategy={other!r}"):
        load_strategy(build_config({**given, "strategy": other}))
    plan = plan_for(tmp_path, checked=False, **given, strategy="auto")
    assert plan.strategy.name == strategy
