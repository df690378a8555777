"""Measure the speed of this machine for predict/rates.py, in the processes that `plan --calibrate`
starts.

With GPUs, only rank 0 measures computation. Processes that share a CPU all take measurements at the
same time, because they also train at the same time."""

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
from distributed_training.predict.costs.block import BACKWARD_ATTENTION
from distributed_training.predict.costs.loss import head_costs
from distributed_training.predict.costs.precision import MOMENT_BYTES, UPDATE_BYTES
from distributed_training.predict.predict import local_cluster
from distributed_training.predict.rates import cpu_rates, from_calibration
from distributed_training.predict.speed import StepCosts
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.machine import Machine, detect_machine
from distributed_training.settings.request import build_config
from distributed_training.tools.links import Group, open_group, time_group

NUM_ELEMENTS = 2**28  # elements that GELU reads; AdamW updates a quarter as many
MODELS = {"cuda": ("gpt2-medium", "gpt2-xl"), "cpu": ("gpt2-tiny",)}
TOKENS = {"cuda": 16384, "cpu": 2048}
LENGTH = 1024  # sequence length at which attention is measured
NUM_CALLS = 30  # timed calls per part of a training step


def time_matmuls(group: Group) -> list[dict[str, Any]]:
    """Measure matrix multiplications in the forward pass and for the gradients of the inputs and
    the weights. Return the FLOP/s by shape and dtype."""
    entries = []
    device = group.device
    tokens = TOKENS[device.type]
    for model in MODELS[device.type]:
        size = find_model(model).size
        for n, k in (*size.block_matrices, (size.padded_vocab_size, size.hidden_size)):
            for dtype in (torch.bfloat16, torch.float32):
                # On GPUs, fp32 has the same low speed for all shapes, so one shape is enough.
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
                rates = {name: flops / group.time_call(call) for name, call in calls.items()}
                shape = {"tokens": tokens, "in": k, "out": n, "dtype": str(dtype)}
                entries.append({**shape, "flops_per_s": rates})
    return entries


def time_memory_traffic(group: Group) -> dict[str, float]:
    """Return the memory bandwidth in bytes/s that GELU and AdamW achieve on a GPU. AdamW moves 28
    bytes per parameter."""
    x = torch.randn(NUM_ELEMENTS, device=group.device, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.randn(NUM_ELEMENTS // 4, device=group.device))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True, capturable=True)
    return {
        "gelu": 4 * NUM_ELEMENTS / group.time_call(lambda: F.gelu(x, approximate="tanh")),
        "adamw": 28 * (NUM_ELEMENTS // 4) / group.time_call(optimizer.step),
    }


def time_attention(group: Group) -> dict[str, Any]:
    """Return the FLOP/s of causal attention over a forward and a backward pass. Only the lower
    triangle of the scores is counted."""
    on_gpu = group.device.type == "cuda"
    batch, heads, dtype = (16, 16, torch.bfloat16) if on_gpu else (2, 4, torch.float32)
    shape = (3, batch, heads, LENGTH, 64)
    qkv = torch.randn(shape, device=group.device, dtype=dtype, requires_grad=True)
    query, key, value = qkv.unbind()

    def forward_and_backward() -> None:
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(y, (query, key, value), torch.ones_like(y))

    flops = (1 + BACKWARD_ATTENTION) * 2 * batch * heads * LENGTH * LENGTH * 64
    return {
        "length": LENGTH,
        "flops_per_s": {"both": flops / group.time_call(forward_and_backward)},
    }


def time_launches(group: Group) -> dict[str, float]:
    """Return the time in seconds to launch a tiny kernel and, on a GPU, to run a compiled GPT-2
    block forward and backward. The block processes few tokens, so the GPU waits for the host."""
    x = torch.zeros(1024, device=group.device)
    seconds = {"kernel": group.time_call(lambda: x.add_(1))}
    if group.device.type == "cuda":
        model: Decoder = find_model("gpt2").build(dropout=0.0, seed=1)
        block = torch.compile(model.blocks["0"].to(group.device))
        hidden = torch.randn(1, 64, 768, device=group.device, requires_grad=True)
        seconds["compiled_block"] = group.time_call(lambda: block(hidden).sum().backward())
    return seconds


def time_in_step(call: Callable[[], Any]) -> float:
    """Run `call` NUM_CALLS times and return its median duration in seconds. All processes start
    each call together, as in a training run."""
    durations_s = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        call()
        dist.barrier()
        durations_s.append(time.perf_counter() - start)
    return statistics.median(durations_s)


def time_training_on_cpu(measured: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Return the time in seconds that each part of a training step takes on CPUs, and the memory
    bandwidth in bytes/s that follows from these times.

    `measured` contains the results so far. The measured times include the effects of caches and of
    processes that share the CPU."""
    settings = {"strategy": "dp", "model": "gpt2-tiny", "batch_size": 4, "max_length": 512}
    plan = draft_plan(build_config(settings), local_cluster(machine, 1, 1))
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
        "model": time_in_step(lambda: model(ids, ids).backward()),
        "block": time_in_step(lambda: block(hidden).backward(hidden.detach())),
        "update": time_in_step(update),
    }
    # On a busy machine, a block alone can be slower than in the model. The head is assumed to take
    # at least a tenth of the model's time.
    blocks = plan.size.num_layers * seconds["block"]
    seconds["head"] = max(0.1 * seconds["model"], seconds["model"] - blocks)
    # The predicted time of a part is computation + bytes / rate. At a rate of 1 byte/s, the second
    # term equals the number of bytes.
    unit_rates = dict.fromkeys(("block", "head", "update"), 1.0)
    calibration = {**measured, "memory_bytes_per_s": unit_rates}
    step = StepCosts(
        plan,
        from_calibration(
            calibration, cpu_rates(machine.num_cpus, 1, has_bf16=machine.cpu_has_bf16)
        ),
    )
    bytes_per_parameter = UPDATE_BYTES + 2 * MOMENT_BYTES["adamw"]
    traffic = {"update": bytes_per_parameter * plan.size.num_parameters / seconds["update"]}
    for name, costs in (("block", step.block_costs()), ("head", head_costs(step))):
        compute_s, memory_bytes, _ = np.sum(costs, axis=0)
        # Matrix multiplications alone can be slower than in the model. Memory traffic is assumed to
        # take at least a tenth of the time.
        traffic[name] = memory_bytes / max(seconds[name] - compute_s, 0.1 * seconds[name])
    return {"training_s": seconds, "memory_bytes_per_s": traffic}


def calibrate(group: Group) -> dict[str, Any]:
    """Measure the speed of this process and of communication in the group. Return the results, or
    {} on ranks that measure only communication. All ranks must call this function."""
    on_gpu = group.device.type == "cuda"
    process = group.process
    collectives = []
    if process.world_size > 1:
        # Up to 256 MiB on GPUs or 4 MiB on CPUs
        sizes = [4**power for power in range(7, 15 if on_gpu else 12)]
        collectives = time_group(group, None, sizes, ("all_reduce", "all_gather", "reduce_scatter"))
    if on_gpu and process.rank > 0:  # only rank 0 measures; the others wait at the end of the group
        return {}
    group = replace(group, synchronized=not on_gpu)
    results: dict[str, Any] = {
        "matrix_products": time_matmuls(group),
        "attention": [time_attention(group)],
        "seconds": time_launches(group),
        "collectives": collectives,
    }
    if on_gpu:
        results["memory_bytes_per_s"] = time_memory_traffic(group)
    else:
        results |= time_training_on_cpu(results, detect_machine())
    return results


def main(file: Path) -> int:
    """Measure the speed of this machine in all processes that the launcher started. Without a
    launcher, measure it in this process alone. Rank 0 writes the results to `file`. Return the exit
    code."""
    start = time.perf_counter()
    with open_group() as group:
        results = calibrate(group)
    if group.process.rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, provenance("python real_model_example.py plan --calibrate") | results)
        print(f"Wrote {file} after {time.perf_counter() - start:.0f} s.")
    return 0
