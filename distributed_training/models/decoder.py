"""The frame of a decoder-only language model, which a family fills with its blocks.
Letters in the shape comments: B batch, T tokens, D hidden, V vocabulary, P padded vocabulary."""

import copy
import fnmatch
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models import ModelSize
from distributed_training.models.attention import Documents, attend, describe_documents

Role = Literal["column", "row", "whole", "heads", "positions", "vocabulary"]
"""What tensor parallelism makes of a module: split by its output; split by its input (outputs are
terms of a sum); held whole and used by each process on its own tokens, or on its own heads; the
same for a table that is indexed by position; rows dealt out by token."""
Positions = int | torch.Tensor
"""Where tokens are: the position of the first, which others follow, or of each of them, [B, T]."""
# Constants of SplitMix64 as int64, and an odd number that spreads keys.
_SPLITMIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, 0x2545F4914F6CDD1D)
_ROLES: dict[str, Role] = {
    "token_embedding": "vocabulary",
    "blocks.*.norm_[12]": "whole",
    "blocks.*.qkv": "column",
    "blocks.*.attention_out": "row",
    "blocks.*.mlp_in": "column",
    "blocks.*.mlp_out": "row",
    "norm_out": "whole",
    "output_rows": "vocabulary",
}


class Linear(nn.Linear):
    """nn.Linear in the dtype of its input: fp32 weights are rounded at use (and their gradients
    arrive in fp32), so that every strategy has the same arithmetic. A block calls each of its own
    once, with [B, T, features]: parallel/zero_bubble.py counts on it."""

    adds_bias = True  # not where the product is one term of a sum: who sums adds it
    # A function of (layer, x) in place of what follows. One for all layers: torch.compile shares a
    # block's graph only among blocks that call the same functions.
    instead: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        # A module of (x, product) whose output takes the product's place (parallel/lora.py).
        self.adapter: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x) if self.instead is None else self.instead(self, x)
        return y if self.adapter is None else self.adapter(x, y)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T, and the bias where this layer adds it."""
        return F.linear(x, self.weight.to(x.dtype), self.own_bias(x.dtype))

    def own_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        return self.bias.to(dtype) if self.adds_bias and self.bias is not None else None


class Past:
    """Keys and values of the tokens that a whole model has seen, each of which passed it once."""

    def __init__(self) -> None:
        self.length = 0
        self.cache: Any = None  # of a model that keeps them itself
        self._kept: dict[nn.Module, tuple[torch.Tensor, ...]] = {}

    def add(self, block: nn.Module, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A block's keys and values of all tokens, [B, H, T, K], with its `new` ones."""
        if block in self._kept:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(self._kept[block], new, strict=True))
        self._kept[block] = new
        return self._kept[block]


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then an MLP. A family's __init__ sets norm_1,
    qkv, attention_out, norm_2, mlp_in and mlp_out, in the order of its parameters."""

    norm_1: nn.Module
    attention_out: Linear
    norm_2: nn.Module
    # x [B, T, D], `Positions` -> q, k, v, each [B, H, T, K]; k, v with H or fewer.
    heads: Callable[..., Sequence[torch.Tensor]]
    mlp: Callable[..., torch.Tensor]  # [B, T, D] -> [B, T, D]

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, x: torch.Tensor, past: Past | None = None, documents: Documents | None = None
    ) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        y = self.attention(self.norm_1(x), past, documents)
        x = x + F.dropout(y, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm_2(x)), self.dropout, self.training)

    def attention(
        self, x: torch.Tensor, past: Past | None = None, documents: Documents | None = None
    ) -> torch.Tensor:
        """Causal self-attention, [B, T, D] -> [B, T, D]; of packed records, within `documents`."""
        start = past.length if past is not None else 0
        q, k, v = self.heads(x, start if documents is None else documents.positions)
        if past is not None:
            k, v = past.add(self, k, v)
        rate = self.dropout if self.training else 0.0
        y = attend(q, k, v, documents, is_causal=start == 0, dropout=rate)
        return self.attention_out(y.flatten(2))


class Decoder(nn.Module):
    """Token embedding, blocks, final norm, output layer: a whole model, or a stage of one.
    A family's __init__ sets the modules below, in the order of its parameters, and those that
    `place` needs: the first stage holds what is set before the blocks, the last what is set after.
    The embedding has `size.padded_vocab_size` rows; padding is cut off the logits, or masked,
    before anything sees them."""

    # Patterns of module names -> role, besides those of _ROLES.
    roles: ClassVar[dict[str, Role]] = {}
    token_embedding: nn.Embedding
    blocks: nn.ModuleDict
    norm_out: nn.Module
    output_rows: nn.Embedding  # a table like the embedding, [P, D], where the size is not tied

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__()
        self.size = size
        self.dropout = dropout
        self.is_first = self.is_last = True
        self.compute_dtype: torch.dtype | None = None  # of the residuals; None: the parameters'
        # Gives parameters that are on the device "meta" their initial values (fill_parameters)
        self.fill: Callable[..., None] | None = None
        # Adapters that training continues, of all blocks (peft.py); {}: new ones
        self.initial_adapters: Mapping[str, torch.Tensor] = {}
        # What follows the last norm, to be compiled or replaced.
        self.loss: Callable[..., torch.Tensor] = summed_cross_entropy
        self.project: Callable[..., torch.Tensor] = project_to_vocabulary

    def forward(
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        past: Past | None = None,
    ) -> torch.Tensor:
        """Token ids [B, T] -> logits [B, T, V]; with targets [B, T], of which targets[:, t] follows
        input_ids[:, t], the fp32 sum of the loss over those other than IGNORE_INDEX. The ids follow
        those of the `past`, if any, and become part of it. `positions` and `ends`: those of packed
        records, as in `Samples.batch`. Stages but the first take hidden states [B, T, D], and
        stages but the last return them."""
        x = self.hidden(x, positions, ends, past)
        return self.leave(x, targets) if self.is_last else x

    def hidden(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        past: Past | None = None,
    ) -> torch.Tensor:
        """Token ids, or hidden states, of a stage -> what its last block returns, [B, T, D]."""
        options: dict[str, Any] = {} if past is None else {"past": past}
        if self.is_first:
            start = past.length if past else 0
            x = self.enter(x, start if positions is None else positions)
        if positions is not None and ends is not None:
            options["documents"] = self.describe(positions, ends)
        for block in self.blocks.values():
            x = block(x, **options)
        if past is not None:
            past.length += x.shape[1]
        return x

    @property
    def describe(self) -> Callable[[torch.Tensor, torch.Tensor], Documents]:
        """What describes documents as this model's attention reads them."""
        return functools.partial(
            describe_documents,
            dtype=self.compute_dtype or torch.float32,
            head_size=self.size.attention_width // self.size.num_heads,
            dropout=self.dropout,
        )

    def enter(self, ids: torch.Tensor, positions: Positions = 0) -> torch.Tensor:
        """What precedes the blocks, [B, T] -> [B, T, D], of tokens at `positions`."""
        return self.place(self.token_embedding(ids), positions)

    def leave(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """What follows the blocks, [B, T, D] -> logits [B, T, V], or the summed loss."""
        x = self.norm_out(x)
        weight = self.output_weight.to(x.dtype)
        if targets is None:
            return self.project(x, weight, self.size.vocab_size)
        return self.loss(x, weight, targets, self.size.vocab_size)

    def place(self, x: torch.Tensor, positions: Positions = 0) -> torch.Tensor:
        """What follows the lookup, [B, T, D] -> [B, T, D], of tokens at `positions`."""
        return F.dropout(x.to(self.compute_dtype or x.dtype), self.dropout, self.training)

    @property
    def output_weight(self) -> torch.Tensor:
        """Rows of the output layer, [P, D]; on the last stage, and on the first where tied."""
        return self.token_embedding.weight if self.size.tied else self.output_rows.weight

    def stage(self, blocks: range) -> "Decoder":
        """A run of blocks, with what belongs to the ends, under the names of the whole model. Takes
        modules over; a last stage that is not the first gets a copy of a tied embedding."""
        part = copy.copy(self)
        nn.Module.__init__(part)  # without modules and hooks
        part.is_first = blocks.start == 0
        part.is_last = blocks.stop == self.size.num_layers
        modules = list(self.named_children())
        place = modules.index(("blocks", self.blocks))
        before = modules[:place] if part.is_first else []
        for name, module in before:
            setattr(part, name, module)
        part.blocks = nn.ModuleDict({str(i): self.blocks[str(i)] for i in blocks})
        if part.is_last and self.size.tied and not part.is_first:
            weight = self.token_embedding.weight.detach().clone()
            part.token_embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        after = modules[place + 1 :] if part.is_last else []
        for name, module in after:
            setattr(part, name, module)
        return part

    def find_roles(self) -> dict[str, Role]:
        """What tensor parallelism makes of this model's, or stage's, modules, by their names."""
        return {
            name: role
            for name, _ in self.named_modules()
            for pattern, role in (_ROLES | self.roles).items()
            if fnmatch.fnmatchcase(name, pattern)
        }

    def random_source(self, seed: int, device: torch.device, *, hashed: bool) -> "Source":
        """Return a source of random weights that depend on `seed` alone (`random_source`)."""
        return random_source(self, seed, device, hashed=hashed)

    def vocabulary_parameters(self) -> list[str]:
        """Names of parameters with one row for each token, `padded_vocab_size` of them."""
        roles = self.find_roles().items()
        return [f"{name}.weight" for name, role in roles if role == "vocabulary"]


def project_to_vocabulary(
    x: torch.Tensor, weight: torch.Tensor, vocab_size: int, cap: float = 0.0
) -> torch.Tensor:
    """Hidden states [B, T, D], output rows [P, D] -> logits [B, T, V], between -cap and cap."""
    return limit(F.linear(x, weight)[..., :vocab_size], cap)


def limit(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Bring logits smoothly between -cap and cap; 0 leaves them as they are."""
    return torch.tanh(logits / cap) * cap if cap else logits


def summed_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, cap: float = 0.0
) -> torch.Tensor:
    """Hidden states [B, T, D], output rows [P, D], targets [B, T] -> summed loss, fp32 scalar."""
    logits = limit(F.linear(x, weight).float().flatten(0, -2), cap)
    logits = mask_padding(logits, vocab_size)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def mask_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [N, P], changed in place. Padding is not cut off, as GPUs are quicker with whole
    rows of P numbers, each of which begins at an even address."""
    if logits.shape[1] > vocab_size:
        columns = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(columns >= vocab_size, -torch.inf)
    return logits


def is_block_matrix(name: str, size: ModelSize) -> bool:
    """Return whether a parameter is the weight of one of a block's matrices."""
    return any(fnmatch.fnmatchcase(name, f"blocks.*.{key}.weight") for key in size.matrix_names)


class Fingerprint:
    """A checksum of some thousand numbers of each parameter of a whole model, of which a process
    may have parts."""

    def __init__(self, model: Decoder) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        # (name, indices of samples, their values) of this process's parts
        self.found: list[tuple[str, list[int], list[float]]] = []

    def watching(self, source: "Source") -> "Source":
        """Return `source`, of whose values samples are taken. It may be used in several threads."""

        def read(name: str, box: Box) -> torch.Tensor:
            values = source(name, box)
            start = tuple(part.start or 0 for part in box) or (0,) * values.dim()
            self._take(name, start, values)
            return values

        return read

    def _take(self, name: str, start: tuple[int, ...], values: torch.Tensor) -> None:
        shape = self.shapes[name]
        step = max(1, shape.numel() // 1000)
        places = torch.unravel_index(torch.arange(0, shape.numel(), step, device="cpu"), shape)
        inside = torch.ones_like(places[0], dtype=torch.bool)
        for place, first, size in zip(places, start, values.shape, strict=True):
            inside &= (place >= first) & (place < first + size)
        (indices,) = torch.where(inside)
        own = [place[indices] - first for place, first in zip(places, start, strict=True)]
        samples = values[tuple(index.to(values.device) for index in own)]
        self.found.append((name, indices.tolist(), samples.float().tolist()))

    def combine(self, found: Iterable[Any] | None = None) -> int:
        """Return the checksum of the samples that all processes have `found`, or this one alone."""
        samples: dict[str, Any] = {
            name: np.zeros(len(range(0, shape.numel(), max(1, shape.numel() // 1000))), np.float32)
            for name, shape in self.shapes.items()
        }
        for name, indices, values in itertools.chain.from_iterable(found or [self.found]):
            samples[name][indices] = values
        return zlib.crc32(b"".join(each.tobytes() for each in samples.values()))


Box = tuple[slice, ...]  # part of a tensor, from its first dimension on; (): all of it
# Returns a box of a parameter's initial values, by the parameter's name.
Source = Callable[[str, Box], torch.Tensor]
# Returns the memory in which this process has its part of a parameter, and where the part begins.
Locate = Callable[[torch.Tensor], tuple[torch.Tensor, tuple[int, ...]]]


def build_decoder(family: type[Decoder], size: ModelSize, dropout: float, seed: int) -> Decoder:
    """Build a family's model in fp32 on the current default device, with random weights. On the
    device "meta" it has only names and shapes."""
    device = torch.get_default_device()
    with torch.device("meta"):
        model = family(size, dropout)
    if device.type != "meta":
        source = model.random_source(seed, device, hashed=device.type != "cpu")
        fill_parameters(model, source, device)
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Move parameters that are on "meta", whose values are then undefined, and buffers to `device`,
    in place."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                tensor = torch.empty_like(parameter, device=device)
                module.register_parameter(name, nn.Parameter(tensor, parameter.requires_grad))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module.to_empty(device=device, recurse=False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def locate_whole(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a parameter that one process holds whole, and where it begins."""
    return parameter.detach(), (0,) * parameter.dim()


def fill_parameters(
    model: nn.Module,
    source: Source,
    device: torch.device,
    round_to: torch.dtype | None = None,
    locate: Locate = locate_whole,
) -> None:
    """Give the parameters of a model that are on "meta" their initial values, in place: this
    process's parts, on `device`, rounded to `round_to`. Beside them two parts are in RAM: one is
    read while the other is converted, in another thread."""
    pending = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    allocate(model, device)
    parameters = dict(model.named_parameters())

    def fill(name: str) -> None:
        local, start = locate(parameters[name])
        if local.numel() == 0:
            return
        ends = zip(start, local.shape, strict=True)
        values = source(name, tuple(slice(first, first + size) for first, size in ends))
        if values.shape != local.shape:
            local.zero_()  # rows beyond the vocabulary's
        values = values.to(device)
        own = local[tuple(map(slice, values.shape))]
        own.copy_(values if round_to is None else values.to(round_to))

    on_gpu = device.type == "cuda"
    if on_gpu:  # the threads work on another stream
        torch.cuda.synchronize(device)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, pending))
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def random_source(model: Decoder, seed: int, device: torch.device, *, hashed: bool) -> Source:
    """Return a source of random weights, made on `device`, that depend on `seed` alone: matrices
    normal with deviation 0.02, those whose products are added to the residuals with less (Radford
    et al. 2019), biases 0, norms 1. Padding of the vocabulary is 0. `hashed`: by `hashed_normal`,
    of which each process makes its own part, as on GPUs; else by torch's generator of the CPU."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    indices = {name: index for index, name in enumerate(shapes)}
    roles = model.find_roles()
    padded = model.vocabulary_parameters()

    def draw(name: str, box: Box) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) < 2:
            values = torch.empty(shape, device=device)[box]
            return values.fill_(0.0 if name.endswith("bias") else 1.0)
        adds = roles.get(name.removesuffix(".weight")) == "row"
        deviation = 0.02 / math.sqrt(2 * model.size.num_layers) if adds else 0.02
        key = seed * 100_003 + indices[name]
        if hashed:
            values = hashed_normal(shape, box, key, device).mul_(deviation)
        else:
            values = torch.empty(shape, device="cpu")
            values.normal_(0.0, deviation, generator=torch.Generator().manual_seed(key))
            values = values[box]
        if name in padded:
            first = box[0].start if box else 0
            values[max(0, model.size.vocab_size - first) :].zero_()
        return values

    return draw


def hashed_normal(shape: Sequence[int], box: Box, key: int, device: torch.device) -> torch.Tensor:
    """Return a box of a matrix of random numbers, each of which depends on `key` and its place
    alone, to the last bit on every device: the sum of four uniform ones, which is close to normal,
    with deviation 1 and none beyond 3.5. The hash is SplitMix64 (Steele et al. 2014)."""
    bounds: Any = itertools.zip_longest(box, shape, fillvalue=slice(None))
    (first, stop, _), columns = (part.indices(size) for part, size in bounds)
    places = torch.arange(*columns, device=device)
    out = torch.empty(stop - first, len(places), device=device)
    offset = (key * _SPLITMIX[3] + 2**63) % 2**64 - 2**63
    step = max(1, 2**22 // len(places))  # rows at a time
    for begin in range(first, stop, step):
        rows = torch.arange(begin, min(stop, begin + step), device=device)
        bits = (rows[:, None] * shape[1] + places).mul_(_SPLITMIX[0]).add_(offset)
        for shift, factor in ((30, _SPLITMIX[1]), (27, _SPLITMIX[2]), (31, 1)):
            bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
        total = sum((bits >> shift).bitwise_and_(0xFFFF) for shift in (0, 16, 32, 48))
        out[begin - first : begin - first + step] = total - 2 * 0xFFFF
    return out.mul_(math.sqrt(3 / (2**32 - 1)))


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """AdamW's groups of what learns: matrices decay; biases and norms (one-dimensional) do not."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in learning if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in learning if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
