"""Test the checks that reject a plan before processes start. Each check is tested at its
boundary."""

import dataclasses
import importlib.metadata
import importlib.util
import shutil
from types import SimpleNamespace

import pytest

from distributed_training.models.gpt2 import SIZES
from distributed_training.planner import checks
from distributed_training.planner.sort import suggest
from distributed_training.predict.memory import estimate_memory
from distributed_training.predict.predict import Prediction, local_cluster
from tests.planner.helpers import gpu, plan_for
from tests.support import CPU_MACHINE, GPU_MACHINE, named_strategy, refused

GIB = 2**30


@pytest.fixture(autouse=True)
def _no_extensions_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def draft(tmp_path, strategy="zero2", machine=CPU_MACHINE, num_processes=2, **config):
    """Return a plan without running its checks."""
    config = {"precision": "fp32", "offload_dir": str(tmp_path / "offload"), **config}
    return plan_for(tmp_path, machine, num_processes, checked=False, strategy=strategy, **config)


def local(plan):
    return local_cluster(plan.machine, plan.num_processes, plan.processes_here)


def check_fit(plan):
    checks.check_memory(Prediction(plan, None), local(plan))


SMALL = gpu(gpu_memory_bytes=16 * GIB, gpu_name="Small")


def test_swapping_without_a_gpu_is_refused(tmp_path):
    for strategy in ("dp", "zero3", "offload"):  # these strategies swap no parameters
        draft(tmp_path, strategy, model="gpt2-xl")
    draft(tmp_path, "infinity", model="gpt2-tiny")
    draft(tmp_path, "infinity", GPU_MACHINE, model="gpt2-xl")
    with refused("model='gpt2-medium'", "gpt2-tiny"):
        draft(tmp_path, "infinity", model="gpt2-medium")


def test_missing_packages_are_refused_only_if_they_are_used(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    gone = {"deepspeed", "wandb"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name)
    )
    notes = []
    checks.check_packages(draft(tmp_path, "fsdp"), notes)
    with refused("'zero1'", "deepspeed", "-r requirements.txt"):
        checks.check_packages(draft(tmp_path, "zero1"), notes)
    with refused("log_to='wandb'", "pip install wandb"):
        checks.check_packages(draft(tmp_path, "fsdp", log_to="wandb"), notes)
    assert notes == []


def test_an_untested_version_is_noted_and_not_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.140.0")
    notes = []
    checks.check_packages(draft(tmp_path, "zero1"), notes)
    assert [note.partition(" ")[0] for note in notes] == ["torch", "deepspeed"]


@pytest.mark.parametrize(
    ("config", "num_processes", "parts"),
    [
        ({"model": "gpt2-tiny", "strategy": "fsdp"}, 2, ["model='gpt2-tiny'"]),
        ({"strategy": "dp"}, 2, ["strategy='dp'", "fsdp"]),
        ({"strategy": "zero3"}, 2, ["strategy='zero3'", "fsdp"]),
        ({"strategy": "fsdp", "dp_replicate": 2}, 2, ["strategy='fsdp'"]),
        ({"strategy": "fsdp"}, 3, ["3 GPUs", "128"]),
    ],
)
def test_experts_that_cannot_stay_are_refused(config, num_processes, parts, tmp_path):
    values = {"model": "Qwen/Qwen3-30B-A3B", "lora_rank": 16, "expert_parallel": True, **config}
    with refused("expert_parallel=True", *parts):
        plan_for(tmp_path, GPU_MACHINE, num_processes, checked=False, **values)


def test_more_processes_than_gpus_are_refused(tmp_path):
    checks.check_gpus(draft(tmp_path, machine=gpu(num_gpus=4), num_processes=4))
    checks.check_gpus(draft(tmp_path, machine=CPU_MACHINE, num_processes=64))
    # Processes on other machines do not count.
    checks.check_gpus(draft(tmp_path, machine=gpu(num_gpus=4), num_processes=8, here=4))
    with refused("5 processes", "--num_gpus 4"):
        checks.check_gpus(draft(tmp_path, machine=gpu(num_gpus=4), num_processes=5))


def test_suggestions_for_too_little_memory_fit(tmp_path):
    """The suggestion for a batch that is far too large for four 16 GiB GPUs must give a plan that
    fits."""
    config = {"machine": SMALL, "num_processes": 4, "model": "gpt2-xl", "batch_size": 16}
    large = draft(tmp_path, "pp", micro_batch_size=16, **config)
    settings, choice = suggest(large, local(large))[0]
    planned = draft(tmp_path, **{"strategy": "pp", **config, **settings})
    check_fit(planned)
    assert estimate_memory(planned) == choice.memory
    assert not settings.keys() & {"lora_rank", "base_dtype"}


def test_lora_is_suggested_before_offload(tmp_path):
    """If all weights do not fit, the suggestions are LoRA, then LoRA with a 4-bit base, then
    offload. RAM or a disk that is too small excludes offload."""
    config = {
        "strategy": "dp",
        "model": "gpt2-xl",
        "batch_size": 1,
        "activation_checkpointing": "full",
    }
    for ram, disk, num_offloads in ((512, 512, 2), (16, 512, 1), (16, 16, 0)):
        machine = gpu(
            gpu_memory_bytes=16 * GIB, num_gpus=1, ram_bytes=ram * GIB, disk_bytes=disk * GIB
        )
        large = draft(tmp_path, machine=machine, num_processes=1, **config)
        settings = [settings for settings, _ in suggest(large, local(large))]
        assert settings[0]["lora_rank"] == settings[1]["lora_rank"] == 16
        assert ("base_dtype" in settings[0], settings[1]["base_dtype"]) == (False, "nf4")
        assert all("lora_rank" not in others for others in settings[2:])
        assert len(settings) == 2 + (num_offloads > 0)
        with refused("lora_rank=16", "base_dtype=nf4", "--force"):
            check_fit(large)


def test_runs_that_may_fit_or_are_forced_are_not_refused(tmp_path):
    memory = estimate_memory(draft(tmp_path, "dp", gpu(), model="gpt2"))
    least, most = memory.likely_bytes
    assert least < memory.needed_bytes < most
    needed = memory.needed_bytes
    for room, size in (
        ("yes", most), ("tight", most - 1), ("tight", needed), ("unlikely", needed - 1),
        ("unlikely", least),
    ):  # fmt: skip
        plan = draft(tmp_path, "dp", gpu(gpu_memory_bytes=size), model="gpt2")
        check_fit(plan)
        assert Prediction(plan, None).memory_fit == room
    small = draft(tmp_path, "dp", gpu(gpu_memory_bytes=least - 1), model="gpt2")
    with refused("gpt2", "dp", "GiB", "NVIDIA H200", "Set strategy=", "--force"):
        check_fit(small)
    forced = small.requested.model_copy(update={"force": True})
    check_fit(dataclasses.replace(small, requested=forced))


@pytest.mark.parametrize(
    ("strategy", "machine", "per_parameter"),
    [
        # minimum bytes per parameter in each of 2 processes: state, or the model during its
        # construction
        ("fsdp", CPU_MACHINE, 8),
        ("offload", GPU_MACHINE, 4 + 6 + 2),
    ],
)
def test_host_memory_boundary_is_the_prediction(strategy, machine, per_parameter, tmp_path):
    # If RAM is short, the copy for checkpoints is omitted first.
    roomy = estimate_memory(draft(tmp_path, strategy, machine, model="gpt2", checkpoint_every=0))
    needed = 2 * roomy.host_bytes
    assert needed > 2 * per_parameter * SIZES["gpt2"].num_parameters
    enough, short = (
        draft(tmp_path, strategy, dataclasses.replace(machine, ram_bytes=size), model="gpt2")
        for size in (needed, needed - 1)
    )
    check_fit(enough)
    with refused("GiB of RAM", "2 processes"):
        check_fit(short)


def free_disk(monkeypatch, num_bytes):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes))


@pytest.mark.parametrize(
    ("config", "per_parameter"),
    [
        ({"keep_checkpoints": 3}, 12 * 4 + 4 * 2),
        ({"checkpoint_every": "signal", "keep_best": False}, 12 + 4),
        ({"keep_best": True}, 12 * 2 + 4 * 2),
        ({"checkpoint_every": 0, "export": False}, 0),
    ],
)
def test_disk_boundary_by_hand(config, per_parameter, tmp_path, monkeypatch):
    needed = per_parameter * SIZES["gpt2"].num_parameters
    free_disk(monkeypatch, needed)
    notes: list[str] = []
    checks.check_disk(draft(tmp_path, model="gpt2", **config), notes)
    assert not notes
    if needed:
        free_disk(monkeypatch, needed - 1)
        checks.check_disk(draft(tmp_path, model="gpt2", **config), notes)
        assert len(notes) == 1
        assert str(tmp_path) in notes[0]


def test_folders_of_a_run_are_writable_and_the_compilers_cache_has_space(tmp_path, monkeypatch):
    with refused(__file__):
        checks.check_disk(draft(tmp_path, output_dir=f"{__file__}/runs"), [])
    free_disk(monkeypatch, 2**16)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/some/cache")
    notes: list[str] = []
    checks.check_disk(draft(tmp_path, compile=True), notes)
    assert "/some/cache" in notes[-1]


def test_each_strategy_names_the_extensions_it_builds():
    """The extensions of each strategy have the names of DeepSpeed's op builders."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    for name, builders in {
        "dp": [],
        "zero3": [],
        "offload": [CPUAdamBuilder],
        "infinity": [CPUAdamBuilder, AsyncIOBuilder, PinMemoryBuilder],
    }.items():
        names = [builder().name for builder in builders]
        assert named_strategy(name).extensions == names


def test_an_environment_whose_path_has_a_space_is_refused_for_extensions(tmp_path, monkeypatch):
    """torch passes its own path to the linker without quotes."""
    torch = SimpleNamespace(origin="/my projects/torch/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch)
    checks.check_extensions(draft(tmp_path, "zero3"))
    with refused("'offload'", torch.origin, "dp or fsdp"):
        checks.check_extensions(draft(tmp_path, "offload"))


def test_a_missing_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    checks.check_extensions(draft(tmp_path, "zero3"))
    with refused("no-such-compiler", "apt-get install g++"):
        checks.check_extensions(draft(tmp_path, "offload"))
