"""run_cases.py, saving two states of each case: after steps in a row, and with a resume between.

    torchrun --nproc_per_node=2 resume_cases.py CASES.json OUT.pt

OUT.pt: {case: {"losses": [], "straight": full state, "resumed": full state}}.
"""

import tempfile
from pathlib import Path

import run_cases
import torch.distributed as dist

from distributed_training.assemble import build_engine, build_sampler
from distributed_training.plan import load_plan_data, make_plan

BEFORE, AFTER = 3, 3


def run_case(config, machine, topology):
    """Train, save, train on; then load into a new engine and train on from there."""
    count = topology.world_size
    plan = make_plan(config, machine, num_processes=count, processes_here=count)
    data, _ = load_plan_data(plan)
    sampler = build_sampler(config, data, topology)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)

    def train(engine, steps):
        for step in steps:
            engine.train_step(sampler.step_batch(data.train, step))

    engine = build_engine(plan, topology)
    train(engine, range(BEFORE))
    engine.save(Path(folder[0]))
    dist.barrier()
    train(engine, range(BEFORE, BEFORE + AFTER))
    straight = engine.full_state()
    engine.close()
    engine = build_engine(plan, topology)
    engine.load(Path(folder[0]))
    train(engine, range(BEFORE, BEFORE + AFTER))
    resumed = engine.full_state()
    engine.close()
    return {"losses": [0.0], "straight": straight, "resumed": resumed}


run_cases.run_case = run_case
run_cases.main()
