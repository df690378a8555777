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

# Logits: one row per last token.
TABLE = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))


def sample(logits=lambda window: TABLE[window], prompt=(5,), **changes):
    settings = {"num_tokens": 30, "context": 8, "eos_id": -1, "seed": 3, **changes}
    return [*prompt, *continuation(logits, list(prompt), **settings)]


def test_generation_depends_on_the_seed_alone_and_at_temperature_zero_on_nothing():
    torch.manual_seed(1)
    first = sample()
    torch.manual_seed(2)
    assert sample() == first
    assert sample(seed=4) != first
    assert len(first) == 31
    ids = sample(temperature=0.0)
    assert ids[1:] == [int(TABLE[last].argmax()) for last in ids[:-1]]
    assert sample(temperature=0.0, seed=4) == ids


def test_generation_takes_one_of_the_forty_likeliest():
    pairs = itertools.pairwise(sample(num_tokens=200))
    ranks = [int((TABLE[last] > TABLE[last, new]).sum()) for last, new in pairs]
    assert max(ranks) < 40
    assert max(ranks) > 20


def test_generation_sees_no_more_than_the_context():
    windows = []

    def logits(window):
        windows.append(window[0].tolist())
        return TABLE[window]

    ids = sample(logits, prompt=range(6))
    assert windows == [([*ids[:end], -1, -1])[:8] for end in (6, 7)] + [
        ids[:end][-8:] for end in range(8, 36)
    ]  # padded


def test_generation_ends_at_end_of_text():
    ids = sample()
    eos = ids[10]
    assert sample(eos_id=eos) == ids[: ids.index(eos, 1)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("runs")
    assert_ok(train({**SMALL, "strategy": "dp", "max_steps": 2, "output_dir": output_dir}))
    return Path(only_record(output_dir)["run_dir"])


def test_a_run_answers_a_prompt_and_lines(run_dir):
    words = ("--prompt", "def ", "--num_tokens", 12)
    asked = command("generate", run_dir, *words)
    assert asked.stdout.startswith("def ")
    other = command("generate", run_dir.parent / "latest", *words, "--seed", 1)
    assert other.stdout != asked.stdout
    lines = subprocess.run(
        [sys.executable, str(SCRIPT), "generate", run_dir / "hf", "--num_tokens", "12"],
        input="def \ndef \n", capture_output=True, text=True, timeout=60, env=clean_environment(),
    )  # fmt: skip
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


def command(*words):
    return heavy_pool().script(words)
