"""Test that runs of earlier versions can be resumed.

The file earlier_run/plan.json was written by commit 035d89f8, for a run on the text from
`write_text`. FINGERPRINT is the data fingerprint in that run's checkpoint."""

from pathlib import Path
from types import SimpleNamespace

from distributed_training.checkpoint.earlier import is_earlier_fingerprint
from distributed_training.data.pieces import RUNNING, TEXT
from distributed_training.data.tokenizer import ASSETS
from distributed_training.plan.plan import load_plan
from tests.support import refused

EARLIER_RUN = Path(__file__).parent / "earlier_run"
FINGERPRINT = "0bb171db64b0ff89"
NUM_SAMPLES = 664


def write_text(folder, last=3000):
    lines = [f"The number {i} comes before {i + 1}.\n" for i in range(last)]
    (folder / "counted.txt").write_text("".join(lines))


def test_a_plan_of_an_earlier_release_is_read():
    plan = load_plan(EARLIER_RUN)
    typed = {"dataset", "learning_rate", "max_length", "num_samples"}
    assert all(plan.requested.is_set(key) for key in typed)
    assert not plan.requested.is_set("seed")
    assert plan.requested.learning_rate == plan.config.learning_rate == 0.002
    assert plan.work["tokenizer"] == "embedded"
    assert plan.layout_fingerprint["mesh"] == "pp 1 x dp_replicate 1 x dp_shard 1 x tp 1"
    assert plan.size.num_layers == 2


def test_an_earlier_plan_with_a_value_no_longer_accepted_is_refused(tmp_path):
    text = (EARLIER_RUN / "plan.json").read_text()
    powersgd = text.replace('"gradient_compression": "none"', '"gradient_compression": "powersgd"')
    (tmp_path / "plan.json").write_text(powersgd)
    with refused("gradient_compression"):
        load_plan(tmp_path)


def test_an_earlier_fingerprint_is_recognized_only_for_the_same_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = SimpleNamespace(is_gpt2=True, folder=ASSETS / "bpe-2048")
    data = SimpleNamespace(form=RUNNING, tokenizer=tokenizer, train=range(NUM_SAMPLES))
    config = load_plan(EARLIER_RUN).config
    write_text(tmp_path)
    assert is_earlier_fingerprint(FINGERPRINT, config, data)
    fewer = SimpleNamespace(**{**vars(data), "train": range(NUM_SAMPLES - 1)})
    assert not is_earlier_fingerprint(FINGERPRINT, config, fewer)
    records = SimpleNamespace(**{**vars(data), "form": TEXT})
    assert not is_earlier_fingerprint(FINGERPRINT, config, records)
    write_text(tmp_path, last=3001)
    assert not is_earlier_fingerprint(FINGERPRINT, config, data)
