import dataclasses
import json
import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.config import KEYS, RunConfig, build_config, describe_work
from distributed_training.errors import UserError
from real_model_example import CONFIG
from tests.unit.conftest import refused

# One other value for each key, valid by itself.
OTHER = {
    "model": "gpt2",
    "strategy": "dp",
    "batch_size": 5,
    "epochs": 5,
    "max_length": 64,
    "num_samples": -1,
    "seed": 5,
    "deepspeed_config": "x.json",
    "dataset": "embedded",
    "tokenizer": "gpt2",
    "weights": "random",
    "precision": "fp32",
    "grad_accum_steps": 5,
    "learning_rate": 0.5,
    "lr_schedule": "linear",
    "warmup_steps": 5,
    "weight_decay": 0.5,
    "max_grad_norm": None,
    "dropout": 0.5,
    "dp_replicate": 2,
    "dp_shard": -1,
    "tp": 2,
    "pp": 2,
    "sequence_parallel": False,
    "pipeline_schedule": "gpipe",
    "pipeline_cut": "1,1",
    "activation_checkpointing": "full",
    "compile": False,
    "pack": False,
    "max_steps": 5,
    "eval_every": 5,
    "eval_samples": -1,
    "generate": None,
    "output_dir": "elsewhere",
    "offload_dir": "elsewhere",
    "checkpoint_every": 0,
    "keep_checkpoints": 5,
    "export": False,
    "resume": "auto",
    "log_to": "wandb",
}
NOT_WORK = {
    "strategy",
    "batch_size",  # counted in global_batch_size
    "grad_accum_steps",  # likewise
    "deepspeed_config",
    "dp_replicate",
    "dp_shard",
    "tp",
    "pp",
    "sequence_parallel",
    "pipeline_schedule",
    "pipeline_cut",
    "activation_checkpointing",
    "compile",
    "eval_every",
    "eval_samples",
    "generate",
    "output_dir",
    "offload_dir",
    "checkpoint_every",
    "keep_checkpoints",
    "export",
    "resume",
    "log_to",
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A file for property tests, which may not use fixtures that are renewed per test."""
    return tmp_path_factory.mktemp("config") / "preset.json"


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_script_and_run_config_agree():
    def typed(words):
        return {key: (type(value), value) for key, value in words.items()}

    assert set(CONFIG) == set(KEYS)
    assert typed(CONFIG) == typed(RunConfig().to_user_words())
    assert build_config(CONFIG) == RunConfig()


def test_later_sources_win(tmp_path):
    preset = write(tmp_path / "p.json", '{"batch_size": 8, "epochs": 3, "_comment": "why"}')
    config = {"batch_size": 2, "epochs": 2, "seed": 1}
    merged = build_config(config, preset=preset, overrides=["epochs=4", "epochs=5"])
    assert (merged.micro_batch_size, merged.num_epochs, merged.seed) == (8, 5, 1)
    assert merged.seq_len == RunConfig().seq_len


@pytest.mark.parametrize("key", KEYS)
def test_every_key_reaches_its_field(key):
    assert OTHER[key] != RunConfig().to_user_words()[key]
    words = build_config({key: OTHER[key]}).to_user_words()
    assert words == {**RunConfig().to_user_words(), key: OTHER[key]}
    by_text = build_config({}, overrides=[f"{key}={OTHER[key]}"])
    assert by_text.to_user_words() == words


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("batchsize", "'batch_size'"),
        ("learning-rate", "'learning_rate'"),
        ("epoch", "'epochs'"),
        ("Model", "'model'"),
    ],
)
def test_unknown_key_gets_the_nearest(key, hint, tmp_path):
    preset = write(tmp_path / "p.json", json.dumps({key: 1}))
    for build in (
        lambda: build_config({key: 1}),
        lambda: build_config({}, preset=preset),
        lambda: build_config({}, overrides=[f"{key}=1"]),
    ):
        with refused(repr(key), f"did you mean {hint}?"):
            build()


def test_unknown_key_like_no_other_lists_the_keys():
    with refused("'qqqq'", "batch_size", "log_to"):
        build_config({"qqqq": 1})
    with refused("unknown key 5"):
        build_config({5: 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", "4"),
        ("batch_size", 4.0),
        ("batch_size", None),
        ("batch_size", True),
        ("batch_size", 0),
        ("batch_size", -1),
        ("batch_size", 2**31 + 1),
        ("max_length", 1),
        ("max_length", "auto"),
        ("num_samples", 0),
        ("num_samples", -2),
        ("num_samples", 2**62 + 1),
        ("seed", -1),
        ("seed", 2**31),
        ("learning_rate", True),
        ("learning_rate", "fast"),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("learning_rate", -math.inf),
        ("learning_rate", -1e-9),
        ("learning_rate", 11.0),
        ("weight_decay", None),
        ("weight_decay", math.nan),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", math.inf),
        ("dropout", 1.0),
        ("pack", 1),
        ("pack", "True"),
        ("compile", "yes"),
        ("compile", None),
        ("model", "gpt3"),
        ("model", ["gpt2"]),
        ("precision", "bf8"),
        ("lr_schedule", "auto"),
        ("activation_checkpointing", True),
        ("strategy", 2),
        ("strategy", ""),
        ("dataset", " "),
        ("output_dir", "a\0b"),
        ("output_dir", None),
        ("checkpoint_every", -1),
        ("checkpoint_every", False),
        ("keep_checkpoints", 0),
        ("log_to", "mlflow"),
        ("max_steps", 0),
        ("eval_samples", 0),
    ],
)
def test_bad_value_is_refused_with_key_value_and_rule(key, value, tmp_path):
    with refused(f"{key}={value!r} is not accepted", f"{key} is "):
        build_config({key: value})
    preset = write(tmp_path / "p.json", json.dumps({key: value}))
    with refused(f"{key}="):
        build_config({}, preset=preset)
    with pytest.raises(UserError):
        RunConfig(**{KEYS[key][0]: value})


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model", "gpt2-medum", "did you mean 'gpt2-medium'?"),
        ("precision", "bfloat16", "one of bf16, fp16, fp32"),
        ("batch_size", 0, "a whole number >= 1"),
        ("dropout", 2.0, "a number >= 0 and <= 0.99"),
        ("num_samples", 0, ">= 1 or -1"),
        ("max_grad_norm", "x", "None"),
    ],
)
def test_rule_says_what_to_type(key, value, rule):
    with refused(rule):
        build_config({key: value})


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("learning_rate=1e-3", "learning_rate", 1e-3),
        ("learning_rate=1", "learning_rate", 1.0),
        ("learning_rate=auto", "learning_rate", "auto"),
        ("max_grad_norm=None", "max_grad_norm", None),
        ("max_grad_norm=null", "max_grad_norm", None),
        ("pack=False", "pack", False),
        ("compile=true", "compile", True),
        ("compile=auto", "compile", "auto"),
        ("num_samples=-1", "num_samples", -1),
        (" seed = 7 ", "seed", 7),
        ("output_dir=a=b", "output_dir", "a=b"),
        ("output_dir=5", "output_dir", "5"),
        ("dataset=true", "dataset", "true"),
    ],
)
def test_set_text_becomes_a_value(text, field, value):
    parsed = getattr(build_config({}, overrides=[text]), field)
    assert (type(parsed), parsed) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs", ("'epochs'", "no '='", "key=value")),
        ("=3", ("unknown key ''",)),
        ("epochs=", ("epochs=''",)),
        ("epochs=two", ("epochs='two'", "a whole number")),
        ("epochs=1e1", ("epochs=10.0",)),
        ("epochs=true", ("epochs=True",)),
        ("learning_rate=NaN", ("learning_rate=nan",)),
        ("learning_rate=Infinity", ("learning_rate=inf",)),
        ("pack=1", ("pack=1", "True or False")),
        ("epochs=None", ("epochs=",)),
    ],
)
def test_bad_set_text_is_refused(text, words):
    with refused(*words):
        build_config({}, overrides=[text])


def test_missing_preset_names_a_near_one(tmp_path):
    write(tmp_path / "large.json", "{}")
    with refused("larg.json does not exist", f"did you mean {tmp_path / 'large.json'}?"):
        build_config({}, preset=str(tmp_path / "larg.json"))
    with refused("does not exist", "check the path"):
        build_config({}, preset=str(tmp_path / "nowhere" / "x.json"))


def test_preset_that_is_not_json_names_line_and_column(tmp_path):
    with refused("p.json is not valid JSON", "line 3 column 1"):
        build_config({}, preset=write(tmp_path / "p.json", '{\n "epochs": 2,\n}'))
    with refused("line 1 column 1"):
        build_config({}, preset=write(tmp_path / "p.json", ""))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"epochs"'])
def test_preset_that_is_not_an_object(text, tmp_path):
    with refused("p.json is not a JSON object"):
        build_config({}, preset=write(tmp_path / "p.json", text))


def test_unreadable_preset(tmp_path):
    with refused("cannot be read"):
        build_config({}, preset=str(tmp_path))
    (tmp_path / "p.json").write_bytes(b'{"model": "\xff"}')
    with refused("p.json cannot be read", "0xff"):
        build_config({}, preset=str(tmp_path / "p.json"))


@pytest.mark.parametrize("key", KEYS)
def test_work_is_what_every_strategy_shares(key):
    base = describe_work(RunConfig(), 8)
    changed = describe_work(build_config({key: OTHER[key]}), 8)
    assert (changed == base) == (key in NOT_WORK)


def test_work_holds_the_global_batch_size():
    assert describe_work(RunConfig(), 8) != describe_work(RunConfig(), 16)
    assert describe_work(RunConfig(), 8)["global_batch_size"] == 8


BIGGEST = 10**5000  # beyond what Python prints and reads
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-BIGGEST, BIGGEST),
    st.integers(-2, 2000),
    st.floats(),
    st.text(max_size=20),
    st.text(st.characters(codec=None, categories=("Cs", "Cc", "Zl", "Zp", "L")), max_size=5),
    st.binary(max_size=5),
    st.sampled_from([value for value in OTHER.values() if isinstance(value, str)]),
    st.just("auto"),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def at_any_length(function):
    """`function`, called without Python's limit on the digits of a number that it prints."""

    def unlimited(*arguments):
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            return function(*arguments)
        finally:
            sys.set_int_max_str_digits(limit)

    return unlimited


near_misses = st.builds(
    lambda key, at, text: key[:at] + text + key[at + 1 :],
    st.sampled_from(list(KEYS)),
    st.integers(0, 12),
    st.text(max_size=2),
)
real_keys = st.sampled_from(list(KEYS))
keys = st.one_of(real_keys, real_keys, near_misses, st.text(max_size=10), st.none(), st.integers())


def attempt(build):
    """(what it returns, "") or (None, the text of its UserError)."""
    try:
        return build(), ""
    except UserError as error:
        return None, str(error)


def config_or_explanation(build):
    """The RunConfig, or None after checking that the refusal is one line that says something."""
    config, text = attempt(build)
    if config is None:
        assert text.splitlines() == [text]
        assert len(text) > 10
        return None
    assert isinstance(config, RunConfig)
    words = config.to_user_words()
    assert build_config(words) == config
    for key, value in words.items():
        assert value is None or value == "auto" or type(value) is KEYS[key][1].kind
    return config


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(keys, values, max_size=5))
def test_any_config_resolves_or_explains(config):
    config_or_explanation(lambda: build_config(config))


@settings(max_examples=300, deadline=None)
@given(real_keys, values)
def test_any_value_of_a_known_key_resolves_or_names_the_key(key, value):
    config, text = attempt(lambda: build_config({key: value}))
    assert text.startswith(f"{key}=") if config is None else config.to_user_words()[key] == value


with_value = at_any_length(lambda key, value: f"{key}={value}")
with_json = at_any_length(lambda key, value: f"{key}={json.dumps(value)}")
set_texts = st.one_of(
    st.text(max_size=30),
    st.builds(with_value, keys, st.text(max_size=20)),
    st.builds(with_value, real_keys, values),
    st.builds(
        with_json,
        real_keys,
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=4,
        ),
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(set_texts, max_size=3))
def test_any_set_text_resolves_or_explains(texts):
    config_or_explanation(lambda: build_config({}, overrides=texts))


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=40),
        st.dictionaries(st.one_of(real_keys, st.text(max_size=5)), scalars, max_size=3).map(
            at_any_length(lambda document: json.dumps(document, default=repr).encode())
        ),
    )
)
def test_any_preset_file_resolves_or_explains(scratch, content):
    scratch.write_bytes(content)
    config_or_explanation(lambda: build_config({}, preset=str(scratch)))


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_config({"epochs": 10**5000}),
        lambda: build_config({"learning_rate": 10**400}),
        lambda: build_config({10**5000: 1}),
        lambda: build_config({}, overrides=["epochs=" + "1" * 5000]),
    ],
    ids=["int", "float", "key", "set"],
)
def test_numbers_that_python_cannot_print(build):
    config_or_explanation(build)


@pytest.mark.parametrize(("key", "value"), [("num_samples", -1.0), ("checkpoint_every", 0.0)])
def test_float_for_a_special_whole_number_is_refused(key, value):
    with refused(f"{key}={value!r}"):
        build_config({key: value})


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 900 + "]" * 900, "1" * 5000])
def test_json_that_python_gives_up_on_is_refused(text, tmp_path):
    preset = write(tmp_path / "p.json", '{"epochs": ' + text + "}")
    with refused("p.json"):
        build_config({}, preset=preset)
    with refused("epochs="):
        build_config({}, overrides=[f"epochs={text}"])


def test_a_long_value_is_cut_in_the_answer():
    with refused("model='aaa", "(10002 characters)") as caught:
        build_config({"model": "a" * 10_000})
    assert len(str(caught.value)) < 600


def test_a_preset_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "p.json", '{"epochs": 7}')
    assert build_config({}, preset="~/p.json").num_epochs == 7


@pytest.mark.parametrize("path", ["a" * 300, "~nobody-of-that-name/a"])
def test_preset_paths_that_pathlib_refuses(path):
    with refused(f"preset='{path[:100]}", "cannot be used as a path"):
        build_config({}, preset=path)
