"""Measure how much longer a split backward pass takes than a whole one on this machine's CPU.

    python results/lab/tutorial/cut_cost.py pipedream_tutorial/records/cpu-cut.json

The result is `(I + W) / B`: the time of the two parts, I and W, relative to the time B of the whole
pass. The model consists of GPT-2 blocks and runs on one thread. The pass is split in three ways: by
our code (train/trainer.py), by PyTorch's pipeline helpers, and by two calls to autograd.grad. The
measurements of the whole pass and of all three ways alternate, so that other load on the machine
affects them equally. Times are medians.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from pipedream.errors import UserError, main_with_errors
from pipedream.schedules.ops import Op
from pipedream.schedules.orders import build_schedule
from pipedream.schedules.policies import POLICIES
from pipedream.train.models import GPT2_SIZES, Task, gpt2_blocks
from pipedream.train.trainer import StageTrainer
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

SETTINGS: dict[str, Any] = {"model": "gpt2", "blocks": 2, "sequences": 2, "tokens": 128}
REPEATS = 30

PassTimes = tuple[float, float, float]
"""Seconds for F, I and W. If the backward pass is whole, seconds for F and B, followed by 0."""


def time_steps(*steps: Callable[[], Any]) -> PassTimes:
    """Run two or three steps. Return the duration of each step in seconds, with 0 for a missing
    third step."""
    times = []
    for step in steps:
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return times[0], times[1], sum(times[2:])


def time_trainer(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, *, cut: bool) -> PassTimes:
    """Time the passes of the runtime's StageTrainer for the middle of three stages."""
    schedule = build_schedule("zb-h1" if cut else "1f1b", 3, 2)
    trainer = StageTrainer(
        module, schedule, POLICIES["flush"], stage=1, batch_size=2, learning_rate=0.1
    )
    task = Task(inputs=x, targets=x, microbatch_size=len(x))
    kinds = ("I", "W") if cut else ("B",)
    steps = [partial(trainer.run, Op(kind, 1, 0), dy, task) for kind in kinds]
    return time_steps(lambda: trainer.forward(0, x, x), *steps)


def time_torch_helpers(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> PassTimes:
    """Time stage_backward_input and stage_backward_weight of torch.distributed.pipelining."""
    x = x.detach().requires_grad_()
    measured: dict[str, Any] = {}
    module.zero_grad()

    def forward() -> None:
        measured["y"] = module(x)

    def backward_input() -> None:
        _, measured["groups"] = stage_backward_input(
            [measured["y"]], [dy], [x], module.parameters()
        )

    return time_steps(
        forward,
        backward_input,
        lambda: stage_backward_weight(module.parameters(), measured["groups"]),
    )


def time_two_calls(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> PassTimes:
    """Time two calls to autograd.grad on the same graph."""
    x = x.detach().requires_grad_()
    measured: dict[str, Any] = {}

    def forward() -> None:
        measured["y"] = module(x)

    return time_steps(
        forward,
        lambda: torch.autograd.grad(measured["y"], x, dy, retain_graph=True),
        lambda: torch.autograd.grad(measured["y"], list(module.parameters()), dy),
    )


METHODS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], PassTimes]] = {
    "whole": lambda *inputs: time_trainer(*inputs, cut=False),
    "cut": lambda *inputs: time_trainer(*inputs, cut=True),
    "torch": time_torch_helpers,
    "twice": time_two_calls,
}


def measure(repeats: int = REPEATS) -> dict[str, Any]:
    """Measure all methods in METHODS. Map each name to {"ms": [F, I, W], "ratio": (I + W) / B}. For
    the whole pass, "ms" is [F, B, 0]."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = GPT2_SIZES[SETTINGS["model"]]._replace(num_layers=SETTINGS["blocks"])
    module = nn.Sequential(*gpt2_blocks(size))
    x, dy = torch.randn(2, SETTINGS["sequences"], SETTINGS["tokens"], size.hidden)
    times: dict[str, list[PassTimes]] = {name: [] for name in METHODS}
    for turn in range(2 + repeats):
        for name, run in METHODS.items():
            pass_times = run(module, x, dy)
            if turn >= 2:  # the first turns are a warm-up
                times[name].append(pass_times)
    whole_backward_s = [backward for _, backward, _ in times["whole"]]
    return {
        name: {
            "ms": [round(1e3 * statistics.median(column), 3) for column in zip(*rows, strict=True)],
            # The ratio is computed per turn, because the machine's speed may change between turns.
            "ratio": round(
                statistics.median(
                    (i + w) / b for (_, i, w), b in zip(rows, whole_backward_s, strict=True)
                ), 4,
            ),
        }
        for name, rows in times.items()
    }  # fmt: skip


def main() -> None:
    """Measure all methods, and write the record."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).parent.is_dir():
        raise UserError(
            "give one path in an existing folder",
            "type python results/lab/tutorial/cut_cost.py pipedream_tutorial/records/cpu-cut.json",
        )
    results = measure()
    record = {
        "command": f"python results/lab/tutorial/cut_cost.py {sys.argv[1]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "settings": SETTINGS | {"repeats": REPEATS, "threads": 1, "dtype": "float32"},
        "ways": results,
    }
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main_with_errors(main)
