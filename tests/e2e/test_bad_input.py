"""Every mistake: one line on what, why and what to type instead; exit code 2; nothing left."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time

import pytest

from tests.conftest import HIDDEN_GPUS, SMALL, assert_ok, run_command, script, train
from tests.e2e.support import (
    H200,
    assert_refused,
    fake_nvidia_smi,
    launcher_command,
    our_errors,
    run_folders,
)
from tests.pool import ROOT, SCRIPT

# Command line after the script's name, with {tmp} for the test's folder; words of the answer.
COMMAND_LINES = {
    "unknown key": (["--set", "batch_sise=4"], ["batch_sise", "batch_size"]),
    "key without value": (["--set", "batch_size"], ["batch_size", "--set key=value"]),
    "unknown strategy": (["--strategy", "zero-2"], ["strategy='zero-2'", "'zero2'", "infinity"]),
    "unknown model": (["--model", "gpt2-medum"], ["gpt2-medum", "'gpt2-medium'"]),
    "unknown option": (["--stratgy", "dp"], ["--stratgy", "--strategy"]),
    "word": (["--set", "batch_size=four"], ["batch_size='four'", "whole number >= 1"]),
    "fraction": (["--set", "epochs=1.5"], ["epochs=1.5", "whole number"]),
    "maybe for True": (["--set", "pack=maybe"], ["pack='maybe'", "True or False"]),
    "num_samples 0": (["--set", "num_samples=0"], ["num_samples=0", ">= 1 or -1"]),
    "num_samples beyond the data": (
        ["--set", "num_samples=99999999", "--num_gpus", "2"],
        ["num_samples=99999999", "small-text", "at most", "-1"],
    ),
    "max_length beyond the model": (
        ["--set", "max_length=1025", "--dry-run"], ["max_length=1025", "gpt2-tiny", "1024"],
    ),
    "fp16 without a GPU": (["--set", "precision=fp16", "--dry-run"], ["fp16", "GPU", "fp32"]),
    "compiled infinity": (
        ["--strategy", "infinity", "--set", "compile=true", "--dry-run"],
        ["compile=True", "infinity", "auto or False"],
    ),
    "pretrained tiny": (
        ["--set", "weights=pretrained", "--dry-run"], ["pretrained", "gpt2-tiny", "random"],
    ),
    "zero processes": (["--num_gpus", "0"], ["--num_gpus", "'0'", "positive"]),
    "processes in words": (["--num_gpus", "both"], ["--num_gpus", "'both'", "all"]),
    "more memory than there is": (
        ["--model", "gpt2-xl", "--num_gpus", "512", "--dry-run"],
        ["512 processes", "GiB", "fewer processes"],
    ),
    "disk too small": (
        ["--model", "gpt2", "--set", "keep_checkpoints=1000", "--dry-run"],
        ["GiB free", "GiB", "output_dir", "checkpoint_every"],
    ),
    "output_dir is a file": (
        ["--set", "output_dir={tmp}/file.txt", "--dry-run"], ["file.txt", "not a folder"],
    ),
    "dataset missing": (
        ["--set", "dataset={tmp}/none.txt", "--num_gpus", "2"], ["none.txt", "does not exist"],
    ),
    "dataset empty": (
        ["--set", "dataset={tmp}/empty.txt", "--num_gpus", "2"], ["empty.txt", "no text"],
    ),
    "dataset not UTF-8": (
        ["--set", "dataset={tmp}/latin.txt", "--num_gpus", "2"],
        ["latin.txt", "UTF-8", "after 'caf'", "iconv"],
    ),
    "dataset too short": (
        ["--set", "dataset={tmp}/short.txt", "--num_gpus", "2"],
        ["short.txt", "too short", "max_length"],
    ),
    "dataset of another kind": (
        ["--set", "dataset={tmp}/data.doc", "--num_gpus", "2"], ["data.doc", ".txt", ".jsonl"],
    ),
    "dataset is a pipe": (
        ["--set", "dataset={tmp}/pipe.txt", "--num_gpus", "2"],
        ["pipe.txt", "not a regular file", "copy it to a file"],
    ),
    "dataset neither here nor on the Hub": (
        ["--set", "dataset=me/none", "--dry-run"], ["'me/none'", "neither a path nor", "Hub"],
    ),
    "validation file missing": (
        ["--set", "validation_dataset={tmp}/none.csv", "--num_gpus", "2"],
        ["validation_dataset=", "none.csv", "does not exist"],
    ),
    "records of two forms": (
        ["--set", "dataset={tmp}/mixed.jsonl", "--num_gpus", "2"],
        ["mixed.jsonl line 2", "no \"messages\" list", "assistant"],
    ),
    "csv without a text": (
        ["--set", "dataset={tmp}/body.csv", "--num_gpus", "2"],
        ["body.csv line 2", "'body', 'label'", "completion"],
    ),
    "jsonl that does not parse": (
        ["--set", "dataset={tmp}/bad.jsonl", "--num_gpus", "2"],
        ["bad.jsonl", "line 2", "column 10"],
    ),
    "jsonl without text": (
        ["--set", "dataset={tmp}/notext.jsonl", "--num_gpus", "2"],
        ["notext.jsonl", "line 1", '{"text": "..."}'],
    ),
    "tokenizer folder missing": (
        ["--set", "tokenizer={tmp}/none", "--dry-run"], ["tokenizer=", "vocab.json"],
    ),
    "weights folder missing": (
        ["--set", "weights={tmp}/none", "--dry-run"], ["weights=", "config.json", "hf/"],
    ),
    "preset missing": (["--preset", "{tmp}/brokn.json"], ["brokn.json", "mean broken.json?"]),
    "preset that does not parse": (
        ["--preset", "{tmp}/broken.json"], ["broken.json", "line 3 column 3"],
    ),
    "preset with an unknown key": (
        ["--preset", "{tmp}/key.json"], ["key.json", "'epoch'", "epochs"],
    ),
    "DeepSpeed JSON missing": (
        ["--set", "deepspeed_config={tmp}/none.json"], ["none.json", "does not exist"],
    ),
    "DeepSpeed JSON that does not parse": (
        ["--set", "deepspeed_config={tmp}/broken.json"], ["broken.json", "line 3 column 3"],
    ),
    "JSON and CONFIG disagree on the batch": (
        ["--set", "deepspeed_config={tmp}/batch.json", "--dry-run"],
        ["batch.json", "train_micro_batch_size_per_gpu=16", "batch_size=2", '"auto"'],
    ),
    "JSON and CONFIG disagree on the stage": (
        ["--set", "deepspeed_config={tmp}/stage.json", "--dry-run"],
        ["stage.json", "gradients, parameters", "strategy='zero2'"],
    ),
    "JSON and CONFIG disagree on the rate": (
        ["--set", "deepspeed_config={tmp}/rate.json", "--dry-run"],
        ["rate.json", "optimizer.params.lr=0.5", "learning_rate"],
    ),
    "JSON with a section of the wrong kind": (
        ["--set", "deepspeed_config={tmp}/section.json", "--dry-run"],
        ["section.json", "optimizer"],
    ),
    "JSON for a native strategy": (
        ["--strategy", "fsdp", "--set", "deepspeed_config={tmp}/batch.json", "--dry-run"],
        ["fsdp", "deepspeed_config", "strategy to zero2"],
    ),
    "resume from nowhere": (
        ["--set", "resume={tmp}/none", "--dry-run"], ["resume=", "no checkpoint", "auto"],
    ),
    "WikiText-2 without Hub or cache": (
        ["--set", "dataset=wikitext-2", "--dry-run"],
        ["wikitext-2", "hf download Salesforce/wikitext --repo-type dataset"],
    ),
    "pretrained weights without Hub or cache": (
        ["--model", "gpt2", "--set", "weights=pretrained", "--dry-run"],
        ["hf download openai-community/gpt2"],
    ),
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """Wrong files of many kinds."""
    texts = {
        "file.txt": "text",
        "empty.txt": " \n\n",
        "short.txt": "Too short to train on.",
        "data.doc": "text\nabc\n",
        "bad.jsonl": '{"text": "fine"}\n{"text": fine}\n',
        "notext.jsonl": '{"body": "fine"}\n',
        "mixed.jsonl": '{"messages": []}\n{"text": "fine"}\n',
        "body.csv": "body,label\nabc,1\n",
        "broken.json": '{\n  "epochs": 2\n  "seed": 3\n}\n',
        "key.json": '{"epoch": 2}',
        "batch.json": _zero2_json(train_micro_batch_size_per_gpu=16),
        "stage.json": _zero2_json(zero_optimization={"stage": 3}),
        "rate.json": _zero2_json(optimizer={"type": "AdamW", "params": {"lr": 0.5}}),
        "section.json": _zero2_json(optimizer="AdamW"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 au lait\n".encode("latin-1"))
    return tmp_path


def _zero2_json(**changes: object) -> str:
    document = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
    }
    return json.dumps({**document, **changes})


@pytest.mark.parametrize("case", COMMAND_LINES)
def test_command_line_is_refused_in_one_line(case, files):
    arguments, words = COMMAND_LINES[case]
    arguments = [text.replace("{tmp}", str(files)) for text in arguments]
    output_dir = files / "runs"
    values = {**SMALL, "strategy": "zero2", "output_dir": output_dir}
    result = script(values, *arguments, HF_HOME=str(files / "hf"))
    assert_refused(result, *words)
    assert run_folders(output_dir) == []


def test_package_that_is_not_there_is_named(tmp_path):
    missing = [
        name for name in ("wandb", "mlflow", "trackio") if importlib.util.find_spec(name) is None
    ]
    if not missing:
        pytest.skip("all optional packages are installed")
    values = {**SMALL, "log_to": missing[0], "output_dir": tmp_path / "runs"}
    result = script(values, "--dry-run")
    assert_refused(result, missing[0], "log_to", f"pip install {missing[0]}")


def test_library_that_is_not_there_is_named(tmp_path):
    values = {**SMALL, "output_dir": tmp_path / "runs"}
    infinity = {**values, "strategy": "infinity"}
    result = script(infinity, "--dry-run", CC="false")  # a compiler that finds nothing
    assert_refused(result, "libaio", "apt-get install libaio-dev")
    offload = {**values, "strategy": "offload"}
    result = script(offload, "--dry-run", CXX="no-such-compiler")
    assert_refused(result, "no-such-compiler", "apt-get install g++")


def test_stale_extension_lock_is_named(tmp_path):
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    an_hour_ago = time.time() - 3600
    os.utime(lock, (an_hour_ago, an_hour_ago))
    values = {**SMALL, "strategy": "offload", "output_dir": tmp_path / "runs"}
    extensions = str(tmp_path / "extensions")
    result = script(values, "--num_gpus", "2", TORCH_EXTENSIONS_DIR=extensions)
    assert_refused(result, str(lock), "60 minutes", f"rm {lock}")
    assert run_folders(tmp_path / "runs") == []


def test_gpu_that_torch_cannot_use_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this torch can use a GPU")
    path = fake_nvidia_smi(tmp_path / "bin", H200)
    values = {**SMALL, "output_dir": tmp_path / "runs"}
    result = train(values, unset=[HIDDEN_GPUS], PATH=path)
    assert_refused(result, torch.__version__, "CUDA_VISIBLE_DEVICES")


def test_world_size_that_was_not_delivered_is_said_once(tmp_path):
    values = {**SMALL, "output_dir": tmp_path / "runs"}
    result = script(values, "--num_gpus", "3", num_processes=2)
    assert result.returncode != 0
    (line,) = our_errors(result.stderr)
    assert "3" in line
    assert "started 2" in line
    assert run_folders(tmp_path / "runs") == []


def test_mistake_that_needs_the_data_is_said_once_under_a_launcher(tmp_path):
    """Rank 0 finds it, all ranks end with it."""
    values = {**SMALL, "strategy": "dp", "num_samples": 99999999, "output_dir": tmp_path / "runs"}
    result = run_command(launcher_command("torchrun", values), timeout_s=60)
    assert result.returncode != 0
    (line,) = our_errors(result.stderr)
    assert "num_samples=99999999" in line
    assert "SignalException" not in result.stderr
    assert run_folders(tmp_path / "runs") == []


CHECKPOINT_VALUES = {**SMALL, "strategy": "dp", "max_steps": 2}


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory):
    """A run's folder with checkpoints/step-00000002 of one process under dp."""
    output_dir = tmp_path_factory.mktemp("checkpointed")
    values = {**CHECKPOINT_VALUES, "output_dir": output_dir}
    assert_ok(train(values))
    (folder,) = run_folders(output_dir)
    return folder


def test_a_damaged_checkpoint_is_refused(checkpointed, tmp_path):
    run_dir = tmp_path / "runs" / checkpointed.name
    shutil.copytree(checkpointed, run_dir)
    tensors = run_dir / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    values = {**CHECKPOINT_VALUES, "output_dir": tmp_path / "runs", "resume": run_dir}
    result = script(values, "--dry-run")
    assert_refused(result, str(run_dir), "has other contents")
    assert run_folders(tmp_path / "runs") == [run_dir]


def test_checkpoint_of_other_work_is_refused(checkpointed, tmp_path):
    values = {**CHECKPOINT_VALUES, "output_dir": tmp_path, "resume": checkpointed}
    result = script(values, "--num_gpus", "2", "--dry-run")
    words = ["another run", "global_batch_size was", "batch_size x grad_accum_steps"]
    assert_refused(result, str(checkpointed), *words)


def test_damage_in_another_ranks_file_is_said_once(tmp_path):
    values = {**CHECKPOINT_VALUES, "output_dir": tmp_path / "runs"}
    assert_ok(train(values, num_processes=2))
    (run_dir,) = run_folders(tmp_path / "runs")
    file = run_dir / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    result = train({**values, "resume": run_dir}, num_processes=2)
    assert result.returncode != 0
    errors = our_errors(result.stderr)
    assert len(errors) == 1, result.stderr[-3000:]
    assert "is damaged" in errors[0]
    assert "rank-00001.safetensors" in errors[0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"\xff" * 64, ["model.safetensors", "cannot be read"]),
        ("config.json", b'{"model_type": "bert"}', ["config.json", "model_type='bert'"]),
        ("config.json", b'{"model_type": "gpt2", "n_layer": 12}', ["vocab_size", "set model"]),
    ],
    ids=["damaged tensors", "another model", "another size"],
)
def test_weights_that_do_not_fit_are_refused(name, content, words, checkpointed, tmp_path):
    shutil.copytree(checkpointed / "hf", tmp_path / "hf")
    (tmp_path / "hf" / name).write_bytes(content)
    values = {**CHECKPOINT_VALUES, "weights": tmp_path / "hf", "output_dir": tmp_path / "runs"}
    result = script(values)
    assert_refused(result, str(tmp_path / "hf"), *words)
    assert run_folders(tmp_path / "runs") == []


def test_a_python_without_the_packages_is_named():
    result = run_command([sys.executable, "-S", SCRIPT, "plan"])
    fix = "activate" if (ROOT / ".venv").is_dir() else "-m pip install -r"
    assert_refused(result, "is not installed in this Python", sys.executable, fix)


def test_what_a_file_of_ones_own_lacks_is_not_looked_for_in_our_packages(tmp_path):
    (tmp_path / "__init__.py").write_text("import no_such_module\n")
    result = run_command([sys.executable, SCRIPT, "--model", tmp_path, "--dry-run"])
    assert result.returncode != 0
    assert "No module named 'no_such_module'" in result.stderr
    assert "pip install" not in result.stderr
