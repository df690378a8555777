"""Measure the rates of this machine's GPUs that predict/rates.py otherwise estimates, in the
processes that `plan --calibrate` starts. Only rank 0 measures computation."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from distributed_training.models import find_model
from distributed_training.models.decoder import Decoder
from distributed_training.parallel.agree import gather
from distributed_training.predict.rates import tiled_multiplications
from distributed_training.records.record import provenance, write_json
from distributed_training.tools.links import open_group

NUM_CALLS = 50  # number of calls that are timed
# Sizes of the measured linear layer
TOKENS = 16384
IN_FEATURES = 1024
OUT_FEATURES = 3072
NUM_ELEMENTS = 2**28  # elements that GELU reads
GATHERED_BYTES = 2**28  # size of the tensor that is all-gathered


def time_call(call: Callable[[], object]) -> float:
    """Return the mean time per call in seconds."""
    call()  # compiles
    return Timer("call()", globals={"call": call}).timeit(NUM_CALLS).mean


def matmul_flops(device: torch.device) -> float:
    """Return the FLOP/s of a linear layer's three matrix multiplications. FLOPs are counted with
    `tiled_multiplications`, which counts whole tiles."""
    x = torch.randn(TOKENS, IN_FEATURES, device=device, dtype=torch.bfloat16)
    w = torch.randn(OUT_FEATURES, IN_FEATURES, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    w.requires_grad_()

    def forward_and_backward() -> None:
        y = F.linear(x, w)
        torch.autograd.grad(y, (x, w), y.detach())

    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    shapes = (
        (TOKENS, IN_FEATURES, OUT_FEATURES),  # forward
        (TOKENS, OUT_FEATURES, IN_FEATURES),  # gradient of x
        (OUT_FEATURES, TOKENS, IN_FEATURES),  # gradient of w
    )
    multiplications = sum(tiled_multiplications(*shape, num_sms) for shape in shapes)
    return 2 * multiplications / time_call(forward_and_backward)


def memory_bandwidth(device: torch.device) -> float:
    """Return the bytes/s that GELU reads and writes."""
    x = torch.randn(NUM_ELEMENTS, device=device, dtype=torch.bfloat16)
    return 4 * NUM_ELEMENTS / time_call(lambda: F.gelu(x, approximate="tanh"))


def block_seconds(device: torch.device) -> float:
    """Return the time to launch a compiled GPT-2 block forward and backward. The block processes
    few tokens, so the GPU waits for the host."""
    model: Decoder = find_model("gpt2").build(dropout=0.0, seed=1)
    block = torch.compile(model.blocks["0"].to(device))
    hidden = torch.randn(1, 64, 768, device=device, requires_grad=True)
    return time_call(lambda: block(hidden).sum().backward())


def link_bandwidth(device: torch.device) -> float:
    """Return the bytes/s that the slowest rank sends in an all-gather. All ranks must call this
    function."""
    members = dist.get_world_size()
    shard = torch.zeros(GATHERED_BYTES // 4 // members, device=device)
    tensor = shard.repeat(members)
    seconds = max(gather(time_call(lambda: dist.all_gather_into_tensor(tensor, shard))))
    return (members - 1) / members * GATHERED_BYTES / seconds


def main(file: Path) -> int:
    """Measure the rates in all processes that the launcher started. Without a launcher, measure
    them in this process alone. Rank 0 writes the results to `file`. Return the exit code."""
    rates = {}
    with open_group() as (process, device):
        if process.world_size > 1:
            rates["link_bytes_per_s"] = link_bandwidth(device)
        if process.rank > 0:  # only rank 0 measures; the others wait at the end of the group
            return 0
        rates["gemm_flops"] = matmul_flops(device)
        rates["memory_bytes_per_s"] = memory_bandwidth(device)
        block_s = block_seconds(device)
    results = {"rates": rates, "block_s": block_s}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, provenance("python real_model_example.py plan --calibrate") | results)
    print(f"Wrote {file}.")
    return 0
