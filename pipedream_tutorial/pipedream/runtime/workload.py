"""What the runtime trains: a model cut into stages, its loss, and its microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipedream.errors import UserError
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
    """By stage."""
    loss: Loss
    task: Task
    text: str
    """Model, layers, microbatch and dtype in words."""


def build_workload(config: Mapping[str, Any], device: torch.device) -> Workload:
    """The model and data that CONFIG asks for, on a device.

    Raises UserError when the model's layers cannot be cut evenly into the stages.
    """
    name, p, seed = config["model"], config["num_stages"], config["seed"]
    layers, batch, dtype = _sizes(config, device)
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
    workload = build_workload(config, device)
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
