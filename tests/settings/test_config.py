"""Test that CONFIG, presets and overrides either become a Config or give a one-line error
with advice."""

import contextlib
import json
import math
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from distributed_training.settings import request
from distributed_training.settings.config import AUTO, KEYS, Config, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import Options, config_key
from distributed_training.settings.request import PRESETS_DIR, build_config, read_template
from real_model_example import CONFIG
from tests.support import refused

WORK = {
    "model", "epochs", "max_length", "num_samples", "seed", "dataset", "validation_dataset",
    "columns", "tokenizer", "chat_template", "system",
    "weights", "precision", "learning_rate", "lr_schedule", "warmup_steps",
    "weight_decay", "max_grad_norm", "dropout", "pack", "max_steps", "gradient_compression",
    "lora_rank", "lora_alpha", "lora_dropout", "lora_targets",
    "optimizer", "base_dtype",
    "preference", "preference_beta", "preference_margin", "preference_label_smoothing",
    "preference_sft",
}  # fmt: skip
TYPES = {"integer": int, "number": float, "boolean": bool, "string": str, "null": type(None)}


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def test_script_and_run_config_agree():
    """The script's CONFIG contains only default values, so it equals Config()."""
    defaults = Config().to_key_values()
    for name, value in CONFIG.items():
        assert (type(value), value) == (type(defaults[name]), defaults[name]), name


def another_value(key):
    for value in (*key.choices[::-1], 2, 5, 0.5, not key.default, "elsewhere"):
        with contextlib.suppress(UserError):
            if value not in (key.default, AUTO) and build_config({key.name: value}):
                return value


# Values of Config, if they are not the value that was given
RESOLVED = {"chat_template": {"chat_template": read_template("chatml")}}
OTHER = {name: another_value(key) for name, key in KEYS.items()} | {
    "model": "gpt2", "dataset": "embedded", "tokenizer": "gpt2", "weights": "random",
    "strategy": "dp", "pipeline_cut": "1,1", "lora_targets": "q_proj",
    "chat_template": "chatml", "preference_label_smoothing": 0.25,
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_every_key_sets_its_field_and_the_work(name, tmp_path):
    """Every source of a key must set the same field."""
    other = OTHER[name]
    changed = build_config({name: other})
    values = RESOLVED.get(name, {name: other})
    assert changed.to_key_values() == {**Config().to_key_values(), **values}
    assert with_values(Request(), **values, set_keys={name}) == changed
    assert Request.model_validate_json(changed.model_dump_json()) == changed
    assert KEYS[name].work == (name in WORK)
    typed = build_config({}, overrides={name: other})
    assert (typed.to_key_values(), typed.is_set(name)) == (changed.to_key_values(), True)
    preset = write(tmp_path / "p.json", {name: other})
    assert build_config({}, preset=preset).to_key_values() == changed.to_key_values()


def test_later_sources_win_and_nothing_changes_afterwards(tmp_path):
    preset = write(tmp_path / "p.json", {"batch_size": 8, "epochs": 3, "_comment": "why"})
    config = {"batch_size": 2, "epochs": 2, "seed": 1}
    merged = build_config(config, preset=preset, overrides={"epochs": "5"})
    assert (merged.batch_size, merged.epochs, merged.seed) == (8, 5, 1)
    with pytest.raises(ValidationError):
        merged.seed = 2


class OwnOptions(Options):
    rank: int = config_key(8, work=True)
    mode: Literal["a", "Bb"] = config_key("a", work=False)


def test_an_engine_adds_keys_of_its_own(tmp_path, monkeypatch):
    own = {"dp": OwnOptions}
    monkeypatch.setattr(request, "strategy_options", lambda name: own.get(name, Options))
    preset = write(tmp_path / "p.json", {"rank": 4})
    built = build_config({"strategy": "dp"}, preset=preset, overrides={"mode": "bb"})
    assert built.engine_options == {"rank": 4, "mode": "Bb"}
    assert built.to_key_values() == Config(strategy="dp").to_key_values() | built.engine_options
    with refused("unknown key 'rank'"):
        build_config({"strategy": "tp", "rank": 4})
    with refused("unknown key 'rank'"):
        build_config({"strategy": "tp"}, overrides={"rank": "4"})
    with refused("mode='b'", "'Bb'"):
        build_config({"strategy": "dp", "mode": "b"})


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        ({"lr": 0.1, "learning_rate": 0.1}, ("'lr'", "--learning_rate")),
        ({"qqqq": 1}, ("'qqqq'", "model, dataset")),
        ({"epoch": 1}, ("'epoch'", " epochs?")),
        ({"fp16": True}, ("unknown key 'fp16'", "Use --precision fp16")),
    ],
)
def test_unknown_names_are_refused(config, messages):
    with refused(*messages):
        build_config(config)


# key -> (values that are not accepted, words in the error)
BAD = {
    "batch_size": (["4", 4.5, None, True], "'auto'"),
    "num_samples": ([0, -2], "1 or be -1"),
    "learning_rate": (["fast", math.nan, -1e-9], "'auto'"),
    "pack": ([1, "True"], "True or False or be 'auto'"),
    "compile": ([3], "'auto'"),
    "precision": (["BF16", "bfloat16"], "'auto', 'bf16', 'fp16' or 'fp32'"),
    "dataset": ([" "], ""),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_value_is_refused_with_key_value_and_rule(name):
    for value in BAD[name][0]:
        with refused(f"{name}={value!r}", BAD[name][1]):
            build_config({name: value})
        with refused(f"{name}={value!r}"):
            with_values(Config(), **{name: value})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("learning_rate=1", 1.0),
        ("max_grad_norm=None", None),
        ("pack=FALSE", False),
        ("compile=AUTO", "auto"),
        ("num_samples=-1", -1),
        ("seed= 7 ", 7),
        ("output_dir=a=b", "a=b"),
        ("output_dir=5", "5"),
        ("generate= The ", " The "),
    ],
)
def test_set_arguments_are_parsed(text, value):
    name, _, typed = text.partition("=")
    parsed = getattr(build_config({}, overrides={name: typed}), name)
    assert (type(parsed), parsed) == (type(value), value)


def test_presets_load_by_name_by_path_and_from_home(tmp_path, monkeypatch):
    for path in PRESETS_DIR.glob("*.json"):
        named, by_path = (build_config({}, preset=name) for name in (path.stem, path.name))
        assert named.to_key_values() == by_path.to_key_values()
        assert named.to_key_values() != build_config({}).to_key_values()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "own.json", {"epochs": 7})
    for path in ("own.json", "~/own.json", str(tmp_path / "own.json")):
        assert build_config({}, preset=path).epochs == 7
    with refused("quik", "quick.json"):
        build_config({}, preset="quik")


words = st.sampled_from([word for key in KEYS.values() for word in key.choices])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | words
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=3), scalars)
real_keys = st.sampled_from([*KEYS])
near_misses = st.builds(
    lambda name, at, text: name[:at] + text + name[at + 1 :],
    real_keys, st.integers(0, 12), st.text(max_size=2),
)  # fmt: skip
keys = st.one_of(real_keys, real_keys, near_misses, st.text(max_size=10), st.none(), st.integers())
set_texts = st.text(max_size=20) | values.map(str) | st.floats().map(json.dumps)


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(keys, values, max_size=5),
    st.dictionaries(keys, set_texts, max_size=3),
    st.booleans(),
)
@example({"dataset": [None]}, {}, False)
def test_any_config_and_any_text_give_a_config_or_a_clear_error(config, texts, typed):
    """The result must be either a complete Config or a one-line error."""
    try:
        built = build_config({}, overrides=texts) if typed else build_config(config)
    except UserError as error:
        text = str(error)
        assert text.splitlines() == [text]
        assert len(text) > 10
        return
    key_values = built.to_key_values()
    assert build_config(key_values).to_key_values() == key_values
    for name, value in key_values.items():
        assert type(value) in {TYPES[schema["type"]] for schema in KEYS[name].schemas}, name
