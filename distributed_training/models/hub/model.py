"""Wrap a decoder from transformers as a `Decoder` (models/decoder.py).

The modules and their computations come from transformers. The wrapper adds casts, the loss, the
names of blocks, and the boundaries of packed documents. Weights are cast to `compute_dtype` at each
use, as in FSDP and DeepSpeed."""

import contextlib
import copy
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from distributed_training.models import private
from distributed_training.models.attention import Documents
from distributed_training.models.decoder import (
    EXPERT_ENDS,
    Decoder,
    KVCache,
    Linear,
    Positions,
    project_to_vocabulary,
    softcap,
)
from distributed_training.models.hub import UnsupportedError, text_document
from distributed_training.models.hub.attention import NAME, attention, set_chunk_sizes
from distributed_training.models.hub.experts import STACKS, experts
from distributed_training.models.hub.packing import separate_recurrences
from distributed_training.models.initial_weights import Slices, WeightSource, stored_buffers
from distributed_training.models.size import ModelSize
from distributed_training.settings.errors import UserError, describe

# Classes that compute x W^T plus an optional bias
LINEAR_CLASSES = {"Linear", "FalconLinear"}


def make_config(document: dict[str, Any], dropout: float = 0.0) -> Any:
    """Build the transformers config with all dropout rates set to `dropout`, but without layer
    dropout."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[document["model_type"]]
    with _wrong_values_refused():
        config = config_class.from_dict(private.decode_floats(document))
    if document.get("head_dim", 0) is None:  # HunYuan's default, which its code cannot use
        config.head_dim = config.hidden_size // config.num_attention_heads
    for key, value in config.to_dict().items():
        if "drop" in key and type(value) in (float, int):
            setattr(config, key, 0.0 if key.endswith("layerdrop") else dropout)
    return config


@contextlib.contextmanager
def _wrong_values_refused() -> Iterator[None]:
    """Raise UnsupportedError if transformers raises an exception, which may be of any class."""
    try:
        yield
    except Exception as error:
        raise UnsupportedError(f"cannot be built by transformers: {describe(error)}") from None


def build_whole_net(document: dict[str, Any]) -> Any:
    """Build the transformers model of a config.json on the meta device. It is multimodal if the
    config has a `text_config`."""
    from transformers import AutoModelForImageTextToText

    config = make_config(document)
    if "text_config" not in document:
        return build_net(config)
    with torch.device("meta"), _wrong_values_refused():
        return AutoModelForImageTextToText.from_config(config).to("meta")


def build_net(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Build the transformers model with parameters on the meta device and buffers on the CPU. The
    model calls this package's attention and experts if its class accepts replacements."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AttentionInterface,
        logging,
    )
    from transformers.integrations.moe import ExpertsInterface

    logging.set_verbosity_error()
    mappings: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    model_class: Any = next(
        mapping[type(config)] for mapping in mappings if type(config) in mapping
    )
    AttentionInterface.register(NAME, attention)  # transformers then builds no masks
    ExpertsInterface.register(NAME, experts)
    with torch.device("meta"), _wrong_values_refused():
        net = private.build_hub_model(model_class, config, dtype, NAME)
    separate_recurrences(net)
    set_chunk_sizes(net)
    net.to("meta")  # some parameters are on the CPU, such as results of torch.normal
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if getattr(module, "rope_type", "") == "dynamic":  # it acts only beyond `num_positions`
            module.rope_type = "default"
        if hasattr(module, "is_transposed"):  # a module of the ExpertsInterface
            ends = torch.zeros(module.num_experts, dtype=torch.int32, device="cpu")
            module.register_buffer(EXPERT_ENDS, ends, persistent=False)
    with torch.device("cpu"):
        private.initialize_buffers(net)  # A module may initialize the buffers of others.
    return net


def read_num_positions(config: Any) -> int:
    """Return the maximum length of a sample, or 2**20 if the config has no limit."""
    for key in ("max_position_embeddings", "max_seq_len"):
        value = getattr(config, key, None)
        if value is not None and value > 0:  # XLNet's is -1
            return int(value)
    return 2**20


def read_num_stable(config: Any) -> int:
    """Return the maximum length of a sample in which the position of each token depends only on the
    tokens of its record."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [read_num_positions(config)]
    for parameters in (rope, *rope.values()):  # of the model, or of each type of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4 scales by the sample's position
        limits.append(config.floor_scale - 1)
    return min(limits)


def read_num_kv_heads(config: Any) -> int | None:
    """Return the number of key/value heads, or None if it is that of queries or differs between
    layers."""
    count = config.to_dict().get("num_key_value_heads")
    return count if isinstance(count, int) else None


def find_blocks(net: Any) -> tuple[str, Any, nn.ModuleList]:
    """Return (name of a model's list of blocks, module that runs these blocks on token ids, list of
    blocks). Raises UnsupportedError if there is no such module."""
    count = net.config.num_hidden_layers
    for name, module in net.named_modules():
        if "input_ids" in inspect.signature(module.forward).parameters:
            for child_name, child in module.named_children():
                if isinstance(child, nn.ModuleList) and len(child) == count:
                    return f"{name}.{child_name}", module, child
    raise UnsupportedError(f"has no module that takes token ids and runs a list of {count} blocks")


def list_outer_modules(net: nn.Module, inner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a model calls before or after its blocks, with their names. These are
    beside `inner` or in it."""
    for owner_name, owner in net.named_modules():
        if inner in owner.modules():
            for name, module in owner.named_children():
                if inner not in module.modules() and not isinstance(module, nn.ModuleList):
                    yield f"{owner_name}.{name}".removeprefix("."), module


def is_read_directly(module: nn.Module, matrix: str) -> bool:
    """Return whether code computes with the weight of a matrix in a module, as in Mamba's fused
    kernels. Adapters would then have no effect."""
    parent, _, name = matrix.rpartition(".")
    code = _source(type(module.get_submodule(parent)))  # type: ignore[arg-type]
    weight = f"self.{name}.weight"
    return any(f"{weight}{end}" in code for end in (",", " @", ".clamp("))


@functools.cache  # Finding a class in its file takes 60 ms.
def _source(cls: type) -> str:
    # Subclasses that this package makes have the names of their classes, but no code.
    return inspect.getsource([base for base in cls.__mro__ if base.__name__ == cls.__name__][-1])


class HubDecoder(private.MovedModule, Decoder):
    """Decoder that wraps any `AutoModelForCausalLM` model that models/hub/ accepts.

    The blocks of the transformers model are in `blocks`, and `net` contains its other modules."""

    inner: Any  # the module of `net` whose forward runs the blocks
    head: Any  # the output layer
    entry: Any = None  # the stand-in before this stage's blocks, which returns what was received
    exit: Any = None  # the stand-in after this stage's blocks, which keeps what is to be sent
    # Number of parts into which tp splits the tokens of a sample, or 0 without tp. With tp, hidden
    # states do not show how many tokens and samples there are.
    token_parts = 0
    cast_dtype: torch.dtype | None  # value of `compute_dtype`, which each module also has

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__(size, dropout)
        # The weights decide whether the output layer is tied, as in transformers.
        document = text_document(size.config["document"]) | {"tie_word_embeddings": size.tied}
        net = build_net(make_config(document, dropout))
        path, inner, layers = find_blocks(net)
        self.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(layers)})
        self.net = net
        name = path.rpartition(".")[2]
        delattr(inner, name)  # A registered list would give every parameter a second name.
        setattr(inner, name, tuple(layers))
        head = net.get_output_embeddings()
        norm_out: nn.Module = nn.Identity()
        for child in inner.children():
            if type(child).__name__.endswith("Norm"):
                norm_out = child
        # Plain references, because these modules already have names in `net`. A model without a
        # norm after the blocks gets an identity instead.
        vars(self).update(
            inner=inner, head=head, token_embedding=net.get_input_embeddings(), norm_out=norm_out
        )
        if size.tied:
            del head.weight
        buffers = stored_buffers(self)
        for path, module in self.named_modules():
            names = tuple(name for name, _ in module.named_parameters(recurse=False))
            if not names:  # such as the decays of MiniMax, but no statistics of a router
                own = module.named_buffers(recurse=False)
                names = tuple(name for name, _ in own if f"{path}.{name}" in buffers)
            if type(module).__name__ in LINEAR_CLASSES and module is not head:
                cls = _cast_class(Linear, names) if is_read_directly(self, path) else Linear
                module.__class__ = cls  # type: ignore[assignment]
                module.adapter = None  # type: ignore[assignment]
            elif type(module) is nn.Embedding:
                module.register_forward_hook(_cast_output)
            elif names:
                module.__class__ = _cast_class(type(module), names)  # type: ignore[arg-type]
        # Position embeddings may be fp32 buffers, which would make the whole residual stream fp32.
        self.blocks["0"].register_forward_pre_hook(_cast_input)
        self.compute_dtype = None

    @property
    def compute_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """Dtype in which all modules read their parameters. None keeps the stored dtype."""
        return self.cast_dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype | None) -> None:
        # Each module holds the dtype, so that the modules' classes do not refer to this model.
        # torch.compile caches these classes, and everything that they refer to, until the process
        # ends.
        for module in self.modules():
            module.cast_dtype = dtype  # type: ignore[assignment]

    def run(
        self,
        x: torch.Tensor,
        positions: Positions,
        documents: Documents | None,
        past: KVCache | None,
    ) -> torch.Tensor:
        """Run the whole model except its output layer on token ids [B, T]. Return the output of the
        last norm, [B, T, D]. If this is a pipeline stage, other stages' modules do nothing."""
        options: dict[str, Any] = {"use_cache": past is not None}
        if documents is not None:
            if isinstance(positions, int):
                positions += torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
            options |= {"documents": documents, "position_ids": positions}
        elif self.token_parts:
            length = x.shape[1] * (1 if self.is_first else self.token_parts)
            options["position_ids"] = torch.arange(length, device=x.device)[None]
        if past is not None:
            names = inspect.signature(self.inner.forward).parameters
            name = "cache" if "cache" in names else "past_key_values"
            if past.cache is not None:  # otherwise, the model creates one of its own class
                options[name] = past.cache
            if "position_ids" in names:  # Bamba would count them in a block that caches no keys
                own_positions = torch.arange(past.length, past.length + x.shape[1])
                options["position_ids"] = own_positions.to(x.device).expand(x.shape)
            if getattr(self.net.config, "attention_chunk_size", None):
                options["first_position"] = past.length
        if self.is_first:
            options["input_ids"] = x
        else:
            # The first stage has done what the model does before its blocks, so this does not
            # matter here.
            options["inputs_embeds"] = torch.zeros_like(x)
            self.entry.received = x
        output = self.inner(**options)
        y = output.last_hidden_state
        if past is not None:
            past.cache = getattr(output, name, None)
            past.length += x.shape[1]
            if past.length == self.size.num_positions < self.size.context_length:
                past.cache = None  # The next token changes the positions of all tokens.
            if past.cache is None:  # RecurrentGemma returns none, so it computes all tokens again.
                past.length = 0
        if not self.is_first:
            self.entry.received = None
        if not self.is_last:
            y, self.exit.sent = self.exit.sent, None
        return y  # type: ignore[no-any-return]

    def stage(self, blocks: range) -> "HubDecoder":
        """Return the pipeline stage that contains a range of blocks, as in `Decoder.stage`. It runs
        the code of the whole model, in which stand-ins replace the modules of other stages."""
        is_first = blocks.start == 0
        is_last = blocks.stop == self.size.num_layers
        if is_first and is_last:
            return self
        stand_ins = {
            block: StandIn(block, self.size.config["block_outputs"])
            for index, block in self.blocks.items()
            if int(index) not in blocks
        }
        shared = [self.blocks[str(index)] for index in blocks]
        for name, module in list_outer_modules(self.net, self.inner):
            is_here = is_first if name in self.size.config["before_blocks"] else is_last
            if is_here or not any(True for _ in module.parameters()):
                shared.append(module)
            elif not (is_last and self.size.tied and module is self.token_embedding):
                stand_ins[module] = StandIn(module)
        # A copy refers to the values of `memo` instead of the objects with these ids.
        memo = {id(kept): kept for kept in (*shared, self.size, self.loss, self.net.config)}
        memo |= {id(module): stand_in for module, stand_in in stand_ins.items()}
        stage = copy.deepcopy(self, memo)
        stage.is_first, stage.is_last = is_first, is_last
        if not is_first:
            vars(stage)["entry"] = stand_ins[self.blocks[str(blocks.start - 1)]]
        if not is_last:
            vars(stage)["exit"] = stand_ins[self.blocks[str(blocks.stop)]]
            stage.exit.sends = True
        for index in self.blocks:
            if int(index) not in blocks:
                del stage.blocks[index]
        return stage

    def apply_head(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [B, T, V] from the last norm's output [B, T, D]. With targets [B, T],
        return the summed loss instead."""
        head = self.size.config["head"]
        scale = head["scale"]
        x = x * scale if scale != 1 else x
        weight = private.local_part(self.output_weight).to(x.dtype)
        bias = private.stored_parameter(self.head, "bias")
        if bias is not None:
            bias = private.local_part(bias)
            # Express the bias as the weight of one more hidden unit whose value is 1. Seven more
            # columns of zeros keep the rows aligned.
            column = scale * bias.to(x.dtype)[:, None]
            weight = torch.cat([weight, F.pad(column, (0, 7))], 1)
            x = F.pad(x, (0, 8), value=1.0)
        if targets is None:
            return project_to_vocabulary(x, weight, self.size.vocab_size, cap=head["cap"])
        if len(weight) % 8:  # GPUs multiply unaligned rows at a fraction of their speed
            weight = F.pad(weight, (0, 0, 0, self.size.padded_vocab_size - len(weight)))
        return self.loss(x, weight, targets, self.size.vocab_size, cap=head["cap"])

    @property
    def output_weight(self) -> torch.Tensor:
        holder = self.token_embedding if self.size.tied else self.head
        return private.stored_parameter(holder, "weight")  # type: ignore[no-any-return]

    def vocabulary_parameters(self) -> list[str]:
        tables = {self.token_embedding, self.head}
        return [
            f"{name}.{key}"
            for name, module in self.named_modules()
            if module in tables
            for key, _ in module.named_parameters(recurse=False)
        ]

    def random_source(self, seed: int, device: torch.device, *, hashed: bool) -> WeightSource:
        """Return a source of random weights that depend only on `seed` and `hashed`. Linear layers,
        embeddings and experts have the distribution that most models have in transformers, as in
        `Decoder.random_source`. transformers initializes all other parameters, on the CPU."""
        draw_matrix = super().random_source(seed, device, hashed=hashed)
        indices = {name: index for index, (name, _) in enumerate(self.named_parameters())}
        # Shapes before matrices are quantized, by module. draw_matrix draws stacks of experts.
        shapes = defaultdict[str, dict[str, torch.Size]](dict)
        for name, parameter in self.named_parameters():
            module_name, _, key = name.rpartition(".")
            shapes[module_name][key] = torch.Size([0]) if key in STACKS else parameter.shape
        buffers = stored_buffers(self)
        lock = threading.Lock()  # All threads share torch's global generator.

        def draw(name: str, slices: Slices) -> Any:
            if name in buffers:
                return buffers[name]  # initialized when the model was built
            module_name, _, parameter_name = name.rpartition(".")
            is_layer = isinstance(self.get_submodule(module_name), nn.Linear | nn.Embedding)
            if parameter_name in STACKS or (is_layer and parameter_name == "weight"):
                return draw_matrix(name, slices)
            with lock, torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
                module = private.copy_with_unset_parameters(
                    self.get_submodule(module_name), shapes[module_name]
                )
                module.cast_dtype = None  # Initial values written to a cast copy would be lost.
                torch.manual_seed(seed * 100_003 + indices[name])
                private.initialize(self.net, module)
            values = private.stored_parameter(module, parameter_name).detach()
            if values.isnan().any():
                # The module around Qwen3-Next's router initializes it, as a linear layer.
                if values.dim() == 2:
                    return draw_matrix(name, slices)
                raise UserError(
                    f"{name} has no random values: transformers initializes it only in a "
                    "constructor. Set weights=pretrained."
                )
            return values[slices]

        return draw

    def move(self, function: private.MapTensor, recurse: bool) -> None:
        """Apply `function` to the model, but keep the dtype of buffers, such as rotary
        frequencies."""
        buffers = {id(buffer) for buffer in self.buffers()}

        def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
            moved = function(tensor)
            return tensor.to(moved.device) if id(tensor) in buffers else moved

        super().move(move_tensor, recurse)


class StandIn(nn.Module):
    """Module that replaces a module of another pipeline stage, and returns its input. It has the
    attributes of that module, because models read them."""

    received: torch.Tensor | None = None  # hidden states that are returned instead of the input
    sends = False  # whether the input is kept in `sent`
    sent: torch.Tensor | None = None

    def __init__(self, original: nn.Module, num_outputs: int = 0) -> None:
        """Replace `original`, which returns a tuple of `num_outputs` values, or a tensor if it is
        0."""
        super().__init__()
        vars(self).update(original=original, num_outputs=num_outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def forward(self, x: Any, *_arguments: Any, **_options: Any) -> Any:
        if self.received is not None:
            x = self.received
        elif self.sends:
            self.sent = x
        elif not torch.is_tensor(x) or x.dim() < 3:
            x = torch.zeros(())  # added to hidden states, instead of embeddings of positions
        return (x, *[None] * (self.num_outputs - 1)) if self.num_outputs else x


def _cast_output(module: Any, _ids: Any, x: torch.Tensor) -> torch.Tensor:
    """Cast the embeddings of the input tokens to the module's `cast_dtype`. Casting the whole
    embedding table would take longer."""
    return x.to(module.cast_dtype or x.dtype)


def _cast_input(block: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (_cast_output(block, None, args[0]), *args[1:])


@functools.cache  # Modules of one class share a subclass, so that torch.compile shares one graph.
def _cast_class(cls: Any, names: tuple[str, ...]) -> type:
    """Return a subclass of the module class `cls` that casts the parameters listed in `names` to
    the module's `cast_dtype` whenever they are read."""

    def cast(name: str) -> property:
        def read(self: Any) -> torch.Tensor:
            value = private.stored_parameter(self, name)
            # FSDP reads its own shards, whose mesh has more axes.
            if isinstance(value, DTensor) and value.device_mesh.mesh_dim_names == ("tp",):
                value = value.to_local()
            return value.to(self.cast_dtype or value.dtype)

        return property(read)

    members: dict[str, Any] = {name: cast(name) for name in names}
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__, "cast_dtype": None})


def read_logit_transform(net: Any, inner: Any) -> dict[str, float]:
    """Return the "scale" and "cap" of the function that a model applies to the results z of its
    output layer, whose inputs are computed by `inner`. The model's parameters need no values.

    The function is `scale * z` if the cap is 0, and `cap * tanh(scale * z / cap)` otherwise. Raises
    UnsupportedError for any other function."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            """Return None for what only some models return."""

    z = torch.tensor([1e-6, 1.0, -3.0, 50.0, 1e9], dtype=torch.float64)
    output = Output(last_hidden_state=z[None, :, None])
    head = net.get_output_embeddings()
    inner.forward = lambda *_arguments, **_options: output
    head.forward = lambda x: x
    ids = torch.zeros(1, len(z), dtype=torch.int64)
    logits = net(input_ids=ids, use_cache=False).logits
    y = logits.double().flatten()
    del inner.forward, head.forward
    scale = float(f"{float(y[0] / z[0]):.9g}")
    scaled = scale * z
    is_only_scaled = torch.allclose(y, scaled, rtol=1e-6)
    cap = 0.0 if is_only_scaled else float(y[-1])
    if not torch.allclose(y, softcap(scaled, cap), rtol=1e-4):
        raise UnsupportedError("changes its logits by more than scaling and capping")
    return {"scale": scale, "cap": cap}
