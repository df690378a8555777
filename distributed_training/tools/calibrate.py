"""What `plan --calibrate` runs in its processes: how fast this machine works, for predict/rates.py.

GPUs are measured on rank 0 alone; processes that share a CPU measure all at once, as they train."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from distributed_training.models import find_model
from distributed_training.models.decoder import Decoder
from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.memory import MOMENT_BYTES
from distributed_training.predict.predict import this_machine
from distributed_training.predict.rates import cpu_rates, from_calibration
from distributed_training.predict.speed import BACKWARD_ATTENTION, UPDATE_BYTES, Work
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.config import build_config
from distributed_training.settings.machine import Machine, detect_machine
from distributed_training.tools.links import Group, open_group, time_group

VALUES = 2**28  # of the tensors that element-wise kernels read
MODELS = {"cuda": ("gpt2-medium", "gpt2-xl"), "cpu": ("gpt2-tiny",)}
TOKENS = {"cuda": 16384, "cpu": 2048}
LENGTH = 1024  # of the sequences that attention is measured on
CALLS = 30  # of a part of a training


def matrix_products(group: Group) -> list[dict[str, Any]]:
    """FLOP/s of the forward products and of those for inputs' and weights' gradients."""
    found = []
    device = group.device
    tokens = TOKENS[device.type]
    for model in MODELS[device.type]:
        size = find_model(model).size
        for n, k in (*size.block_matrices, (size.padded_vocab_size, size.hidden_size)):
            for dtype in (torch.bfloat16, torch.float32):
                # A GPU's fp32 is slow, and the same for all shapes.
                if device.type == "cuda" and dtype == torch.float32 and n != 3072:
                    continue
                x = torch.randn(tokens, k, device=device, dtype=dtype)
                w = torch.randn(n, k, device=device, dtype=dtype)
                y = F.linear(x, w)
                calls = {
                    "forward": partial(F.linear, x, w),
                    "inputs": partial(torch.mm, y, w),
                    "weights": partial(torch.mm, y.t(), x),
                }
                flops = 2 * tokens * k * n
                rates = {name: flops / group.seconds(call) for name, call in calls.items()}
                shape = {"tokens": tokens, "in": k, "out": n, "dtype": str(dtype)}
                found.append({**shape, "flops_per_s": rates})
    return found


def memory_traffic(group: Group) -> dict[str, float]:
    """Bytes a second of an element-wise kernel on a GPU, and of AdamW's 28 bytes a parameter."""
    x = torch.randn(VALUES, device=group.device, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.randn(VALUES // 4, device=group.device))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True, capturable=True)
    return {
        "gelu": 4 * VALUES / group.seconds(lambda: F.gelu(x, approximate="tanh")),
        "adamw": 28 * (VALUES // 4) / group.seconds(optimizer.step),
    }


def attention(group: Group) -> dict[str, Any]:
    """FLOP/s of causal attention, counted over the lower triangle, forward and backward."""
    on_gpu = group.device.type == "cuda"
    batch, heads, dtype = (16, 16, torch.bfloat16) if on_gpu else (2, 4, torch.float32)
    shape = (3, batch, heads, LENGTH, 64)
    drawn = torch.randn(shape, device=group.device, dtype=dtype, requires_grad=True)
    query, key, value = drawn.unbind()

    def both() -> None:
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(y, (query, key, value), torch.ones_like(y))

    flops = (1 + BACKWARD_ATTENTION) * 2 * batch * heads * LENGTH * LENGTH * 64
    return {"length": LENGTH, "flops_per_s": {"both": flops / group.seconds(both)}}


def launches(group: Group) -> dict[str, float]:
    """Seconds of a tiny kernel and, on a GPU, of one compiled block of GPT-2 forward and backward,
    on so few tokens that the GPU waits for the host."""
    x = torch.zeros(1024, device=group.device)
    found = {"kernel": group.seconds(lambda: x.add_(1))}
    if group.device.type == "cuda":
        model: Decoder = find_model("gpt2").build(dropout=0.0, seed=1)
        block = torch.compile(model.blocks["0"].to(group.device))
        hidden = torch.randn(1, 64, 768, device=group.device, requires_grad=True)
        found["compiled_block"] = group.seconds(lambda: block(hidden).sum().backward())
    return found


def in_step(call: Callable[[], Any]) -> float:
    """Median of CALLS that all processes begin and end together, as the steps of a training."""
    found = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        dist.barrier()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def of_training(found: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """On CPUs: seconds that parts of a model take, and the bytes a second of element-wise work
    that they mean by predict/speed.py. Caches, and processes beside it, are in them."""
    words = {"strategy": "dp", "model": "gpt2-tiny", "batch_size": 4, "max_length": 512}
    plan = draft_plan(build_config(words), this_machine(machine, 1, 1))
    model: Decoder = plan.model.build(dropout=0.0, seed=1)
    shape = (plan.batch.micro_batch_size, plan.config.max_length)
    ids = torch.randint(plan.size.vocab_size, shape)
    hidden = torch.randn(*shape, plan.size.hidden_size, requires_grad=True)
    block = model.blocks["0"]
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds = {
        "model": in_step(lambda: model(ids, ids).backward()),
        "block": in_step(lambda: block(hidden).backward(hidden.detach())),
        "update": in_step(update),
    }
    # At least a tenth, should a busy machine have made blocks slow when they were alone.
    blocks = plan.size.num_layers * seconds["block"]
    seconds["head"] = max(0.1 * seconds["model"], seconds["model"] - blocks)
    # Each part takes arithmetic + bytes / rate; at one byte a second all else is next to nothing.
    measured = {**found, "memory_bytes_per_s": dict.fromkeys(("block", "head", "update"), 1.0)}
    work = Work(plan, from_calibration(measured, cpu_rates(machine.num_cpus, 1)))
    each = UPDATE_BYTES[False] + 2 * MOMENT_BYTES["adamw"]
    traffic = {"update": each * plan.size.num_parameters / seconds["update"]}
    for name, costs in (("block", work.block()), ("head", work.head())):
        arithmetic, memory, _ = np.sum(costs, axis=0)
        # At least a tenth, should products have been slower on their own.
        traffic[name] = memory / max(seconds[name] - arithmetic, 0.1 * seconds[name])
    return {"training_s": seconds, "memory_bytes_per_s": traffic}


def calibrate(group: Group) -> dict[str, Any]:
    """All figures of one process, and those of the group. Collective."""
    on_gpu = group.device.type == "cuda"
    process = group.process
    between = []
    if process.world_size > 1:
        sizes = [4**power for power in range(7, 15 if on_gpu else 12)]  # to 256 or 4 MiB
        between = time_group(group, None, sizes, ("all_reduce", "all_gather", "reduce_scatter"))
    if on_gpu and process.rank > 0:  # waits for the group's end: rank 0 is measured alone
        return {}
    group = replace(group, together=not on_gpu)
    found: dict[str, Any] = {
        "matrix_products": matrix_products(group),
        "attention": [attention(group)],
        "seconds": launches(group),
        "collectives": between,
    }
    if on_gpu:
        found["memory_bytes_per_s"] = memory_traffic(group)
    else:
        found |= of_training(found, detect_machine())
    return found


def main(file: Path) -> int:
    """Measure as one of a launcher's processes, or alone; the exit code."""
    start = time.perf_counter()
    with open_group() as group:
        found = calibrate(group)
    if group.process.rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, provenance("python real_model_example.py plan --calibrate") | found)
        print(f"wrote {file} after {time.perf_counter() - start:.0f} s")
    return 0
