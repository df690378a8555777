"""Test strategy folders: the shipped ones, invalid ones, and the user's own folders and engines."""

import json

import pytest

from distributed_training.engines.native import INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW
from distributed_training.settings.keys import Options, read_keys
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import (
    list_strategies,
    load_strategy,
    strategy_options,
)
from tests.planner.helpers import NAMES
from tests.support import deepspeed_json, named_strategy, refused


def test_shipped_strategies_have_their_order_and_meaning():
    assert list(list_strategies()) == [*NAMES[:-1], "local_sgd", "compressed", "cp"]
    for name in NAMES:
        strategy = named_strategy(name)
        assert strategy_options(name) == Options
        if strategy.engine != "native":
            # The loss scale starts and changes as in native engines, so all strategies skip the
            # same fp16 steps.
            fp16 = strategy.document["fp16"]
            assert 2.0 ** fp16["initial_scale_power"] == INITIAL_LOSS_SCALE
            assert (fp16["loss_scale_window"], fp16["hysteresis"]) == (LOSS_SCALE_WINDOW, 1)


@pytest.mark.parametrize(
    ("strategy", "document", "messages"),
    [
        ("hybrid", deepspeed_json("zero1"), ("stage 1", "pipeline")),
        ("zero2", deepspeed_json("zero2", pipeline={"stages": 2}), ("pipeline",)),
        ("dp", deepspeed_json(), ("strategy='dp'", "deepspeed_config=")),
        ("zero2", [], ()),
        ("zero2", {"zero_optimization": {"stage": 4}}, ("stage=4",)),
        ("zero2", {"zero_optimization": {"offload_param": {"device": "gpu"}}}, ("offload_param",)),
        ("zero2", deepspeed_json(zero_optimization={"stage": "auto"}), ("stage='auto' is not",)),
    ],
)
def test_json_of_another_strategy_is_refused(strategy, document, messages, tmp_path):
    path = tmp_path / "given.json"
    path.write_text(json.dumps(document))
    with refused("given.json", *messages):
        load_strategy(build_config({"strategy": strategy, "deepspeed_config": str(path)}))


def test_pp_may_be_set_together_with_a_deepspeed_json(tmp_path):
    path = tmp_path / "given.json"
    path.write_text(json.dumps(deepspeed_json("hybrid")))
    values = {"strategy": "hybrid", "deepspeed_config": str(path), "pp": 4}
    assert load_strategy(build_config(values)).mesh["pp"] == 4


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Return a function that writes strategy folders. Its keyword arguments map each folder name to
    the content of config.json."""
    monkeypatch.setattr("distributed_training.settings.strategies.STRATEGIES_DIR", tmp_path)

    def write(**documents):
        for folder, document in documents.items():
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "config.json").write_text(json.dumps(document))
        return tmp_path

    return write


def load_own(**config):
    return load_strategy(build_config({"strategy": "own", **config}))


def test_a_clone_may_add_strategies(folders):
    folders(**{
        "10_ten": {"name": "ten", "deepspeed": "configs/ds_config_zero1.json"},
        "9_nine": {"name": "nine", "deepspeed": "configs/ds_config_zero3.json"},
        "without_number": {"name": "own", "mesh": {}},
    })  # fmt: skip
    assert list(list_strategies()) == ["nine", "ten", "own"]
    strategies = [named_strategy(name) for name in list_strategies()]
    assert [strategy.zero.stage for strategy in strategies] == [3, 1, 0]
    assert strategies[-1].engine == "native"


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        ([], ('"mesh": {...}',)),
        ({"name": "own"}, ("mesh", "deepspeed")),
        ({"name": "own", "mesh": {}, "meshes": 1}, ("meshes",)),
        ({"name": "own", "deepspeed": "no.json"}, ("no.json",)),
        ({"name": "own", "mesh": {"ep": 2}}, ("ep=2", "dp_replicate")),
        ({"name": "own", "mesh": {}, "engine": "natve"}, ("'natve'", "native")),
        # An engine accepts only the axes that it supports.
        ({"name": "own", "deepspeed": "configs/ds_config_hybrid.json"}, ("'deepspeed'", "pp=")),
    ],
)
def test_invalid_strategy_folders_are_refused(document, messages, folders):
    folders(own=document)
    with refused(*messages):
        load_own()


ENGINE = '''
from distributed_training.settings.keys import Options, config_key
from distributed_training.settings.strategies import Traits

TRAITS = Traits(build="MyEngine", axes=("dp_replicate",))


class OPTIONS(Options):
    local_steps: int = config_key(4, work=True)
    """read from the source code"""


class MyEngine:
    pass
'''


def test_a_strategy_folder_may_contain_an_engine(folders):
    root = folders(own={"name": "own", "mesh": {"dp_replicate": -1}, "engine": "engine.py"})
    file = root / "own" / "engine.py"
    file.write_text(ENGINE)
    strategy = load_own()
    assert (strategy.engine, strategy.traits.build) == ("engine.py", f"{file}:MyEngine")
    assert strategy.traits.axes == ("dp_replicate",)
    helps = {name: key.help for name, key in read_keys(strategy_options("own")).items()}
    assert helps == {"local_steps": "read from the source code"}
    engine = strategy.load_engine()
    assert engine.__name__ == "MyEngine"
    assert engine is strategy.load_engine(), "the file is run once"
