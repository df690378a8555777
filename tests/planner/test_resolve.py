from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from distributed_training.data import hub
from distributed_training.data.tokenizer import EMBEDDED_DIR
from distributed_training.models import weights
from distributed_training.planner.choose import choose_model
from distributed_training.planner.data import find_sources
from distributed_training.planner.make_plan import draft_plan, make_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.settings.request import build_config
from tests.planner.helpers import gpu, plan_for
from tests.support import CPU_MACHINE, GPU_MACHINE, refused, save_tiny, small_text

GIB = 2**30


def decide(machine=CPU_MACHINE, *, world_size=1, **config):
    """Return an object with the fields of the draft and of its sources, and a list of notes."""
    built = build_config({"strategy": "zero2", **config})
    notes = []
    draft = draft_plan(built, local_cluster(machine, world_size, world_size), notes)
    draft, folders = find_sources(draft, notes)
    found = {name: getattr(draft, name) for name in draft.__dataclass_fields__}
    return SimpleNamespace(**found, **folders, size=draft.size), notes


def test_a_user_text_without_a_gpu_uses_the_words_preset():
    """The preset "words" does not replace values given on the command line or CONFIG values that
    differ from their defaults."""
    own = {"dataset": str(small_text()), "epochs": 2, "max_length": 100}
    built = build_config({"strategy": "dp", **own}, overrides={"batch_size": "4"})
    config = draft_plan(built, local_cluster(CPU_MACHINE, 2, 2)).config
    found = (config.epochs, config.max_steps, config.dropout, config.max_length, config.batch_size)
    assert found == (60, 1200, 0.1, 100, 4)
    assert config.dataset == own["dataset"]
    for values, machine in (
        (own, gpu()), ({**own, "dataset": "embedded"}, CPU_MACHINE),
        ({**own, "model": "gpt2-tiny"}, CPU_MACHINE),
    ):  # fmt: skip
        assert decide(machine, world_size=2, **values)[0].config.epochs == 2


def test_without_a_gpu_every_strategy_trains_the_same_model():
    for world_size, strategy in ((2, "pp"), (8, "3d"), (4, "zero2")):
        config = decide(world_size=world_size, strategy=strategy)[0].config
        found = (config.model, config.learning_rate, config.tokenizer)
        assert found == ("gpt2-tiny", 3e-3, "embedded")
    with refused("pp=4", "gpt2-tiny-4-blocks"):
        decide(world_size=4, strategy="pp")


@pytest.mark.parametrize(
    ("machine", "model", "precision", "compiled"),
    [
        (CPU_MACHINE, "gpt2-tiny", "fp32", False),
        (gpu(), "gpt2-medium", "bf16", True),
        (gpu(gpu_memory_bytes=12 * GIB - 1), "gpt2", "bf16", True),
        (gpu(compute_capability=(7, 5)), "gpt2-medium", "fp16", True),
        (gpu(compute_capability=(6, 1)), "gpt2-medium", "fp16", False),
    ],
)
def test_auto_values_follow_the_machine(machine, model, precision, compiled):
    plan, notes = decide(machine)
    config, notes_text = plan.config, " / ".join(notes)
    assert (config.model, config.precision, config.compile) == (model, precision, compiled)
    assert ("no GPU was found" in notes_text) == (machine is CPU_MACHINE)
    assert ("less than 12 GiB" in notes_text) == (model == "gpt2")


def test_without_a_hub_auto_uses_shipped_files_with_a_note():
    plan, notes = decide(gpu())
    config = plan.config
    assert (config.dataset, config.tokenizer, config.weights) == ("embedded", "embedded", "random")
    assert (plan.tokenizer_dir, plan.weights_dir) == (EMBEDDED_DIR, None)
    text = " / ".join(notes)
    for words in ("WikiText-2 is not available", "GPT-2's tokenizer", "starts from random weights"):
        assert words in text
    assert "hidden from unit tests" in text  # the note gives the reason


def test_missing_weights_are_pointed_out(monkeypatch):
    """If GPT-2's weights are missing, an explicit request for them raises an error that explains
    how to get them. Otherwise, the run starts from random weights, with a note."""
    monkeypatch.setattr(hub, "fetch_folder", lambda *_, **__: EMBEDDED_DIR)
    monkeypatch.setattr(weights, "fetch_weights", Mock(side_effect=OSError("404")))
    resolved, notes = decide(gpu())
    assert (resolved.config.tokenizer, resolved.config.weights) == ("gpt2", "random")
    assert any("pretrained weights are not available (404)" in note for note in notes)
    for named in ({"weights": "pretrained"}, {"model": "gpt2-medium"}):
        with refused("hf download openai-community/gpt2-medium", "weights to random"):
            decide(gpu(), **named)


def test_learning_rate_follows_the_weights(tmp_path):
    save_tiny(tmp_path)
    for rate, config in {
        3e-3: {"model": "gpt2-tiny"}, 3e-4: {"weights": "random"},
        5e-5: {"weights": str(tmp_path), "tokenizer": "embedded", "model": "gpt2-tiny"},
        2e-4: {"lora_rank": 4, "weights": "random"},
        0.0: {"learning_rate": 0.0, "weights": "random"},
    }.items():  # fmt: skip
        assert decide(**{"model": "gpt2", **config})[0].config.learning_rate == rate


OLD = gpu(compute_capability=(7, 5), gpu_name="Old")
TINY = {"model": "gpt2-tiny"}


@pytest.mark.parametrize(
    ("machine", "values", "messages"),
    [
        # A value that the user sets is never replaced.
        (CPU_MACHINE, {"tokenizer": "gpt2", "weights": "random"},
         ("tokenizer='gpt2'", "hf download openai-community/gpt2")),
        (CPU_MACHINE, {}, ("gpt2", "hf download", "weights to random")),
        (CPU_MACHINE, {"weights": "none/such"}, ("weights='none/such'",)),
        (CPU_MACHINE, {"tokenizer": "embedded"}, ("tokenizer", "'embedded'")),
        (CPU_MACHINE, {"weights": "pretrained", **TINY}, ("'gpt2-tiny'", "is not published")),
        (CPU_MACHINE, {"precision": "fp16"}, ("'fp16'", "precision to fp32")),
        (OLD, {"precision": "bf16"}, ("'bf16'", "Old", "precision to fp16")),
    ],
)  # fmt: skip
def test_unavailable_files_and_dtypes_are_refused(machine, values, messages):
    with refused(*messages):
        decide(machine, **{"model": "gpt2", **values})


def test_tensor_parallelism_across_machines_is_pointed_out(tmp_path):
    for here, has_note in ((8, False), (2, True), (6, True)):
        plan = plan_for(tmp_path, num_processes=24, here=here, strategy="tp", tp=4, dp_replicate=6)
        assert any("tp=4 spans several machines" in note for note in plan.notes) == has_note


def test_nothing_is_fetched_for_a_layout_that_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "fetch_folder", Mock(side_effect=AssertionError("asked the Hub")))
    given = build_config({"strategy": "dp", "model": "gpt2-xl", "output_dir": str(tmp_path)})
    with refused("26.1 GiB", "--force"):
        make_plan(given, local_cluster(gpu(gpu_memory_bytes=2 * GIB), 1, 1))


TP = {"strategy": "tp", "world_size": 2}
TWO = {"world_size": 2}


@pytest.mark.parametrize(
    ("key", "values", "obstacle"),
    [
        ("compile", {"strategy": "infinity"}, "strategy='infinity'"),
        ("cuda_graphs", {"strategy": "zero2", **TWO}, "strategy='zero2'"),
        ("cuda_graphs", {"strategy": "dp", "gradient_compression": "bf16"}, "gradient_comp"),
        ("cuda_graphs", {"dropout": 0.1, **TP}, "dropout under tp or activation"),
        ("async_tp", {"compile": False, **TP}, "compile=False"),
        ("async_tp", {"strategy": "fsdp", **TWO}, "tp=1"),
    ],
)
def test_unusable_auto_switches_are_turned_off_with_a_reason(key, values, obstacle):
    """If a switch is "auto" and cannot be used, it is turned off. Except for async_tp, a note gives
    the reason. An explicit True is rejected with the reason."""
    resolved, notes = decide(gpu(num_gpus=2), **values)
    note = f"{key} is off, because it cannot be used with {obstacle}"
    assert getattr(resolved.config, key) is False
    assert key == "async_tp" or any(text.startswith(note) for text in notes)
    with refused(f"{key}=True", obstacle, "auto or False"):
        decide(gpu(num_gpus=2), **{**values, key: True})


def test_async_tp_is_on_for_compiled_tp_on_measured_gpus():
    ampere = gpu(num_gpus=2, compute_capability=(8, 0))
    assert decide(gpu(num_gpus=2, compute_capability=(9, 0)), **TP)[0].config.async_tp is True
    assert decide(ampere, **TP)[0].config.async_tp is False
    assert decide(ampere, async_tp=True, **TP)[0].config.async_tp is True
    for machine, why in (
        (gpu(num_gpus=1), "tp=2 across machines with 1 GPU each"),
        (CPU_MACHINE, "a CPU"),
    ):
        with refused("async_tp=True", why, "auto"):
            decide(machine, async_tp=True, **TP)
    with refused("cuda_graphs=True", "CPU"):
        decide(CPU_MACHINE, strategy="dp", cuda_graphs=True)


def test_compiled_steps_use_a_cuda_graph():
    for values in (
        {"strategy": "dp", "dropout": 0.1},
        {"strategy": "fsdp", "activation_checkpointing": "selective"},
        {"strategy": "pp", "pipeline_schedule": "zb-v", "model": "gpt2", "weights": "random"},
    ):
        config = decide(gpu(), world_size=2, **values)[0].config
        assert config.cuda_graphs is config.compile is True


def test_a_default_max_length_is_lowered_to_the_models_context(monkeypatch):
    size = SimpleNamespace(num_positions=64, has_linear_attention=False)
    short = SimpleNamespace(size=size, hub_id=None, has_own_code=False)
    monkeypatch.setattr("distributed_training.planner.choose.find_model", lambda name: short)
    for typed, length in (({}, 64), ({"max_length": 100}, 100)):
        notes = []
        config = build_config({"model": "gpt2", **typed})
        chosen, _ = choose_model(config, GPU_MACHINE, notes)
        assert chosen.max_length == length
        assert len(notes) == (not typed)
