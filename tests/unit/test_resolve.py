import dataclasses
import json
import shutil

import pytest

from distributed_training import hub
from distributed_training.config import build_config
from distributed_training.plan import make_plan
from distributed_training.resolve import fetch, settle
from distributed_training.strategy import load_strategy
from distributed_training.tokenizer import EMBEDDED_DIR
from distributed_training.topology import build_topology
from tests.unit.conftest import CPU_MACHINE, GPU_MACHINE, refused

GIB = 2**30


def gpu(**changes):
    return dataclasses.replace(GPU_MACHINE, **changes)


def decide(machine=CPU_MACHINE, *, world_size=1, **config):
    built = build_config(config)
    strategy = load_strategy(built)
    topology = build_topology(
        strategy, world_size=world_size, rank=0, local_rank=0, device_type="cpu"
    )
    return fetch(settle(built, machine, strategy, topology, processes_here=1))


@pytest.fixture
def stocked_hub(tmp_path, monkeypatch):
    """A Hub that has every file asked for; the shipped tokenizer stands in for GPT-2's."""
    shutil.copytree(EMBEDDED_DIR, tmp_path / "hub")

    def fetch_all(repo_id, filenames, **_):
        return [tmp_path / "hub" / name for name in filenames]

    monkeypatch.setattr(hub, "fetch_all", fetch_all)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("machine", "model", "precision", "compiled"),
    [
        (CPU_MACHINE, "gpt2-tiny", "fp32", False),
        (gpu(), "gpt2-medium", "bf16", True),
        (gpu(gpu_memory_bytes=12 * GIB), "gpt2-medium", "bf16", True),
        (gpu(gpu_memory_bytes=12 * GIB - 1), "gpt2", "bf16", True),
        (gpu(compute_capability=(8, 0)), "gpt2-medium", "bf16", True),
        (gpu(compute_capability=(7, 5)), "gpt2-medium", "fp16", True),
        (gpu(compute_capability=(6, 1)), "gpt2-medium", "fp16", False),
    ],
)
def test_auto_becomes_what_the_machine_can_do(machine, model, precision, compiled):
    config = decide(machine).config
    assert (config.model, config.precision, config.compile) == (model, precision, compiled)


def test_without_a_hub_auto_takes_what_is_shipped_and_says_so_loudly():
    resolved = decide(gpu())
    config = resolved.config
    assert (config.dataset, config.tokenizer, config.weights) == ("embedded",) * 2 + ("random",)
    assert resolved.tokenizer_dir == EMBEDDED_DIR
    assert resolved.weights_dir is None
    notes = " / ".join(resolved.notes)
    for words in ("WIKITEXT-2 IS NOT TO BE HAD", "GPT-2's TOKENIZER IS NOT", "weights are random"):
        assert words in notes
    assert "hidden from unit tests" in notes  # the reason


def test_with_a_hub_auto_takes_what_is_published(stocked_hub):
    resolved = decide(gpu())
    config = resolved.config
    assert (config.dataset, config.tokenizer, config.weights) == (
        "wikitext-2", "gpt2", "pretrained",
    )  # fmt: skip
    assert resolved.tokenizer_dir == resolved.weights_dir == stocked_hub
    assert config.learning_rate == 5e-5
    assert resolved.notes == ()


def test_the_tiny_model_takes_the_shipped_tokenizer_and_random_weights(stocked_hub):
    resolved = decide(CPU_MACHINE)
    assert (resolved.config.tokenizer, resolved.config.weights) == ("embedded", "random")
    assert "no GPU found" in resolved.notes[0]


def test_missing_weights_are_said_loudly(stocked_hub, monkeypatch):
    def fetch_weights(_):
        raise OSError("404")

    monkeypatch.setattr(hub, "fetch_weights", fetch_weights)
    resolved = decide(gpu())
    assert (resolved.config.tokenizer, resolved.config.weights) == ("gpt2", "random")
    assert any("PRETRAINED WEIGHTS ARE NOT TO BE HAD (404)" in note for note in resolved.notes)
    with refused("weights='pretrained (gpt2-medium)'", "hf download openai-community/gpt2-medium"):
        decide(gpu(), weights="pretrained")


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        ({"model": "gpt2-tiny"}, 3e-3),
        ({"model": "gpt2"}, 3e-4),
        ({"model": "gpt2", "weights": "some/folder"}, 5e-5),
        ({"model": "gpt2", "learning_rate": 0.1}, 0.1),
        ({"model": "gpt2", "learning_rate": 0.0}, 0.0),
    ],
)
def test_learning_rate_follows_the_weights(config, rate):
    assert decide(**config).config.learning_rate == rate


def test_what_is_given_is_kept():
    given = {
        "model": "gpt2",
        "precision": "bf16",
        "compile": True,
        "tokenizer": "embedded",
        "weights": "random",
        "dataset": "my/own.txt",
        "learning_rate": 0.5,
    }
    resolved = decide(CPU_MACHINE, **given)
    assert resolved.config == build_config(given)
    assert resolved.notes == ()


@pytest.mark.parametrize(
    ("key", "value", "command"),
    [
        ("dataset", "wikitext-2", "hf download Salesforce/wikitext --repo-type dataset"),
        ("tokenizer", "gpt2", "hf download openai-community/gpt2 vocab.json merges.txt"),
    ],
)
def test_what_is_asked_for_by_name_is_never_replaced(key, value, command):
    with refused(f"{key}={value!r} is neither in the Hub's cache", command):
        decide(model="gpt2", **{key: value})


def test_pretrained_weights_need_their_tokenizer():
    with refused("tokenizer='gpt2'", "hf download"):
        decide(model="gpt2", weights="pretrained")
    with refused("weights='pretrained' is impossible", "they need GPT-2's tokenizer"):
        decide(model="gpt2", weights="pretrained", tokenizer="embedded")
    with refused("weights='pretrained' is impossible", "gpt2-tiny is not published"):
        decide(model="gpt2-tiny", weights="pretrained")


def test_precision_that_the_machine_lacks():
    with refused("precision='fp16' needs a GPU", "set fp32"):
        decide(CPU_MACHINE, precision="fp16")
    with refused("precision='bf16' is not supported by Old", "set fp16"):
        decide(gpu(compute_capability=(7, 5), gpu_name="Old"), precision="bf16")
    assert decide(CPU_MACHINE, precision="bf16").config.precision == "bf16"


def test_parameters_on_disk_are_not_compiled():
    assert decide(gpu(), strategy="infinity").config.compile is False
    assert decide(gpu(), strategy="offload").config.compile is True
    with refused("compile=True does not work with strategy='infinity'", "auto or False"):
        decide(gpu(), strategy="infinity", compile=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"strategy": "pp", "pipeline_schedule": "zb-h1"}, "pipeline_schedule='zb-h1'"),
        ({"strategy": "pp", "pipeline_schedule": "zb-v"}, "pipeline_schedule='zb-v'"),
        ({"strategy": "tp", "dropout": 0.1, "sequence_parallel": False}, "dropout under tp"),
    ],
)
def test_layouts_that_cannot_be_compiled(values, words):
    values = {**values, "grad_accum_steps": 4, "world_size": 2}
    resolved = decide(gpu(), **values)
    assert resolved.config.compile is False
    assert any(f"not compiled: {words}" in note for note in resolved.notes)
    with refused(f"compile=True does not work with {words}", "auto or False"):
        decide(gpu(), compile=True, **values)


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "pp", "pipeline_schedule": "interleaved"},
        {"strategy": "tp", "dropout": 0.1},
        {"strategy": "tp", "sequence_parallel": False},
        {"strategy": "hybrid"},
    ],
)
def test_layouts_that_are_compiled(values):
    assert decide(gpu(), world_size=2, grad_accum_steps=4, **values).config.compile is True


NO_CHECKPOINTS = "no checkpoints: infinity cannot be resumed exactly"


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("every", [None, 0])
def test_infinity_writes_no_checkpoints_and_says_so(every, resume):
    resolved = decide(strategy="infinity", checkpoint_every=every, resume=resume)
    assert resolved.config.checkpoint_every == 0
    assert (NO_CHECKPOINTS in resolved.notes) == (every is None)  # 0 is what the user said


@pytest.mark.parametrize("config", [{"checkpoint_every": 1}, {"resume": "runs/x"}], ids=str)
def test_infinity_is_not_resumed(config):
    words = ("checkpoint_every to 0", "resume to None")
    with refused("strategy='infinity' cannot be resumed", *words):
        decide(strategy="infinity", **config)
    assert decide(strategy="zero3", **config).notes == decide(strategy="zero3").notes


@pytest.mark.parametrize("every", [None, 0, 7])
@pytest.mark.parametrize("strategy", ["dp", "zero3", "offload", "fsdp"])
def test_every_other_strategy_saves_as_it_is_told(strategy, every):
    resolved = decide(strategy=strategy, checkpoint_every=every)
    assert resolved.config.checkpoint_every == every
    assert NO_CHECKPOINTS.replace("infinity", strategy) not in resolved.notes


@pytest.mark.parametrize("model", ["gpt2-tiny", "gpt2-xl"])
def test_max_length_beyond_the_model(model):
    assert decide(model=model, max_length=1024).config.seq_len == 1024
    with refused("max_length=1025 is beyond the model", f"{model} has 1024", "at most 1024"):
        decide(model=model, max_length=1025)


def test_a_tokenizer_that_is_larger_than_the_model(tmp_path):
    shutil.copytree(EMBEDDED_DIR, tmp_path / "big")
    file = tmp_path / "big" / "vocab.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "extra": 2048}))
    tokenizer = str(tmp_path / "big")
    with refused("has 2049 tokens", "gpt2-tiny knows 2048"):
        decide(model="gpt2-tiny", tokenizer=tokenizer)
    resolved = decide(model="gpt2", tokenizer=tokenizer)
    assert (resolved.config.tokenizer, str(resolved.tokenizer_dir)) == (tokenizer, tokenizer)


def test_a_tokenizer_that_is_not_there(tmp_path):
    with refused(f"tokenizer='{tmp_path / 'no'}' is not a folder", "vocab.json"):
        decide(tokenizer=str(tmp_path / "no"))
    with refused("has no vocab.json"):
        decide(tokenizer=str(tmp_path))


@pytest.mark.parametrize("key", ["tokenizer", "weights"])
@pytest.mark.parametrize("path", ["a" * 300, "~nobody-of-that-name/a"])
def test_paths_that_pathlib_refuses(key, path, tmp_path):
    config = build_config({key: path, "output_dir": str(tmp_path)})
    with refused(f"{key}="):
        make_plan(config, CPU_MACHINE, num_processes=1, processes_here=1)


def test_a_prompt_that_is_no_text_is_refused_before_training():
    with refused("generate holds '\\ud800'"):
        decide(generate="a\ud800")


def test_weights_below_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert decide(model="gpt2", weights="~/hf").weights_dir == tmp_path / "hf"


@pytest.mark.parametrize(("processes_here", "said"), [(4, False), (8, False), (2, True), (6, True)])
def test_tensor_parallelism_across_machines_is_pointed_out(processes_here, said):
    built = build_config({"strategy": "tp", "tp": 4, "dp_replicate": 6})
    strategy = load_strategy(built)
    topology = build_topology(strategy, world_size=24, rank=0, local_rank=0, device_type="cpu")
    notes = settle(built, CPU_MACHINE, strategy, topology, processes_here=processes_here).notes
    assert any("tp=4 REACHES ACROSS MACHINES" in note for note in notes) == said


def test_nothing_is_fetched_for_a_layout_that_is_refused(tmp_path, monkeypatch):
    def unwanted(*_, **__):
        raise AssertionError("asked the Hub")

    monkeypatch.setattr(hub, "fetch_all", unwanted)
    given = {"strategy": "tp", "model": "gpt2-xl", "output_dir": str(tmp_path)}
    with refused("tp=2 does not divide num_heads=25"):
        make_plan(build_config(given), gpu(num_gpus=2), num_processes=2, processes_here=2)
    small = gpu(gpu_memory_bytes=2 * GIB)
    with refused("for its state alone"):
        make_plan(
            build_config({**given, "strategy": "dp"}), small, num_processes=1, processes_here=1
        )
