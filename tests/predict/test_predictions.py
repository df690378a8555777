"""The planner's model against every published run, and against what must hold of any model."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shutil

import pytest

from distributed_training.advise.checks import check_memory
from distributed_training.advise.cluster import machine_rates, parse_cluster, this_machine
from distributed_training.advise.make import draft_plan
from distributed_training.advise.rank import enumerate_plans, rank_layouts, settings_of
from distributed_training.plan.schedules import SCHEDULES, divisors
from distributed_training.predict.memory import estimate_memory
from distributed_training.predict.orders import build_orders, simulate
from distributed_training.predict.rates import (
    calibration_file,
    cpu_rates,
    from_calibration,
    rates_of,
)
from distributed_training.predict.speed import estimate_step
from distributed_training.predict.state import estimate_state
from distributed_training.settings.config import build_config
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.gpus import GPUS
from distributed_training.settings.strategies import (
    load_strategy,
    strategy_defaults,
    strategy_options,
)
from results.lab.pages import validate
from tests.plan.helpers import CPU_CALIBRATION, NAMES, plan_for
from tests.support import CPU_MACHINE, GPU_MACHINE, refused

H200 = rates_of(GPUS["H200"])


def build(name, **config):
    values = {"model": "gpt2-medium", "strategy": name, **config}
    return build_config(values, defaults=strategy_defaults, options=strategy_options)


def test_memory_of_published_runs():
    errors = [row.memory_error for row in validate.gpu_rows() if row.began_empty]
    assert len(errors) > 80
    assert validate.share_within(errors, 0.05) >= 0.9
    assert min(errors) > -0.10


def test_time_of_published_runs():
    errors = [row.time_error for row in validate.gpu_rows()]
    assert validate.share_within(errors, 0.10) >= 0.8
    assert max(map(abs, errors)) < 0.25


def test_ram_of_processes_without_gpus():
    """Under every strategy that runs on 1, 2 and 4 of them; time where it was measured."""
    rows = validate.cpu_rows()
    assert len(rows) > 20
    assert max(abs(row.memory_error) for row in rows) < 0.10
    timed = [abs(row.time_error) for row in rows if row.time_error is not None]
    assert max(timed, default=0.0) < 0.20


def test_times_of_processes_without_gpus_are_shown(tmp_path, monkeypatch):
    machine = {**dataclasses.asdict(CPU_MACHINE)}
    run = {
        "processes": 2, "config": {"model": "gpt2-tiny", "strategy": "dp"},
        "peak_host_bytes": 2**29, "step_time_s": 0.2,
    }  # fmt: skip
    file = tmp_path / "strategies.json"
    runs = [run, {**run, "processes": 1, "step_time_s": None}]
    document = {"machine": machine, "runs": runs, "calibrations": {"2": CPU_CALIBRATION}}
    file.write_text(json.dumps(document))
    rows = validate.cpu_rows(file)
    monkeypatch.setattr(validate, "cpu_rows", lambda: rows)
    header, _, row = validate.on_cpus().splitlines()
    assert [cell.strip() for cell in header.split("|")] == ["", "processes", "1", "2", ""]
    name, alone, two = [cell.strip() for cell in row.split("|")[1:-1]]
    assert name == "dp"
    assert re.fullmatch(r"512, [+-][\d.]+%", alone)
    plan = draft_plan(build_config(run["config"]), CPU_MACHINE, 2, 2)
    rates = from_calibration(CPU_CALIBRATION, cpu_rates(CPU_MACHINE.num_cpus, 2))
    error = estimate_step(plan, rates).seconds / 0.2 - 1
    assert re.fullmatch(rf"512, [+-][\d.]+%; 200 ms, {re.escape(f'{error:+.0%}')}", two)


def test_rates_that_were_measured_predict_as_well():
    """One minute of microbenchmarks on four H200s, and not one training run."""
    errors = validate.calibrated_errors()
    assert validate.share_within(errors, 0.10) >= 0.8
    assert validate.share_within(errors, 0.25) >= 0.95


def test_what_was_calibrated_is_used_from_then_on(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTRIBUTED_TRAINING_CACHE", str(tmp_path))
    assert machine_rates(GPU_MACHINE, 4) == H200
    assert this_machine(GPU_MACHINE, 4, 4).rates.estimated
    shutil.copy(ROOT / "results/calibration/h200-x4.json", calibration_file("NVIDIA H200"))
    rates = machine_rates(GPU_MACHINE, 4)
    assert not rates.estimated
    assert rates.gemm_flops == pytest.approx(7e14, rel=0.05)
    assert rates.link_bytes == pytest.approx(3e11, rel=0.05)
    assert rates.disk_bytes == H200.disk_bytes  # not measured


def test_the_first_choice_is_close_to_the_best_of_each_page():
    behind = {
        name: first.measured_s / best.measured_s - 1
        for name, (first, best) in validate.first_choices(validate.gpu_rows()).items()
    }
    assert len(behind) > 10
    assert max(behind.values()) < 0.05, behind


FIXED = [name for name, schedule in SCHEDULES.items() if not schedule.searched]


@pytest.mark.parametrize("schedule", FIXED)
def test_orders_idle_as_the_closed_forms_say(schedule):
    """All stages alike, a backward pass twice a forward one, in equal halves."""
    known = SCHEDULES[schedule]
    compared = 0
    for p, m in itertools.product((2, 3, 4, 8), (1, 2, 3, 4, 6, 8, 16, 24)):
        if not known.takes(p, m) or (expected := known.bubble(p, m)) is None:
            continue
        ranks = known.ranks(p)
        part = 1 / known.stages_per_rank
        lengths = {"F": part, "B": 2 * part, "I": part, "W": part}
        seconds = {(kind, s): lengths[kind] for kind in lengths for s in range(len(ranks))}
        length, busy = simulate(build_orders(schedule, p, m), seconds, ranks, 0.0)
        assert busy == pytest.approx([3 * m] * p)
        assert 1 - sum(busy) / p / length == pytest.approx(expected)
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("schedule", FIXED)
def test_every_stage_does_every_micro_batch_once(schedule):
    known = SCHEDULES[schedule]
    for p, m in itertools.product((1, 2, 4), (4, 8)):
        orders = build_orders(schedule, p, m)
        done = [step for order in orders for step in order]
        assert len(done) == len(set(done))
        kinds = "FIW" if known.splits_backward and p > 1 else "FB"
        stages = len(known.ranks(p)) if p > 1 else 1
        assert set(done) == set(itertools.product(kinds, range(stages), range(m)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["gpt2", "gpt2-xl-20-heads"])
def test_more_processes_never_raise_the_state_of_one(name, model, tmp_path):
    """The fullest process's, wherever it lies along a pipeline, and what it has elsewhere."""
    found = []
    for count in (1, 2, 4, 8, 12, 16, 24, 32):
        machine = dataclasses.replace(GPU_MACHINE, num_gpus=count)
        words = {"checked": False, "strategy": name, "model": model, "batch_size": 4}
        with contextlib.suppress(UserError):  # not every number of processes has a layout
            state = estimate_state(plan_for(tmp_path, machine, count, **words))
            found.append(state.on_device + state.host + state.disk)
    assert len(found) > 2
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_larger_takes_more(name, tmp_path):
    """Longer texts: more memory, and more time where the host does not bind; recomputing: less."""
    common = {"strategy": name, "model": "gpt2", "checked": False}
    small, large = (
        plan_for(tmp_path, GPU_MACHINE, 4, batch_size=64, max_length=length, **common)
        for length in (256, 1024)
    )
    assert estimate_memory(small).peak_bytes < estimate_memory(large).peak_bytes
    assert estimate_step(small, H200).seconds <= estimate_step(large, H200).seconds
    again = plan_for(
        tmp_path, GPU_MACHINE, 4, batch_size=64, max_length=1024,
        activation_checkpointing="full", **common,
    )  # fmt: skip
    assert estimate_memory(again).peak_bytes < estimate_memory(large).peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_what_is_ranked_is_what_starts(name, tmp_path):
    """Typed as its settings say, every ranked layout becomes a plan with the same mesh and cut."""
    config = build(name, batch_size=4)
    cluster = parse_cluster("4xH200")
    plans = list(enumerate_plans(config, cluster))
    assert plans
    for ranked in plans:
        words = {**settings_of(ranked), "batch_size": 4, "model": "gpt2-medium", "strategy": name}
        planned = plan_for(tmp_path, cluster.machine, 4, checked=False, **words)
        assert (planned.mesh, planned.batch) == (ranked.mesh, ranked.batch)
        assert planned.layout == ranked.layout
        assert planned.config.pipeline_schedule == ranked.config.pipeline_schedule


@pytest.mark.parametrize("count", [8, 12])
def test_what_is_ranked_is_all_that_starts(count, tmp_path):
    """Every way to write `count` as a product of the four axes, typed under every strategy."""
    cluster = parse_cluster(f"{count}xH200")
    ranked, started = set(), set()
    for name in NAMES:
        config = build(name, model="gpt2")
        strategy = load_strategy(config)
        for plan in enumerate_plans(config, cluster):
            ranked.add(layout_of(plan))
        for pp, copies, tp in itertools.product(divisors(count), repeat=3):
            shards, odd = divmod(count, pp * copies * tp)
            axes = {"pp": pp, "dp_replicate": copies, "dp_shard": shards, "tp": tp}
            told = {axis: size for axis, size in axes.items() if strategy.mesh[axis] != size}
            if odd or not shards:
                continue
            with contextlib.suppress(UserError):
                plan = plan_for(
                    tmp_path, cluster.machine, count, checked=False, strategy=name, model="gpt2",
                    **{axis: size for axis, size in told.items() if strategy.mesh[axis] != -1},
                )  # fmt: skip
                started.add(layout_of(plan))
    assert started == ranked
    assert len(started) > 15


def layout_of(plan):
    """What is equal for two names of one layout: hybrid without a pipeline is zero1."""
    name = plan.strategy.name if plan.strategy.traits.takes_deepspeed_json else "native"
    name = "zero1" if name == "hybrid" and plan.mesh["pp"] == 1 else name
    return name, tuple(plan.mesh.values())


def test_what_plan_says_does_not_fit_a_run_refuses_and_nothing_else():
    choices = rank_layouts(
        lambda name: build(name, model="gpt2-xl", batch_size=16), parse_cluster("4xV100-16GB")
    )
    assert {choice.prediction.fits for choice in choices} == {True, False}
    for choice in choices:
        refusal = contextlib.nullcontext() if choice.prediction.fits else refused("GiB a GPU")
        with refusal:
            check_memory(choice.plan, lambda plan: [])


def test_on_one_gpu_nothing_is_better_than_dp():
    choices = rank_layouts(lambda name: build(name, batch_size=8), parse_cluster("H200"))
    assert choices[0].plan.strategy.name == "dp"
    assert choices[0].prediction.fits


def test_a_thousand_gpus_are_ranked():
    choices = rank_layouts(lambda name: build(name, model="gpt2-xl"), parse_cluster("128x8xH100"))
    assert len(choices) > 100
    assert all(choice.plan.num_processes == 1024 for choice in choices)
    seconds = [choice.prediction.step.seconds for choice in choices if choice.prediction.fits]
    assert seconds == sorted(seconds)
