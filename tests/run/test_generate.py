"""Sampling, and the command `generate`."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed_training.run.saving.export import continuation
from tests.conftest import SMALL, assert_ok, clean_environment, heavy_pool, only_record, train
from tests.e2e.support import assert_refused
from tests.pool import SCRIPT


class FakeEngine:
    """Logits from a fixed table of one row per last token; remembers the windows it was given."""

    def __init__(self, num_tokens=100, seed=0):
        self.table = torch.randn(
            num_tokens, num_tokens, generator=torch.Generator().manual_seed(seed)
        )
        self.windows = []

    def logits(self, window):
        self.windows.append(window[0].tolist())
        return self.table[window]


def sample(engine, prompt=(5,), **changes):
    settings = {"num_tokens": 30, "context": 8, "eos_id": -1, "seed": 3, **changes}
    return [*prompt, *continuation(engine.logits, list(prompt), **settings)]


def test_generation_depends_on_the_seed_and_not_on_the_global_generator():
    torch.manual_seed(1)
    first = sample(FakeEngine())
    torch.manual_seed(2)
    assert sample(FakeEngine()) == first
    assert sample(FakeEngine(), seed=4) != first
    assert len(first) == 31


def test_generation_takes_one_of_the_forty_likeliest():
    engine = FakeEngine()
    ids = sample(engine, num_tokens=200)
    ranks = [
        int((engine.table[last] > engine.table[last, new]).sum())
        for last, new in itertools.pairwise(ids)
    ]
    assert max(ranks) < 40
    assert max(ranks) > 20


def test_generation_sees_no_more_than_the_context():
    engine = FakeEngine()
    ids = sample(engine, prompt=range(6))
    assert engine.windows == [([*ids[:end], -1, -1])[:8] for end in (6, 7)] + [
        ids[:end][-8:] for end in range(8, 36)
    ]  # padded


def test_generation_ends_at_end_of_text():
    engine = FakeEngine()
    ids = sample(engine)
    eos = ids[10]
    again = sample(engine, eos_id=eos)
    assert again == ids[: ids.index(eos, 1)]


def test_at_temperature_zero_the_likeliest_is_taken():
    engine = FakeEngine()
    ids = sample(engine, temperature=0.0)
    assert ids[1:] == [int(engine.table[last].argmax()) for last in ids[:-1]]
    assert sample(FakeEngine(), temperature=0.0, seed=4) == ids


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("runs")
    assert_ok(train({**SMALL, "strategy": "dp", "max_steps": 2, "output_dir": output_dir}))
    return Path(only_record(output_dir)["run_dir"])


def test_a_run_answers_a_prompt_and_lines(run_dir):
    asked = command("generate", run_dir, "--prompt", "def ", "--num_tokens", 12)
    assert_ok(asked)
    assert asked.stdout.startswith("def ")
    assert len(asked.stdout) > len("def \n")
    for folder in (run_dir / "hf", run_dir.parent / "latest"):
        again = command("generate", folder, "--prompt", "def ", "--num_tokens", 12)
        assert again.stdout == asked.stdout, folder
    other = command("generate", run_dir, "--prompt", "def ", "--num_tokens", 12, "--seed", 1)
    assert other.stdout != asked.stdout
    lines = command("generate", run_dir, "--num_tokens", 12, typed="def \ndef \n")
    assert lines.stdout == 2 * asked.stdout


def test_the_text_is_that_of_transformers(run_dir):
    """The likeliest tokens, from the exported folder."""
    transformers = pytest.importorskip("transformers")
    folder = run_dir / "hf"
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("import os", return_tensors="pt").input_ids
    theirs = model.generate(ids, max_new_tokens=20, do_sample=False)
    asked = command(
        "generate", folder, "--prompt=import os", "--max_new_tokens=20", "--temperature=0"
    )
    assert asked.stdout == tokenizer.decode(theirs[0], skip_special_tokens=True) + "\n"


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for words, said in {
        (tmp_path / "none",): "does not exist",
        (tmp_path / "empty",): "neither a run nor a model",
        (tmp_path / "empty", "--top_k", 0): "at least 1",
        (): "required: run",
    }.items():
        assert_refused(command("generate", *words), said)


def command(*words, typed=None):
    """On a warm process, but for what is typed."""
    if typed is None:
        return heavy_pool().script(words)
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        input=typed, capture_output=True, text=True, timeout=60, env=clean_environment(),
    )  # fmt: skip
