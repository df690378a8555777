"""Measure schedules on GPUs with pipedream_runtime.py and blocks of GPT-2 medium.

    python results/lab/tutorial/benchmark.py flushes --record out.json
    torchrun --nproc_per_node=4 results/lab/tutorial/benchmark.py zero-bubble --record out.json

`flushes` measures GPipe, 1F1B and PipeDream. `zero-bubble` measures schedules that split the
backward pass. `search` measures orders found by a search, in a case in which sending takes as long
as a forward pass. Options after the name are passed to pipedream_runtime.py and override the
benchmark's settings.
"""

import sys

import checkout  # noqa: F401
from pipedream.errors import UserError, main_with_errors, nearest

ON_GPUS = [
    "--device=cuda", "--model=gpt2-medium", "--forward_ms=0", "--backward_ms=0",
    "--learning_rate=0.01", "--calibrate_on=8", "--check_weights=no",
]  # fmt: skip
BENCHMARKS = {
    # With fewer than 8 sequences, a GPU would wait for the host to launch its work.
    "flushes": [
        "--schedule=gpipe,1f1b,pipedream", "--num_microbatches=4,8,16,32", "--num_batches=3",
        "--microbatch_size=8", "--repeats=3",
    ],
    # F, I and W of half a rank's blocks still take 5 ms on an H200.
    "zero-bubble": [
        "--schedule=zb-h1,1f1b,zb-h2,search,interleaved,zb-v,v-half,v-min", "--num_microbatches=8",
        "--layers_per_stage=6", "--microbatch_size=32", "--timeout_s=60", "--repeats=3",
    ],
    # With little work between messages of the same size, and with a slower link, sending takes as
    # long as F.
    "search": [
        "--schedule=zb-h1,search,1f1b,zb-h2", "--memory=4,5,6", "--num_microbatches=8",
        "--num_batches=1", "--layers_per_stage=1", "--microbatch_size=96", "--nccl_max_ctas=2",
        "--timeout_s=60", "--repeats=5",
    ],
}  # fmt: skip


def arguments(name: str) -> list[str]:
    """Return the benchmark's settings as arguments for pipedream_runtime.py."""
    if name not in BENCHMARKS:
        raise UserError(f"there is no benchmark {name!r}", nearest(name, BENCHMARKS))
    return [*ON_GPUS, *BENCHMARKS[name]]


def main() -> None:
    """Run the benchmark named on the command line, by default `flushes`."""
    import pipedream_runtime

    name, *others = sys.argv[1:] or ["flushes"]
    pipedream_runtime.start([*arguments(name), *others])


if __name__ == "__main__":
    main_with_errors(main)
