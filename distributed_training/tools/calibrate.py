"""Measure the speed of this machine's GPUs for predict/rates.py, in the processes that
`plan --calibrate` starts. Only rank 0 measures computation."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from distributed_training.models import find_model
from distributed_training.models.decoder import Decoder
from distributed_training.parallel.agree import gather
from distributed_training.predict.costs.block import BACKWARD_ATTENTION
from distributed_training.records.record import provenance, write_json
from distributed_training.tools.links import Group, open_group

NUM_ELEMENTS = 2**28  # elements that GELU reads; AdamW updates a quarter as many
MODELS = ("gpt2-medium", "gpt2-xl")
TOKENS = 16384
LENGTH = 1024  # sequence length at which attention is measured


def time_matmuls(group: Group) -> list[dict[str, Any]]:
    """Measure matrix multiplications in the forward pass and for the gradients of the inputs and
    the weights. Return the FLOP/s by shape and dtype."""
    entries = []
    for model in MODELS:
        size = find_model(model).size
        for n, k in (*size.block_matrices, (size.padded_vocab_size, size.hidden_size)):
            for dtype in (torch.bfloat16, torch.float32):
                # fp32 has the same low speed for all shapes, so one shape is enough.
                if dtype == torch.float32 and n != 3072:
                    continue
                x = torch.randn(TOKENS, k, device=group.device, dtype=dtype)
                w = torch.randn(n, k, device=group.device, dtype=dtype)
                y = F.linear(x, w)
                calls = {
                    "forward": partial(F.linear, x, w),
                    "inputs": partial(torch.mm, y, w),
                    "weights": partial(torch.mm, y.t(), x),
                }
                flops = 2 * TOKENS * k * n
                rates = {name: flops / group.time_call(call) for name, call in calls.items()}
                shape = {"tokens": TOKENS, "in": k, "out": n, "dtype": str(dtype)}
                entries.append({**shape, "flops_per_s": rates})
    return entries


def time_memory_traffic(group: Group) -> dict[str, float]:
    """Return the memory bandwidth in bytes/s that GELU and AdamW achieve. AdamW moves 28
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
    batch, heads = 16, 16
    shape = (3, batch, heads, LENGTH, 64)
    qkv = torch.randn(shape, device=group.device, dtype=torch.bfloat16, requires_grad=True)
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
    """Return the time in seconds to launch a tiny kernel, and to run a compiled GPT-2 block forward
    and backward. The block processes few tokens, so the GPU waits for the host."""
    x = torch.zeros(1024, device=group.device)
    model: Decoder = find_model("gpt2").build(dropout=0.0, seed=1)
    block = torch.compile(model.blocks["0"].to(group.device))
    hidden = torch.randn(1, 64, 768, device=group.device, requires_grad=True)
    return {
        "kernel": group.time_call(lambda: x.add_(1)),
        "compiled_block": group.time_call(lambda: block(hidden).sum().backward()),
    }


def time_all_gathers(group: Group) -> list[dict[str, Any]]:
    """Return the time in seconds to all-gather tensors of up to 256 MiB, on the slowest rank. All
    ranks must call this function."""
    members = group.process.world_size
    entries = []
    for num_bytes in (4**power for power in range(7, 15)):
        shard = torch.zeros(num_bytes // 4 // members, device=group.device)
        call = partial(dist.all_gather_into_tensor, shard.repeat(members), shard)
        seconds = max(gather(group.time_call(call)))
        entries.append({"members": members, "bytes": num_bytes, "seconds": {"all_gather": seconds}})
    return entries


def main(file: Path) -> int:
    """Measure the speed of this machine in all processes that the launcher started. Without a
    launcher, measure it in this process alone. Rank 0 writes the results to `file`. Return the exit
    code."""
    start = time.perf_counter()
    with open_group() as group:
        collectives = time_all_gathers(group) if group.process.world_size > 1 else []
        if group.process.rank > 0:  # only rank 0 measures; the others wait at the end of the group
            return 0
        group = replace(group, synchronized=False)
        results = {
            "matrix_products": time_matmuls(group),
            "attention": [time_attention(group)],
            "seconds": time_launches(group),
            "memory_bytes_per_s": time_memory_traffic(group),
            "collectives": collectives,
        }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, provenance("python real_model_example.py plan --calibrate") | results)
    print(f"Wrote {file} after {time.perf_counter() - start:.0f} s.")
    return 0
