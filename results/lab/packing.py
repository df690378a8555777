"""Compare packed with padded records on one GPU: speed, losses, and CUDA graph replays.

    python results/lab/packing.py --out FOLDER [--tiny]

Records come from Python's standard library: a function's source is the prompt and its docstring is
the answer, as in CodeSearchNet. Lengths are therefore realistic, and no download is needed. Models
have random weights and train in bf16. --tiny is a smoke test for CPUs. The program prints a table
and writes all results to FOLDER/packing.json.
"""

import functools
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout
import numpy as np
import torch
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX, StepBatch
from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.models import attention
from distributed_training.records.record import provenance, write_json
from results.lab.corpus.records import write_records
from results.lab.harness import Group, Run, each_run, open_group
from results.lab.steps import time_step
from results.lab.unpack import unpack_rows

COMMON: dict[str, Any] = {
    "strategy": "dp", "precision": "bf16", "learning_rate": 1e-4, "tokenizer": "embedded",
    "weights": "random", "num_samples": -1, "eval_samples": 8, "checkpoint_every": 0,
}  # fmt: skip
MODELS = (
    ("gpt2-medium", 32, 1024),
    ("Qwen3-0.6B", 8, 1024),
)  # model, sequences, tokens per sequence
TINY = (("gpt2-tiny", 4, 128), ("tests/models/grouped", 4, 128))
TIMED_STEPS = 20
NUM_LOSSES = 20
ROWS_PER_MICRO_BATCH = 8  # records per micro-batch if each record has a separate row
DEADLINE_S = 330.0
# Heads, head size, blocks, and tokens per block for measurements of attention alone
SHAPES = ((16, 64, 8, 1024), (16, 128, 8, 1024), (16, 128, 2, 4096))


def measure_speed(run: Run) -> dict[str, Any]:
    """Train for a few steps. Return the tokens per second (without padding) after the CUDA graph is
    captured, the losses of all steps, and other measurements."""
    batches = [run.batch(step) for step in range(NUM_EAGER_STEPS + 3 + TIMED_STEPS)]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    losses = []
    seconds = []
    for batch in batches:
        step_seconds, loss = time_step(run, batch)
        seconds.append(step_seconds)
        losses.append(loss)
    timed = seconds[-TIMED_STEPS:]
    tokens = sum(batch.num_tokens for batch in batches[-TIMED_STEPS:])
    packing = run.plan.packing
    train = run.data.train
    measured = {
        "real_tokens_per_s": tokens / sum(timed),
        "step_time_s": statistics.median(timed),
        "real_share": train.real_share,
        "records_per_block": len(train.starts) / len(train),
        "mean_length": packing and packing.mean_length,
        "graph": run.engine.step_graph.graph is not None,  # type: ignore[attr-defined]
        "losses": losses,
    }
    if torch.cuda.is_available():
        measured["peak_bytes"] = torch.cuda.max_memory_allocated()
    return measured


def measure_with_mask(run: Run) -> dict[str, Any]:
    """Run `measure_speed` with an attention mask instead of the document kernel."""
    largest = attention._MAX_HEAD_SIZE
    attention._MAX_HEAD_SIZE = 0
    try:
        return measure_speed(run)
    finally:
        attention._MAX_HEAD_SIZE = largest


def unpack_records(run: Run, batch: StepBatch, *, backwards: bool) -> StepBatch:
    """Return a step's records with one row per record and ROWS_PER_MICRO_BATCH records
    per micro-batch. With `backwards`, reverse the order of the rows."""
    padding_id = run.data.tokenizer.eos_id
    rows = [
        row
        for blocks in batch.micro_batches
        for row in unpack_rows(blocks, padding_id).swapaxes(0, 1)
    ]
    rows = [row for row in rows if (row[1] != IGNORE_INDEX).any()]
    empty = np.stack([np.full_like(rows[0][0], padding_id), rows[0][1] * 0 - 100])
    rows += [empty] * (-len(rows) % ROWS_PER_MICRO_BATCH)
    if backwards:
        rows.reverse()
    groups = [
        rows[first : first + ROWS_PER_MICRO_BATCH]
        for first in range(0, len(rows), ROWS_PER_MICRO_BATCH)
    ]
    return replace(batch, micro_batches=[tuple(np.stack(group, axis=1)) for group in groups])


def measure_losses(run: Run, transform: Callable[[Run, StepBatch], StepBatch]) -> dict[str, Any]:
    """Train for NUM_LOSSES steps on the batches that `transform` returns. Return the losses and
    gradient norms."""
    curves: dict[str, list[float]] = {"losses": [], "grad_norms": []}
    for step in range(NUM_LOSSES):
        batch = transform(run, run.batch(step))
        result = run.engine.train_step(batch)
        curves["losses"].append(float(result.loss_sum) / batch.num_targets)
        curves["grad_norms"].append(float(result.grad_norm or 0.0))
    return curves


def time_attention(lengths: np.ndarray) -> Iterator[dict[str, Any]]:
    """Time the forward and backward passes of attention alone, replayed as a CUDA graph. Yield one
    row per shape and kind of attention."""
    for heads, head_size, batch, seq_len in SHAPES:
        shape = (batch, heads, seq_len, head_size)
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).contiguous()
            .transpose(1, 2).requires_grad_() for _ in range(3)
        )  # fmt: skip
        cases: dict[str, Any] = {"causal": None}
        for name, length in (("whole", seq_len), ("300", 300), ("60", 60), ("data", None)):
            positions, ends = build_blocks(batch, seq_len, length, lengths)
            options: dict[str, Any] = {"dtype": q.dtype, "head_size": head_size, "dropout": 0.0}
            cases[f"varlen {name}"] = attention.describe_documents(positions, ends, **options)
            if name == "data":
                cases["mask"] = attention.describe_documents(
                    positions, ends, **{**options, "dropout": 1.0}
                )
        for name, documents in cases.items():

            def forward_backward(
                documents: Any = documents, q: Any = q, k: Any = k, v: Any = v
            ) -> Any:
                y = attention.attend(q, k, v, documents)
                return torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

            yield {
                "heads": heads, "head_size": head_size, "blocks": batch, "seq_len": seq_len,
                "attention": name, "seconds": time_graph_replay(forward_backward),
            }  # fmt: skip


def build_blocks(
    batch: int, seq_len: int, length: int | None, lengths: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill blocks with documents, and return the positions and document ends. Each document has
    `length` tokens. If `length` is None, lengths are drawn from `lengths`."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(batch):
        sizes = rng.choice(lengths, seq_len) if length is None else np.full(seq_len, length)
        ends = np.minimum(np.cumsum(sizes), seq_len)
        rows.append(np.append(ends[ends < seq_len], seq_len))
    width = max(map(len, rows))
    ends = torch.tensor(np.stack([np.pad(row, (0, width - len(row)), "edge") for row in rows]))
    starts = F.pad(ends, (1, 0))
    indices = torch.arange(seq_len).expand(batch, seq_len).contiguous()
    documents = torch.searchsorted(ends, indices, right=True)
    return (indices - starts.gather(1, documents)).cuda(), ends.cuda()


def time_graph_replay(function: Callable[[], Any], times: int = 20) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = function()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    del outputs
    return (time.perf_counter() - began) / times


def largest_gap(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference between the losses of two runs."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=False))


class Results:
    """Measurements that are written to disk after every run."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        self.file = folder / "packing.json"
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        command = shlex.join(["python", "results/lab/packing.py", "--out", "FOLDER"])
        self.values: dict[str, Any] = {
            **provenance(command + " --tiny" * tiny), "gpu": gpu, "tiny": tiny,
            "records": {}, "speed": {}, "losses": {}, "graph": {}, "attention": [],
        }  # fmt: skip

    def add(self, part: str, name: str, measured: Any) -> None:
        self.values[part][name] = measured
        self.write()

    def write(self) -> None:
        write_json(self.file, self.values)


def measure(group: Group, results: Results, models: Any, dataset: Path) -> None:
    """Measure all runs, starting with the most important ones, and print the table row by row."""
    began = time.monotonic()

    def measure_run(values: dict[str, Any], use: Callable[[Run], Any]) -> Any:
        remaining_s = DEADLINE_S - (time.monotonic() - began)
        for _, ranks in each_run(group, {"run": {**values}}, use, deadline_s=remaining_s):
            if isinstance(ranks, str):
                print(f"refused: {ranks}", file=sys.stderr)
                return None
            return ranks[0]
        print("A run was skipped because the time limit was reached.", file=sys.stderr)
        return None

    def config(model: str, batch: int, length: int) -> dict[str, Any]:
        sources = {"dataset": str(dataset), "model": model}
        return {**COMMON, **sources, "batch_size": batch, "max_length": length}

    def compare_speed(label: str, changes: dict[str, Any], use: Callable[[Run], Any]) -> None:
        for model, batch, length in models:
            if speed := measure_run({**config(model, batch, length), **changes}, use):
                results.add("speed", f"{model} {batch} x {length}, {label}", speed)
                peak = speed.get("peak_bytes", 0) / 2**30
                print(
                    f"{model:<12} {batch:>2} x {length}  {label:<13}"
                    f"{speed['real_tokens_per_s']:>10,.0f} real tokens/s  "
                    f"{1000 * speed['step_time_s']:7.1f} ms  {100 * speed['real_share']:5.1f}% real"
                    f"  {speed['records_per_block']:5.1f} records per block  {peak:5.1f} GiB"
                    f"  graph {speed['graph']}",
                    flush=True,
                )

    compare_speed("packed", {}, measure_speed)
    compare_speed("padded", {"pack": False}, measure_speed)
    for model, _, length in models:
        values = {**config(model, 4, length), "cuda_graphs": False, "compile": False}
        values["loss_chunk_tokens"] = 2048
        transforms: dict[str, Any] = {
            "packed": lambda _run, batch: batch,
            "packed again": lambda _run, batch: batch,
            "one by one": functools.partial(unpack_records, backwards=False),
            "one by one, backwards": functools.partial(unpack_records, backwards=True),
            # Shows the error that bf16 itself causes
            "one by one, fp32": functools.partial(unpack_records, backwards=False),
        }
        runs_by_case = {
            name: measure_run(
                {**values, "precision": "fp32"} if name.endswith("fp32") else values,
                functools.partial(measure_losses, transform=transform),
            )
            for name, transform in transforms.items()
        }
        if all(runs_by_case.values()):
            losses = {name: run["losses"] for name, run in runs_by_case.items()}
            separate_losses = losses["one by one"]
            gaps = {
                "packed against one by one": largest_gap(losses["packed"], separate_losses),
                "packed twice": largest_gap(losses["packed"], losses["packed again"]),
                "one by one in two orders": largest_gap(
                    losses["one by one, backwards"], separate_losses
                ),
                "packed against fp32": largest_gap(losses["packed"], losses["one by one, fp32"]),
                "one by one against fp32": largest_gap(separate_losses, losses["one by one, fp32"]),
            }
            results.add("losses", model, {**runs_by_case, "apart": gaps})
            text = "; ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
            print(f"{model}: largest relative difference of {NUM_LOSSES} losses: {text}")
    # Compare a graph that is replayed with other documents with two runs without a graph.
    model, batch, length = models[0]
    values = {**config(model, batch, length), "cuda_graphs": False}
    eager_runs = [measure_run(values, measure_speed) for _ in range(2)]
    graph_run = results.values["speed"].get(f"{model} {batch} x {length}, packed")
    if all(eager_runs) and graph_run:
        runs = [run["losses"][NUM_EAGER_STEPS:] for run in (graph_run, *eager_runs)]
        gaps = {
            "replayed against launched": largest_gap(runs[0], runs[1]),
            "launched twice": largest_gap(runs[2], runs[1]),
        }
        names = ("replayed", "launched", "launched again")
        results.add("graph", model, {**dict(zip(names, runs, strict=True)), "apart": gaps})
        text = "; ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
        print(f"{model}: largest relative difference of {len(runs[0])} losses: {text}")
    compare_speed("packed, mask", {}, measure_with_mask)


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(description="Compare packed records with padded ones.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.out, arguments.tiny)
    models = TINY if arguments.tiny else MODELS
    with tempfile.TemporaryDirectory() as folder, open_group() as group:
        dataset = Path(folder, "functions.jsonl")
        write_records(dataset)
        lengths = np.array([])

        def measure_lengths(run: Run) -> dict[str, Any]:
            nonlocal lengths
            lengths = run.data.train.lengths
            quantiles = np.quantile(lengths, [0.1, 0.5, 0.9, 0.99]).tolist()
            return {"count": len(lengths), "mean": float(lengths.mean()), "quantiles": quantiles}

        values = {**COMMON, "model": "gpt2-tiny", "dataset": str(dataset), "max_length": 1024}
        for _, ranks in each_run(group, {"look": values}, measure_lengths):
            results.values["records"] = ranks[0]
            print(f"records: {ranks[0]}")
        results.write()
        if torch.cuda.is_available():
            for row in time_attention(lengths):
                results.values["attention"].append(row)
                print("  ".join(f"{value}" for value in row.values()), flush=True)
            results.write()
        measure(group, results, models, dataset)
    results.values["seconds"] = time.monotonic() - began
    results.write()
    print(f"Wrote {results.file} after {results.values['seconds']:.0f} s.")
    return 0


if __name__ == "__main__":
    checkout.run(main)
