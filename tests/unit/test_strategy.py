import copy
import json
import os
from pathlib import Path

import pytest

from distributed_training.config import build_config
from distributed_training.deepspeed_json import fill_deepspeed_json
from distributed_training.engines.base import INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW
from distributed_training.strategy import (
    ROOT,
    Strategy,
    estimate_state_bytes,
    list_strategies,
    load_strategy,
)
from tests.unit.conftest import named_strategy, refused

SPLIT = ["tp", "pp", "3d", "hybrid"]
NAMES = ["dp", "zero1", "zero2", "zero3", "offload", "infinity", "fsdp", *SPLIT]
DEEPSPEED = ["zero1", "zero2", "zero3", "offload", "infinity", "hybrid"]
# What the strategies mean, by DeepSpeed's words.
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "offload": 2, "infinity": 3, "hybrid": 1}
DEVICES = {"offload": ("cpu", "none"), "infinity": ("nvme", "nvme")}
# CONFIG of the tests below, and what the JSON must hold for it.
CONFIG = {
    "batch_size": 3,
    "grad_accum_steps": 5,
    "max_grad_norm": 0.5,
    "precision": "bf16",
    "learning_rate": 2e-4,
    "weight_decay": 0.1,
}
DECIDED = {
    "train_micro_batch_size_per_gpu": ("batch_size", 3),
    "gradient_accumulation_steps": ("grad_accum_steps", 5),
    "gradient_clipping": ("max_grad_norm", 0.5),
    "bf16.enabled": ("precision", True),
    "fp16.enabled": ("precision", False),
}


def own_json(name="zero2", **changes):
    """The DeepSpeed JSON of a strategy; a dotted key changes one value, None removes it."""
    document = copy.deepcopy(dict(named_strategy(name).document))
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = document
        for part in parents:
            section = section[part]
        section[last] = value
    return document


def given_json(tmp_path, document, strategy="zero2", **config):
    """The strategy as loaded with `document` for its deepspeed_config, and the config."""
    path = tmp_path / "given.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    built = build_config({**CONFIG, "strategy": strategy, "deepspeed_config": str(path), **config})
    return load_strategy(built), built


def fill(strategy, config, dp_size=4):
    return fill_deepspeed_json(strategy, config, dp_size=dp_size, offload_dir="/fast/disk")


def value_at(document, path):
    for part in path.split("."):
        document = document[part]
    return document


def test_strategies_in_the_folders_order():
    assert list(list_strategies()) == NAMES
    numbers = [path.parent.name.partition("_")[0] for path in list_strategies().values()]
    assert numbers == [str(number) for number in range(1, 12)]


def test_a_deepspeed_strategy_is_a_link_into_configs():
    linked = []
    for name in DEEPSPEED:
        path = list_strategies()[name]
        assert path.is_symlink()
        assert not os.path.isabs(os.readlink(path))  # a clone elsewhere keeps working
        assert path.resolve().parent == ROOT / "configs"
        linked.append(path.resolve())
    assert sorted(linked) == sorted((ROOT / "configs").glob("ds_config_*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_engine_follows_from_the_file(name):
    strategy = named_strategy(name)
    assert strategy.engine == ("deepspeed" if name in DEEPSPEED else "native")
    assert strategy.zero_stage == STAGES.get(name, 0)
    devices = (strategy.offload_device("optimizer"), strategy.offload_device("param"))
    assert devices == DEVICES.get(name, ("none", "none"))
    assert strategy.needs_cpu_adam == (name in ("offload", "infinity"))
    assert strategy.needs_async_io == (name == "infinity")


def test_meshes_and_what_is_divided():
    own = {
        "dp": {"dp_replicate": -1},
        "tp": {"tp": -1},
        "pp": {"pp": -1},
        "3d": {"pp": 2, "dp_shard": -1, "tp": 2},
        "hybrid": {"pp": 2, "dp_shard": -1},
    }
    whole = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    assert {name: named_strategy(name).mesh for name in NAMES} == {
        name: {**whole, **own.get(name, {"dp_shard": -1})} for name in NAMES
    }
    phrases = {name: named_strategy(name).describe_sharding() for name in NAMES}
    for name, parts in {
        "dp": (),
        "zero1": ("optimizer state",),
        "zero2": ("optimizer state", "gradients"),
        "zero3": ("optimizer state", "gradients", "parameters"),
        "fsdp": ("optimizer state", "gradients", "parameters"),
        "tp": ("each layer over tp",),
        "pp": ("layers over pp",),
        "hybrid": ("layers over pp", "optimizer state"),
    }.items():
        words = ("optimizer state", "gradients", "parameters", "layers over pp")
        for part in (*words, "each layer over tp"):
            assert (part in phrases[name]) == (part in parts)
    divided = {name for name in NAMES if named_strategy(name).divides_parameters}
    assert divided == {"zero3", "infinity", "fsdp", *SPLIT}
    assert "kept on cpu" in phrases["offload"]
    assert phrases["infinity"].count("kept on nvme") == 2


@pytest.mark.parametrize(
    ("mesh", "divided"),
    [
        ({}, False),
        ({"dp_replicate": 4}, False),
        ({"dp_shard": -1}, True),
        ({"dp_replicate": -1, "dp_shard": 2}, True),
        ({"dp_replicate": -1, "tp": 2}, True),
        ({"pp": 4}, True),
    ],
)
def test_a_mesh_divides_parameters_along_all_axes_but_dp_replicate(mesh, divided):
    strategy = Strategy(name="x", source=Path("x.json"), document={"mesh": mesh})
    assert strategy.divides_parameters == divided


@pytest.mark.parametrize("name", DEEPSPEED)
def test_loss_scale_is_the_native_engines(name):
    """fp16 skips the same steps under every strategy: a scale that halves at each overflow."""
    fp16 = named_strategy(name).document["fp16"]
    assert 2.0 ** fp16["initial_scale_power"] == INITIAL_LOSS_SCALE
    assert fp16["loss_scale_window"] == LOSS_SCALE_WINDOW
    assert fp16["hysteresis"] == 1


@pytest.mark.parametrize("name", DEEPSPEED)
def test_gradients_are_reduced_in_deepspeeds_own_choice_of_dtype(name):
    """bf16 under bf16: half of the traffic that fp32 would be."""
    assert "communication_data_type" not in named_strategy(name).document


def test_a_clone_may_add_a_strategy(tmp_path, monkeypatch):
    for folder, document in (
        ("10_ten", {"name": "ten", "mesh": {}}),
        ("9_nine", {"name": "nine", "mesh": {}}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(document))
    monkeypatch.setattr("distributed_training.strategy.STRATEGIES_DIR", tmp_path)
    assert list(list_strategies()) == ["nine", "ten"]


def test_unknown_strategy_gets_the_nearest():
    with refused("strategy='zero4'", "infinity", "did you mean 'zero"):
        load_strategy(build_config({"strategy": "zero4"}))
    with refused("strategy='qqq'", "the strategies are dp, zero1"):
        load_strategy(build_config({"strategy": "qqq"}))


@pytest.mark.parametrize("name", DEEPSPEED)
def test_filling_leaves_no_auto_and_takes_config(name):
    strategy = named_strategy(name)
    before = copy.deepcopy(strategy.document)
    filled = fill(strategy, build_config({**CONFIG, "strategy": name}))
    assert '"auto"' in json.dumps(before)
    assert '"auto"' not in json.dumps(filled)
    assert {path: value_at(filled, path) for path in DECIDED} == {
        path: value for path, (_, value) in DECIDED.items()
    }
    assert "train_batch_size" not in filled
    assert filled["zero_optimization"]["stage"] == STAGES[name]
    assert strategy.document == before


def test_offload_folder_is_filled_in():
    zero = fill(named_strategy("infinity"), build_config(CONFIG))["zero_optimization"]
    assert zero["offload_optimizer"]["nvme_path"] == "/fast/disk"
    assert zero["offload_param"]["nvme_path"] == "/fast/disk"


def test_an_nvme_path_of_the_json_stays(tmp_path):
    path = "zero_optimization.offload_param.nvme_path"
    filled = fill(*given_json(tmp_path, own_json("infinity", **{path: "/own"}), "infinity"))
    assert value_at(filled, path) == "/own"


def test_aio_is_at_the_top_level():
    assert "aio" in named_strategy("infinity").document


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("train_micro_batch_size_per_gpu", 4),
        ("train_micro_batch_size_per_gpu", "3"),
        ("gradient_accumulation_steps", 1),
        ("gradient_clipping", 1.0),
        ("gradient_clipping", None),
        ("bf16.enabled", False),
        ("fp16.enabled", True),
    ],
)
def test_disagreement_names_both_sides(path, wrong, tmp_path):
    key, _ = DECIDED[path]
    strategy, config = given_json(tmp_path, own_json(**{path: wrong}))
    with refused("given.json", f"{path}={wrong!r}", f"{key}={CONFIG[key]!r}", f"change {key}"):
        fill(strategy, config)


def test_agreement_is_accepted(tmp_path):
    document = own_json(
        **{path: value for path, (_, value) in DECIDED.items()},
        train_batch_size=3 * 5 * 4,
        optimizer={"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.1}},
        scheduler={},
    )
    filled = fill(*given_json(tmp_path, document), dp_size=4)
    assert filled == fill(*given_json(tmp_path, own_json()), dp_size=4)
    assert not {"train_batch_size", "optimizer", "scheduler"} & set(filled)


def test_missing_sections_are_made(tmp_path):
    filled = fill(*given_json(tmp_path, {"zero_optimization": {"stage": 2}}, precision="fp16"))
    assert filled["fp16"] == {"enabled": True}
    assert filled["bf16"] == {"enabled": False}
    assert filled["gradient_clipping"] == 0.5


def test_no_clipping_is_zero_for_deepspeed(tmp_path):
    config = {"max_grad_norm": None}
    filled = fill(*given_json(tmp_path, own_json(gradient_clipping=0), **config))
    assert filled["gradient_clipping"] == 0.0
    with refused("gradient_clipping=1.0", "max_grad_norm=None"):
        fill(*given_json(tmp_path, own_json(gradient_clipping=1.0), **config))


def test_wrong_train_batch_size_shows_the_product(tmp_path):
    strategy, config = given_json(tmp_path, own_json(train_batch_size=64))
    with refused("train_batch_size=64", "60", "batch_size 3", "grad_accum_steps 5", "x 4 data"):
        fill(strategy, config, dp_size=4)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "Adam"}, ("optimizer.type='Adam'", "AdamW")),
        ({"type": "AdamW", "params": {"lr": 1.0}}, ("optimizer.params.lr=1.0", "learning_rate")),
        ({"params": {"weight_decay": 0}}, ("optimizer.params.weight_decay=0", "weight_decay")),
        ({"params": {"eps": 1e-6}}, ("optimizer.params.eps=1e-06",)),
    ],
)
def test_optimizer_section_may_only_repeat_config(section, words, tmp_path):
    strategy, config = given_json(tmp_path, own_json(optimizer=section))
    with refused("given.json", *words):
        fill(strategy, config)


def test_optimizer_section_with_auto_is_dropped(tmp_path):
    section = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": "auto"}}
    assert "optimizer" not in fill(*given_json(tmp_path, own_json(optimizer=section)))


def test_scheduler_section_is_refused(tmp_path):
    strategy, config = given_json(tmp_path, own_json(scheduler={"type": "WarmupLR"}))
    with refused("given.json", "scheduler", "lr_schedule", "remove"):
        fill(strategy, config)


def test_auto_that_nobody_decides_is_named(tmp_path):
    path = "zero_optimization.reduce_bucket_size"
    strategy, config = given_json(tmp_path, own_json(**{path: "auto"}))
    with refused("given.json", '"auto"', path):
        fill(strategy, config)


def test_json_of_another_stage(tmp_path):
    with refused("zero_optimization.stage=3", "strategy='zero2' means 2"):
        given_json(tmp_path, own_json("zero3"))


def test_json_with_another_offload(tmp_path):
    with refused("offload_optimizer.device='cpu'", "strategy='zero2' means 'none'"):
        given_json(tmp_path, own_json("offload"))
    with refused("offload_optimizer.device='none'", "strategy='offload' means 'cpu'"):
        given_json(tmp_path, own_json("zero2"), "offload")
    document = own_json("infinity", **{"zero_optimization.offload_param": {"device": "cpu"}})
    with refused("offload_param.device='cpu'", "means 'nvme'"):
        given_json(tmp_path, document, "infinity")


@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_native_strategy_takes_no_deepspeed_json(name, tmp_path):
    with refused(f"strategy='{name}'", "deepspeed_config=", "zero1, zero2, zero3, offload"):
        given_json(tmp_path, own_json(), name)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ('{"zero_optimization": {\n"stage": }}', ("line 2 column 10",)),
        ([], ("is not a JSON object",)),
        ({"zero_optimization": 2}, ("zero_optimization is not a JSON object",)),
        ({"bf16": True}, ("bf16 is not a JSON object",)),
        ({"fp16": None}, ("fp16 is not a JSON object",)),
        ({"zero_optimization": {"stage": 4}}, ("stage=4", "0, 1, 2 or 3")),
        ({"zero_optimization": {"stage": True}}, ("stage=True",)),
        ({"zero_optimization": {"stage": "auto"}}, ("stage='auto'",)),
        ({"zero_optimization": {"stage": 2.0}}, ("stage=2.0",)),
        ({"zero_optimization": {"stage": []}}, ("stage=[]",)),
        ({"zero_optimization": {"offload_param": []}}, ("offload_param",)),
        ({"zero_optimization": {"offload_param": {"device": ["cpu"]}}}, ("device=['cpu']",)),
        ("[" * 900 + "]" * 900, ("nested",)),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, ("offload_param",)),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, ("offload_optimizer",)),
    ],
)
def test_json_that_is_not_understood(document, words, tmp_path):
    with refused("given.json", *words):
        given_json(tmp_path, document)


def test_missing_json_names_a_near_one():
    wrong = str(ROOT / "configs" / "ds_config_zero22.json")
    with refused("ds_config_zero22.json does not exist", "did you mean", "ds_config_zero2.json"):
        load_strategy(build_config({"deepspeed_config": wrong}))


def test_a_mesh_in_a_deepspeed_json_does_not_change_the_engine(tmp_path):
    with refused("mesh"):
        given_json(tmp_path, own_json(mesh={"dp_shard": -1}))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "AdamW"},
        {"optimizer": ["AdamW"]},
        {"optimizer": None},
        {"optimizer": {"type": "AdamW", "params": []}},
        {"optimizer": {"type": "AdamW", "params": None}},
    ],
    ids=str,
)
def test_optimizer_section_of_another_form_is_refused(changes, tmp_path):
    with refused("given.json", "optimizer", "is not a JSON object"):
        fill(*given_json(tmp_path, own_json(**changes)))


@pytest.mark.parametrize(
    ("path", "written", "config"),
    [
        ("gradient_clipping", True, {"max_grad_norm": 1.0}),
        ("gradient_clipping", False, {"max_grad_norm": None}),
        ("train_micro_batch_size_per_gpu", True, {"batch_size": 1}),
        ("gradient_accumulation_steps", True, {"grad_accum_steps": 1}),
        ("bf16.enabled", 1, {}),
        ("fp16.enabled", 0.0, {}),
        ("train_batch_size", True, {"batch_size": 1, "grad_accum_steps": 1}),
        ("optimizer", {"params": {"lr": True}}, {"learning_rate": 1.0}),
    ],
)
def test_true_is_not_one(path, written, config, tmp_path):
    strategy, built = given_json(tmp_path, own_json(**{path: written}), **config)
    with refused("given.json", path, "True" if path == "optimizer" else f"={written!r}"):
        fill(strategy, built, dp_size=1)


def test_offload_null_means_none(tmp_path):
    document = own_json(**{"zero_optimization.offload_optimizer": None})
    assert fill(*given_json(tmp_path, document))["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("value", "place"),
    [(["auto"], "flags[0]"), ([1, [{"a": "auto"}]], "flags[1][0].a"), ({"a": ["auto"]}, "flags.a")],
)
def test_auto_in_a_list_is_named(value, place, tmp_path):
    strategy, config = given_json(tmp_path, own_json(flags=value))
    with refused('"auto" is not understood at', place):
        fill(strategy, config)


@pytest.mark.parametrize("path", ["a" * 300, "~nobody-of-that-name/a"])
def test_paths_that_pathlib_refuses(path):
    with refused("deepspeed_config="):
        load_strategy(build_config({"deepspeed_config": path}))


def test_a_deepspeed_json_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given_json(tmp_path, own_json())
    config = build_config({**CONFIG, "deepspeed_config": "~/given.json"})
    assert load_strategy(config).source == tmp_path / "given.json"


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"cp": 2}, ("'cp' of size 2", "pp, dp_replicate, dp_shard, tp")),
        ({"dp_shards": -1}, ("'dp_shards'",)),
        ({"dp_shard": "all"}, ("'dp_shard' of size 'all'", "whole number")),
        ({"dp_shard": 2.0}, ("size 2.0",)),
        ({"dp_replicate": True}, ("size True",)),
        ({"dp_replicate": None}, ("size None",)),
    ],
)
def test_a_mesh_that_is_not_understood(mesh, words):
    strategy = Strategy(name="x", source=Path("x.json"), document={"mesh": mesh})
    with refused("x.json", *words):
        _ = strategy.mesh


def zero_of_stage(stage):
    document = {"zero_optimization": {"stage": stage}}
    return Strategy(name=f"zero{stage}", source=Path("x"), document=document)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_papers_example(stage, gigabytes):
    """Figure 1 of the ZeRO paper: 7.5B parameters over 64 GPUs."""
    parts = estimate_state_bytes(
        zero_of_stage(stage), num_parameters=7_500_000_000, precision="bf16", dp_size=64
    )
    assert sum(parts.values()) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("name", "precision", "parts"),
    [
        # bytes a parameter on 4 processes: parameters, gradients, optimizer, host, disk
        ("dp", "bf16", (4, 4, 8, 0, 0)),
        ("dp", "fp32", (4, 4, 8, 0, 0)),
        ("fsdp", "bf16", (1, 1, 2, 0, 0)),
        ("zero1", "bf16", (2, 2, 3, 0, 0)),
        ("zero1", "fp16", (2, 2, 3, 0, 0)),
        ("zero1", "fp32", (4, 4, 3, 0, 0)),
        ("zero2", "bf16", (2, 0.5, 3, 0, 0)),
        ("zero3", "bf16", (0.5, 0.5, 3, 0, 0)),
        ("offload", "bf16", (2, 0, 0, 3 + 1, 0)),
        ("infinity", "bf16", (0, 0, 0, 1, 3 + 0.5)),
    ],
)
def test_state_bytes_by_part(name, precision, parts):
    estimate = estimate_state_bytes(
        named_strategy(name), num_parameters=1000, precision=precision, dp_size=4
    )
    names = ("parameters", "gradients", "optimizer", "host", "disk")
    assert estimate == {name: 1000 * part for name, part in zip(names, parts, strict=True)}


@pytest.mark.parametrize(
    ("precision", "dp_size", "parts"),
    [
        ("bf16", 4, (1 + 2, 4, 2)),
        ("fp32", 4, (1 + 4, 4, 2)),
        ("bf16", 1, (4 + 2, 4, 8)),
        ("fp32", 1, (4, 4, 8)),
    ],
)
def test_state_bytes_of_a_stage_while_its_micro_batches_run(precision, dp_size, parts):
    """strategies/10_3d_parallel: 12 / S + 6 bytes a parameter in bf16."""
    estimate = estimate_state_bytes(
        named_strategy("3d"), num_parameters=1000, precision=precision, dp_size=dp_size
    )
    found = [estimate[part] / 1000 for part in ("parameters", "gradients", "optimizer")]
    assert found == list(parts)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_shards_nothing(name):
    one, eight = (
        estimate_state_bytes(
            named_strategy(name), num_parameters=1000, precision="bf16", dp_size=size
        )
        for size in (1, 8)
    )
    on_host = name in ("offload", "infinity")  # gradients wait there in fp32: 4 bytes, not 2
    rounded = name in ("pp", "3d")  # a stage's weights, 2 bytes, while a step runs
    assert sum(one.values()) == (18_000 if on_host or rounded else 16_000)
    assert sum(eight.values()) <= sum(one.values())
    assert (sum(eight.values()) == sum(one.values())) == (name in ("dp", "tp", "pp"))


def test_a_folder_of_ones_own_is_a_strategy(tmp_path, monkeypatch):
    for name, text in [("my_zero2", "{}"), ("12_mine", '{"name": "mine", "mesh": {}}')]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    monkeypatch.setattr("distributed_training.strategy.STRATEGIES_DIR", tmp_path)
    assert list(list_strategies()) == ["mine", "my_zero2"]
