"""Test plans with fewer or smaller exchanges: errors, predicted memory and ranking."""

import pytest

from distributed_training.planner.make_plan import draft_plan
from distributed_training.planner.sort import sort_layouts
from distributed_training.predict.mechanism import pipeline_ranks
from distributed_training.predict.memory import checkpoint_copy_bytes, estimate_memory
from distributed_training.predict.predict import Prediction, local_cluster, parse_cluster
from distributed_training.settings.config import AUTO
from tests.planner.helpers import merged
from tests.support import CPU_MACHINE, refused

H200 = parse_cluster("8xH200")
BF16_WEIGHTS = {"optimizer": "adamw-bf16-weights", "precision": "bf16"}
ZB_H1 = {"strategy": "3d", "pipeline_schedule": "zb-h1"}
TOPK = {"strategy": "compressed", "compression": "topk-int8"}


def plan_of(strategy, machine=CPU_MACHINE, processes=4, **values):
    config = merged({"strategy": strategy, "model": "gpt2-tiny", **values})
    return draft_plan(config, local_cluster(machine, processes, processes))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"strategy": "fsdp", "gradient_compression": "bf16"}, "used with strategy='fsdp'"),
        ({"strategy": "zero2", "gradient_compression": "bf16"}, "strategy='zero2'"),
        ({"strategy": "compressed", "compression_rank": 65}, "compression_rank=65"),
        ({**TOPK, "compression_k": 0.0}, "compression_k=0.0"),
        ({**TOPK, "on_nonfinite": "skip"}, "on_nonfinite='skip'"),
        # An overflow would persist in the stored compression error.
        ({"strategy": "compressed", "precision": "fp16"}, "precision='fp16'"),
        ({"strategy": "zero2", "on_nonfinite": "skip"}, "on_nonfinite"),
        ({"strategy": "local_sgd", "local_steps": 0}, "local_steps=0"),
        ({"strategy": "local_sgd", "outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"local_steps": 8}, "local_steps"),
        ({"strategy": "local_sgd", "preference": "dpo"}, "strategy='local_sgd'"),
        ({"strategy": "compressed", "preference": "simpo"}, "strategy='compressed'"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb=0.0"),
        ({"strategy": "zero2", "optimizer": "adamw-bf16"}, "optimizer='adamw-bf16'"),
        ({"strategy": "local_sgd", "optimizer": "adamw-bf16"}, "optimizer='adamw-bf16'"),
        ({"strategy": "3d", "tp": 2, **BF16_WEIGHTS}, "used with strategy='3d'"),  # pp is 2
        ({"strategy": "cp", **BF16_WEIGHTS}, "used with strategy='cp'"),
        ({"strategy": "compressed", **BF16_WEIGHTS}, "used with strategy='compressed'"),
        ({"strategy": "hybrid", "pipeline_schedule": "zb-v"}, "pipeline_schedule='zb-v'"),
        ({**ZB_H1, "activation_checkpointing": "full"}, "activation_checkpointing='full'"),
        ({"lora_rank": 8, **BF16_WEIGHTS}, "used with lora_rank=8"),
        ({**BF16_WEIGHTS, "precision": "fp32"}, "used with precision='fp32'"),
    ],
)
def test_unsupported_exchange_settings_are_refused(values, said):
    with refused(said):
        plan_of(**{"strategy": "dp", "machine": H200.machine, **values})


def test_a_bare_deepspeed_json_has_deepspeeds_defaults(tmp_path):
    file = tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    bare, ours = (plan_of("zero3", deepspeed_config=given) for given in (str(file), None))
    assert Prediction(bare, H200.rates).as_record() == Prediction(ours, H200.rates).as_record()


def test_bytes_of_optimizer_state_and_checkpoint():
    """Check the number of bytes of optimizer state (8 per parameter for Adam) and of the checkpoint
    copy (12 per parameter, sharded over four replicas). State that differs between replicas is not
    sharded."""
    for values, optimizer, copied in (
        ({"strategy": "dp"}, 8, 12 / 4),
        ({"strategy": "dp", "cp": 2}, 8, 12 / 4),
        ({"strategy": "dp", "optimizer": "adamw-bf16"}, 4, 8 / 4),
        ({"strategy": "local_sgd"}, 8, 12 / 4 + 12),
        ({"strategy": "local_sgd", "outer_lr": 0.7}, 12, 12 / 4 + 16),
        ({"strategy": "local_sgd", "outer_lr": 0.7, "outer_momentum": 0.9}, 16, 12 / 4 + 20),
        ({"strategy": "compressed"}, 12, 12 / 4 + 4),
        (TOPK, 13, 12 / 4 + 5),
    ):
        plan = plan_of(**values)
        whole = estimate_memory(plan).state["parameters"] / 4
        assert estimate_memory(plan).state["optimizer"] == optimizer * whole
        assert checkpoint_copy_bytes(plan, pipeline_ranks(plan)) == copied * whole


def test_another_algorithm_is_ranked_only_when_asked_for():
    def ranked(strategy, **values):
        return sort_layouts(merged({"strategy": strategy, "model": "gpt2", **values}), H200)

    assert "local_sgd" not in {choice.plan.strategy.name for choice in ranked(AUTO)}
    own = [choice.plan for choice in ranked("local_sgd")]
    assert {plan.strategy.name for plan in own} == {"local_sgd"}
    assert {plan.mesh["dp_replicate"] for plan in own} == {8}
    compressed = ranked(AUTO, gradient_compression="bf16")
    assert {choice.plan.mesh["dp_replicate"] for choice in compressed} == {8}
    split = [choice.plan for choice in ranked(AUTO, cp=2) if choice.plan.mesh["dp_replicate"] == 4]
    assert {plan.only_copies for plan in split} == {True, False}  # the same mesh under dp and cp
    skips = ranked(AUTO, on_nonfinite="skip")
    assert {choice.plan.strategy.engine for choice in skips} == {"native"}
