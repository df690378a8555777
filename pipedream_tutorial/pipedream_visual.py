"""Draw the tutorial's figures of simulated timelines: python pipedream_visual.py

To change the figures, edit CONFIG or add options such as `--set num_stages=8` or
`--only naive_pipeline,memory_vs_bubble`. The figures of measured runs are drawn by
results/lab/tutorial/pages.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pipedream.config import SHARED_RULES, Rule, parse_arguments
from pipedream.errors import main_with_errors

CONFIG: dict[str, Any] = {
    "num_stages": 4,  # stages of the pipeline, one per rank
    "num_microbatches": 8,  # microbatches per batch
    "chunks": 2,  # stages per rank under interleaved 1F1B
    "forward": 1,  # time of one microbatch's forward pass on a rank, in any unit
    "input_gradient": 1,  # time of the half of the backward pass that computes the input's gradient
    "weight_gradient": 1,  # time of the half that computes the weights' gradients
    "communication": 0,  # time of a message between two ranks, which keep computing meanwhile
    "overlap_saving": 0,  # share of the shorter pass hidden if F and B overlap (DualPipeV)
    "stage_scale": None,  # one factor per stage or chunk, such as [1, 1, 2, 1]; None: equal stages
    "weight_size": 1,  # memory of a rank's weights, relative to a microbatch's activations
    "output": "figures",  # folder for the pictures, created if necessary
    "only": None,  # pictures to draw; None: all pictures
}

PICTURES = {
    "naive_pipeline": "grids",
    "microbatch_forward": "grids",
    "microbatch_backward": "grids",
    "weight_versioning": "grids",
    "utilization_comparison": "charts",
    "bubble_vs_microbatches": "charts",
    "memory_vs_bubble": "charts",
}
"""Picture -> module of pipedream.draw with its function."""

SHARED_KEYS = (
    "chunks", "forward", "input_gradient", "weight_gradient", "communication", "overlap_saving",
    "stage_scale",
)  # fmt: skip
RULES: dict[str, Rule] = {
    # In larger pipelines, cells are too small to see.
    "num_stages": replace(SHARED_RULES["num_stages"], high=16),
    "num_microbatches": replace(SHARED_RULES["num_microbatches"], high=64),
    **{key: SHARED_RULES[key] for key in SHARED_KEYS},
    "weight_size": replace(SHARED_RULES["forward"], high=1000),
    "output": Rule(kind=str),
    "only": Rule(kind=str, is_list=True, nullable=True, choices=tuple(PICTURES)),
}


def main() -> None:
    """Draw the pictures that CONFIG and the command line request, and print the file names."""
    config = parse_arguments(
        CONFIG, RULES, "Draw the tutorial's figures from simulated timelines.", script=__file__
    )
    from pipedream.draw import charts, grids  # matplotlib may be missing
    from pipedream.draw.page import save

    modules = {"charts": charts, "grids": grids}
    settings = {**config, "num_batches": 2}
    folder = Path(config["output"])
    folder.mkdir(parents=True, exist_ok=True)
    for name in config["only"] or PICTURES:
        path = folder / f"{name}.png"
        draw = getattr(modules[PICTURES[name]], name)
        save(draw(settings), path)
        print(path, flush=True)


if __name__ == "__main__":
    main_with_errors(main)
