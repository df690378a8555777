"""Partition a model into stages with PipeDream's algorithm, and simulate the result.

python pipedream_planner.py
python pipedream_planner.py --set workers=16 --set bandwidth=1e9
python pipedream_planner.py --set profile=gpt2 --set save_profile=profiles/mine.json
"""

import shlex
import sys
from collections.abc import Sequence
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any

from pipedream.config import FOLDER, Rule, parse_arguments
from pipedream.errors import UserError, main_with_errors, nearest
from pipedream.plan.planner import (
    Plan,
    full_speed_in_flight,
    make_plan,
    plan_pipeline,
    simulate_plan,
)
from pipedream.plan.profile import (
    Layer,
    Profile,
    device_name,
    load_profile,
    measure_profile,
    save_profile,
)

CONFIG: dict[str, Any] = {
    "profile": "profiles/gpt2_cpu.json",  # profile's .json, or model to measure: gpt2, gpt2-medium
    "workers": 8,  # number of workers among which the layers are partitioned
    # 1.25e8 is 1 Gbit/s.
    "bandwidth": 1.25e8,  # bytes per second between two workers; None: sending takes no time
    "replication": True,  # True: a stage may be replicated on several workers
    # PipeDream's formula uses all workers.
    "use_all_workers": False,  # True: use all workers, even if fewer workers would be faster
    # 2: ring all-reduce over full-duplex links. 4: PipeDream's links, one direction at a time
    "sync_factor": 2,  # synchronizing m replicas sends this * (m - 1) / m times the weights
    "num_microbatches": 128,  # number of microbatches to simulate
    # The other keys are for measurements. Before timed runs, a third as many warm-up runs are made.
    "device": "cpu",  # device to measure on
    "dtype": "float32",  # dtype to measure with
    "batch": 1,  # sequences per microbatch in measurements
    "sequence": 256,  # tokens per sequence in measurements
    "threads": 1,  # number of CPU threads in measurements
    "repeats": 9,  # timed runs of each layer's passes
    "save_profile": None,  # JSON file for the measured profile
}

RULES: dict[str, Rule] = {
    "profile": Rule(kind=str),
    "workers": Rule(kind=int, low=1, high=64),
    "bandwidth": Rule(kind=Fraction, low=1, high=1e14, nullable=True),
    "replication": Rule(kind=bool),
    "use_all_workers": Rule(kind=bool),
    "sync_factor": Rule(kind=Fraction, low=0, high=100),
    "num_microbatches": Rule(kind=int, low=1, high=512),
    "device": Rule(kind=str, choices=("cpu", "cuda")),
    "dtype": Rule(kind=str, choices=("float32", "bfloat16")),
    "batch": Rule(kind=int, low=1, high=1024),
    "sequence": Rule(kind=int, low=1, high=1024),
    "threads": Rule(kind=int, low=1, high=256),
    "repeats": Rule(kind=int, low=1, high=1000),
    "save_profile": Rule(kind=str, nullable=True),
}


def main() -> None:
    config = parse_arguments(
        CONFIG,
        RULES,
        "Partition a model into pipeline stages and simulate the pipeline.",
        script=__file__,
    )
    profile = get_profile(config)
    layers = profile.layers
    workers = config["workers"]
    bandwidth = config["bandwidth"]
    network = {
        "bandwidth": inf if bandwidth is None else bandwidth,
        "sync_factor": config["sync_factor"],
    }

    def plan_with(**options: bool) -> Plan:
        return plan_pipeline(layers, num_workers=workers, **options, **network)

    plan = plan_with(replication=config["replication"], use_all_workers=config["use_all_workers"])
    speed = "links without delay" if bandwidth is None else f"{float(bandwidth):g} bytes/s"
    print(
        f"{profile.model}, {len(layers)} layers, microbatches of {profile.batch} x "
        f"{profile.sequence} tokens, {profile.dtype}\n"
        f"measured on {profile.device}, CPU threads: {profile.threads}, torch {profile.torch}\n"
        f"{workers} workers, {speed}, sync factor {config['sync_factor']}\n"
    )
    print_stages(plan, layers)
    last = len(layers) - 1
    print_comparison(
        {
            "this plan": plan,
            "data parallelism": make_plan(layers, [(last, workers)], **network),
            "straight pipeline": plan_with(replication=False),
            "one worker": make_plan(layers, [(last, 1)], **network),
        }
    )
    print_simulation(plan, config["num_microbatches"])


def get_profile(config: dict[str, Any]) -> Profile:
    """Load or measure the profile that `config["profile"]` names. Save a measured profile if
    `config["save_profile"]` names a file."""
    path, target = Path(config["profile"]), config["save_profile"]
    if not path.exists() and (FOLDER / path).exists():  # scripts can be started from any folder
        path = FOLDER / path
    if path.suffix == ".json":
        if target is not None:
            raise UserError(
                f"save_profile={target!r} would save a measured profile, but {path} is loaded",
                "set profile to gpt2 or gpt2-medium, or leave save_profile out",
            )
        return load_profile(path)
    if target is not None and not Path(target).parent.is_dir():
        raise UserError(
            f"save_profile={target!r}: no such folder", "create it, or name another folder"
        )
    profile = measure_gpt2(config)
    if target is not None:
        save_profile(profile, Path(target))
    return profile


def measure_gpt2(config: dict[str, Any]) -> Profile:
    """Measure the layers of the model that `config["profile"]` names, with random weights and
    tokens. Return the profile."""
    import torch
    from pipedream.train.models import GPT2_SIZES, gpt2_layers

    name = config["profile"]
    if name not in GPT2_SIZES:
        raise UserError(
            f"profile={name!r} is neither a .json file nor a model", nearest(name, GPT2_SIZES)
        )
    if config["device"] == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch finds no GPU", "set device to cpu")
    device = torch.device(config["device"])
    size = GPT2_SIZES[name]
    torch.set_num_threads(config["threads"])
    torch.manual_seed(0)
    dtype = getattr(torch, config["dtype"])
    modules = [(name, layer.to(device, dtype)) for name, layer in gpt2_layers(size).items()]
    shape = config["batch"], config["sequence"] + 1
    text = torch.randint(size.vocabulary, shape, device=device)
    layers = measure_profile(modules, text[:, :-1], targets=text[:, 1:], repeats=config["repeats"])
    return Profile(
        model=name,
        device=device_name(device),
        torch=torch.__version__,
        command=shlex.join(["python", *sys.argv]),
        layers=tuple(layers),
        **{key: config[key] for key in ("dtype", "batch", "sequence", "threads")},
    )


def print_stages(plan: Plan, layers: Sequence[Layer]) -> None:
    """Print one line per stage. Then print the bottleneck and NOAM, the number of microbatches in
    flight per input worker."""
    rows = [["stage", "layers", "workers", "in flight", "compute s", "weights MiB", "sent MiB"]]
    needed = full_speed_in_flight(plan.replicas)
    for index, stage in enumerate(plan.stages):
        names = layers[stage.first].name
        if stage.last > stage.first:
            names += f" .. {layers[stage.last].name}"
        rows.append(
            [
                str(index),
                names,
                str(stage.replicas),
                str(needed[index]),
                f"{float(stage.compute_s):.4f}",
                f"{float(stage.weight_bytes) / 2**20:.1f}",
                f"{float(stage.sent_bytes) / 2**20:.2f}",
            ]
        )
    print_table(rows)
    print(f"\nbottleneck: {plan.bottleneck}")
    needed_note = (
        f"; this plan needs {needed[0]} to run at full speed" if needed[0] > plan.noam else ""
    )
    print(
        f"NOAM {plan.noam} (PipeDream's number of microbatches in flight per input worker"
        f"{needed_note})\n"
    )


def print_comparison(plans: dict[str, Plan]) -> None:
    """Print the predicted period and throughput of each plan, and its speed-up relative to the last
    plan in `plans`."""
    rows = [["predicted", "workers", "replicas", "period s", "microbatches/s", "speed-up"]]
    *_, base = plans.values()
    for name, plan in plans.items():
        rows.append(
            [
                name,
                str(plan.num_workers),
                "-".join(map(str, plan.replicas)),
                f"{float(plan.period_s):.4f}",
                f"{float(1 / plan.period_s):.3f}",
                f"{float(base.period_s / plan.period_s):.2f}",
            ]
        )
    print_table(rows)


def print_simulation(plan: Plan, num_microbatches: int) -> None:
    """Print the plan's period and utilization, once with the planner's model of links and once with
    the simulator's model."""
    rows = [["simulated", "in flight", "period s", "of predicted", "utilization"]]
    for busy, title in [(True, "links carry one message at a time"), (False, "links only delay")]:
        run = simulate_plan(plan, num_microbatches, busy_links=busy)
        period = ["-", "-"]
        if run.period_s is not None:
            period = [f"{float(run.period_s):.4f}", f"{float(run.period_s / plan.period_s):.1%}"]
        in_flight = "-".join(map(str, run.in_flight))
        rows.append([title, in_flight, *period, f"{float(run.utilization):.1%}"])
    assigned = "assigned round robin to the workers of each stage"
    print(f"\n{num_microbatches} microbatches under 1F1B, {assigned}:\n")
    print_table(rows)
    if any("-" in row for row in rows):
        print("\n-: the run is too short to reach a steady state; increase num_microbatches")
    sync_bound = [str(k) for k, stage in enumerate(plan.stages) if stage.sync_s > stage.compute_s]
    if sync_bound:
        print(f"\npasses as long as their weight synchronization: stage {', '.join(sync_bound)}")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print columns that are as wide as their longest cell, with numbers right-aligned."""
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        numbers = all(cell[0].isdigit() or cell == "-" for cell in column[1:])
        columns.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    for row in zip(*columns, strict=True):
        print("  ".join(row).rstrip())


if __name__ == "__main__":
    main_with_errors(main)
