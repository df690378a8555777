"""A strategy's DeepSpeed JSON filled in from CONFIG, and where the two disagree."""

import json
from types import SimpleNamespace

import pytest

from distributed_training.plan.deepspeed_json import fill_deepspeed_json
from distributed_training.records.record import Batch
from distributed_training.settings.config import build_config
from distributed_training.settings.strategies import load_strategy
from tests.plan.helpers import NAMES
from tests.support import named_strategy, own_json, refused

DEEPSPEED = [name for name in NAMES if named_strategy(name).traits.takes_deepspeed_json]
# CONFIG and the batch of the tests below, and what the JSON must hold for them.
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
    """`document` as the strategy's deepspeed_config, filled in."""
    path = tmp_path / "given.json"
    path.write_text(json.dumps(document))
    given = {**CONFIG, "strategy": strategy, "deepspeed_config": str(path), **config}
    built = build_config(given)
    return filled_in(load_strategy(built), built)


def filled_in(strategy, config):
    return fill_deepspeed_json(
        SimpleNamespace(strategy=strategy, config=config, batch=BATCH, offload_dir="/fast/disk")
    )


def value_at(document, path):
    for part in path.split("."):
        document = document[part]
    return document


@pytest.mark.parametrize("name", DEEPSPEED)
def test_filling_leaves_no_auto_and_takes_config(name):
    strategy = named_strategy(name)
    before = json.dumps(strategy.document)
    filled = filled_in(strategy, build_config({**CONFIG, "strategy": name}))
    assert '"auto"' in before
    assert '"auto"' not in json.dumps(filled)
    assert [value_at(filled, path) for path in DECIDED] == [value for _, value in DECIDED.values()]
    assert filled["zero_optimization"]["stage"] == strategy.zero.stage
    assert json.dumps(strategy.document) == before


def test_offload_folder_is_filled_in_where_the_json_leaves_it_open(tmp_path):
    path = "zero_optimization.offload_param.nvme_path"
    for given, expected in (("auto", "/fast/disk"), ("/own", "/own")):
        filled = fill(tmp_path, own_json("infinity", **{path: given}), "infinity")
        assert value_at(filled, path) == expected
        assert value_at(filled, path.replace("param", "optimizer")) == "/fast/disk"


@pytest.mark.parametrize(
    ("path", "wrong", "said", "config"),
    [
        ("train_micro_batch_size_per_gpu", "3", "micro_batch_size=3", {}),
        ("gradient_accumulation_steps", 1, "num_microbatches=5", {}),
        ("fp16.enabled", True, "precision='bf16'", {}),
        # True is not 1.
        ("gradient_clipping", True, "max_grad_norm=1.0", {"max_grad_norm": 1.0}),
    ],
)
def test_disagreement_names_both_sides(path, wrong, said, config, tmp_path):
    with refused("given.json", f"{path}={wrong!r}", said, f"change {said.split('=')[0]}"):
        fill(tmp_path, own_json(**{path: wrong}), **config)


def test_agreement_is_accepted_and_missing_sections_are_made(tmp_path):
    document = own_json(
        **{path: value for path, (_, value) in DECIDED.items()},
        train_batch_size=60,
        optimizer={"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.1}},
        scheduler={},
    )
    filled = fill(tmp_path, document)
    assert filled == fill(tmp_path, own_json())
    assert not {"train_batch_size", "optimizer", "scheduler"} & set(filled)
    bare = fill(tmp_path, {"zero_optimization": {"stage": 2}}, precision="fp16")
    assert (bare["fp16"], bare["bf16"]) == ({"enabled": True}, {"enabled": False})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_batch_size": 64}, ("train_batch_size=64", "60 = 4 replicas x 5 micro")),
        ({"optimizer": {"type": "Adam"}}, ("optimizer.type='Adam'", "AdamW")),
        ({"optimizer": {"params": {"lr": 1.0}}}, ("params.lr=1.0", "learning_rate")),
        ({"optimizer": {"params": {"eps": 1e-6}}}, ("optimizer.params.eps=1e-06",)),
        ({"optimizer": None}, ("optimizer", "is not a JSON object")),
        ({"scheduler": {"type": "WarmupLR"}}, ("scheduler", "lr_schedule", "remove")),
        ({"pipeline": {"partition": "uniform"}}, ("pipeline.partition", "pipeline_cut", "remove")),
        # "auto" that nobody decides is named by its place.
        ({"flags": {"a": {"b": "auto"}}}, ("not understood at flags.a.b",)),
    ],
    ids=str,
)
def test_what_config_decides_is_not_for_the_json(changes, words, tmp_path):
    with refused("given.json", *words):
        fill(tmp_path, own_json(**changes))
