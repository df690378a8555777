#!/usr/bin/env python3
"""Fine-tune GPT-2 under any strategy from one CONFIG.

    python real_model_example.py                            one process
    deepspeed --num_gpus=N real_model_example.py            N processes
    torchrun --nproc_per_node=N real_model_example.py       N processes
    python real_model_example.py --num_gpus all             as many as there are GPUs

Change CONFIG, or put single keys over it: --batch_size 8. --help lists them all.
"""

import os
import sys
from pathlib import Path

CONFIG = {
    # The work: the same under every strategy.
    "model": "auto",  # gpt2-tiny, gpt2, -medium, -large, -xl, gpt2-xl-20-heads; auto: by machine
    "strategy": "auto",  # dp, zero1/2/3, offload, infinity, fsdp, tp, pp, 3d, hybrid, local_sgd
    "batch_size": 4,  # sequences per GPU and accumulation step
    "epochs": 2,  # passes over the training samples
    "max_length": 512,  # tokens per sample
    "num_samples": "auto",  # training samples an epoch; auto: up to 1000, -1: all
    "seed": 42,  # initial weights, order of the data, dropout
    "deepspeed_config": None,  # path of a DeepSpeed JSON; None: the strategy's own
    "dataset": "auto",  # a .txt, .md, .jsonl, .csv, .parquet file, a folder, user/name of the Hub
    "validation_dataset": None,  # likewise; None: the dataset's own split, or else its last 5%
    "tokenizer": "auto",  # gpt2, embedded, a folder with vocab.json and merges.txt
    "weights": "auto",  # pretrained, random, a folder in Hugging Face's format
    "precision": "auto",  # bf16, fp16, fp32; master weights are fp32 in every case
    "grad_accum_steps": 1,  # accumulation steps per optimizer step; multiplies batch_size
    "learning_rate": "auto",  # peak; auto: 5e-5 for pretrained weights, more for random ones
    "lr_schedule": "cosine",  # constant, linear, cosine; the last two end at 0
    "warmup_steps": 10,  # steps over which the learning rate rises
    "weight_decay": 0.01,  # AdamW's, on matrices only
    "max_grad_norm": 1.0,  # clip the global gradient norm; None: never
    "dropout": 0.0,  # on embeddings, attention and residuals
    "gradient_compression": "none",  # with dp: bf16, powersgd, topk-int8
    "compression_rank": 4,  # with powersgd
    "compression_k": 0.01,  # with topk-int8: share of the gradient that is sent exactly
    "pack": True,  # True: full blocks of running text; False: one padded line a sample
    "max_steps": -1,  # stop after so many optimizer steps; -1: whole epochs
    # How it runs. One optimizer step sees batch_size x grad_accum_steps x processes sequences under
    # every strategy; these two say how a layout cuts them.
    "micro_batch_size": "auto",  # sequences that pass through the model at a time
    "num_microbatches": "auto",  # micro-batches of a replica in one optimizer step
    # Processes = dp_replicate x dp_shard x tp x pp; None: as the strategy says, -1: what is left.
    "dp_replicate": None,  # copies of the model
    "dp_shard": None,  # processes that a copy's state is divided over
    "tp": None,  # processes that every layer is split over
    "pp": None,  # processes that the layers are dealt out to
    "sequence_parallel": True,  # with tp: split what lies between the split layers, too
    "async_tp": "auto",  # with tp, compiled: exchange while a product computes
    "pipeline_schedule": "auto",  # gpipe, 1f1b, interleaved, zb-h1, zb-v, zb-auto: with pp
    "pipeline_cut": None,  # blocks of each stage, "7,7,7,3"; None: equal estimated cost
    "bucket_cap_mb": None,  # with dp: MiB of gradients averaged together; None: PyTorch's, 25
    "fsdp_prefetch": 1,  # with fsdp: blocks whose parameters are gathered ahead of their use
    "activation_checkpointing": "none",  # full, selective: less memory, more arithmetic
    "loss_chunk_tokens": 0,  # whose logits are in memory at a time; 0: a micro-batch's
    "compile": "auto",  # torch.compile; auto: on GPUs; whole: as one graph, on one process
    "cuda_graphs": "auto",  # a training step as one launch; auto: where that is correct
    # What is looked at and kept.
    "eval_every": 0,  # steps between evaluations; 0: at each epoch's end only
    "eval_samples": 200,  # validation samples used; -1: all
    "generate": "The value of",  # prompt of the samples before and after; None: none
    "output_dir": "runs",  # each run gets a folder in here; relative to this file
    "shared_disk": True,  # False: each node keeps its own part of a checkpoint
    "offload_dir": None,  # where infinity keeps its files; None: output_dir/.offload
    "checkpoint_every": None,  # steps; None: each epoch's end, 0: never
    "keep_checkpoints": 1,  # older ones are deleted
    "keep_best": False,  # write best/ at each evaluation that beats those before
    "on_nonfinite": "stop",  # loss or gradients nan or inf: stop, skip the update, rollback
    "profile": 0,  # steps of which each rank writes a trace, and on a GPU what is in memory
    "hang_timeout_s": 600,  # a step that takes longer, on several processes, ends the run; 0: never
    "rendezvous_timeout_s": 120,  # wait so long for processes of other nodes
    "export": True,  # write hf/ in Hugging Face's format at the end
    "push": None,  # user/name on the Hugging Face Hub: where hf/ is sent to at the end
    "resume": None,  # auto: the newest unfinished run of this work; or a run's folder
    "log_to": None,  # tensorboard, wandb, mlflow, trackio: install it first
    "verbose": False,  # show what libraries print about themselves, too
}


def main() -> int:
    """Run the command line; `train` is what runs without a command."""
    try:
        from distributed_training import cli

        return cli.main(CONFIG, __doc__, __file__)
    except ModuleNotFoundError as error:
        root = Path(os.path.relpath(Path(__file__).parent))
        pinned = (root / "requirements.txt").read_text().splitlines()
        if (error.name or "").partition(".")[0] not in [line.partition("=")[0] for line in pinned]:
            raise  # an import of somebody's own file
        fix = f"{sys.executable} -m pip install -r {root / 'requirements.txt'}"
        made = root / ".venv" / "bin" / "activate"
        if made.is_file() and not made.parent.samefile(Path(sys.prefix, "bin")):
            fix = f"source {made}"
        if os.environ.get("RANK", "0") == "0":
            python = f"{error.name} is not installed in this Python ({sys.executable})"
            print(f"error: {python}; type {fix}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
