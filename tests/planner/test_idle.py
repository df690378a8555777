"""Test keys that have no effect. On the command line, they are rejected. In CONFIG, they only
produce a note."""

import pytest

from distributed_training.planner.conflicts import PREREQUISITES
from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.predict import local_cluster
from tests.planner.helpers import merged
from tests.support import CPU_MACHINE, refused

TYPED = {
    "fsdp_prefetch": "2", "bucket_cap_mb": "25", "gradient_compression": "bf16",
    "pipeline_schedule": "gpipe", "offload_dir": "/tmp/offload",
    "lora_alpha": "8", "lora_dropout": "0.1", "lora_targets": "c_attn",
}  # fmt: skip
USES = {
    "fsdp_prefetch": {"strategy": "fsdp"}, "bucket_cap_mb": {}, "gradient_compression": {},
    "pipeline_schedule": {"strategy": "pp"}, "offload_dir": {"strategy": "infinity"},
    "lora_alpha": {"lora_rank": 2}, "lora_dropout": {"lora_rank": 2},
    "lora_targets": {"lora_rank": 2},
}  # fmt: skip
POWERSGD = {"strategy": "compressed"}
TOPK = {"strategy": "compressed", "compression": "topk-int8"}


def notes_of(config, *override):
    notes = []
    config = {"strategy": "dp", "model": "gpt2-tiny-4-blocks", **config}
    draft_plan(merged(config, *override), local_cluster(CPU_MACHINE, 2, 2), notes)
    return [note for note in notes if "has no effect" in note]


def test_every_key_is_tested():
    # False requests nothing and True is the default, so sequence_parallel is never rejected.
    assert {key for prerequisite in PREREQUISITES for key in prerequisite.keys} == {
        *TYPED,
        "sequence_parallel",
    }


@pytest.mark.parametrize("key", TYPED)
def test_a_typed_key_has_an_effect_or_is_refused(key):
    override = f"{key}={TYPED[key]}"
    assert notes_of(USES[key], override) == []
    unused = {"strategy": "zero3"} if USES[key] == {} else {}
    with refused(f"{key}=", "cannot be used with", f"Leave out {key}, or set "):
        notes_of(unused, override)


@pytest.mark.parametrize(
    ("key", "value"),
    [("pipeline_schedule", "gpipe"), ("offload_dir", "/tmp/offload"), ("lora_alpha", 8.0),
     ("lora_dropout", 0.1), ("lora_targets", "c_attn")],
)  # fmt: skip
def test_a_key_without_effect_in_config_gives_a_note(key, value):
    (note,) = notes_of({key: value})
    assert note.startswith(f"{key}={value!r} has no effect, because ")
    assert notes_of({key: value, **USES[key]}) == []


@pytest.mark.parametrize(
    "override",
    ["fsdp_prefetch=1", "pipeline_schedule=1f1b", "sequence_parallel=True", "lora_alpha=16"],
)
def test_a_resolved_config_can_be_typed(override):
    """The command line may set a key to the value that the plan resolves for it, even if the key
    has no effect. The plan then contains a note."""
    (note,) = notes_of({"strategy": "zero2"}, override)
    assert note.startswith(override.split("=")[0])


@pytest.mark.parametrize(
    "override", ["pipeline_schedule=auto", "sequence_parallel=False", "offload_dir=None",
              "lora_dropout=0", "lora_targets=None", "gradient_compression=none"],
)  # fmt: skip
def test_values_that_turn_features_off_are_always_accepted(override):
    assert notes_of({"strategy": "zero2"}, override) == []


@pytest.mark.parametrize(
    ("config", "override", "idle"),
    [(POWERSGD, "compression_rank=2", "compression_k"),
     (TOPK, "compression_k=0.1", "compression_rank")],
)  # fmt: skip
def test_options_of_another_engine_are_refused(config, override, idle):
    assert notes_of(config, override) == []
    with refused(f"{idle}=1", "has no effect", f"Leave out {idle}"):
        notes_of(config, f"{idle}=1")
    value = {"compression_k": 0.5, "compression_rank": 2}[idle]
    assert len(notes_of({**config, idle: value})) == 1
