"""What the runtime trains: a model cut into stages, its loss, and its microbatches."""

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
from pipedream.schedules.catalogue import layers_of_a_stage
from pipedream.schedules.ops import Schedule
from pipedream.schedules.policies import Policy
from pipedream.train.models import GPT2_SIZES, GPT2Size, Task, build_stages, build_task, gpt2_layers
from pipedream.train.oracle import run_schedule
from pipedream.train.trainer import Loss, StageTrainer, Weights

# One token of vocabulary: embedding and head are not used.
BLOCKS: dict[str, GPT2Size] = {
    "gpt2-medium": replace(GPT2_SIZES["gpt2-medium"], vocabulary=1),
    "gpt2-tiny": GPT2Size(num_layers=8, hidden=64, heads=4, vocabulary=1, seq_len=32),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Every process builds the same one, from the seed, and takes its stage."""

    modules: list[nn.Module]
    """By stage; each but the last gives a tensor of the form that it takes."""
    loss: Loss
    task: Task
    text: str
    """Model, layers, microbatch and dtype in words."""


def build_workload(config: Mapping[str, Any], device: torch.device, chunks: int = 1) -> Workload:
    """The model and data that CONFIG asks for, on a device, each rank's layers cut into `chunks`.

    Raises UserError when the model's layers cannot be cut evenly into the stages.
    """
    name, p, seed = config["model"], config["num_stages"] * chunks, config["seed"]
    layers, batch, dtype = _sizes(config, device)
    layers = layers_of_a_stage(layers, chunks)
    text = describe_workload(config, device)
    if name == "mlp":
        return Workload(
            modules=[m.to(device) for m in build_stages(p, layers, seed=seed, dtype=dtype)],
            loss=nn.functional.cross_entropy,
            task=_move(build_task(seed=seed, microbatch_size=batch, dtype=dtype), device),
            text=text,
        )
    size = BLOCKS[name]
    torch.manual_seed(seed)
    with device:
        blocks = gpt2_layers(replace(size, num_layers=layers * p))[1:-1]
    parts = [nn.Sequential(*blocks[s * layers : (s + 1) * layers]) for s in range(p)]
    return Workload(
        modules=[part.to(dtype) for part in parts],
        loss=nn.functional.mse_loss,
        task=_block_task(size, batch, seed, dtype, device),
        text=text,
    )


def describe_workload(config: Mapping[str, Any], device: torch.device) -> str:
    """Model, layers, microbatch and dtype in words; errors as build_workload."""
    name = config["model"]
    layers, batch, dtype = _sizes(config, device)
    if name == "mlp":
        return (
            f"mlp, {count(layers, 'layer')} a stage, {batch} samples a microbatch, {_short(dtype)}"
        )
    size = BLOCKS[name]
    return (
        f"{name}, {count(layers, 'block')} of hidden size {size.hidden} a stage (no embedding, no "
        f"head), {batch} sequences of {size.seq_len} a microbatch, {_short(dtype)}"
    )


def _sizes(config: Mapping[str, Any], device: torch.device) -> tuple[int, int, torch.dtype]:
    """Layers a stage, microbatch size and dtype, where CONFIG leaves them open as well."""
    name, asked = config["model"], config["layers_per_stage"]
    if name == "mlp":
        return asked or 2, config["microbatch_size"] or 8, DTYPES[config["dtype"] or "float64"]
    layers = asked or _even_cut(name, BLOCKS[name].num_layers, config["num_stages"])
    dtype = config["dtype"] or ("bfloat16" if device.type == "cuda" else "float32")
    return layers, config["microbatch_size"] or 4, DTYPES[dtype]


def _even_cut(name: str, num_layers: int, num_stages: int) -> int:
    if num_layers % num_stages:
        able = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise UserError(
            f"the {num_layers} blocks of {name} cannot be cut evenly into {num_stages} stages",
            f"set num_stages to one of {', '.join(map(str, able))}, or set layers_per_stage",
        )
    return num_layers // num_stages


def _block_task(
    size: GPT2Size, batch: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Task:
    """Four microbatches of normal numbers, in place of embedded text, and others as the target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4 * batch, size.seq_len, size.hidden)
    return Task(
        inputs=torch.randn(shape, generator=generator).to(device, dtype),
        targets=torch.randn(shape, generator=generator).to(device, dtype),
        microbatch_size=batch,
    )


def _move(task: Task, device: torch.device) -> Task:
    return replace(task, inputs=task.inputs.to(device), targets=task.targets.to(device))


def count(number: int, noun: str) -> str:
    """'1 stage', '2 stages'."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def train_alone(
    config: Mapping[str, Any], schedule: Schedule, policy: Policy, m: int, device: torch.device
) -> list[Weights]:
    """The final weights of every stage, on the CPU. `m`: microbatches in a batch."""
    workload = build_workload(config, device, schedule.stages_per_rank)
    last = len(workload.modules) - 1
    trainers = [
        StageTrainer(
            module,
            policy,
            stage=stage,
            num_stages=last + 1,
            batch_size=m,
            num_microbatches=m * config["num_batches"],
            learning_rate=config["learning_rate"],
            loss=workload.loss if stage == last else None,
            cut=schedule.cuts_backward,
        )
        for stage, module in enumerate(workload.modules)
    ]
    run_schedule(schedule, trainers, workload.task)
    return [on_cpu(trainer.weights) for trainer in trainers]


def on_cpu(weights: Weights) -> Weights:
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}


def equal_bits(ours: list[Weights], theirs: list[Weights]) -> bool:
    """Whether all stages' weights are the same bits."""
    return all(
        a.keys() == b.keys() and all(_same_bits(a[name], b[name]) for name in a)
        for a, b in zip(ours, theirs, strict=True)
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal would take what has diverged to NaN on both sides as different."""
    a, b = (tensor.flatten().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)


def on_gpus(config: Mapping[str, Any]) -> bool:
    """Whether the stages run on GPUs: where device=auto finds one for each of them, they do.

    Raises UserError where device=cuda finds fewer.
    """
    wanted, stages, gpus = config["device"], config["num_stages"], torch.cuda.device_count()
    if wanted == "cuda" and gpus < stages:
        fewer = "set num_stages to that, " if gpus else ""
        raise UserError(
            f"device=cuda needs a GPU for each of {stages} stages, and this machine has "
            f"{gpus or 'none'}",
            f"{fewer}run it where there are {stages}, or add --set device=cpu",
        )
    return wanted != "cpu" and gpus >= stages


def emulated_ms(config: Mapping[str, Any], device: torch.device) -> tuple[float, float]:
    """Forward and backward durations that are slept: on a CPU as CONFIG says, on a GPU none."""
    if device.type == "cuda":
        return 0.0, 0.0
    return float(config["forward_ms"]), float(config["backward_ms"])


def describe(config: Mapping[str, Any], device: torch.device) -> str:
    """What is about to run, in words."""
    p = config["num_stages"]
    forward, backward = emulated_ms(config, device)
    where, gpus = "NCCL, a GPU each", torch.cuda.device_count()
    if device.type == "cpu":
        few = gpus and config["device"] == "auto"
        where = "gloo, on the CPU" + f", as there are {gpus} GPUs for {p} stages" * bool(few)
    lines = [f"{count(p, 'stage')}, a process each ({where}): {describe_workload(config, device)}"]
    if forward or backward:
        lines.append(
            f"emulated device: each forward sleeps {forward:g} ms and each backward "
            f"{backward:g} ms on top of its small real computation"
        )
    return "\n".join(lines)


def about(config: Mapping[str, Any], arguments: list[str]) -> dict[str, Any]:
    """What a record says of how it came about: command, versions, machine, emulation, workload,
    CONFIG."""
    on_gpu = on_gpus(config)
    device = torch.device("cuda" if on_gpu else "cpu")
    forward, backward = emulated_ms(config, device)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if on_gpu:
        versions |= {
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
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
