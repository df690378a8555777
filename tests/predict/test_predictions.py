"""Test properties of predictions and rankings. tests/lab/test_predictions.py tests the accuracy of
predictions."""

import contextlib
import itertools
import json
import math

import pytest

from distributed_training.plan.schedules import divisors
from distributed_training.planner.make_plan import draft_plan
from distributed_training.planner.sort import predict_all, sort_by_speed, sort_layouts
from distributed_training.predict import speed
from distributed_training.predict.predict import Prediction, local_cluster, parse_cluster
from distributed_training.predict.rates import FITTED, gpu_rates
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import GPUS
from distributed_training.settings.strategies import MESH_AXES, load_strategy
from tests.planner.helpers import NAMES, merged, plan_for
from tests.support import CPU_MACHINE, GPU_MACHINE

H200 = gpu_rates(GPUS["H200"])


def build(name, **config):
    return merged({"model": "gpt2-medium", "strategy": name, **config})


def test_every_fitted_value_says_where_it_comes_from():
    entries = json.loads((ROOT / "distributed_training/predict/constants.json").read_text())
    assert set(entries) == set(vars(FITTED))
    for name, entry in entries.items():
        assert set(entry) == {"value", "unit", "what", "record", "range"}, name


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_times_are_the_same_in_every_version_of_python(schedule, monkeypatch):
    # Since Python 3.12, sum() rounds less, so other ranks may be the first of several equal ones.
    def exact_sum(values, start=0):
        values = list(values)
        if all(isinstance(value, float) for value in values):
            return math.fsum(values)
        return sum(values, start)

    cluster = parse_cluster("4xT4")
    request = build("pp", pp=4, batch_size=2, pipeline_schedule=schedule)
    for choice in predict_all(request, cluster):
        plan = choice.plan
        old = speed.estimate_step(plan, cluster.rates)
        with monkeypatch.context() as patch:
            patch.setattr(speed, "sum", exact_sum, raising=False)
            new = speed.estimate_step(plan, cluster.rates)
        assert new[:2] == (pytest.approx(old.seconds, rel=1e-9), old.bound_by)


def test_a_cpu_has_no_time_but_its_layouts_are_compared():
    cluster = local_cluster(CPU_MACHINE, 2, 2)
    first, *others = sort_layouts(build("auto", model="gpt2-tiny"), cluster)
    record = first.as_record()
    assert {record[key] for key in ("step_time_s", "tokens_per_s", "likely_s", "evidence")} == {
        None
    }
    assert first.estimate.seconds < 2 * min(other.estimate.seconds for other in others)


def test_a_cpus_time_follows_from_its_measured_cores():
    cores = vars(FITTED.cpu_core)
    slow = {name: rate / 2 for name, rate in cores.items()}
    slow_python = cores | {"calls": cores["calls"] / 2}
    seconds = []
    for measured in (cores, slow, slow_python):
        cluster = local_cluster(CPU_MACHINE, 1, 1, measured)
        plan = draft_plan(build("dp", model="gpt2-tiny"), cluster)
        record = Prediction(plan, cluster.rates).as_record()
        assert "measured" in record["evidence"]
        assert record["likely_s"] is None
        seconds.append(record["step_time_s"])
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.05)
    assert 1.01 * seconds[0] < seconds[2] < 1.5 * seconds[0]


def test_offloading_attention_saves_time_only_if_blocks_take_longer_than_their_copies(tmp_path):
    def seconds(model, mode):
        config = {"model": model, "weights": "random", "lora_rank": 16, "batch_size": 4}
        config |= {"max_length": 1024, "activation_checkpointing": mode}
        plan = plan_for(tmp_path, GPU_MACHINE, 1, **config)
        return Prediction(plan, H200).step.seconds

    large, small = (
        seconds(model, "offload-attention") / seconds(model, "full")
        for model in ("Llama-3.1-8B", "Qwen3-0.6B")
    )
    assert large < 0.95
    assert small > 1.5


@pytest.mark.parametrize(
    ("name", "gemm", "memory", "link"),
    [  # published TFLOP/s and GB/s, see constants.json
        ("A100-80GB", 270, 1800, 300), ("T4", 24, 280, 15.75), ("H100@500W", 600, 3000, 450),
        ("a100-80gb-pcie", 245, 1750, 31.5), ("B200", 1745, 4000, 900),
    ],
)  # fmt: skip
def test_gpu_rates_follow_generation_form_factor_and_power(name, gemm, memory, link):
    rates = parse_cluster(f"4x{name}").rates
    assert rates.gemm_flops / 1e12 == pytest.approx(gemm, rel=0.03)
    assert rates.memory_bytes_per_s / 1e9 == pytest.approx(memory, rel=0.05)
    assert rates.link_bytes_per_s / 1e9 < link


@pytest.mark.parametrize("count", [8, 12])
def test_every_layout_that_can_start_is_ranked(count, tmp_path):
    """Try every factorization of `count` into sizes of the five mesh axes, with every strategy. The
    accepted layouts must be exactly the ranked layouts."""
    cluster = parse_cluster(f"{count}xH200")
    listed, started = set(), set()
    for name in NAMES:
        config = build(name, model="gpt2")
        strategy = load_strategy(config)
        listed |= {layout_of(choice.plan) for choice in predict_all(config, cluster)}
        for pp, copies, cp, tp in itertools.product(divisors(count), repeat=4):
            shards, odd = divmod(count, pp * copies * cp * tp)
            if odd or not shards:
                continue
            axes = dict(zip(MESH_AXES, (pp, copies, shards, cp, tp), strict=True))
            axis_settings = {
                a: size for a, size in axes.items() if strategy.mesh[a] not in (-1, size)
            }
            values = {"checked": False, "strategy": name, "model": "gpt2", **axis_settings}
            with contextlib.suppress(UserError):
                started.add(layout_of(plan_for(tmp_path, cluster.machine, count, **values)))
    assert started == listed
    assert len(started) > 15


def layout_of(plan):
    """Return a key that is equal for equal layouts. For example, hybrid without a pipeline has the
    same key as zero1."""
    name = plan.strategy.name if plan.strategy.traits.uses_zero else "native"
    name = "zero1" if name == "hybrid" and plan.mesh["pp"] == 1 else name
    return name, tuple(plan.mesh.values())


def ranked(cluster, **config):
    return sort_layouts(build(AUTO, **config), parse_cluster(cluster))


def test_rankings_for_slow_links_and_for_a_thousand_gpus():
    """Over links of 31.5 GB/s, gathering the weights of gpt2-xl costs more than a pipeline's
    bubble."""
    choices = ranked("4xA100-80GB-PCIe", model="gpt2-xl-20-heads", batch_size=4)
    assert sort_by_speed(choices)[0].plan.mesh["pp"] > 1
    choices = ranked("128x8xH100", model="gpt2-xl")
    assert len(choices) > 100
    assert {choice.plan.num_processes for choice in choices} == {1024}
