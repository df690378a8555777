"""Runs several small trainings in one process group and saves what they computed.

    torchrun --nproc_per_node=2 run_cases.py CASES.json OUT.pt [STEPS]

CASES.json: {name: {CONFIG key: value}}. OUT.pt: {name: {losses, grad_norms, state, evaluation,
logits}}, where losses are means over the global batch's real tokens and state is the full fp32
parameters. evaluation is the loss of one global batch and logits those of PROMPT, both halfway, so
that training goes on after them.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from distributed_training import sizes

# Deep enough to be cut into stages of unequal length, or into two stages for each of four
# processes, and still small; before config reads SIZES.
for word, depth in {"six": 6, "eight": 8}.items():
    sizes.SIZES[f"{word}-layers"] = sizes.ModelSize(
        vocab_size=2048, num_positions=128, num_layers=depth, num_heads=4, hidden_size=32
    )

from distributed_training import launch  # noqa: E402
from distributed_training.assemble import build_engine, build_sampler, seed_dropout  # noqa: E402
from distributed_training.config import build_config  # noqa: E402
from distributed_training.machine import detect_machine  # noqa: E402
from distributed_training.plan import load_plan_data, make_plan  # noqa: E402
from distributed_training.strategy import load_strategy  # noqa: E402
from distributed_training.topology import build_topology, process_group  # noqa: E402
from distributed_training.train import learning_rate  # noqa: E402

NUM_STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 20
PROMPT = torch.tensor([[5, 700, 2047, 9, 9]])  # a length that no number of processes here divides


def run_case(config, machine, topology):
    plan = make_plan(
        config, machine, num_processes=topology.world_size, processes_here=topology.world_size
    )
    data, _ = load_plan_data(plan)
    sampler = build_sampler(config, data, topology)
    engine = build_engine(plan, topology)
    seed_dropout(config, topology)
    losses, norms, answers = [], [], {}
    for step in range(NUM_STEPS):
        engine.set_learning_rate(learning_rate(plan.config, step, NUM_STEPS))
        batch = sampler.step_batch(data.train, step)
        if step == NUM_STEPS // 2:
            answers = ask(engine, batch)
        result = engine.train_step(batch)
        losses.append(mean_loss([result.loss_sum], batch))
        norms.append(float(result.grad_norm))
    state = engine.full_state()
    if state is not None:
        assert all(tensor.dtype is torch.float32 for tensor in state.values())
    engine.close()
    return {"losses": losses, "grad_norms": norms, "state": state, **answers}


def ask(engine, batch):
    """What an engine answers without learning from it, on all ranks alike."""
    before = engine.full_state()
    evaluation = mean_loss([engine.eval_step(*arrays) for arrays in batch.micro_batches], batch)
    logits = engine.logits(PROMPT).float().cpu()
    first = logits.clone()
    dist.broadcast(first, src=0)
    torch.testing.assert_close(logits, first, msg="logits differ between ranks")
    state = engine.full_state()
    if state is not None:
        assert all(torch.equal(state[name], before[name]) for name in before), "evaluation"
    return {"evaluation": evaluation, "logits": first}


def mean_loss(sums, batch):
    """Of the global batch, from every rank's sums of its own samples' losses."""
    total = torch.stack([each.double().cpu() for each in sums]).sum()
    dist.all_reduce(total)
    return float(total) / batch.num_targets


def main():
    cases = json.loads(Path(sys.argv[1]).read_text())
    machine = detect_machine()
    process = launch.current_process(__import__("os").environ) or launch.alone()
    launch.prepare_environment(machine, process.world_size)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        first = True
        for name, values in cases.items():
            config = build_config({"output_dir": folder, **values})
            topology = build_topology(
                load_strategy(config),
                world_size=process.world_size,
                rank=process.rank,
                local_rank=process.local_rank,
                device_type="cuda" if machine.num_gpus else "cpu",
            )
            if first:
                group = process_group(topology)
                group.__enter__()
                first = False
            results[name] = run_case(config, machine, topology)
            torch.compiler.reset()  # after a few variants of a block it would give up compiling
            print(f"{name}: {results[name]['losses'][-1]:.6f}", flush=True)
        if process.rank == 0:
            torch.save(results, sys.argv[2])
        group.__exit__(None, None, None)


if __name__ == "__main__":
    main()
