"""Fewer and smaller exchanges, planned: what is refused, what they need, what ranks them."""

from __future__ import annotations

import dataclasses

import pytest

from distributed_training.plan.cluster import parse_cluster
from distributed_training.plan.make import draft_plan
from distributed_training.plan.predict import predict
from distributed_training.plan.rank import best_layout, rank_layouts, under_strategy
from distributed_training.settings.config import build_config
from distributed_training.settings.strategies import strategy_defaults, strategy_options
from tests.conftest import light_pool
from tests.support import CPU_MACHINE, refused

H200 = parse_cluster("8xH200")


def plan_of(machine=CPU_MACHINE, processes=4, **values):
    config = build_config({"model": "gpt2-tiny", **values}, options=strategy_options)
    return draft_plan(config, machine, processes, processes)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"strategy": "fsdp", "gradient_compression": "bf16"}, "does not go with strategy='fsdp'"),
        ({"strategy": "zero2", "gradient_compression": "powersgd"}, "strategy='zero2'"),
        ({"strategy": "local_sgd", "gradient_compression": "bf16"}, "strategy='local_sgd'"),
        ({"gradient_compression": "powersgd", "compression_rank": 65}, "compression_rank=65"),
        ({"gradient_compression": "topk-int8", "compression_k": 0.0}, "compression_k=0.0"),
        ({"compression_k": 1.5}, "compression_k=1.5"),
        ({"compression_rank": 0}, "compression_rank=0"),
        ({"strategy": "local_sgd", "local_steps": 0}, "local_steps=0"),
        ({"strategy": "local_sgd", "outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"local_steps": 8}, "local_steps"),
    ],
)
def test_refusals(values, said):
    with refused(said):
        plan_of(**{"strategy": "dp", **values})


def test_fp16_keeps_no_error_that_an_overflow_would_stay_in():
    for kind in ("powersgd", "topk-int8"):
        with refused("precision='fp16'"):
            plan_of(H200.machine, strategy="dp", gradient_compression=kind, precision="fp16")
    plan_of(H200.machine, strategy="dp", gradient_compression="bf16", precision="fp16")


def test_a_step_that_compresses_is_not_captured():
    plan = plan_of(H200.machine, strategy="dp", gradient_compression="bf16")
    assert plan.config.cuda_graphs is False
    assert any("no CUDA graph: gradient_compression" in note for note in plan.notes)
    with refused("cuda_graphs=True"):
        plan_of(H200.machine, strategy="dp", gradient_compression="bf16", cuda_graphs=True)


def test_state_bytes():
    def optimizer(**values):
        return plan_of(**values).state.optimizer / plan_of(strategy="dp").state.optimizer

    assert optimizer(strategy="local_sgd") == 1
    assert optimizer(strategy="local_sgd", outer_lr=0.7) == 12 / 8
    assert optimizer(strategy="local_sgd", outer_lr=0.7, outer_momentum=0.9) == 16 / 8
    assert optimizer(strategy="dp", gradient_compression="powersgd") == 12 / 8
    assert optimizer(strategy="dp", gradient_compression="topk-int8") == 13 / 8


def test_slow_links_are_what_they_pay_on():
    """Predicted seconds of a step over 1 Gbit/s fall with the bytes; over NVLink nearly not."""
    machine = H200.machine
    slow = dataclasses.replace(H200.rates, link_bytes=0.125e9)
    seconds = {}
    for name, values in {
        "dp": {"strategy": "dp"},
        "bf16": {"strategy": "dp", "gradient_compression": "bf16"},
        "topk-int8": {"strategy": "dp", "gradient_compression": "topk-int8"},
        "local": {"strategy": "local_sgd", "local_steps": 64},
    }.items():
        plan = plan_of(machine, 8, model="gpt2-medium", batch_size=16, cuda_graphs=False, **values)
        seconds[name] = [predict(plan, rates, 8).step.seconds for rates in (slow, H200.rates)]
    over_slow = [seconds[name][0] for name in ("dp", "bf16", "topk-int8", "local")]
    assert over_slow == sorted(over_slow, reverse=True)
    assert over_slow[0] > 10 * over_slow[-1]
    over_nvlink = [both[1] for both in seconds.values()]
    assert max(over_nvlink) < 1.2 * min(over_nvlink)


def test_another_algorithm_is_ranked_only_when_asked_for():
    def build(name):
        return build_config(
            {"strategy": name, "model": "gpt2"},
            defaults=strategy_defaults,
            options=strategy_options,
        )

    def names(asked):
        return {choice.plan.strategy.name for choice in rank_layouts(build, H200, asked)}

    assert names("local_sgd") - names("dp") == {"local_sgd"}
    config = build("local_sgd")
    assert best_layout(config, H200.machine, 8, 8).plan.strategy.name != "local_sgd"
    assert under_strategy(config, "dp").engine_options == {}


def test_as_typed():
    for typed in (["--strategy", "local_sgd", "--local_steps", "0"],
                  ["--strategy", "zero2", "--gradient_compression", "bf16"]):  # fmt: skip
        shown = light_pool().script([*typed, "--dry-run"])
        assert (shown.returncode, shown.stderr.count("\n")) == (2, 1), shown.stderr
