"""What pipedream_runtime.py's CONFIG may hold, and what --benchmark sets. Imports no torch."""

from __future__ import annotations

from typing import Any

from pipedream.config import Rule
from pipedream.schedules.catalogue import SCHEDULES

ON_GPUS: dict[str, Any] = {
    "device": "cuda",
    "model": "gpt2-medium",
    "forward_ms": 0,
    "backward_ms": 0,
    "learning_rate": 0.01,
    "repeats": 3,
    "calibrate_on": 8,
    "check_weights": False,
    "go_on": True,
}
BENCHMARKS: dict[str, dict[str, Any]] = {
    "flushes": ON_GPUS
    | {
        "num_microbatches": [4, 8, 16, 32],
        "num_batches": 3,
        "microbatch_size": 8,  # where a GPU works for as long as the host takes to launch, it waits
    },
    "zero-bubble": ON_GPUS
    | {
        "schedule": [
            "zb-h1", "1f1b", "zb-h2", "search", "interleaved", "zb-v", "v-half", "v-min",
        ],
        "num_microbatches": [8],
        "layers_per_stage": 6,
        "microbatch_size": 32,  # F, I and W of half a rank's blocks still take 5 ms of an H200
        "timeout_s": 60,
    },
    "search": ON_GPUS
    | {
        "schedule": ["zb-h1", "search", "1f1b", "zb-h2"],
        "memory": [4, 5, 6],
        "num_microbatches": [8],
        "num_batches": 1,
        "layers_per_stage": 1,  # little work between messages of the same size
        "microbatch_size": 96,
        "nccl_max_ctas": 2,  # and a slower link: to send takes about as long as F
        "repeats": 5,
        "timeout_s": 60,
    },
}  # fmt: skip

RULES: dict[str, Rule] = {
    "num_stages": Rule(text="stages p, one process each", kind=int, low=1, high=64),
    "num_microbatches": Rule(
        text="microbatches m in a batch, one run for each", kind=int, many=True, low=1, high=4096
    ),
    "num_batches": Rule(text="batches in a run", kind=int, low=1, high=1000),
    "schedule": Rule(
        text="one run for each; all: those with one copy of the model",
        kind=str,
        many=True,
        choices=("all", "search", *SCHEDULES),
        or_file=".csv",
    ),
    "memory": Rule(
        text="of search: microbatches that a rank may hold, one run for each; None: num_stages",
        kind=int,
        many=True,
        none=True,
        low=1,
        high=4096,
    ),
    "model": Rule(
        text="what is trained; of gpt2 the blocks only",
        kind=str,
        choices=("mlp", "gpt2-tiny", "gpt2-medium"),
    ),
    "layers_per_stage": Rule(
        text="None: 2 of mlp, an even share of the blocks of a gpt2",
        kind=int,
        none=True,
        low=1,
        high=256,
    ),
    "microbatch_size": Rule(
        text="samples or sequences in a microbatch; None: 8 of mlp, 4 of a gpt2",
        kind=int,
        none=True,
        low=1,
        high=512,
    ),
    "dtype": Rule(
        text="None: float64 for mlp; for a gpt2 bfloat16 on a GPU, float32 on the CPU",
        kind=str,
        none=True,
        choices=("float64", "float32", "bfloat16"),
    ),
    "device": Rule(text="auto: GPUs if any", kind=str, choices=("auto", "cpu", "cuda")),
    "forward_ms": Rule(
        text="each forward on the CPU also sleeps this long, to emulate a device",
        kind=float,
        low=0,
        high=10_000,
    ),
    "backward_ms": Rule(text="the same for a whole backward", kind=float, low=0, high=10_000),
    "learning_rate": Rule(text="of plain SGD", kind=float, low=0, high=100),
    "seed": Rule(text="of weights and data", kind=int, low=0, high=10**6),
    "repeats": Rule(text="timed runs of each case", kind=int, low=1, high=1000),
    "warmups": Rule(text="runs of each case before those", kind=int, low=0, high=1000),
    "receive_depth": Rule(text="receives posted ahead", kind=int, low=0, high=64),
    "nccl_max_ctas": Rule(
        text="multiprocessors of a GPU that one pending receive may take; None: as NCCL likes",
        kind=int,
        none=True,
        low=1,
        high=32,
    ),
    "calibrate_on": Rule(
        text="the m of the run, of the first schedule, that durations are from; None: the first m",
        kind=int,
        none=True,
    ),
    "check_weights": Rule(text="compare with the one-process run bit for bit", kind=bool),
    "timeout_s": Rule(text="longest wait for another stage, seconds", kind=float, low=1, high=3600),
    "go_on": Rule(text="where a schedule fails, start again without it", kind=bool),
}
