"""Test that keys that have no effect give a note."""

import pytest

from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.predict import local_cluster
from tests.planner.helpers import merged
from tests.support import CPU_MACHINE

LORA, COMPRESSED = {"lora_rank": 2}, {"strategy": "compressed"}
# (key and value, CONFIG under which the key has an effect, CONFIG under which it has none)
CASES = [
    ("bucket_cap_mb=25", {}, {"strategy": "zero3"}),
    ("gradient_compression=none", {}, {"strategy": "fsdp"}),
    ("pipeline_schedule=gpipe", {"strategy": "pp"}, {}),
    ("checkpointed_blocks=1", {"activation_checkpointing": "full"}, {}),
    ("offload_dir=/tmp/offload", {"strategy": "infinity"}, {}),
    ("lora_alpha=8", LORA, {}),
    ("lora_dropout=0.1", LORA, {}),
    ("lora_targets=c_attn", LORA, {}),
    ("preference_margin=0.5", {"preference": "simpo"}, {"preference": "dpo"}),
    ("preference_label_smoothing=0.1", {"preference": "dpo"}, {"preference": "orpo"}),
    ("compression_rank=2", COMPRESSED, {**COMPRESSED, "compression": "topk-int8"}),
    ("compression_k=0.1", {**COMPRESSED, "compression": "topk-int8"}, COMPRESSED),
]


def notes_of(config, *overrides, num_processes=2):
    notes = []
    config = {"strategy": "dp", "model": "gpt2-tiny-4-blocks", **config}
    cluster = local_cluster(CPU_MACHINE, num_processes, num_processes)
    draft_plan(merged(config, *overrides), cluster, notes)
    return [note.partition("=")[0] for note in notes if "has no effect" in note]


@pytest.mark.parametrize(("override", "used", "idle"), CASES)
def test_a_key_has_an_effect_or_gives_a_note(override, used, idle):
    assert notes_of(used, override) == []
    assert notes_of(idle, override) == [override.partition("=")[0]]
    assert notes_of(idle) == []


def test_compression_and_buckets_have_no_effect_in_one_process():
    config = {"strategy": "fsdp", "gradient_compression": "bf16", "bucket_cap_mb": 25.0}
    assert {*notes_of(config, num_processes=1)} == {"gradient_compression", "bucket_cap_mb"}
