"""Measure the runs of a plan one after another, in one process group.

    torchrun --nproc_per_node=N results/lab/measure.py results/plans/PLAN.json FOLDER

The plan's "measure" is one of:

- `speed`: train a few steps. Measure the step time without and with a CUDA graph, and the memory.
- `loss`: train the plan's number of `steps`. Measure the losses and the validation loss.
- `peak`: list the lines of code that allocated the GPU memory in use at the peak of a step.

Besides CONFIG keys, a run may set `layers` (the number of blocks of a smaller model), a
config.json as `model`, which then runs transformers' code, and "functions" as `dataset`: one record
per function of Python's standard library. Rank 0 writes FOLDER/PLAN.json after every run.

For `peak`, PyTorch's allocator records the events of the last step. The program replays these
events up to the moment when the most memory is allocated. Memory that the host has freed but
another stream still uses is listed in separate rows.
"""

import collections
import json
import linecache
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import checkout
import torch
import torch.distributed as dist

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.machine import GIB
from distributed_training.train.loop import learning_rate
from results.lab.harness import Run, RunCache, each_run, open_group_for
from results.lab.runs import read_plan, write_inputs
from results.lab.steps import synchronize, time_step

NUM_EAGER = 3  # steps before the step whose allocations are listed
TIMED_STEPS = 10
MIN_ROW_BYTES = 8 * 2**20  # The table combines all smaller rows in one row.
ON_GPU = torch.cuda.is_available()


def measure_speed(run: Run) -> dict[str, Any]:
    """Train a few steps. Return the time, the memory and the predictions."""
    seconds = []
    losses = []
    num_tokens = 0
    eager_peak = 0
    num_warmup = NUM_EAGER_STEPS + 3 if ON_GPU else 2
    for step in range(num_warmup + TIMED_STEPS):
        batch = run.batch(step)
        step_seconds, loss = time_step(run, batch)
        seconds.append(step_seconds)
        losses.append(loss)
        num_tokens += batch.num_tokens if step >= num_warmup else 0
        if ON_GPU and step == NUM_EAGER_STEPS - 1:
            eager_peak = torch.cuda.max_memory_allocated()
    plan = run.plan
    predicted: Any = plan.prediction or {}
    timed = seconds[-TIMED_STEPS:]
    train = run.data.train
    median_s = statistics.median(timed)
    return {
        "ms": 1000 * median_s,
        "step_time_s": median_s,
        "ms op by op": 1000 * statistics.median(seconds[2:NUM_EAGER_STEPS]),
        "tokens_per_s": plan.batch.global_batch_size * plan.config.max_length / median_s,
        "real_tokens_per_s": num_tokens / sum(timed),
        "real_share": train.real_share,
        "records_per_block": len(train.starts) / len(train),
        "peak_gib": eager_peak / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if ON_GPU else 0.0,
        "graph": getattr(getattr(run.engine, "step_graph", None), "graph", None) is not None,
        "losses": losses,
        "predicted_ms": 1000 * (predicted.get("step_time_s") or 0.0),
        "predicted_gib": predicted.get("peak_bytes", 0) / GIB,
        "notes": list(plan.notes),
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


def measure_loss(run: Run, num_steps: int) -> dict[str, Any]:
    """Train for `num_steps` steps. Return the loss of each step, the median step time and the
    validation loss."""
    steps = []
    for step in range(num_steps):
        run.engine.set_learning_rate(learning_rate(run.plan.config, step, num_steps))
        steps.append(time_step(run, run.batch(step)))
    seconds, losses = zip(*steps, strict=True)
    median_s = statistics.median(seconds[-TIMED_STEPS:])
    peak = torch.cuda.max_memory_allocated() if ON_GPU else 0
    return {
        "ms": 1000 * median_s, "losses": losses, "evaluation": validation_loss(run),
        "peak_gib": peak / GIB, "prediction": run.plan.prediction,
    }  # fmt: skip


def measure_peak(run: Run) -> dict[str, Any]:
    """Return the peak memory of a step, the predicted peak and its components, and the allocations
    that are live at the peak."""
    num_steps = NUM_EAGER_STEPS if run.plan.config.cuda_graphs else NUM_EAGER - 1
    for step in range(num_steps):
        run.engine.train_step(run.batch(step))
    predicted: Any = run.plan.prediction
    measured = {
        "predicted": predicted["memory_bytes"], "predicted_bytes": predicted["peak_bytes"],
    }  # fmt: skip
    if not ON_GPU:
        return measured
    torch.cuda.reset_peak_memory_stats()
    measured["before_bytes"] = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    run.engine.train_step(run.batch(num_steps))
    synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    measured["peak_bytes"] = torch.cuda.max_memory_allocated()
    events = snapshot["device_traces"][torch.cuda.current_device()]
    measured["at_peak"] = find_peak_allocations(events)
    return measured


def find_peak_allocations(events: Sequence[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """Return rows for the memory that a step has allocated at its peak. Each row contains a size in
    bytes, a number of allocations, and the line of code that made them. A row with a negative size
    shows the memory from before the step that had been freed by then."""
    live: dict[int, dict[str, Any]] = {}
    total = peak = 0
    peak_index = -1
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= event["size"]
        if total > peak:
            peak, peak_index = total, index
    freed_bytes = 0
    freed = set()
    for event in events[: peak_index + 1]:
        address = event["addr"]
        if event["action"] == "alloc":
            live[address] = event
            freed.discard(address)
        elif event["action"] == "free_requested":
            freed.add(address)
        elif event["action"] == "free_completed" and not live.pop(address, None):
            freed_bytes += event["size"]
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for address, event in live.items():
        prefix = "freed, but another stream uses it: " if address in freed else ""
        entry = sums[prefix + source_line(event.get("frames", []))]
        entry[0] += event["size"]
        entry[1] += 1
    rows = sorted(((size, count, line) for line, (size, count) in sums.items()), reverse=True)
    shown = [row for row in rows if row[0] >= MIN_ROW_BYTES]
    small = rows[len(shown) :]
    shown.append((sum(row[0] for row in small), sum(row[1] for row in small), "less than 8 MiB"))
    shown.append((-freed_bytes, 0, "freed memory from before the step"))
    shown.append((peak, 0, "all"))
    return shown


def source_line(frames: Sequence[dict[str, Any]]) -> str:
    """Return the innermost line that is in this project or in compiled code, followed by the line
    that called it."""
    names = []
    for frame in frames:
        file = frame["filename"]
        compiled = "torchinductor" in file or "/inductor/" in file or "output_code" in file
        if compiled or "distributed_training" in file:
            line = linecache.getline(file, frame["line"]).strip()[:90]
            short = "compiled" if compiled else file.rpartition("distributed_training/")[2]
            names.append(f"{short}:{frame['line']} {line}")
        elif not names and ("_foreach" in frame["name"] or "fsdp" in file):
            names.append(f"{file.rpartition('/')[2]}:{frame['line']} {frame['name']}")
        if len(names) == 2:
            break
    return " < ".join(names) or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    arguments, plan, runs = read_plan("Measure the runs of a plan.", argv)
    measures: dict[str, Callable[[Run], Any]] = {
        "speed": measure_speed,
        "loss": partial(measure_loss, num_steps=plan.get("steps")),
        "peak": measure_peak,
    }
    document: dict[str, Any] = {
        **provenance(shlex.join(["python", *sys.argv]), commit=arguments.git_commit),
        "plan": plan, "gpu": torch.cuda.get_device_name() if ON_GPU else None, "cases": {},
    }  # fmt: skip
    with open_group_for(runs) as group:
        folder = group.folder / f"rank-{group.process.rank}"
        runs = {name: write_inputs(values, folder / name) for name, values in runs.items()}
        measured = each_run(
            group,
            runs,
            measures[plan["measure"]],
            deadline_s=arguments.deadline_s,
            run_cache=RunCache(),
        )
        for name, ranks in measured:
            if group.process.rank > 0:
                continue
            document["cases"][name] = ranks if isinstance(ranks, str) else ranks[0]
            if not isinstance(ranks, str) and len(ranks) > 1:
                document.setdefault("ranks", {})[name] = ranks
            print(f"{name}: {json.dumps(document['cases'][name])[:600]}", flush=True)
            write_json(arguments.out / arguments.plan.name, document)
    return 0


if __name__ == "__main__":
    checkout.run(main)
