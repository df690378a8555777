"""Set up ranks on this machine with torch's fake process group, which sends nothing."""

import contextlib
import zlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed_training.models.gpt2 import SIZES, gpt2_size
from distributed_training.models.private import local_part, locate_local
from distributed_training.predict.memory import estimate_memory
from distributed_training.supervise.process import Process
from distributed_training.train.run import build_engine, build_topology
from tests.planner.helpers import plan_for
from tests.support import CPU_MACHINE

WORLD_SIZE, RANKS_PER_NODE = 128, 8
RANKS = (0, 37, 77, 127)  # one rank per stage if there are four stages
LAYOUTS = {
    "tp4 x pp4 x dp8": {"strategy": "3d", "tp": 4, "pp": 4, "num_microbatches": 4},
    "HSDP 16 x 8": {"strategy": "fsdp", "dp_replicate": 16, "dp_shard": 8},
}
SIZE = gpt2_size(vocab_size=2048, num_positions=64, num_layers=8, num_heads=8, hidden_size=128)


@contextlib.contextmanager
def fake_engine(plan, rank):
    """Build one rank's engine."""
    world_size = plan.num_processes
    process = Process(
        rank=rank,
        world_size=world_size,
        local_rank=rank % RANKS_PER_NODE,
        local_world_size=min(world_size, RANKS_PER_NODE),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield build_engine(plan, build_topology(plan, process, torch.device("cpu")))
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # cached results contain this rank's mesh


def measure_rank(plan, rank):
    """Return the number of elements in the unsharded parameters of a rank's stage, the number of
    bytes in the rank's shards, and the ranks in its tp group."""
    with fake_engine(plan, rank) as engine:
        num_elements = sum(parameter.numel() for parameter in engine.parameters)
        shard_bytes = sum(local_part(parameter).nbytes for parameter in engine.parameters)
        tp_ranks = (
            [rank] if engine.tp_group is None else dist.get_process_group_ranks(engine.tp_group)
        )
        return num_elements, shard_bytes, tp_ranks


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_of_128_ranks_have_the_planned_sizes(name, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "eight", SIZE)
    work = {"model": "eight", "batch_size": 1, "max_length": 64}
    plan = plan_for(tmp_path, CPU_MACHINE, WORLD_SIZE, here=RANKS_PER_NODE, **work, **LAYOUTS[name])
    stages, tp, shards = plan.mesh["pp"], plan.mesh["tp"], plan.mesh["dp_shard"]
    by_rank = {rank: measure_rank(plan, rank) for rank in RANKS}

    stage_elements = [num_elements for num_elements, _, _ in by_rank.values()]
    # The last stage holds a copy of the embedding as its output layer.
    copied_elements = SIZE.vocab_size * SIZE.hidden_size if stages > 1 else 0
    expected = plan.size.num_parameters + copied_elements
    assert sum(stage_elements) == expected if stages > 1 else set(stage_elements) == {expected}
    for rank, (num_elements, shard_bytes, tp_ranks) in by_rank.items():
        # The sizes are not exact, because tp does not shard vectors, and dp_shard shards rows
        # unevenly.
        assert shard_bytes == pytest.approx(4 * num_elements / (tp * shards), rel=0.15), rank
        assert tp_ranks == list(range(rank - rank % tp, rank - rank % tp + tp))
    largest_bytes = max(shard_bytes for _, shard_bytes, _ in by_rank.values())
    assert largest_bytes == pytest.approx(estimate_memory(plan).state["optimizer"] / 2, rel=0.06)


def test_a_rank_computes_the_gradient_of_its_own_rows(tmp_path):
    plan = plan_for(tmp_path, CPU_MACHINE, 4, strategy="tp")
    with fake_engine(plan, 1) as engine, torch.profiler.profile(record_shapes=True) as profile:
        table = engine.stages["0"].token_embedding
        table(torch.arange(64)[None]).sum().backward()
    calls = [event for event in profile.events() if "embedding_dense_backward" in event.name]
    assert {call.concrete_inputs[2] for call in calls} == {table.num_embeddings // 4}


def run_updates(plan, rank):
    """Run two optimizer steps on one rank, with gradients that depend only on the parameter and the
    step. Return {part name: (slices of the whole tensor, values)}."""
    with fake_engine(plan, rank) as engine:
        engine.init_optimizer_state(0)
        for step in range(2):
            for name, parameter in zip(engine.gradient_names, engine.parameters, strict=True):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
                gradient = torch.randn(parameter.shape, generator=generator)
                shard, start = locate_local(parameter)
                slices = tuple(slice(a, a + n) for a, n in zip(start, shard.shape, strict=True))
                engine.local_params[parameter].grad = gradient[slices].to(shard.dtype)
            engine.optimizer.step()
        return {
            part.name: (
                tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True)),
                part.get().clone(),
            )
            for part in engine.state_parts()
        }


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("adamw-bf16", "float32"), ("adamw-bf16-weights", "bfloat16")]
)
def test_shards_are_rounded_like_whole_tensors(optimizer, dtype, tmp_path):
    """FSDP's shards are uneven with 3 ranks. With tp, a shard of some matrices is a range of
    columns. With both, FSDP shards the shards of tp."""
    config = {"optimizer": optimizer, "precision": "bf16", "batch_size": 2, "max_length": 64}
    whole = run_updates(plan_for(tmp_path, CPU_MACHINE, 1, strategy="dp", **config), 0)
    weight_dtypes = {part.dtype for name, (_, part) in whole.items() if name.startswith("weight/")}
    assert weight_dtypes == {getattr(torch, dtype)}
    for size, layout in (
        (3, {"strategy": "fsdp"}),
        (2, {"strategy": "tp"}),
        (4, {"strategy": "3d", "pp": 1, "tp": 2}),
    ):
        plan = plan_for(tmp_path, CPU_MACHINE, size, **layout, **config)
        for rank in range(size):
            for name, (slices, values) in run_updates(plan, rank).items():
                assert torch.equal(values, whole[name][1][slices]), (layout, rank, name)
