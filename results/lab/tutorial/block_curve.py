"""Measure how the micro-batch size affects the speed of one block of GPT-2.

    python results/lab/tutorial/block_curve.py pipedream_tutorial/records/curve-cpu.json
    python results/lab/tutorial/block_curve.py --device cuda out.json

Each row of the record has a number of sequences, and the seconds of their forward and backward
passes. The sizes alternate, so that other load on the machine affects all of them equally.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from pipedream.runtime.record import device_name
from pipedream.train.models import GPT2_SIZES, gpt2_blocks
from torch import nn

SIZES = (1, 2, 4, 8, 16, 32, 64)
REPEATS, PASSES, WARMUPS = 15, 5, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"model": "gpt2", "tokens": 16, "dtype": "float32"},  # one thread, as a stage has
    "cuda": {"model": "gpt2-medium", "tokens": 1024, "dtype": "bfloat16"},
}


def build_pass(block: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass for the input `x` and the gradient
    `dy` of the output, both [sequences, tokens, hidden]. On a GPU, it replays a CUDA graph, so that
    the host's launches cost no time. A graph knows only addresses: the caller keeps `x` and `dy`.
    The gradients of the weights are added to those of earlier passes."""

    def run() -> None:
        block(x).backward(dy)

    if not x.is_cuda:
        return run
    with torch.cuda.stream(torch.cuda.Stream()):  # libraries allocate memory in the first pass
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def time_passes(run: Callable[[], None]) -> float:
    """Return the mean seconds per pass."""
    begun = time.perf_counter()
    for _ in range(PASSES):
        run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / PASSES


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Return the median seconds for each number of sequences."""
    settings = SETTINGS[device.type]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = GPT2_SIZES[settings["model"]]._replace(num_layers=1)
    dtype = getattr(torch, settings["dtype"])
    block = gpt2_blocks(size)[0].to(device, dtype)
    shape = settings["tokens"], size.hidden
    passes, tensors = {}, {}
    for n in SIZES:
        x = torch.randn(n, *shape, device=device, dtype=dtype, requires_grad=True)
        tensors[n] = x, torch.ones_like(x)
        passes[n] = build_pass(block, *tensors[n])
    seconds: dict[int, list[float]] = {n: [] for n in SIZES}
    for turn in range(WARMUPS + REPEATS):
        for n, run in passes.items():
            took = time_passes(run)
            if turn >= WARMUPS:
                seconds[n].append(took)
    return [
        {"sequences": n, "seconds": round(statistics.median(times), 7)}
        for n, times in seconds.items()
    ]


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("record", type=Path, help="path of the record to write")
    parser.add_argument("--device", choices=tuple(SETTINGS), default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    record = {
        "command": f"python results/lab/tutorial/block_curve.py --device {device.type} OUT.json",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": device_name(device),
        "settings": SETTINGS[device.type] | {"repeats": REPEATS, "passes": PASSES},
        "rows": measure(device),
    }
    arguments.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
