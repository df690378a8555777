"""Test that one function chooses the layout for plan, strategy=auto, jobs and advice."""

import dataclasses
import json
import random
import re
import shlex
import sys

import pytest

from distributed_training.cli import main
from distributed_training.planner import make_plan as make_plan_module
from distributed_training.planner.data import Sources
from distributed_training.planner.make_plan import draft_plan, make_plan
from distributed_training.planner.rank import describe_suggestion, rank
from distributed_training.predict.predict import parse_cluster, predict
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.request import build_config
from distributed_training.tools import plan as command
from distributed_training.tools.plan import MAX_SHOWN, as_dict
from real_model_example import CONFIG
from tests.support import refused

CLUSTERS = [
    "T4", "L4", "A10G", "RTX-3060", "RTX-5090", "H200", "2xT4", "2xRTX-4090", "4xA100-40GB",
    "3xH200", "4xH100-80GB", "2x2xH100-80GB",
]  # fmt: skip
VALUES = {
    "model": ["gpt2", "gpt2-medium", "gpt2-xl", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"],
    "batch_size": [1, 2, 4, 4, 8, 8, 32, 32, AUTO],
    "max_length": [256, 512, 1024],
    "grad_accum_steps": [1, 1, 2, 8],
    "lora_rank": [0, 0, 16],
    "activation_checkpointing": ["none", "none", "selective"],
}  # fmt: skip
SMALL = CLUSTERS[:6]


def facts(plan, cluster):
    """Return everything that plan prints about a layout, and the settings that produce it."""
    keys = ("batch_size", "activation_checkpointing", "lora_rank", "base_dtype")
    values = {key: getattr(plan.config, key) for key in (*keys, "pipeline_schedule")}
    return json.loads(json.dumps(as_dict(predict(plan, cluster.rates)))), values


def random_requests(count):
    """Yield a cluster and the options of a request. Most clusters are small to save time."""
    draw = random.Random(66)
    for number in range(count):
        cluster = draw.choice(CLUSTERS if number % 10 == 0 else SMALL)
        chosen = {key: draw.choice(values) for key, values in VALUES.items()}
        yield cluster, [f"--{key}={value}" for key, value in chosen.items() if draw.random() < 0.7]


def configure(options):
    """Return CONFIG with options of the form --key=value or --key value."""
    words = [part for option in options for part in option.split("=", 1)]
    pairs = zip(words[::2], words[1::2], strict=True)
    return build_config(CONFIG, overrides=[f"{k.removeprefix('--')}={v}" for k, v in pairs])


def job_options(file):
    """Return the script's options in a job that plan wrote."""
    words = shlex.split(re.search(r"run=\((.+)\)", file.read_text())[1])
    return words[1 : words.index("--strict")]


def test_plan_auto_dry_runs_jobs_and_errors_choose_the_same_layout(monkeypatch, capsys, tmp_path):
    """For 200 random requests, the command and the job that plan writes, and a dry run with
    strategy=auto have the same layout, batch and prediction. If all weights fit only with offload,
    or not at all, the dry run is refused, and the error suggests plan's choice first."""
    sources = Sources(tokenizer_dir=tmp_path, weights_dir=None, adapters_dir=None)
    monkeypatch.setattr(
        make_plan_module, "find_sources", lambda draft, notes, needs_weights: (draft, sources)
    )
    monkeypatch.setattr(command, "count_work", lambda draft, notes: "unknown")
    monkeypatch.setattr(command, "_describe_larger_batch", lambda request, cluster: "")
    job = tmp_path / "job.slurm"
    num_advised = 0
    for name, typed in random_requests(200):
        cluster = parse_cluster(name)
        error = planned = None
        try:
            planned = make_plan(configure(typed), cluster, needs_weights=False)
        except UserError as refusal:
            error = str(refusal)
        words = ["plan", "--cluster", name, *typed, "--write", str(job)]
        monkeypatch.setattr(sys, "argv", ["real_model_example.py", *words])
        code = main(CONFIG, "About.", str(ROOT / "real_model_example.py"))
        out, err = capsys.readouterr()
        if code:  # nothing fits
            assert error in " ".join(err.split())
            continue
        options = job_options(job)
        assert out.partition("  # first")[2].splitlines()[1].endswith(shlex.join(options))
        chosen = draft_plan(configure(options), cluster)
        expected = facts(chosen, cluster)
        if planned is not None:
            assert facts(planned, cluster) == expected
            continue
        num_advised += 1
        advice = describe_suggestion({}, predict(chosen, cluster.rates))
        assert error.partition("Set ")[2].partition(", or ")[0].endswith(advice.strip())
    assert num_advised > 5


@pytest.mark.parametrize(
    ("cluster", "values"),
    [
        ("8xH100-80GB", {"model": "meta-llama/Llama-3.1-8B"}),
        ("2x4xH100-80GB", {"model": "gpt2-xl", "batch_size": 16, "max_length": 1024}),
        ("4xL4", {"model": "Qwen/Qwen3-4B", "batch_size": 8}),
        ("7xH200", {"model": "Qwen/Qwen3-4B", "batch_size": 8, "max_length": 4096}),
        ("2x8xA100", {"model": "gpt2-xl", "network_gbit": 10, "grad_accum_steps": 2}),
    ],
)
def test_layouts_that_cannot_win_are_skipped_without_changing_the_best_rows(cluster, values):
    cluster = parse_cluster(cluster)
    request = build_config({**values, "strategy": AUTO})
    complete, pruned = rank(request, cluster), rank(request, cluster, num_best=MAX_SHOWN)
    rows, best = ([json.dumps(as_dict(row)) for row in rows] for rows in (complete, pruned))
    assert best[:MAX_SHOWN] == rows[:MAX_SHOWN]
    assert len(best) < len(rows) or not all(choice.fits for choice in complete)
    assert json.dumps(as_dict(rank(request, cluster, num_best=1)[0])) == rows[0]


def first_of(cluster, **values):
    request = build_config({**values, "strategy": AUTO})
    return rank(request, parse_cluster(cluster))


def test_the_first_choice_is_one_that_a_practitioner_would_accept():
    """dp or fsdp comes first unless another layout is faster by more than the errors. On one GPU,
    strategies that only shard are not listed."""
    for cluster, values, names in (
        ("7xH200", {"model": "Qwen/Qwen3-4B", "batch_size": 8, "max_length": 4096}, {"fsdp"}),
        ("2x8xH100", {"model": "gpt2-xl"}, {"dp", "fsdp"}),
        ("8xH100", {"model": "Qwen/Qwen3-0.6B", "batch_size": 1, "grad_accum_steps": 8}, {"dp"}),
        ("8xH100", {"model": "meta-llama/Llama-3.1-8B"}, {"fsdp"}),
    ):
        assert first_of(cluster, **values)[0].plan.strategy.name in names
    listed = {choice.plan.strategy.name for choice in first_of("H100-80GB", model="gpt2-xl")}
    assert listed == {"dp", "offload", "infinity"}


def test_no_layout_is_chosen_without_the_ram_that_it_needs():
    large = {"model": "Qwen/Qwen3-8B", "strategy": AUTO}
    desktop, server = parse_cluster("RTX-4090"), parse_cluster("RTX-4090")
    machine = dataclasses.replace(server.machine, ram_bytes=2**39)
    server = dataclasses.replace(server, machine=machine)
    assert not rank(build_config(large), desktop)[0].fits
    assert rank(build_config(large), server)[0].plan.strategy.name == "offload"
    with refused("lora_rank=16", "base_dtype=nf4"):
        make_plan(build_config(large), desktop)


@pytest.mark.parametrize("name", ["H20", "GH200", "H100-PCIe", "A100"])
def test_gpus_count_as_measured_by_name(name):
    assert not first_of(name, model="gpt2-medium")[0].validated
    assert first_of("H200", model="gpt2-medium")[0].validated
