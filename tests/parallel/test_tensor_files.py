"""Test that tensors written under one sharding can be read under any other sharding."""

import itertools
import random

import pytest
import torch
from safetensors.torch import load_file

from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import (
    TensorFiles,
    build_part,
    choose_writer,
    write_parts,
)

SHAPE = (11, 6)
WHOLE = torch.arange(66.0).view(SHAPE)
PADDED = torch.nn.functional.pad(WHOLE, (0, 0, 0, 5))  # padded like a vocabulary


def split_into_ranges(seed):
    """Return five shards of the padded tensor. Each shard is a range of consecutive elements, as
    under ZeRO."""
    boundaries = [0, *sorted(random.Random(seed).sample(range(96), 4)), 96]
    return [((low,), PADDED.flatten()[low:high]) for low, high in itertools.pairwise(boundaries)]


def split_into_boxes(seed):
    draw = random.Random(seed)
    rows = [0, *sorted(draw.sample(range(17), 2)), 16]
    columns = [0, draw.randrange(1, 6), 6]
    return [
        ((top, left), PADDED[top:bottom, left:right])
        for top, bottom in itertools.pairwise(rows)
        for left, right in itertools.pairwise(columns)
    ]


SHARDINGS = {
    "whole": [((0, 0), PADDED)],
    **{f"ranges {seed}": split_into_ranges(seed) for seed in range(2)},
    **{f"boxes {seed}": split_into_boxes(seed) for seed in range(2)},
}


def save(folder, sharding):
    """Write one file per shard, and return the opened files."""
    for number, (start, values) in enumerate(sharding):
        part = build_part("w", values, SHAPE, start)
        write_parts(folder / f"rank-{number:05d}.safetensors", [part])
    return TensorFiles(sorted(folder.iterdir()))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_tensors_saved_under_any_sharding_load_under_any_other(sharding, tmp_path):
    files = save(tmp_path, SHARDINGS[sharding])
    assert torch.equal(files.read_whole("w"), WHOLE)
    for other in SHARDINGS.values():
        for start, values in other:
            target = torch.zeros_like(values)
            part = build_part("w", target, SHAPE, start)
            part.get().copy_(files.read(part))
            assert torch.equal(target, values)


def test_a_file_is_in_safetensors_format_and_holds_no_padding(tmp_path):
    (tmp_path / "a").mkdir()
    save(tmp_path / "a", SHARDINGS["whole"])
    (file,) = (tmp_path / "a").iterdir()
    assert torch.equal(load_file(file)["w"], WHOLE)
    state = torch.arange(7, dtype=torch.uint8)
    size, _ = write_parts(tmp_path / "b", [build_part("state", state, (7,), (0,))])
    assert size == (tmp_path / "b").stat().st_size
    assert torch.equal(load_file(tmp_path / "b")["state"], state)


def test_overlapping_parts_of_two_nodes_are_read_once(tmp_path):
    files = save(tmp_path, [*split_into_ranges(0), *split_into_ranges(1)])
    part = build_part("w", WHOLE[2:7, 1:], SHAPE, (2, 1))
    assert torch.equal(files.read(part), WHOLE[2:7, 1:])


@pytest.mark.parametrize("disk", [range(4), range(4, 8), range(2, 4)])
def test_the_replicas_on_a_disk_take_turns_in_writing(disk):
    sizes = {"world_size": 8, "dp_replicate": 4, "dp_shard": 1, "pp": 2, "device_type": "cpu"}
    for number in range(5):
        for rank in disk:
            topology = Topology(rank=rank, local_rank=0, **sizes)
            writer = choose_writer(WHOLE, number, topology, disk)
            assert writer == disk[number % len(disk)]
    topology = Topology(rank=6, local_rank=0, **sizes)
    assert [choose_writer(WHOLE, n, topology, range(8)) for n in range(5)] == [4, 5, 6, 7, 4]


def test_missing_and_foreign_tensors_are_refused(tmp_path):
    save(tmp_path, split_into_boxes(0))
    incomplete = [
        path for path in sorted(tmp_path.iterdir()) if path.name != "rank-00001.safetensors"
    ]
    files = TensorFiles(incomplete)
    with pytest.raises(ValueError, match=r"66 .*w"):
        files.read_whole("w")
    with pytest.raises(ValueError, match=r"66 .*other"):
        files.read(build_part("other", WHOLE, SHAPE, (0, 0)))
    with pytest.raises(ValueError, match=r"\[11, 6\].*\[6, 11\]"):
        files.read(build_part("w", WHOLE.t(), SHAPE[::-1], (0, 0)))
