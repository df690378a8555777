#!/usr/bin/env python3
"""Fine-tune GPT-2 under any strategy from one CONFIG.

    python real_model_example.py                            one process
    deepspeed --num_gpus=N real_model_example.py            N processes
    torchrun --nproc_per_node=N real_model_example.py       N processes
    python real_model_example.py --num_gpus all             as many as there are GPUs

Change CONFIG, or put single keys over it with --set key=value.
"""

CONFIG = {
    # The work: the same under every strategy.
    "model": "auto",  # gpt2-tiny, gpt2, -medium, -large, -xl, gpt2-xl-20-heads; auto: by machine
    "strategy": "zero2",  # dp, zero1, zero2, zero3, offload, infinity, fsdp, tp, pp, 3d, hybrid
    "batch_size": 4,  # sequences per GPU and micro-batch
    "epochs": 2,  # passes over the training samples
    "max_length": 512,  # tokens per sample
    "num_samples": 1000,  # training samples an epoch; -1: all
    "seed": 42,  # initial weights, order of the data, dropout
    "deepspeed_config": None,  # path of a DeepSpeed JSON; None: the strategy's own
    "dataset": "auto",  # wikitext-2, embedded, a .txt or .jsonl file or a folder of them
    "tokenizer": "auto",  # gpt2, embedded, a folder with vocab.json and merges.txt
    "weights": "auto",  # pretrained, random, a folder in Hugging Face's format
    "precision": "auto",  # bf16, fp16, fp32; master weights are fp32 in every case
    "grad_accum_steps": 1,  # micro-batches per GPU and optimizer step
    "learning_rate": "auto",  # peak; auto: 5e-5 for pretrained weights, more for random ones
    "lr_schedule": "cosine",  # constant, linear, cosine; the last two end at 0
    "warmup_steps": 10,  # steps over which the learning rate rises
    "weight_decay": 0.01,  # AdamW's, on matrices only
    "max_grad_norm": 1.0,  # clip the global gradient norm; None: never
    "dropout": 0.0,  # on embeddings, attention and residuals
    "pack": True,  # True: full blocks of running text; False: one padded line a sample
    "max_steps": -1,  # stop after so many optimizer steps; -1: whole epochs
    # How it runs. Processes = dp_replicate x dp_shard x tp x pp; None: as the strategy's JSON says,
    # -1: what is left of the processes.
    "dp_replicate": None,  # copies of the model
    "dp_shard": None,  # processes that a copy's state is divided over
    "tp": None,  # processes that every layer is split over
    "pp": None,  # processes that the layers are dealt out to
    "sequence_parallel": True,  # with tp: split the tokens between the split layers, too
    "pipeline_schedule": "1f1b",  # gpipe, 1f1b, interleaved, zb-h1, zb-v: with pp
    "pipeline_cut": None,  # blocks of each stage, "7,7,7,3"; None: equal estimated cost
    "activation_checkpointing": "none",  # full, selective: less memory, more arithmetic
    "compile": "auto",  # torch.compile; auto: on GPUs
    # What is looked at and kept.
    "eval_every": 0,  # evaluate every so many steps besides each epoch's end; 0: never
    "eval_samples": 200,  # validation samples used; -1: all
    "generate": "The ",  # prompt of the sample at the end; None: no sample
    "output_dir": "runs",  # each run gets a folder in here; relative to this file
    "offload_dir": None,  # where infinity keeps its files; None: output_dir/.offload
    "checkpoint_every": None,  # steps; None: each epoch's end, 0: never
    "keep_checkpoints": 1,  # older ones are deleted
    "export": True,  # write hf/ in Hugging Face's format at the end
    "resume": None,  # auto: the newest unfinished run of this work; or a run's folder
    "log_to": None,  # tensorboard, wandb: install them first
}


def main() -> int:
    """CONFIG -> plan -> processes -> training -> record."""
    import os
    import sys
    from pathlib import Path

    from distributed_training import launch
    from distributed_training.errors import UserError

    rank = os.environ.get("RANK", "0")
    try:
        arguments = launch.parse_arguments(sys.argv[1:], __doc__.splitlines()[0])
        return start(arguments, launch, Path(__file__).resolve())
    except UserError as error:
        if rank == "0":  # every rank finds the same mistake; one says it
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:  # once training has begun, Ctrl-C saves instead
        print("interrupted before training began", file=sys.stderr)
        return 130


def start(arguments, launch, script) -> int:
    """Run as a worker when a launcher started this process; else plan, and start workers."""
    import os
    import sys

    from distributed_training.config import build_config
    from distributed_training.corpus import read_corpus
    from distributed_training.machine import detect_machine
    from distributed_training.plan import load_plan_data, make_plan, reserve_run_dir
    from distributed_training.strategy import load_strategy

    # Folders in CONFIG are relative to this file, those of the command line to where one stands.
    here = {**CONFIG, "output_dir": str(script.parent / str(CONFIG["output_dir"]))}
    config = build_config(here, preset=arguments.preset, overrides=launch.overrides(arguments))
    machine = detect_machine()
    process = launch.current_process(os.environ)
    mesh = load_strategy(config).mesh
    requested = launch.requested_processes(arguments.num_gpus, machine, mesh)
    if process is not None:
        launch.check_world_size(requested, process, machine)
        launch.prepare_environment(machine, process.local_world_size)
        if arguments.dry_run:
            count = process.world_size
            here = process.local_world_size
            plan = make_plan(config, machine, num_processes=count, processes_here=here)
            read_corpus(plan.config.dataset)
            if process.rank == 0:
                print(launch.describe_plan(plan, "(this one)"))
            return 0
        return work(config, machine, process, arguments.run_dir)
    count = requested or 1
    if count == 1 and not arguments.dry_run:
        launch.prepare_environment(machine, 1)
        if machine.num_gpus > 1:
            print(f"using 1 of {machine.num_gpus} GPUs; --num_gpus all uses all")
        return work(config, machine, launch.alone(), arguments.run_dir)
    plan = make_plan(config, machine, num_processes=count, processes_here=count)
    passed = [text for text in sys.argv[1:] if text != "--dry-run"]
    command, typed = launch.launch_command(plan, str(script), passed)
    if arguments.dry_run:
        read_corpus(plan.config.dataset)  # fails where it cannot be read
        print(launch.describe_plan(plan, typed))
        return 0
    load_plan_data(plan)  # too little text, too: better before processes start
    plan = reserve_run_dir(plan)
    command, _ = launch.launch_command(plan, str(script), passed)
    launch.prepare_environment(machine, count)
    return launch.spawn(command, plan)


def work(config, machine, process, run_dir) -> int:
    """Import torch and do this process's part."""
    from distributed_training.worker import run_worker

    return run_worker(config, machine, process, run_dir)


if __name__ == "__main__":
    raise SystemExit(main())
