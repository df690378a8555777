"""What the runtime trains: a model cut into stages, its loss, its microbatches, and the device."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipedream.errors import UserError
from pipedream.plan.profile import device_name
from pipedream.runtime.prediction import Case
from pipedream.schedules.catalogue import layers_of_a_stage
from pipedream.train.models import GPT2_SIZES, GPT2Size, Task, build_stages, build_task, gpt2_layers
from pipedream.train.oracle import build_trainers, run_schedule
from pipedream.train.trainer import Loss, Weights

Config = Mapping[str, Any]

# One token of vocabulary: embedding and head are not used.
BLOCKS: dict[str, GPT2Size] = {
    "gpt2-medium": replace(GPT2_SIZES["gpt2-medium"], vocabulary=1),
    "gpt2-tiny": GPT2Size(num_layers=8, hidden=64, heads=4, vocabulary=1, seq_len=32),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Every process builds the same one, from the seed, and takes its stages."""

    modules: list[nn.Module]
    """By stage; each but the last gives a tensor of the form that it takes."""
    loss: Loss
    task: Task


def build_workload(config: Config, device: torch.device, chunks: int = 1) -> Workload:
    """The model and data that CONFIG asks for, on a device, each rank's layers cut into `chunks`.

    Raises UserError when the model's layers cannot be cut evenly into the stages.
    """
    num_stages = config["num_stages"] * chunks
    seed = config["seed"]
    layers, batch, dtype = _sizes(config, device)
    layers = layers_of_a_stage(layers, chunks)
    if config["model"] == "mlp":
        modules = build_stages(num_stages, layers, seed=seed, dtype=dtype)
        task = build_task(seed=seed, microbatch_size=batch, dtype=dtype)
        loss: Loss = nn.functional.cross_entropy
    else:
        size = BLOCKS[config["model"]]
        torch.manual_seed(seed)
        with device:
            blocks = gpt2_layers(replace(size, num_layers=layers * num_stages))[1:-1]
        cuts = range(0, layers * num_stages, layers)
        modules = [nn.Sequential(*blocks[cut : cut + layers]).to(dtype) for cut in cuts]
        # Four microbatches of normal numbers, in place of embedded text, and others as the target.
        generator = torch.Generator().manual_seed(seed)
        shape = (4 * batch, size.seq_len, size.hidden)
        inputs, targets = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        task = Task(inputs=inputs, targets=targets, microbatch_size=batch)
        loss = nn.functional.mse_loss
    return Workload(
        modules=[module.to(device) for module in modules],
        loss=loss,
        task=replace(task, inputs=task.inputs.to(device), targets=task.targets.to(device)),
    )


def _sizes(config: Config, device: torch.device) -> tuple[int, int, torch.dtype]:
    """Layers a stage, microbatch size and dtype, where CONFIG leaves them open as well."""
    name = config["model"]
    layers = config["layers_per_stage"]
    if name == "mlp":
        return layers or 2, config["microbatch_size"] or 8, DTYPES[config["dtype"] or "float64"]
    total = BLOCKS[name].num_layers
    p = config["num_stages"]
    if not layers and total % p:
        able = [str(n) for n in range(1, total + 1) if total % n == 0]
        raise UserError(
            f"the {total} blocks of {name} cannot be cut evenly into {p} stages",
            f"set num_stages to one of {', '.join(able)}, or set layers_per_stage",
        )
    dtype = config["dtype"] or ("bfloat16" if device.type == "cuda" else "float32")
    return layers or total // p, config["microbatch_size"] or 4, DTYPES[dtype]


def train_alone(config: Config, case: Case, device: torch.device) -> list[Weights]:
    """The final weights of every stage, from one process."""
    workload = build_workload(config, device, case.schedule.stages_per_rank)
    trainers = build_trainers(
        workload.modules,
        case.policy,
        batch_size=case.num_microbatches,
        num_microbatches=case.num_microbatches * case.num_batches,
        learning_rate=config["learning_rate"],
        loss=workload.loss,
        cut=case.schedule.cuts_backward,
    )
    run_schedule(case.schedule, trainers, workload.task)
    return [trainer.weights for trainer in trainers]


def equal_bits(ours: list[Weights], theirs: list[Weights]) -> bool:
    """Whether all stages' weights are the same bits."""
    return all(
        a.keys() == b.keys() and all(_same_bits(a[name], b[name]) for name in a)
        for a, b in zip(ours, theirs, strict=True)
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal would take what has diverged to NaN on both sides as different."""
    a, b = (tensor.detach().cpu().flatten().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)


def on_gpus(config: Config) -> bool:
    """Whether the stages run on GPUs: where device=auto finds one for each of them, they do.

    Raises UserError where device=cuda finds fewer.
    """
    wanted = config["device"]
    stages = config["num_stages"]
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < stages:
        fewer = "set num_stages to that, " if gpus else ""
        raise UserError(
            f"device=cuda needs a GPU for each of {stages} stages, and this machine has "
            f"{gpus or 'none'}",
            f"{fewer}run it where there are {stages}, or add --set device=cpu",
        )
    return wanted != "cpu" and gpus >= stages


def emulated_ms(config: Config, device: torch.device) -> tuple[float, float]:
    """Forward and backward durations that are slept: on a CPU as CONFIG says, on a GPU none."""
    if device.type == "cuda":
        return 0.0, 0.0
    return float(config["forward_ms"]), float(config["backward_ms"])


def describe_workload(config: Config, device: torch.device) -> str:
    """Model, layers, microbatch and dtype in words; errors as build_workload."""
    name = config["model"]
    layers, batch, dtype = _sizes(config, device)
    short = str(dtype).removeprefix("torch.")
    if name == "mlp":
        return f"mlp, {_count(layers, 'layer')} a stage, {batch} samples a microbatch, {short}"
    size = BLOCKS[name]
    return (
        f"{name}, {_count(layers, 'block')} of hidden size {size.hidden} a stage (no embedding, no "
        f"head), {batch} sequences of {size.seq_len} a microbatch, {short}"
    )


def _count(number: int, noun: str) -> str:
    """'1 stage', '2 stages'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe(config: Config, device: torch.device) -> str:
    """What is about to run, in words."""
    p = config["num_stages"]
    gpus = torch.cuda.device_count()
    where = "NCCL, a GPU each"
    if device.type == "cpu":
        where = "gloo, on the CPU"
        if gpus and config["device"] == "auto":
            where += f", as there are {gpus} GPUs for {p} stages"
    text = f"{_count(p, 'stage')}, a process each ({where}): {describe_workload(config, device)}"
    forward, backward = emulated_ms(config, device)
    if forward or backward:
        text += (
            f"\nemulated device: each forward sleeps {forward:g} ms and each backward "
            f"{backward:g} ms on top of its small real computation"
        )
    return text


def about(config: Config, arguments: list[str]) -> dict[str, Any]:
    """What a record says of how it came about: command, versions, machine, emulation, workload,
    CONFIG."""
    on_gpu = on_gpus(config)
    device = torch.device("cuda" if on_gpu else "cpu")
    forward, backward = emulated_ms(config, device)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"cuda": str(torch.version.cuda), "nccl": nccl}
    return {
        "command": " ".join(["python pipedream_runtime.py", *arguments]),
        "versions": versions,
        "machine": {
            "device": device_name(device),
            "gpus": torch.cuda.device_count() if on_gpu else 0,
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "emulated_ms": {"forward": forward, "backward": backward},
        "workload": describe_workload(config, device),
        "config": {key: config[key] for key in sorted(config)},
    }
