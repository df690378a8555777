"""Define a small model that can be split into stages, its data, and GPT-2's blocks.

Weights are initialized layer by layer, so they are the same however the model is split.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedream.errors import UserError
from pipedream.schedules.orders import layers_per_stage

Config = Mapping[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]

WIDTH = 32
NUM_CLASSES = 8
TASK_MICROBATCHES = 64  # number of different microbatches; training repeats them


class ResidualLayer(nn.Module):
    """Residual layer: `x + down(tanh(up(norm(x))))`. A deep stack of these layers can be trained,
    unlike a stack of plain tanh layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, width] -> [batch, width]
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build_stages(
    num_stages: int, layers_per_stage: int, *, seed: int, dtype: torch.dtype = torch.float64
) -> list[nn.Module]:
    """Build stages with `layers_per_stage` layers each. The last stage ends in a classifier."""
    stages: list[list[nn.Module]] = [[] for _ in range(num_stages)]
    for layer in range(num_stages * layers_per_stage):
        torch.manual_seed(seed * 10_000 + layer)
        stages[layer // layers_per_stage].append(ResidualLayer(WIDTH))
    torch.manual_seed(seed * 10_000 + 9_999)
    stages[-1] += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)]
    return [nn.Sequential(*stage).to(dtype) for stage in stages]


class Task(NamedTuple):
    """Inputs and targets of all samples, and the number of samples per microbatch."""

    inputs: Tensor
    targets: Tensor
    microbatch_size: int

    def microbatch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a microbatch. Microbatches are counted from the start of
        training. After all samples have been used, the microbatches repeat."""
        first = index * self.microbatch_size % len(self.targets)
        rows = slice(first, first + self.microbatch_size)
        return self.inputs[rows], self.targets[rows]


def build_task(*, seed: int, microbatch_size: int = 8) -> Task:
    """Build TASK_MICROBATCHES microbatches of normally distributed inputs [samples, WIDTH],
    classified by a random network."""
    num_samples = TASK_MICROBATCHES * microbatch_size
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
    first = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    second = torch.randn(WIDTH, NUM_CLASSES, generator=generator, dtype=torch.float64)
    targets = (torch.tanh(inputs @ first) @ second).argmax(dim=1)
    return Task(inputs, targets, microbatch_size)


class GPT2Size(NamedTuple):
    """Sizes of a stack of GPT-2 blocks. `hidden` must be divisible by `heads`."""

    num_layers: int
    hidden: int
    heads: int
    seq_len: int = 1024


GPT2_SIZES: dict[str, GPT2Size] = {
    "gpt2": GPT2Size(num_layers=12, hidden=768, heads=12),
    "gpt2-medium": GPT2Size(num_layers=24, hidden=1024, heads=16),
    "gpt2-tiny": GPT2Size(num_layers=8, hidden=64, heads=4, seq_len=32),
}


class Block(nn.Module):
    """GPT-2 block: `x + attention(norm(x))`, then `x + mlp(norm(x))`, [B, S, H] -> [B, S, H]."""

    def __init__(self, size: GPT2Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.hidden)
        self.query_key_value = nn.Linear(size.hidden, 3 * size.hidden)
        self.attention_out = nn.Linear(size.hidden, size.hidden)
        self.mlp_norm = nn.LayerNorm(size.hidden)
        self.mlp_in = nn.Linear(size.hidden, 4 * size.hidden)
        self.mlp_out = nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        # [B, S, 3H] -> 3 x [B, heads, S, H / heads]
        qkv = self.query_key_value(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        expanded = functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        return x + self.mlp_out(expanded)


def gpt2_blocks(size: GPT2Size) -> list[nn.Module]:
    """Build the blocks of a GPT-2 without its embedding and head. Initialize their weights as GPT-2
    does, from torch's global generator."""
    blocks = [Block(size) for _ in range(size.num_layers)]
    for module in nn.ModuleList(blocks).modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    # Each block adds twice to the residual stream. This factor keeps the variance of the sum close
    # to the variance of one addition.
    for block in blocks:
        for last in (block.attention_out, block.mlp_out):
            nn.init.normal_(last.weight, std=0.02 / (2 * size.num_layers) ** 0.5)
    return list(blocks)


class Workload:
    """The model to be split into stages, with its loss and its microbatches. All three are
    identical in every process."""

    def __init__(self, config: Config, device: torch.device | None = None) -> None:
        """Read these keys of `config`: num_stages, layers_per_stage, learning_rate, seed, model,
        microbatch_size and dtype. For layers_per_stage, microbatch_size and dtype, None means the
        model's default. Raises UserError if the model's blocks cannot be divided evenly among the
        stages."""
        name = config.get("model", "mlp")
        self.config = config
        self.device = device or torch.device("cpu")
        self.blocks = GPT2_SIZES.get(name)
        p = config["num_stages"]
        total = 2 * p if self.blocks is None else self.blocks.num_layers
        if not config["layers_per_stage"] and total % p:
            divisors = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
            raise UserError(
                f"the {total} blocks of {name} cannot be cut evenly into {p} stages",
                f"set num_stages to one of {divisors}, or set layers_per_stage",
            )
        self.layers_per_rank = config["layers_per_stage"] or total // p
        batch = config.get("microbatch_size") or (8 if self.blocks is None else 4)
        dtype = config.get("dtype")
        self.loss: Loss
        if self.blocks is None:
            dtype = dtype or "float64"
            task = build_task(seed=config["seed"], microbatch_size=batch)
            self.loss = functional.cross_entropy
            text = f"{count(self.layers_per_rank, 'layer')} per stage, {batch} samples"
        else:
            dtype = dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
            # Four microbatches of normally distributed numbers replace embedded text and serve as
            # targets.
            generator = torch.Generator().manual_seed(config["seed"])
            shape = 4 * batch, self.blocks.seq_len, self.blocks.hidden
            x, y = (torch.randn(shape, generator=generator) for _ in range(2))
            task = Task(x, y.to(getattr(torch, dtype)), batch)
            self.loss = functional.mse_loss
            text = (
                f"{count(self.layers_per_rank, 'block')} of hidden size {shape[2]} per stage "
                f"(no embedding, no head), {batch} sequences of {shape[1]}"
            )
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.text = f"{name}, {text} per microbatch, {dtype}"
        inputs = task.inputs.to(self.device, self.dtype)
        self.task = task._replace(inputs=inputs, targets=task.targets.to(self.device))

    def build_modules(self, stages_per_rank: int) -> list[nn.Module]:
        """Return the module of each stage. Every stage except the last returns a tensor with the
        shape and dtype of its input. Raises UserError if a rank's layers cannot be divided
        evenly."""
        layers = layers_per_stage(self.layers_per_rank, stages_per_rank)
        num_stages = self.config["num_stages"] * stages_per_rank
        seed = self.config["seed"]
        if self.blocks is None:
            return build_stages(num_stages, layers, seed=seed, dtype=self.dtype)
        size = self.blocks._replace(num_layers=num_stages * layers)
        torch.manual_seed(seed)
        with self.device:
            blocks = gpt2_blocks(size)
        cuts = range(0, len(blocks), layers)
        return [nn.Sequential(*blocks[cut : cut + layers]).to(self.dtype) for cut in cuts]


def count(number: int, noun: str) -> str:
    """Return text such as '1 stage' or '2 stages'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
