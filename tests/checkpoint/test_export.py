"""Test text generation, the weights from `keep_best` and from checkpoints, and the `generate` and
`export` commands."""

import io
import itertools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

import real_model_example
from distributed_training.checkpoint.export import (
    find_stop_ids,
    generate_ids,
    write_generation_config,
)
from distributed_training.plan.plan import load_plan
from distributed_training.plan.samples import load_data
from tests.conftest import SMALL, assert_ok, heavy_pool, only_record, train
from tests.e2e.support import assert_refused
from tests.pool import SCRIPT
from tests.support import edit_json, read_model, refused

# Row i contains the logits that follow token i.
TABLE = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))


def test_a_list_of_end_tokens_in_config_json_alone_is_exported(tokenizer, tmp_path):
    """Without a generation_config.json, transformers stops at these tokens (marin#4153)."""
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": [0, 2], "model_type": "llama"})
    )
    assert find_stop_ids(tokenizer, False, tmp_path) == [0, 2]
    write_generation_config(tmp_path, tokenizer, False, tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [0, 2]


def sample(logits=lambda window, past: TABLE[window], prompt=(5,), **changes):
    settings = {"num_tokens": 30, "context": 8, "eos_ids": [-1], "seed": 3, **changes}
    return [*prompt, *generate_ids(logits, list(prompt), **settings)]


def test_generation_depends_only_on_the_seed_and_is_greedy_at_temperature_zero():
    torch.manual_seed(1)
    first = sample()
    torch.manual_seed(2)
    assert sample() == first
    assert sample(seed=4) != first
    assert len(first) == 31
    ids = sample(temperature=0.0)
    assert ids[1:] == [int(TABLE[last].argmax()) for last in ids[:-1]]
    assert sample(temperature=0.0, seed=4) == sample(temperature=1e-320) == ids
    eos = first[10]
    assert sample(eos_ids=[-1, eos]) == first[: first.index(eos, 1)]


def test_generation_refuses_non_finite_logits():
    with refused("logits"):
        sample(lambda window, past: torch.full((1, len(window[0]), 100), torch.inf))


def test_generation_samples_from_the_top_40_and_sees_only_the_context_window():
    windows = []

    def logits(window, past):
        windows.append(window[0].tolist())
        return TABLE[window]

    ids = sample(logits, prompt=range(6), num_tokens=200)
    new = [int((TABLE[last] > TABLE[last, new]).sum()) for last, new in itertools.pairwise(ids[5:])]
    assert 20 < max(new) < 40
    assert windows == [ids[:end][-8:] for end in range(6, 206)]


# The learning rate is so high that the last evaluation is not the best.
NOISY = {"learning_rate": 0.03, "lr_schedule": "constant", "warmup_steps": 0, "eval_every": 1,
         "max_steps": 6}  # fmt: skip


def run(folder, strategy, num_processes=2, **changes):
    values = {**SMALL, **NOISY, "strategy": strategy, "output_dir": folder, **changes}
    result = train(values, num_processes=num_processes)
    assert_ok(result)
    return only_record(folder), result.stdout


def validation_loss(run_dir, folder):
    """Return the mean loss on the run's validation samples with the weights in `folder`."""
    plan = load_plan(run_dir)
    samples = load_data(plan).validation
    model = read_model(plan.model, folder)
    with torch.no_grad():
        arrays = map(torch.from_numpy, samples.batch(np.arange(len(samples))))
        return float(model.eval()(*arrays).sum()) / int(samples.lengths.sum())


def test_keep_best_exports_the_weights_with_the_lowest_validation_loss(tmp_path):
    values = {"keep_best": True, "learning_rate": 0.1}
    record, _ = run(tmp_path / "best", "fsdp", **values)
    run_dir = Path(record["run_dir"])
    trained = [entry for entry in record["evaluations"] if entry["step"] > 0]
    lowest = min(trained, key=lambda entry: entry["loss"])
    assert lowest["step"] < trained[-1]["step"], "the test needs a run that gets worse"
    assert record["best"]["step"] == lowest["step"]
    assert validation_loss(run_dir, run_dir / "best") == pytest.approx(lowest["loss"], rel=1e-5)
    last = validation_loss(run_dir, run_dir / "hf")
    assert last == pytest.approx(trained[-1]["loss"], rel=1e-5)
    shutil.rmtree(run_dir / "best")  # then the next evaluation finds the best weights, though worse
    record, _ = run(tmp_path / "best", "fsdp", **values, resume=run_dir, max_steps=7)
    assert record["best"]["step"] == 7


def test_generating_text_and_keeping_the_best_weights_do_not_change_training(tmp_path):
    record, out = run(tmp_path / "a", "zero3", max_steps=2, generate="def ", keep_best=True)
    assert record["sample"].startswith("def ")
    assert out.index("step      0/2") < out.index("sample after training:")
    assert "sample before" not in out, "random weights write nothing"
    assert record["best"]["step"] == 2  # hf/ has these weights
    weights = [Path(record["run_dir"], name, "model.safetensors") for name in ("best", "hf")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    silent, out = run(tmp_path / "silent", "zero3", max_steps=2, generate=None)
    assert silent["best"] is silent["sample"] is None
    assert "sample after" not in out
    assert silent["loss_curve"] == record["loss_curve"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Return the folder of a run with two checkpoints. Its subfolder hf/ contains the same weights
    as the last checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {"checkpoint_every": 2, "keep_checkpoints": 2, "max_steps": 4}
    record, _ = run(folder, "dp", 1, **changes, learning_rate=1e-4)
    return Path(record["run_dir"])


def test_generate_answers_a_prompt_and_lines_of_input(run_dir, monkeypatch, capsys):
    words = ("--prompt", "def ", "--num_tokens", 12)
    generated = command("generate", run_dir, *words)
    assert generated.stdout.startswith("def ")
    other = command("generate", run_dir.parent / "latest", *words, "--seed", 1)
    assert other.stdout != generated.stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO("def \ndef \n"))
    argv = [str(SCRIPT), "generate", str(run_dir / "hf"), "--num_tokens", "12"]
    monkeypatch.setattr(sys, "argv", argv)
    assert real_model_example.main() == 0
    assert capsys.readouterr().out == 2 * generated.stdout


def command(*words):
    return heavy_pool().script(words)


def test_an_interrupted_run_is_exported_from_its_checkpoint(run_dir, tmp_path):
    """The test makes the run look as if it had been killed after its last save. The exported
    checkpoint must equal the hf/ folder of the original run."""
    killed = tmp_path / run_dir.name
    shutil.copytree(run_dir, killed)
    shutil.rmtree(killed / "hf")
    edit_json(killed / "record.json", status="running")
    assert_refused(command("generate", killed, "--prompt", "def "), f"export {killed}")
    result = command("export", killed)
    assert_ok(result)
    assert result.stdout.startswith("Exported ")
    assert "/hf in Hugging Face format." in result.stdout
    for file in (run_dir / "hf").iterdir():
        assert (killed / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    assert_refused(command("export", killed), "hf already exists", "--to")
    older = killed / "checkpoints" / "step-00000002"
    assert_ok(command("export", older, "--to", tmp_path / "older"))
    other = load_file(tmp_path / "older" / "model.safetensors")
    for name, weight in load_file(run_dir / "hf" / "model.safetensors").items():
        assert other[name].shape == weight.shape
        assert not torch.equal(other[name], weight), name
    assert_refused(command("export", tmp_path), str(tmp_path), "runs/latest")
    shutil.rmtree(killed / "checkpoints")
    assert_refused(command("export", killed, "--merge"), str(killed))


def test_exported_adapters_are_continued_and_merged_without_a_checkpoint(run_dir, tmp_path):
    """The merged weights must equal the weights that PEFT's merge produces."""
    base = run_dir / "hf"
    values = {"model": str(base), "weights": str(base), "lora_rank": 4, "learning_rate": 0.05}
    values |= {"max_steps": 2, "checkpoint_every": 0, "output_dir": str(tmp_path)}
    assert_ok(train({**SMALL, **values}))
    record = only_record(tmp_path)
    lora_run_dir = Path(record["run_dir"])
    more = {"model": "auto", "weights": lora_run_dir / "hf", "output_dir": tmp_path / "continued"}
    assert_ok(train({**more, "max_steps": 1}))
    continued = only_record(tmp_path / "continued")
    expected = pytest.approx(record["evaluations"][-1]["loss"], rel=1e-5)
    assert (continued["config"]["lora_rank"], continued["evaluations"][0]["loss"]) == (4, expected)
    assert_ok(command("export", lora_run_dir, "--merge"))
    assert_refused(
        command("export", lora_run_dir / "hf", "--merge"), "merged already exists", "--to"
    )
    copied_dir = tmp_path / "bare"  # published adapters often come without a tokenizer
    copied_dir.mkdir()
    for file in (lora_run_dir / "hf").glob("adapter_*"):
        shutil.copy(file, copied_dir)
    options = ("--prompt", "the", "--num_tokens", 5, "--temperature", 0)
    texts = [command("generate", folder, *options) for folder in (copied_dir, lora_run_dir)]
    assert_ok(texts[0])
    assert texts[0].stdout == texts[1].stdout
