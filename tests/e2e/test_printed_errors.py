"""The guide's refusals of layouts are what the script says, word for word."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT, script

OWN = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2},
       "pipeline": {"stages": 2}}  # fmt: skip
# Strategy, number of processes, keys.
REFUSED = [
    ("3d", 8, "pp=2 dp_shard=3 tp=2"),
    ("3d", 8, "pp=2 dp_replicate=-1 tp=2"),
    ("tp", 8, "model=gpt2-xl"),
    ("tp", 2, "max_length=511"),
    ("pp", 4, "model=gpt2 num_microbatches=2"),
    ("pp", 4, "model=gpt2 batch_size=9 num_microbatches=9 pipeline_schedule=interleaved"),
    ("pp", 4, ""),
    ("pp", 4, "model=gpt2-medium pipeline_cut=6,6,6,5"),
    ("pp", 2, "pipeline_schedule=zb-h1 activation_checkpointing=full"),
    ("hybrid", 2, "pipeline_schedule=gpipe"),
    ("zero2", 2, "tp=2"),
    ("hybrid", 2, "deepspeed_config=own.json"),
]


@pytest.mark.parametrize(("strategy", "count", "keys"), REFUSED)
def test_the_guide_prints_what_is_said(strategy, count, keys, tmp_path):
    own = tmp_path / "own.json"
    own.write_text(json.dumps(OWN))
    values = {"strategy": strategy, "dataset": "embedded"}
    values |= dict(word.split("=") for word in keys.replace("own.json", str(own)).split())
    result = script(values, "--num_gpus", count, "--dry-run")
    assert result.returncode == 2
    said = result.stderr.strip().replace(f"{tmp_path}/", "")
    assert f"| `{said}` |" in (ROOT / "REAL_MODELS_GUIDE.md").read_text(), said
