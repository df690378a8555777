"""Show which lines of code allocated the GPU memory in use at the peak of a training step.

    torchrun --nproc_per_node=N results/lab/peak.py --out FOLDER CASE ...

A CASE is "NAME key=value ...", where each key is a CONFIG key. `layers=N` reduces the model to N
blocks, so that a case takes only seconds. Each case trains for a few steps without a CUDA graph or,
with `cuda_graphs=true`, up to the step that is captured. As in training, the host does not wait for
the GPU between steps.

PyTorch's allocator records the events of the last step. The program replays these events up to the
moment when the most memory is allocated. The table shows the memory on rank 0 at that moment,
without the memory allocated before the step. Memory that the host has freed but another stream
still uses is listed in separate rows.
"""

import collections
import json
import linecache
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout
import torch

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.models import find_model
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.machine import GIB
from results.lab.harness import Run, RunCache, each_run, open_group_for
from results.lab.steps import synchronize

COMMON: dict[str, Any] = {
    "strategy": "dp", "precision": "bf16", "dataset": "embedded", "tokenizer": "embedded",
    "weights": "random", "num_samples": -1, "epochs": 100, "eval_samples": 8,
    "checkpoint_every": 0, "learning_rate": 1e-4, "cuda_graphs": False,
}  # fmt: skip
NUM_STEPS = 3
MIN_ROW_BYTES = 8 * 2**20  # The table combines all smaller rows in one row.


def measure(run: Run) -> dict[str, Any]:
    """Return the peak memory of a step, the predicted peak and its components, and the allocations
    that are live at the peak."""
    num_steps = NUM_EAGER_STEPS if run.plan.config.cuda_graphs else NUM_STEPS - 1
    for step in range(num_steps):
        run.engine.train_step(run.batch(step))
    predicted: Any = run.plan.prediction
    measured: dict[str, Any] = {"predicted": predicted["memory_bytes"]}
    measured["predicted_bytes"] = predicted["peak_bytes"]
    if not torch.cuda.is_available():
        return measured
    measured["peak_before_bytes"] = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    measured["before_bytes"] = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    run.engine.train_step(run.batch(num_steps))
    synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    measured["peak_bytes"] = torch.cuda.max_memory_allocated()
    measured["at_peak"] = find_peak_allocations(
        snapshot["device_traces"][torch.cuda.current_device()]
    )
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


def config_of(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the CONFIG of a case. If the case sets `layers`, write a config.json with that number
    of blocks to `folder`."""
    values = dict(COMMON)
    for word in words:
        key, text = word.split("=", 1)
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    if layers := values.pop("layers", None):
        spec = find_model(values["model"])
        folder.mkdir(parents=True, exist_ok=True)
        document = {**spec.code.to_config(spec.size, 0), "num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(document))
        values["model"] = str(folder)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(description="Show the content of GPU memory at the peak of a step.")
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400.0)
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = {}
    for case in arguments.cases:
        name, *words = shlex.split(case)
        runs[name] = config_of(words, arguments.out / "models" / name)
    results: dict[str, Any] = {}
    with open_group_for(runs) as group:
        measured = each_run(
            group, runs, measure, deadline_s=arguments.seconds, run_cache=RunCache()
        )
        for name, ranks in measured:
            if group.process.rank:
                continue
            results[name] = ranks if isinstance(ranks, str) else ranks[0]
            print(show(name, results[name]), flush=True)
            document = {**provenance(shlex.join(["python", *sys.argv])), "cases": results}
            write_json(arguments.out / "peak.json", document)
    return 0


def show(name: str, result: Any) -> str:
    if isinstance(result, str) or "at_peak" not in result:
        return f"{name}: {result}"
    parts = ", ".join(f"{key} {size / GIB:.2f}" for key, size in result["predicted"].items())
    lines = [
        f"{name}: peak {result['peak_bytes'] / GIB:.2f} GiB, before the step"
        f" {result['before_bytes'] / GIB:.2f}, predicted"
        f" {result['predicted_bytes'] / GIB:.2f} ({parts})"
    ]
    for size, count, line in result["at_peak"]:
        lines.append(f"  {size / GIB:7.3f} {count:4} {line}")
    return "\n".join(lines)


if __name__ == "__main__":
    checkout.run(main)
