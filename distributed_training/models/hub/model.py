"""A decoder of transformers in the frame of `models/decoder.py`. Its modules and their arithmetic
are transformers' own; the frame adds the loss, the blocks' names, casts and documents.

Weights are cast at each use to `compute_dtype`, as FSDP and DeepSpeed hand them to modules."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models import ModelSize
from distributed_training.models.decoder import Box, Decoder, Linear, Past, Source
from distributed_training.models.hub.attention import NAME, register
from distributed_training.settings.errors import UserError

LINEARS = {"Linear", "FalconLinear"}  # classes that compute x W^T, and add a bias


def make_config(document: dict[str, Any], dropout: float, num_layers: int | None) -> Any:
    """Return transformers' config, with `dropout` at every place and only `num_layers` blocks."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[document["model_type"]].from_dict(document)
    for key, value in config.to_dict().items():
        if isinstance(value, float | int) and key.endswith(("dropout", "pdrop", "layerdrop")):
            setattr(config, key, 0.0 if key.endswith("layerdrop") else dropout)
        if num_layers and isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, key, value[:num_layers])
    if num_layers:
        config.num_hidden_layers = num_layers
    return config


def from_config(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Build transformers' model on the default device, with attention of this suite if it takes
    any."""
    from transformers import AutoModelForCausalLM, logging
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    logging.set_verbosity_error()
    register()
    own: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=NAME if own._supports_attention_backend else None
    )


def build_net(document: dict[str, Any], dropout: float, num_layers: int | None = None) -> Any:
    """Build transformers' model on the device "meta", with its buffers on the CPU. With
    `num_layers`, build only the first blocks."""
    with torch.device("meta"):
        net = from_config(make_config(document, dropout, num_layers))
    for module in net.modules():
        if [*module.buffers(recurse=False)]:
            parameters = dict(module._parameters)
            module._parameters.clear()  # stay on "meta"
            module.to_empty(device="cpu", recurse=False)
            module._parameters.update(parameters)
            with torch.device("cpu"):
                net._init_weights(module)
    return net


def find_blocks(net: Any) -> tuple[str, nn.ModuleList]:
    """Return the name of a model's list of blocks, and the list."""
    count = net.config.num_hidden_layers
    for name, module in net.base_model.named_modules(prefix=net.base_model_prefix):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise UserError(f"transformers' {type(net).__name__} has no list of {count} blocks")


class HubDecoder(Decoder):
    """Any model of `AutoModelForCausalLM` that models/hub/ accepts. `net` is the model of
    transformers without its blocks, which are the frame's."""

    inner: Any  # the module of `net` that ran the blocks
    head: Any  # the output layer
    norm_out: Any  # the norm after the blocks; an identity if there is none

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__(size, dropout)
        net = build_net(size.config["document"], dropout)
        path, layers = find_blocks(net)
        parent, _, name = path.rpartition(".")
        self.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(layers)})
        self.net = net
        inner = net.get_submodule(parent)
        delattr(inner, name)  # else every parameter would have two names
        setattr(inner, name, tuple(layers))
        head = net.get_output_embeddings()
        norms = [child for child in inner.children() if type(child).__name__.endswith("Norm")]
        # References, not modules of this one: they have names in `net`.
        vars(self).update(
            inner=inner, token_embedding=net.get_input_embeddings(), head=head,
            norm_out=norms[-1] if norms else nn.Identity(),
        )  # fmt: skip
        if size.tied:
            head._parameters.pop("weight")
        self.takes = set(inspect.signature(inner.forward).parameters)
        self.compute_dtype = None
        classes: dict[Any, type] = {}
        for module in (*net.modules(), *self.blocks.modules()):
            _cast_parameters(module, self, classes)

    def stage(self, blocks: range) -> Decoder:
        """Return the model itself: there are no stages of it."""
        assert len(blocks) == self.size.num_layers
        return self

    def hidden(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        past: Past | None = None,
    ) -> torch.Tensor:
        """Token ids [B, T] -> the last norm's output, [B, T, D]."""
        options: dict[str, Any] = {"use_cache": past is not None}
        if positions is not None and ends is not None:
            options["documents"] = self.describe(positions, ends)
            if "position_ids" in self.takes:
                options["position_ids"] = positions
        if past is not None:
            options["past_key_values"] = past.cache = past.cache or self._new_cache()
            past.length += x.shape[1]
        found: torch.Tensor = self.inner(input_ids=x, **options).last_hidden_state
        return found

    def leave(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The last norm's output [B, T, D] -> logits [B, T, V], or the summed loss."""
        how = self.size.config["head"]
        x = x * how["scale"] if how["scale"] != 1 else x
        weight = self.output_weight.to(x.dtype)
        if (bias := self.head._parameters.get("bias")) is not None:
            # A bias is the weight of one more hidden unit, which is 1. Rows stay aligned.
            weight = torch.cat([weight, F.pad(how["scale"] * bias.to(x.dtype)[:, None], (0, 7))], 1)
            x = torch.cat([x, torch.ones_like(x[..., :1]).expand(*x.shape[:-1], 8)], -1)
        options = {"cap": how["cap"]} if how["cap"] else {}
        if targets is None:
            return self.project(x, weight, self.size.vocab_size, **options)
        return self.loss(x, weight, targets, self.size.vocab_size, **options)

    @property
    def output_weight(self) -> torch.Tensor:
        holder: Any = self.token_embedding if self.size.tied else self.head
        weight: torch.Tensor = holder._parameters["weight"]
        return weight

    def random_source(self, seed: int, device: torch.device, *, hashed: bool) -> Source:
        """Return a source of weights as transformers draws them on the CPU, which depend on `seed`
        alone."""
        indices = {name: index for index, (name, _) in enumerate(self.named_parameters())}
        lock = threading.Lock()  # torch's own generator is one for all threads

        def draw(name: str, box: Box) -> torch.Tensor:
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            # Use transformers' own class: a parameter of the subclass reads as a cast copy, and
            # initial values written to the copy would be lost.
            blank: Any = object.__new__(getattr(module, "uncast", type(module)))
            vars(blank).update(vars(module))
            blank._parameters = {
                key: value if value is None else nn.Parameter(torch.empty(value.shape))
                for key, value in module._parameters.items()
            }
            with lock, torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed * 100_003 + indices[name])
                self.net._init_weights(blank)
            values: torch.Tensor = blank._parameters[last].detach()
            return values[box]

        return draw

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.net.config)

    def _apply(self, fn: Any, recurse: bool = True) -> "HubDecoder":
        """Move buffers, such as rotary frequencies, without changing their dtype."""
        kept: Any = [(module, dict(module._buffers)) for module in self.modules()]
        super()._apply(fn, recurse)
        for module, buffers in kept:
            for name, old in buffers.items():
                if old is not None:
                    module._buffers[name] = old.to(module._buffers[name].device)
        return self


def _cast_parameters(module: nn.Module, model: HubDecoder, classes: dict[Any, type]) -> None:
    """Let a module see its parameters in the model's compute dtype, in place. All modules of a
    class get the same one of `classes`: blocks then share a graph of torch.compile."""
    if type(module).__name__ in LINEARS and module is not model.head:
        module.__class__ = Linear
        module.adapter = None  # type: ignore[assignment]
    elif type(module) is nn.Embedding:
        module.register_forward_hook(lambda _module, _ids, x: x.to(model.compute_dtype or x.dtype))
    elif names := tuple(module._parameters):
        key = (type(module), names)
        if key not in classes:
            classes[key] = _cast_class(*key, model)
        module.__class__ = classes[key]


def _cast_class(cls: type, names: tuple[str, ...], model: HubDecoder) -> type:
    """Return a subclass that reads its parameters in the model's compute dtype."""

    def cast(name: str) -> property:
        def read(self: nn.Module) -> torch.Tensor:
            value: Any = self._parameters[name]
            dtype = model.compute_dtype
            return value if value is None or dtype is None else value.to(dtype)

        return property(read)

    return type(cls.__name__, (cls,), {"uncast": cls, **{name: cast(name) for name in names}})


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


def read_head(net: Any) -> dict[str, float]:
    """Return what a model does to the output layer's products z: "scale", times z, or with a "cap"
    cap tanh(scale z / cap). Raises UserError for anything else."""
    z = torch.tensor([1e-6, 1.0, -3.0, 50.0, 1e9], dtype=torch.float64)
    from transformers.modeling_outputs import MoeModelOutputWithPast

    given = MoeModelOutputWithPast(last_hidden_state=z[None, :, None])
    vars(given).update(cross_attentions=None)
    inner = net.get_submodule(find_blocks(net)[0].rpartition(".")[0])
    head = net.get_output_embeddings()
    with _replaced(inner, lambda *_a, **_k: given), _replaced(head, lambda x: x):
        y = net(input_ids=torch.zeros(1, len(z), dtype=torch.int64), use_cache=False).logits
    y = y.double().flatten()
    scale = float(f"{float(y[0] / z[0]):.9g}")
    if torch.allclose(y, scale * z, rtol=1e-6):
        return {"scale": scale, "cap": 0.0}
    cap = float(y[-1])
    if torch.allclose(y, cap * torch.tanh(scale * z / cap), rtol=1e-4):
        return {"scale": scale, "cap": cap}
    raise UserError(f"the logits of {type(net).__name__} pass through an unknown function")
