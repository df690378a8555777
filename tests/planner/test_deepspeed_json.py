"""Test a strategy's DeepSpeed configuration: values filled in from CONFIG, and conflicts with
CONFIG."""

import json
from types import SimpleNamespace

import pytest

from distributed_training.plan.layout import Batch
from distributed_training.planner.deepspeed_json import (
    ACCEPTED_OPTIMIZER_VALUES,
    FP16_LOSS_SCALING,
    fill_deepspeed_json,
)
from distributed_training.planner.deepspeed_sections import check_sections
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import load_strategy
from tests.planner.helpers import NAMES, plan_for
from tests.support import deepspeed_json, named_strategy, refused

DEEPSPEED = [name for name in NAMES if named_strategy(name).traits.takes_json]
# CONFIG values and the batch for the tests below. DECIDED maps each filled-in path of the DeepSpeed
# configuration to its CONFIG key and its required value.
CONFIG = {"max_grad_norm": 0.5, "precision": "bf16", "learning_rate": 2e-4, "weight_decay": 0.1}
BATCH = Batch(global_batch_size=60, micro_batch_size=3, num_microbatches=5, num_replicas=4)
DECIDED = {
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
    return fill_deepspeed_json(SimpleNamespace(offload_dir="/fast/disk", **plan_fields), [])


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
    assert json.dumps(strategy.document) == before


def test_offload_folder_is_filled_in_if_the_json_says_auto(tmp_path):
    path = "zero_optimization.offload_param.nvme_path"
    for given, expected in (("auto", "/fast/disk"), ("/own", "/own")):
        filled = fill(tmp_path, deepspeed_json("infinity", **{path: given}), "infinity")
        assert value_at(filled, path) == expected
        assert value_at(filled, path.replace("param", "optimizer")) == "/fast/disk"


@pytest.mark.parametrize(
    ("path", "wrong", "config_text", "config"),
    [
        ("train_micro_batch_size_per_gpu", "3", "micro_batch_size=3", {}),
        ("gradient_accumulation_steps", 1, "num_microbatches=5", {}),
        ("fp16.enabled", True, "precision='bf16'", {}),
        # True is not accepted as 1.
        ("gradient_clipping", True, "max_grad_norm=1.0", {"max_grad_norm": 1.0}),
    ],
)
def test_conflicts_name_both_sources(path, wrong, config_text, config, tmp_path):
    with refused(
        "given.json", f"{path}={wrong!r}", config_text, f"change {config_text.split('=')[0]}"
    ):
        fill(tmp_path, deepspeed_json(**{path: wrong}), **config)


def test_equal_values_are_accepted_and_missing_sections_are_added(tmp_path):
    document = deepspeed_json(
        **{path: value for path, (_, value) in DECIDED.items()},
        train_batch_size=60,
        optimizer={"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.1}},
        scheduler={},
    )
    filled = fill(tmp_path, document)
    assert filled == fill(tmp_path, deepspeed_json())
    assert not {"train_batch_size", "optimizer", "scheduler"} & set(filled)
    bare = fill(tmp_path, {"zero_optimization": {"stage": 2}}, precision="fp16")
    assert (bare["fp16"], bare["bf16"]) == (
        {**FP16_LOSS_SCALING, "enabled": True},
        {"enabled": False},
    )


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"train_batch_size": 64}, ("train_batch_size=64", "60 = 4 replicas x 5 micro")),
        ({"optimizer": {"type": "Adam"}}, ("optimizer.type='Adam'", "AdamW")),
        ({"optimizer": {"params": {"lr": 1.0}}}, ("params.lr=1.0", "learning_rate")),
        ({"optimizer": {"params": {"eps": 1e-6}}}, ("optimizer.params.eps=1e-06", "Write 1e-08")),
        ({"optimizer": {"params": {"foo": 1}}}, ("optimizer.params.foo=1", "Remove it")),
        ({"optimizer": None}, ("optimizer", "is not a JSON object")),
        ({"scheduler": {"type": "WarmupLR"}}, ("scheduler", "lr_schedule to constant", "Remove")),
        ({"pipeline": {"partition": "uniform"}}, ("pipeline.partition", "pipeline_cut", "Remove")),
        # The error names the key whose value "auto" is not supported.
        ({"timers": {"a": {"b": "auto"}}}, ("not supported for timers.a.b",)),
        (
            {"zero_optimization.offload_optimizer": "auto"},
            ("not supported for zero_optimization.offload_optimizer",),
        ),
        # Sections without effect, settings that CONFIG decides, and settings that change results
        ({"zero_optimisation": {"stage": 3}}, ("reads zero_optimisation", "'zero_optimization'?")),
        ({"offload_optimizer": {"device": "cpu"}}, ("Move it into zero_optimization",)),
        ({"bfloat16": {"enabled": True}}, ("Rename it to bf16",)),
        ({"wandb": {"enabled": True}}, ("wandb is not accepted in the JSON", "set log_to")),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, ("amp", "set precision")),
        (
            {"communication_data_type": "fp16"},
            ("communication_data_type='fp16'", "same training steps"),
        ),
        ({"gradient_predivide_factor": 2.0}, ("gradient_predivide_factor=2.0",)),
        ({"progressive_layer_drop": {"enabled": True}}, ("progressive_layer_drop would change",)),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, ("data_types would change",)),
        ({"zero_optimization.zero_quantized_weights": True}, ("zero_quantized_weights=True",)),
        (
            {"zero_optimization.zenflow": {"topk_ratio": 0.1}},
            ("zenflow={'topk_ratio': 0.1} would",),
        ),
        ({"zero_optimization.reduce_bucket_size": 1e30}, ("allocates", "at most 4,294,967,296")),
        ({"steps_per_print": "x"}, ("steps_per_print='x'", "a number greater than 0")),
        ({"steps_per_print": 0}, ("steps_per_print=0", "a number greater than 0")),
        ({"wall_clock_breakdown": "yes"}, ("wall_clock_breakdown='yes'", "true or false")),
        ({"zero_optimization.cpu_offload": True}, ("cpu_offload=True", "set strategy to offload")),
        ({"_comment": "x"}, ("reads _comment. Remove it",)),
        ({"bf16.bf16_master_weights_and_grads": True}, ("bf16_master_weights_and_grads=True",)),
    ],
    ids=str,
)
def test_json_sections_that_config_decides_are_refused(changes, messages, tmp_path):
    with refused("given.json", *messages):
        fill(tmp_path, deepspeed_json(**changes))


def test_a_json_may_repeat_the_constants_of_every_engine():
    from distributed_training.engines.base import ADAM

    assert ACCEPTED_OPTIMIZER_VALUES["betas"] == ([*ADAM["betas"]],)
    assert ACCEPTED_OPTIMIZER_VALUES["eps"] == (ADAM["eps"],)
    assert deepspeed_json()["fp16"] == {**FP16_LOSS_SCALING, "enabled": "auto"}


def test_json_values_without_effect_are_accepted(tmp_path):
    usual = {"params": {"betas": [0.9, 0.999], "eps": 1e-8, "lr": "auto"}}
    off = {"amp": {"enabled": False}, "wandb": {"enabled": False, "project": "p"}, "elasticity": {}}
    none = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
    passed_on = {"wall_clock_breakdown": True, "steps_per_print": 1}
    filled = fill(tmp_path, deepspeed_json(optimizer=usual, **off, **none, **passed_on))
    assert filled == fill(tmp_path, deepspeed_json(**passed_on))


def test_sizes_that_the_trainer_fills_follow_from_the_hidden_size(tmp_path):
    names = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    open_sizes = {f"zero_optimization.{name}": "auto" for name in names}
    path = tmp_path / "given.json"
    path.write_text(json.dumps(deepspeed_json("zero3", **open_sizes)))
    config = {
        "strategy": "zero3",
        "deepspeed_config": str(path),
        "model": "gpt2",
    }  # hidden size 768
    plan = plan_for(tmp_path, checked=False, **config)
    zero = plan.strategy.document["zero_optimization"]
    assert [zero[name] for name in names] == [768 * 768, 530841, 7680]
    assert plan.strategy.zero.reduce_bucket_size == 768 * 768


def test_unusual_values_are_checked_by_deepspeed(tmp_path):
    """A child process imports DeepSpeed to check unusual values. Configurations without unusual
    values are checked without DeepSpeed, because the import takes seconds."""
    assert check_sections({"steps_per_print": 1e5}, "") == []
    assert check_sections({"steps_per_print": float("inf")}, "") == ["steps_per_print"]
    assert check_sections({"zero_optimization": {"stage": 0}, "fp16": {"loss_scale": 0}}, "") == []
    unusual = ["zero_optimization.reduce_bucket_size"]
    assert check_sections({"zero_optimization": {"reduce_bucket_size": 0}}, "") == unusual
    path = "zero_optimization.stage3_prefetch_bucket_size"
    with refused("given.json: DeepSpeed does not accept", path.rpartition(".")[2], "integer"):
        fill(tmp_path, deepspeed_json("zero3", **{path: 15099494.4}), "zero3")


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "offload"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "offload"),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "offload"),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}, "infinity"),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, "zero2"),
    ],
)
def test_a_json_runs_only_under_its_strategy_and_others_name_it(zero, strategy, tmp_path):
    path = tmp_path / "given.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    given = {"deepspeed_config": str(path), "model": "gpt2-tiny"}
    assert load_strategy(build_config({**given, "strategy": strategy})).zero.stage == zero["stage"]
    with refused("given.json describes", f"Set strategy to {strategy}"):
        load_strategy(
            build_config({**given, "strategy": "zero3" if zero["stage"] < 3 else "zero2"})
        )
    plan = plan_for(tmp_path, checked=False, **given, strategy="auto")
    assert plan.strategy.name == strategy
