"""Measure how much the loss increases when processes exchange less data or exchange it less often.

    torchrun --nproc_per_node=2 results/lab/exchanges.py FILE.json --seed 1

Each call trains every case of results/plans/cpu-exchanges.json with one seed and adds the results
to FILE. The numbers of bytes come from formulas, which the tests compare with counted bytes. The
file contains no times, and losses do not depend on the load on the machine.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout
import torch
import torch.distributed as dist

from distributed_training.predict.traffic import sent_by_axis
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.files import ROOT, load_json
from distributed_training.train.loop import learning_rate
from results.lab.harness import Run, each_accepted_run, open_group

PLAN = load_json(ROOT / "results/plans/cpu-exchanges.json", "plan")
COMMAND = "torchrun --nproc_per_node=2 results/lab/exchanges.py OUT.json --seed SEED"
CURVE_STEPS = 8  # Each point of a loss curve is the mean of this number of steps.


def train(run: Run) -> dict[str, Any]:
    """Train one case. Return its losses, its final validation loss and the bytes sent per step. All
    ranks must call this function."""
    steps = PLAN["steps"]
    sums = []
    targets = []
    for step in range(steps):
        run.engine.set_learning_rate(learning_rate(run.plan.config, step, steps))
        batch = run.batch(step)
        sums.append(run.engine.train_step(batch).loss_sum.double().cpu())
        targets.append(batch.num_targets)
    losses = torch.stack(sums)
    dist.all_reduce(losses)
    means = (losses / torch.tensor(targets)).view(-1, CURVE_STEPS).mean(1)
    return {
        "losses": means.tolist(),
        "validation_loss": validation_loss(run),
        "sent_bytes_a_step": sum(sent_by_axis(run.plan).values()),
    }


def validation_loss(run: Run) -> float:
    """Return the loss in nats per token over the validation samples. All ranks must call this
    function."""
    samples = run.data.validation
    total = torch.zeros((), dtype=torch.float64, device=run.topology.device)
    for indices in run.sampler.eval_indices(len(samples)):
        total += run.engine.eval_step(*samples.batch(indices)).double()
    dist.all_reduce(total)
    return float(total) / int(samples.num_targets.sum())


def summarize(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return one row per case: the KiB sent per step, the mean validation loss over the seeds, and
    its difference from the loss of the first case."""
    first = next(iter(runs.values()))
    base = next(iter(first.values()))
    rows = {}
    for name, seeds in runs.items():
        losses = [result["validation_loss"] for result in seeds.values()]
        loss_increases = [
            result["validation_loss"] - first[seed]["validation_loss"]
            for seed, result in seeds.items()
        ]
        sent_bytes = next(iter(seeds.values()))["sent_bytes_a_step"]
        rows[name] = {
            "KiB a step": sent_bytes / 2**10,
            "share": sent_bytes / base["sent_bytes_a_step"],
            "validation loss": statistics.mean(losses),
            "more than dp": statistics.mean(loss_increases),
            "from": min(loss_increases),
            "to": max(loss_increases),
        }
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Train every case with one seed and add the results to the record."""
    parser = checkout.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    with open_group() as group:
        cases = {
            name: {**PLAN["common"], "seed": options.seed, **values}
            for name, values in PLAN["cases"].items()
        }
        results = {}
        for name, ranks in each_accepted_run(group, cases, train):
            results[name] = ranks[0]
        if group.process.rank == 0:
            old_record = load_json(options.out, "record") if options.out.exists() else {}
            runs = old_record.get("runs", {name: {} for name in cases})
            for name, values in results.items():
                runs[name][str(options.seed)] = values
            record = {
                "what": "loss of gpt2-tiny on two CPU processes with smaller or fewer exchanges",
                **provenance(COMMAND),
                "processes": group.process.world_size,
                "steps": PLAN["steps"],
                "base": PLAN["common"],
                "cases": PLAN["cases"],
                "after_training": summarize(runs),
                "runs": runs,
            }
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.out, record)
            print(f"Wrote {len(results)} cases with seed {options.seed} to {options.out}.")
    return 0


if __name__ == "__main__":
    checkout.run(main)
