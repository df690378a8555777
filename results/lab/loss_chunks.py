"""Compare the time and memory of several ways to compute the loss: in chunks of various sizes,
without chunks, and with Liger.

    torchrun --nproc_per_node=N results/lab/loss_chunks.py --out FOLDER [--set key=value ...]

N is 1, or 2 with `--set strategy=fsdp` or `--set strategy=tp`. The default is Llama-3.2-1B with
random weights in bf16 and 4 x 2048 tokens per GPU. The variant "liger" runs if liger_kernel is
installed and the strategy is not tp. Every variant trains for the same number of steps, first
without a CUDA graph and then, except for "liger", with a CUDA graph. The columns show the highest
value of any rank:

- `state`: GiB allocated before a step.
- `entry`: GiB allocated before the loss is computed.
- `in loss`: peak GiB during the loss's forward pass.
- `after`: peak GiB from the end of that pass to the end of the step.
- `peak`: peak GiB of the later steps without a graph.
"""

import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout
import torch
from tabulate import tabulate

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.machine import GIB
from results.lab.harness import Run, RunCache, each_run, open_group_for

COMMON: dict[str, Any] = {
    "model": "Llama-3.2-1B", "strategy": "dp", "batch_size": 4, "max_length": 2048,
    "precision": "bf16", "learning_rate": 1e-4, "dataset": "embedded", "tokenizer": "embedded",
    "weights": "random", "num_samples": -1, "epochs": 100, "eval_samples": 8,
    "checkpoint_every": 0,
}  # fmt: skip
VARIANTS = {"whole": 0, "2048": 2048, "4096": 4096, "1024": 1024}
TIMED_STEPS = 8
DEADLINE_S = 90.0


class LigerLoss:
    """Replacement for `Decoder.loss` that uses liger_kernel's fused linear cross entropy."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        assert weight.shape[0] == vocab_size, "Liger's loss does not support a padded vocabulary"
        arguments = (x.flatten(0, -2), weight, targets.flatten(), None, None, -100, 0.0, 0.0, "sum")
        loss: Any = LigerFusedLinearCrossEntropyFunction.apply(*arguments)
        return loss[0] if isinstance(loss, tuple) else loss


def measure(run: Run) -> dict[str, Any]:
    """Train for a few steps. Return this rank's milliseconds per step, its losses, and its memory
    use in GiB."""
    on_gpu = run.topology.device_type == "cuda"
    stage = next(iter(run.engine.stages.values()))  # type: ignore[attr-defined]
    loss = stage.loss
    gib: dict[str, float] = {}

    def note_gib(name: str, *, peak: bool) -> None:
        if on_gpu:
            torch.cuda.synchronize()
            read_bytes = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
            gib[name] = read_bytes() / GIB
            torch.cuda.reset_peak_memory_stats()

    def measured_loss(*arguments: Any, **options: Any) -> Any:
        note_gib("entry", peak=False)
        result = loss(*arguments, **options)
        note_gib("in loss", peak=True)
        return result

    seconds = []
    losses = []
    num_steps = NUM_EAGER_STEPS + 2 + TIMED_STEPS if on_gpu else 4
    for step in range(num_steps):
        if step == 2:
            note_gib("state", peak=False)
            if not run.plan.config.compile or run.plan.config.loss_chunk_tokens:
                stage.loss = (
                    measured_loss  # Otherwise the loss is compiled together with the layers.
                )
        if step == 3:
            note_gib("after", peak=True)
            stage.loss = loss
        batch = run.batch(step)
        began = time.perf_counter()
        result = run.engine.train_step(batch)
        losses.append(float(result.loss_sum) / batch.num_targets)
        seconds.append(time.perf_counter() - began)
        if step == NUM_EAGER_STEPS - 1:
            note_gib("peak", peak=True)
    eager_seconds = seconds[3:NUM_EAGER_STEPS]
    measured = {
        "ms": 1000 * statistics.median(seconds[-TIMED_STEPS:] if on_gpu else eager_seconds),
        "ms op by op": 1000 * statistics.median(eager_seconds),
        "graph": bool(getattr(run.engine.step_graph, "graph", None)),  # type: ignore[attr-defined]
        "losses": losses,
    }
    if on_gpu:
        measured["reserved"] = torch.cuda.max_memory_reserved() / GIB
    return measured | gib


def measure_liger(run: Run) -> dict[str, Any]:
    """Run `measure` with Liger's loss."""
    next(iter(run.engine.stages.values())).loss = LigerLoss()  # type: ignore[attr-defined]
    return measure(run)


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(description="Compare ways to compute the loss.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    overrides = dict(text.split("=", 1) for text in arguments.set)
    common = {**COMMON, **{key: _value(text) for key, text in overrides.items()}}
    runs = {name: {**common, "loss_chunk_tokens": n} for name, n in VARIANTS.items()}
    order = list(VARIANTS)
    if common["strategy"] != "tp" and _has_liger():
        order.append("liger")
    results = []
    began = time.monotonic()
    run_cache = RunCache()
    with open_group_for(runs) as group:
        for name in order:
            # Liger's loss replaces a chunked, uncompiled loss. CUDA graphs cannot capture it.
            values = runs.get(name, {**runs["2048"], "cuda_graphs": False})
            use = measure_liger if name == "liger" else measure
            deadline_s = DEADLINE_S - (time.monotonic() - began)
            for _, ranks in each_run(
                group, {name: values}, use, deadline_s=deadline_s, run_cache=run_cache
            ):
                if group.process.rank:
                    continue
                row = {"loss": name}
                row |= {"refused": ranks} if isinstance(ranks, str) else _fullest(ranks)
                results.append(row)
                print({key: row[key] for key in row if key != "losses"}, flush=True)
        if group.process.rank == 0:
            columns = [name for name in results[0] if name != "losses"]
            table = [[row.get(name) for name in columns] for row in results]
            print(tabulate(table, columns, "github", floatfmt=".2f"))
            document = {
                **provenance(shlex.join(["python", *sys.argv])),
                "config": common, "num_processes": group.process.world_size,
                "results": results, "seconds": time.monotonic() - began,
            }  # fmt: skip
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_json(arguments.out / "loss-chunks.json", document)
    return 0


def _fullest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rank 0's results, but with the longest times and highest memory of any rank."""
    return {
        key: max(rank[key] for rank in ranks) if isinstance(value, float) else value
        for key, value in ranks[0].items()
    }


def _has_liger() -> bool:
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        return False
    return True


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    checkout.run(main)
