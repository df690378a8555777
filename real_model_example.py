#!/usr/bin/env python3
"""Train a language model under any parallelism strategy, with one CONFIG.

    python real_model_example.py                            one process
    deepspeed --num_gpus=N real_model_example.py            N processes
    torchrun --nproc_per_node=N real_model_example.py       N processes
    python real_model_example.py --num_gpus all             one process per GPU

Edit CONFIG, or override single keys: --batch_size 8. --help lists all keys.
"""

import os
import shlex
import sys
from pathlib import Path

# The most common keys. --help lists all keys; every key also works here.
CONFIG = {
    "model": "auto",  # such as gpt2-medium, or a Llama from the Hub; auto: depends on the GPU
    "strategy": "auto",  # dp, zero1/2/3, fsdp, tp, 3d, ... (see --help); auto: the planner's choice
    "batch_size": 4,  # sequences per GPU and accumulation step
    "grad_accum_steps": 1,  # accumulation steps per optimizer step; multiplies batch_size
    "epochs": 2,  # passes over the training samples
    "max_length": 512,  # tokens per sample
    "num_samples": -1,  # training samples per epoch; -1: all
    "seed": 42,  # for initial weights, data order and dropout
    "dataset": "auto",  # a .txt, .md, .jsonl, .csv or .parquet file, a folder, user/name on the Hub
    "precision": "auto",  # bf16, fp16, fp32; master weights are always fp32
    "learning_rate": "auto",  # peak; auto: 5e-5 for pretrained weights, higher for random weights
    "lr_schedule": "cosine",  # constant, linear or cosine; linear and cosine decay toward 0
    "warmup_steps": 10,  # steps over which the learning rate rises
    "activation_checkpointing": "none",  # full, selective: save memory by recomputing activations
    "deepspeed_config": None,  # path to a DeepSpeed configuration file; None: the strategy's file
    "generate": "The value of",  # prompt for samples before and after training; None: no samples
    "output_dir": "runs",  # each run gets a subfolder of this folder; relative to this file
    "checkpoint_every": None,  # every N steps; None: every epoch, signal: only on Ctrl-C, 0: never
    "resume": None,  # a run's folder, or auto: the unfinished run with these settings
    "log_to": None,  # tensorboard, wandb or trackio, which must be installed
}


def main() -> int:
    """Run the command line. Without a command, run `train`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # In a notebook's kernel, output could be lost, and a failed run would end the kernel.
    if hasattr(shell, "kernel"):
        arguments = sys.argv[1:] if sys.argv[0].endswith(Path(__file__).name) else []
        command = shlex.join([sys.executable, os.path.abspath(__file__), *arguments])
        print("error: Training cannot run in a notebook's kernel. Run this command in a cell:")
        print(f"  !{command}")
        return 2
    try:
        from distributed_training import cli

        return cli.main(CONFIG, str(__doc__), __file__)
    except KeyboardInterrupt:  # Ctrl-C during the imports
        print("interrupted before training began", file=sys.stderr)
        return 130
    except MemoryError:
        print("error: Not enough memory to start. Raise the limit (ulimit -v).", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        root = Path(os.path.relpath(Path(__file__).parent))
        pinned = (root / "requirements.txt").read_text().splitlines()
        required = [line.partition("=")[0] for line in pinned]
        if (error.name or "").partition(".")[0] not in [*required, "distributed_training"]:
            raise  # the missing module is not one of this project's requirements
        fix = f"{sys.executable} -m pip install -r {root / 'requirements.txt'}"
        if error.name == "distributed_training":  # python -I and -P skip this script's folder
            fix = f"{sys.executable} -m pip install -e {root}"
        venv_activate = root / ".venv" / "bin" / "activate"
        if venv_activate.is_file() and not venv_activate.parent.samefile(Path(sys.prefix, "bin")):
            fix = f"source {venv_activate}"
        if os.environ.get("RANK", "0") == "0":
            python = f"{error.name} is not installed in this Python ({sys.executable})"
            print(f"error: {python}. Run:\n  {fix}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
