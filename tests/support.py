"""Helpers for the unit tests, which use neither the network nor a GPU."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.models import ModelSpec, find_model
from distributed_training.models.decoder import Decoder
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.records.record import Record, RunRecord, start_record
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import Machine
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import Strategy, load_strategy

CPU_MACHINE = Machine(
    num_gpus=0,
    gpu_name=None,
    gpu_memory_bytes=0,
    compute_capability=(0, 0),
    ram_bytes=64 * 2**30,
    num_cpus=2,
)
GPU_MACHINE = dataclasses.replace(
    CPU_MACHINE,
    num_gpus=4,
    gpu_name="NVIDIA H200",
    gpu_memory_bytes=139 * 2**30,
    compute_capability=(9, 0),
    ram_bytes=512 * 2**30,
)


_WORDS = """
the of and to in a is that for it as was with be by on not this are or from at which but have an had
they you were their one all we can her has there been if more when will would who so no return self
def import class None True False value list number string object file method function module
argument error result index length first second other between before after house water river light
paper letter market winter summer bridge engine forest signal
"""


@functools.cache
def small_text() -> Path:
    """Return the path of a 300 kB text file with the same content on every machine. Tests do not
    use the embedded corpus, because tokenizing it takes longer than most of their training runs."""
    file = Path(tempfile.gettempdir()) / f"small-text-of-tests-{os.getuid()}.txt"
    draw = random.Random(0)
    words = _WORDS.split()
    weights = [1 / (place + 3) for place in range(len(words))]
    lines = (
        " ".join(draw.choices(words, weights, k=draw.choice((3, 6, 12, 24, 48)))).capitalize()
        for _ in range(3000)
    )
    return write_once(file, ".\n".join(lines) + ".\n")


@functools.cache
def small_records() -> Path:
    """Return the path of a file with the same 400 questions and answers on every machine. Most
    records have only a few words."""
    file = Path(tempfile.gettempdir()) / f"small-records-of-tests-{os.getuid()}.jsonl"
    draw = random.Random(0)
    words = _WORDS.split()
    rows = []
    for _ in range(400):
        prompt = " ".join(draw.choices(words, k=draw.choice((1, 2, 3, 5, 8))))
        answer = " ".join(draw.choices(words, k=draw.choice((1, 1, 2, 4, 9, 40))))
        rows.append(json.dumps({"prompt": f"{prompt}?", "completion": f" {answer}"}) + "\n")
    return write_once(file, "".join(rows))


@functools.cache
def small_pairs() -> Path:
    """Return the path of a file with the same 100 pairs of answers on every machine."""
    file = Path(tempfile.gettempdir()) / f"small-pairs-of-tests-{os.getuid()}.jsonl"
    draw = random.Random(0)
    rows = []
    for _ in range(100):
        prompt, *answers = (
            " ".join(draw.choices(_WORDS.split(), k=draw.choice((1, 2, 4, 8)))) for _ in range(3)
        )
        chosen, rejected = (f" {answer}" for answer in answers)
        row = {"prompt": f"{prompt}?", "chosen": chosen, "rejected": rejected}
        rows.append(json.dumps(row) + "\n")
    return write_once(file, "".join(rows))


def write_once(file: Path, text: str) -> Path:
    """Write a file that tests in other processes may be reading, and return its path."""
    if not file.exists() or file.read_text() != text:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(text)
        os.replace(new.name, file)  # atomic, so that concurrent readers see the whole file
    return file


@contextlib.contextmanager
def refused(*words: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Check that the `with` block raises a UserError with a one-line message that contains each of
    `words`."""
    with pytest.raises(UserError) as caught:
        yield caught
    text = str(caught.value)
    assert text.splitlines() == [text]
    for word in words:
        assert word in text


def assert_near(actual: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> None:
    """Check that the relative difference of two tensors in the 2-norm is at most `limit`."""
    assert (actual - expected).norm() <= limit * expected.norm()


def named_strategy(name: str) -> Strategy:
    """Return the shipped strategy with this name."""
    return load_strategy(build_config({"strategy": name}))


def cpu_topology(plan: Plan, rank: int = 0) -> Topology:
    """Return the topology that rank number `rank` has in a plan for CPUs."""
    return Topology(
        world_size=plan.num_processes, rank=rank, local_rank=rank, device_type="cpu", **plan.mesh
    )


_START = {
    "schema_version": 2,
    "status": "running",
    "config": {
        "model": "gpt2-medium",
        "strategy": "zero2",
        "max_length": 512,
        "precision": "bf16",
        "compile": True,
        "activation_checkpointing": "none",
        "weights": "pretrained",
        "dataset": "wikitext-2",
        "tokenizer": "gpt2",
        "learning_rate": 5e-5,
        "lr_schedule": "cosine",
        "warmup_steps": 10,
    },
    "strategy": {"name": "zero2", "engine": "deepspeed"},
    "work": {"model": "gpt2-medium", "seed": 42, "global_batch_size": 32},
    "started_at": "2026-01-01T00:00:00+00:00",
    "run_dir": "runs/x",
    "world_size": 4,
    "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1},
    "machine": {"gpu_name": "NVIDIA H200", "num_gpus": 4, "num_cpus": 64},
    "num_parameters": 354_823_168,
    "batch": {
        "global_batch_size": 32,
        "micro_batch_size": 4,
        "num_microbatches": 2,
        "num_replicas": 4,
    },
    "data": {
        "num_train_samples": 1000,
        "num_validation_samples": 200,
        "real_token_share": 0.875,
        "steps_per_epoch": 32,
    },
    "num_steps": 64,
}
_RESULTS = {
    "status": "ok",
    "step": 64,
    "loss_curve": [[1, 3.5], [64, 3.0625]],
    "evaluations": [
        {"step": 0, "loss": 3.5, "perplexity": 33.125},
        {"step": 64, "loss": 3.0, "perplexity": 20.0625},
    ],
    "performance": {
        "num_timed_steps": 59,
        "step_time_s": {"p10": 0.12, "p50": 0.125, "p90": 0.13, "p99": 0.2},
        "tokens_per_s": 131072.0,
        "mfu": 0.3141,
    },
    "memory": {
        "peak_allocated_bytes": 10 * 2**30,
        "peak_reserved_bytes": 12 * 2**30,
        "peak_host_bytes": 5 * 2**30,
        "by_rank": [{"peak_reserved_bytes": size * 2**30} for size in (12, 11, 10, 9)],
    },
}


def made_record(*, finished: bool = True, **changes: Any) -> Record:
    """Return the values of `record_values` as a validated Record."""
    return Record.model_validate(record_values(finished=finished, **changes))


def record_values(*, finished: bool = True, **changes: Any) -> dict[str, Any]:
    """Return the JSON values of the record of a finished run, or of a run that has just started.
    `a__b=1` sets values["a"]["b"]."""
    return with_changes({**_START, **_RESULTS} if finished else _START, changes, "__")


def start_test_record(run_dir: Path) -> RunRecord:
    """Create and return the record of a run that has just started."""
    values = record_values(finished=False)
    del values["started_at"]
    return start_record(run_dir, **values)


def deepspeed_json(name: str = "zero2", **changes: Any) -> dict[str, Any]:
    """Return a strategy's DeepSpeed configuration after applying `changes`. A dotted key sets a
    nested value."""
    return with_changes(named_strategy(name).document, changes, ".")


def with_changes(
    document: Mapping[str, Any], changes: Mapping[str, Any], separator: str
) -> dict[str, Any]:
    """Return a copy of `document` after applying `changes`. `separator` separates the parts of a
    key's path."""
    values = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *parents, last = path.split(separator)
        section = values
        for part in parents:
            section = section[part]
        section[last] = value
    return values


def edit_json(file: Path, **changes: Any) -> None:
    """Set values in a JSON file. `a__b=1` sets document["a"]["b"] to 1."""
    file.write_text(json.dumps(with_changes(json.loads(file.read_text()), changes, "__")))


def tiny_qwen2(vocab_size: int = 512, **values: Any) -> Any:
    """Return transformers' Qwen 2 model with one layer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": vocab_size}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **values))


def tiny_olmoe(vocab_size: int = 512, **values: Any) -> Any:
    """Return transformers' OLMoE model with one layer of four experts."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": vocab_size}
    shape |= {"num_experts": 4, "num_experts_per_tok": 2}
    return OlmoeForCausalLM(OlmoeConfig(**shape, **values))


def save_now(engine: Any, plan: Any, topology: Topology, **kwargs: Any) -> Path:
    """Save a checkpoint, wait until it is complete, and return its folder. All ranks must call this
    function."""
    from distributed_training.checkpoint.saver import Saver

    saver = Saver(plan, topology)
    saver.begin(engine, **kwargs)
    return saver.finish()[0]


def fingerprint(spec: ModelSpec, folder: Path) -> int:
    """Return the fingerprint that LoRA training computes for a folder's weights."""
    from distributed_training.models.initial_weights import weights_checksum

    return weights_checksum(spec.build_meta_model(), spec.weights_source(folder))


def save_model(
    spec: ModelSpec,
    state: Mapping[str, torch.Tensor],
    folder: Path,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the weights in `state` to a folder that transformers can load."""
    spec.save(lambda name, _: state[name], folder, eos_token_id=7, dtype=dtype)


def save_tiny(folder: Path) -> None:
    """Write gpt2-tiny with random weights to a folder that transformers can load."""
    tiny = find_model("gpt2-tiny")
    save_model(tiny, draw_model(tiny, seed=0).state_dict(), folder)


def draw_model(spec: ModelSpec, *, dropout: float = 0.0, seed: int) -> Decoder:
    """Return the model for `spec` with random weights."""
    cpu = torch.device("cpu")
    model = spec.build_meta_model(dropout=dropout)
    source = model.random_source(seed, cpu, hashed=False)
    InitialWeights(source=source).fill(model, cpu)
    return model


def read_model(spec: ModelSpec, folder: Path) -> Decoder:
    """Return the model for `spec` with the weights from a Hugging Face folder."""
    model = spec.build_meta_model()
    InitialWeights(source=spec.weights_source(folder)).fill(model, torch.device("cpu"))
    return model
