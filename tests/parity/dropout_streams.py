"""run_cases.py, saving the random generator's states before every dropout of one training step.

    torchrun --nproc_per_node=4 dropout_streams.py CASES.json OUT.pt

OUT.pt: {case: {"streams": [of each rank: {"residual": [state, ...], "attention": [...]}]}}, states
as hashes. Equal states draw equal masks.
"""

import hashlib

import run_cases
import torch
import torch.distributed as dist

from distributed_training import model

DRAWING = {"dropout": "residual", "scaled_dot_product_attention": "attention"}
seen: dict[str, list[str]] = {}


class Watched:
    """torch.nn.functional with an eye on what draws random numbers (in evaluation nothing does)."""

    def __getattr__(self, name):
        function = getattr(torch.nn.functional, name)
        if name not in DRAWING:
            return function

        def watched(*arguments, **words):
            if words["dropout_p"] if name == "scaled_dot_product_attention" else arguments[2]:
                state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
                seen.setdefault(DRAWING[name], []).append(state)
            return function(*arguments, **words)

        return watched


def run_case(config, machine, topology, run=run_cases.run_case):
    """The streams of all ranks instead of what was learnt."""
    seen.clear()
    losses = run(config, machine, topology)["losses"]
    streams = [None] * topology.world_size
    dist.all_gather_object(streams, dict(seen))
    return {"losses": losses, "streams": streams}


model.F = Watched()
run_cases.NUM_STEPS = 1
run_cases.run_case = run_case
run_cases.main()
