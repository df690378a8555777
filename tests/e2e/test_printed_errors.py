"""Refusals of layouts, word for word: what, why, and layouts that exist; the guide prints one."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import ROOT, script

GUIDE = ROOT / "REAL_MODELS_GUIDE.md"
OWN = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2},
       "pipeline": {"stages": 2}}  # fmt: skip
# Strategy, number of processes, keys, what is said.
REFUSED = [
    (
        "3d", 8, "pp=2 dp_shard=3 tp=2",
        "mesh pp 2 x dp_shard 3 x tp 2 does not make 8 processes; that of "
        "strategies/10_3d_parallel/config.json needs 12; set dp_shard=2; or pp=1 dp_shard=4; or"
        " tp=1 dp_shard=4"
    ),
    (
        "3d", 8, "pp=2 dp_replicate=-1 tp=2",
        "mesh pp 2 x dp_replicate -1 x dp_shard -1 x tp 2 is not accepted; at most one axis may"
        " be -1; give the others whole numbers of 1 or more"
    ),
    (
        "tp", 8, "model=gpt2-xl",
        "tp=8 does not divide num_heads=25 of gpt2-xl; attention is split by heads; take fsdp"
    ),
    (
        "tp", 2, "max_length=511 micro_batch_size=1",
        "neither max_length=511 nor a micro-batch of 1 is a multiple of tp=2; sequence_parallel "
        "deals out samples or tokens evenly; set max_length to 510 or sequence_parallel to False"
    ),
    (
        "pp", 4, "model=gpt2 num_microbatches=2",
        "num_microbatches=2 does not fit: a replica has 16 sequences a step (batch_size 4 x "
        "grad_accum_steps 1 x its 4 processes); micro_batch_size x num_microbatches must be "
        "that number, and num_microbatches one that 1f1b over pp=4 takes; set "
        "micro_batch_size=4 num_microbatches=4; or micro_batch_size=2 num_microbatches=8; or "
        "micro_batch_size=1 num_microbatches=16; or both to auto"
    ),
    (
        "pp", 4, "model=gpt2 batch_size=9 num_microbatches=9 pipeline_schedule=interleaved",
        "num_microbatches=9 does not fit: a replica has 36 sequences a step (batch_size 9 x "
        "grad_accum_steps 1 x its 4 processes); micro_batch_size x num_microbatches must be "
        "that number, and num_microbatches one that interleaved over pp=4 takes; set "
        "micro_batch_size=9 num_microbatches=4; or micro_batch_size=6 num_microbatches=6; or "
        "micro_batch_size=3 num_microbatches=12; or both to auto"
    ),
    (
        "pp", 4, "",
        "pp=4 needs 4 stages but gpt2-tiny has 2 blocks; its pipeline schedule has 1 a process;"
        " set pp=2 dp_replicate=2; or pp=2 dp_shard=2"
    ),
    (
        "pp", 4, "model=gpt2-medium pipeline_cut=6,6,6,5",
        "pipeline_cut='6,6,6,5' is not 4 numbers that add up to the 24 blocks of gpt2-medium; "
        "write 7,7,7,3, for example, or None"
    ),
    (
        "pp", 2, "pipeline_schedule=zb-h1 activation_checkpointing=full",
        "activation_checkpointing='full' does not go with pipeline_schedule='zb-h1'; the "
        "schedule keeps what would be recomputed for the second half of backward passes; set it"
        " to none, or pipeline_schedule to 1f1b"
    ),
    (
        "hybrid", 2, "pipeline_schedule=gpipe",
        "pipeline_schedule='gpipe' cannot be set with strategy='hybrid'; its engine has 1f1b; "
        "set it to 1f1b, or strategy to pp or 3d"
    ),
    (
        "zero2", 2, "tp=2",
        "tp=2 cannot be set with strategy='zero2'; DeepSpeed divides over all processes; set it"
        " to None, or strategy to 3d, whose mesh has all axes"
    ),
    (
        "hybrid", 2, "deepspeed_config=own.json",
        "own.json: pipeline.stages=2 with zero_optimization.stage=2; a pipeline needs its "
        "gradients whole until its last micro-batch; set the ZeRO stage to 1 or 0, or "
        "pipeline.stages to 1"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "count", "keys", "expected"), REFUSED)
def test_what_is_said(strategy, count, keys, expected, tmp_path):
    own = tmp_path / "own.json"
    own.write_text(json.dumps(OWN))
    values = {"strategy": strategy, "dataset": "embedded"}
    values |= dict(word.split("=") for word in keys.replace("own.json", str(own)).split())
    result = script(values, "--num_gpus", count, "--dry-run")
    assert result.returncode == 2
    assert result.stderr.strip().replace(f"{tmp_path}/", "") == f"error: {expected}"


def test_the_guide_prints_what_is_said():
    printed = re.findall(r"^    error: (mesh .*)$", GUIDE.read_text(), re.MULTILINE)
    assert printed == [REFUSED[0][-1]]
