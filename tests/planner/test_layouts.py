"""Compare the partition of a model into stages with a brute-force search, and test which layouts
are rejected."""

import itertools
import math

import pytest

from distributed_training.models.gpt2 import SIZES, gpt2_size
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.planner.layouts import balanced_cut
from tests.planner.helpers import lay_out, plan_for
from tests.support import refused

DEEP = gpt2_size(vocab_size=2048, num_positions=64, num_layers=7, num_heads=4, hidden_size=32)


def layout_for(world_size, **config):
    return lay_out(world_size, **{"max_length": 1024, **config}).stages


def all_cuts(num_layers, num_stages):
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *ends, num_layers)
        yield [b - a for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("pp", [2, 3, 4, 6])
@pytest.mark.parametrize(
    "size", [SIZES["gpt2-tiny"], SIZES["gpt2"], DEEP], ids=["tiny", "gpt2", "deep"]
)
@pytest.mark.parametrize("seq_len", [32, 1024])
def test_partition_minimizes_the_cost_of_the_costliest_process(size, pp, schedule, seq_len):
    ranks = SCHEDULES[schedule].ranks(pp)
    if len(ranks) > size.num_layers:
        return
    block = sum(map(math.prod, size.kinds[0].matrices)) + 2 * size.hidden_size * seq_len
    head = size.padded_vocab_size * size.hidden_size

    def costliest(counts):
        costs = [0] * pp
        for rank, count in zip(ranks, counts, strict=True):
            costs[rank] += block * count
        costs[ranks[-1]] += head
        return max(costs)

    best_cut = balanced_cut(size.num_layers, block, head, ranks)
    assert list(best_cut) in list(all_cuts(size.num_layers, len(ranks)))
    assert costliest(best_cut) == min(
        costliest(cut) for cut in all_cuts(size.num_layers, len(ranks))
    )


def test_pipeline_cut_sets_the_partition():
    layout = layout_for(2, strategy="pp", pipeline_cut="20, 4")
    assert layout.block_ranges == (range(0, 20), range(20, 24))
    for cut in ("20,5", "24", "24,0", "10,10,4", "a,b", "-1,25"):
        with refused(
            f"pipeline_cut='{cut}'", "2 positive numbers", "24 blocks", "pipeline_cut to 14,10"
        ):
            layout_for(2, strategy="pp", pipeline_cut=cut)
    with refused("1 positive number for all 24 blocks"):
        layout_for(2, strategy="dp", pipeline_cut="12,12")


XL = {"model": "gpt2-xl", "max_length": 1000}


@pytest.mark.parametrize(
    ("num_processes", "config", "messages"),
    [
        (8, {"strategy": "tp", **XL},
         ("tp=8", "num_heads=25")),
        # The model has fewer blocks than the layout has stages.
        (16, {"strategy": "pp", "pipeline_schedule": "interleaved"},
         ("pp=16", "32 stages", "24 blocks")),
        # The product of the axes is not the number of processes.
        (8, {"strategy": "3d", "dp_shard": 3},
         ("dp_shard 3", "needs 12", "has 8")),
        (3, {"strategy": "cp"}, ("cp=3", "num_heads=16")),
        (2, {"strategy": "cp", "max_length": 255}, ("cp=2", "max_length=255")),
        (4, {"strategy": "3d", "pp": 1, "cp": 2}, ("cp=2", "tp=2")),
        (4, {"strategy": "3d", "tp": 1, "cp": 2}, ("cp=2", "pp=2")),
        (2, {"strategy": "zero2", "cp": 2}, ("cp=2", "'zero2'")),
        (7, {"strategy": "hybrid"}, ("multiple of 2", "has 7")),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused(num_processes, config, messages):
    with refused(*messages):
        layout_for(num_processes, **config)


def test_tokens_that_tp_does_not_divide_are_refused(tmp_path):
    config = {"strategy": "tp", "max_length": 255, "checked": False}
    with refused("max_length=255", "tp=2", "max_length to 254"):
        plan_for(tmp_path, micro_batch_size=1, **config)
    plan_for(tmp_path, micro_batch_size=2, **config)  # samples are not split
