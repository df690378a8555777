"""How fast this machine works, for the planner: a minute on GPUs, less without.

    python real_model_example.py calibrate FILE.json
    torchrun --nproc_per_node=4 real_model_example.py calibrate FILE.json

Matrix products of the shapes of a model, element-wise work, attention, launches, AdamW, and
collectives over all processes: what predict/rates.py reads. Means of several calls. GPUs are
measured on rank 0 alone; processes that share a CPU measure all at once, as they train.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from distributed_training.advise.make import draft_plan
from distributed_training.models import find_model
from distributed_training.models.decoder import Decoder
from distributed_training.plan.machine import Machine, available_ram_bytes
from distributed_training.plan.plan import Plan
from distributed_training.predict.kernels import BACKWARD_ATTENTION, UPDATE_BYTES, Cost, Work
from distributed_training.predict.rates import Rates, cpu_rates, from_calibration
from distributed_training.records.record import timestamp, versions, write_json
from distributed_training.settings.config import build_config
from distributed_training.settings.parser import Parser
from distributed_training.settings.strategies import strategy_options
from distributed_training.tools.clock import Clock
from distributed_training.tools.group import open_group
from distributed_training.tools.links import time_group

VALUES = {"cuda": 2**28, "cpu": 2**24}  # of the tensors that element-wise kernels read
MODELS = ("gpt2-medium", "gpt2-xl")
TOKENS = (2048, 16384)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
BYTES = tuple(4**power for power in range(7, 15))  # of a collective's tensor: 16 KiB to 256 MiB


def matrix_products(clock: Clock) -> list[dict[str, Any]]:
    """FLOP/s of the forward products and of those for inputs' and weights' gradients."""
    found = []
    on_gpu = clock.device.type == "cuda"
    for model in MODELS if on_gpu else ("gpt2-tiny",):
        size = find_model(model).size
        vocabulary = (size.padded_vocab_size, size.hidden_size)
        shapes = [shape[::-1] for shape in (*size.block_matrices, vocabulary)]
        for tokens, (k, n) in itertools.product(TOKENS if on_gpu else TOKENS[:1], shapes):
            dtypes = [torch.bfloat16, torch.float32]
            if on_gpu and n != 3072:  # a GPU's fp32 is slow, and the same for all shapes
                dtypes.pop()
            for dtype in dtypes:
                rates = _three_products(clock, tokens, k, n, dtype)
                shape = {"tokens": tokens, "in": k, "out": n, "dtype": str(dtype)}
                found.append({**shape, "flops_per_s": rates})
    return found


def _three_products(
    clock: Clock, tokens: int, k: int, n: int, dtype: torch.dtype
) -> dict[str, float]:
    x = torch.randn(tokens, k, device=clock.device, dtype=dtype)
    w = torch.randn(n, k, device=clock.device, dtype=dtype)
    y = F.linear(x, w)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: F.linear(x, w),
        "inputs": lambda: y @ w,
        "weights": lambda: y.t() @ x,
    }
    return {name: 2 * tokens * k * n / clock.seconds(call) for name, call in calls.items()}


def memory_traffic(clock: Clock) -> dict[str, float]:
    """Bytes a second of an element-wise kernel, and of AdamW's 28 bytes a parameter."""
    count = VALUES[clock.device.type]
    x = torch.randn(count, device=clock.device, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.randn(count // 4, device=clock.device))
    parameter.grad = torch.randn_like(parameter)
    fused = clock.device.type == "cuda"
    optimizer = torch.optim.AdamW([parameter], fused=fused, capturable=fused)
    return {
        "gelu": 4 * count / clock.seconds(lambda: F.gelu(x, approximate="tanh")),
        "adamw": 28 * (count // 4) / clock.seconds(optimizer.step),
    }


def attention(clock: Clock) -> list[dict[str, Any]]:
    """FLOP/s of causal attention, counted over the lower triangle, forward and backward."""
    on_gpu = clock.device.type == "cuda"
    batch, heads, dtype = (16, 16, torch.bfloat16) if on_gpu else (2, 4, torch.float32)
    found = []
    for length in (512, 1024):
        shape = (batch, heads, length, 64)
        inputs = [
            torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        ]

        def both(inputs: list[torch.Tensor] = inputs) -> None:
            query, key, value = inputs
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(y, inputs, torch.ones_like(y))

        flops = (1 + BACKWARD_ATTENTION) * 2 * batch * heads * length * length * 64
        found.append({"length": length, "flops_per_s": {"both": flops / clock.seconds(both)}})
    return found


def launches(clock: Clock) -> dict[str, float]:
    """Seconds of a tiny kernel and, on a GPU, for which the host launches one compiled block of
    GPT-2 forward and backward."""
    x = torch.zeros(1024, device=clock.device)
    found = {"kernel": clock.seconds(lambda: x.add_(1))}
    if clock.device.type == "cuda":
        model: Decoder = find_model("gpt2").build(dropout=0.0, seed=1)
        block = torch.compile(model.blocks["0"].to(clock.device))
        hidden = torch.randn(1, 64, 768, device=clock.device, requires_grad=True)
        found["compiled_block"] = clock.launching(lambda: block(hidden).sum().backward())
    return found


def of_training(clock: Clock, found: dict[str, Any], num_cpus: int) -> dict[str, dict[str, float]]:
    """On CPUs: seconds that parts of a model take, and the bytes a second of element-wise work
    that they mean by predict/kernels.py. Caches, and processes beside it, are in them."""
    words = {"strategy": "dp", "model": "gpt2-tiny", "batch_size": 4, "max_length": 512}
    machine = Machine(
        num_gpus=0, gpu_name=None, gpu_memory_bytes=0, compute_capability=(0, 0),
        ram_bytes=available_ram_bytes(), num_cpus=num_cpus,
    )  # fmt: skip
    plan = draft_plan(build_config(words, options=strategy_options), machine, 1, 1)
    seconds = _parts_of_a_step(clock, plan)
    # Each part takes (arithmetic) + (bytes) / rate.
    measured = {**found, "memory_bytes_per_s": dict.fromkeys(("block", "head", "update"), 1.0)}
    rates = from_calibration(measured, cpu_rates(num_cpus, 1))
    update_bytes = UPDATE_BYTES[False] * plan.size.num_parameters
    traffic = {"update": update_bytes / seconds["update"]}
    for name in ("block", "head"):
        arithmetic, with_one_byte_a_second = (
            sum(getattr(_work(plan, rates, rate), name)(), start=Cost()).total
            for rate in (math.inf, 1.0)
        )
        # At least a tenth, should products have been slower on their own.
        left = max(seconds[name] - arithmetic, 0.1 * seconds[name])
        traffic[name] = (with_one_byte_a_second - arithmetic) / left
    return {"seconds": seconds, "memory_bytes_per_s": traffic}


def _work(plan: Plan, rates: Rates, memory_bytes: float) -> Work:
    own = dataclasses.replace(rates, memory_bytes=memory_bytes, head_memory_bytes=memory_bytes)
    return Work(plan, own)


def _parts_of_a_step(clock: Clock, plan: Plan) -> dict[str, float]:
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
        "model": clock.in_step(lambda: model(ids, ids).backward()),
        "block": clock.in_step(lambda: block(hidden).backward(hidden.detach())),
        "update": clock.in_step(update),
    }
    # At least a tenth, should a busy machine have made blocks slow when they were alone.
    blocks = plan.size.num_layers * seconds["block"]
    seconds["head"] = max(0.1 * seconds["model"], seconds["model"] - blocks)
    return seconds


def collectives(clock: Clock, world_size: int) -> list[dict[str, Any]]:
    """COLLECTIVES over all processes, by size; none of a process alone."""
    if world_size == 1:
        return []
    sizes = BYTES if clock.device.type == "cuda" else BYTES[:5]
    return time_group(clock, dist.group.WORLD, world_size, sizes, COLLECTIVES)


def calibrate(device: torch.device, rank: int, world_size: int) -> dict[str, Any]:
    """All figures of one process, and those of the group. Collective."""
    on_gpu = device.type == "cuda"
    clock = Clock(device, crowded=not on_gpu and world_size > 1)
    between = collectives(clock, world_size)
    if on_gpu and rank > 0:  # the others wait, so that rank 0 is measured alone
        dist.barrier()
        return {}
    found: dict[str, Any] = {
        "matrix_products": matrix_products(clock),
        "memory_bytes_per_s": memory_traffic(clock),
        "attention": attention(clock),
        "seconds": launches(clock),
        "collectives": between,
    }
    if not on_gpu:
        own = of_training(clock, found, len(os.sched_getaffinity(0)))
        found["training_s"] = own["seconds"]
        found["memory_bytes_per_s"] |= own["memory_bytes_per_s"]
    dist.barrier()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description="Measure this machine for the planner.")
    parser.add_argument("file", type=Path, help="where the JSON goes")
    file = parser.parse_args(argv).file
    with open_group() as group:
        start = time.perf_counter()
        process = group.process
        found = calibrate(group.device, process.rank, process.world_size)
        if process.rank == 0:
            on_gpu = group.device.type == "cuda"
            about = {
                "device": torch.cuda.get_device_name(group.device) if on_gpu else "cpu",
                "world_size": process.world_size,
                "num_cpus": len(os.sched_getaffinity(0)),
                "made_at": timestamp(),
                "versions": versions(),
                "took_s": time.perf_counter() - start,
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {**about, **found})
            print(f"wrote {file} after {about['took_s']:.0f} s")
    return 0
