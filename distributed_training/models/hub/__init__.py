"""Run any dense decoder from the Hugging Face Hub with transformers' own modeling code. The size of
a model is measured by building its first blocks on the meta device and tracing one of them. This
measurement imports torch unless its result is cached. The result becomes part of ModelSize and of
the plan."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from distributed_training.models.config_file import CONFIG_FILE, cached_json, read_config
from distributed_training.models.size import ModelSize
from distributed_training.models.weights import is_tied
from distributed_training.settings.errors import UserError, describe
from distributed_training.settings.files import shown

if TYPE_CHECKING:
    import torch

    from distributed_training.models.decoder import Decoder

MODEL_TYPES = ()  # this family accepts every model_type that no other family claims
HUB_IDS: dict[str, str] = {}
STORES_TRANSPOSED = False
SUPPORTED = "only dense text decoders are supported, such as gemma2, phi3, olmo2 or gpt_neox"
_VERSION = 7  # version of the format of cached sizes
# Number of blocks to inspect. Layer patterns repeat within fewer blocks.
_FIRST_BLOCKS = 12
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OTHER_PARTS = re.compile(r"(vision|audio|text|speech).*_config$")
_MIXTURE = re.compile(r"(?i)expert|router|moe|mixture")


def sizes(folder: Path | None = None) -> dict[str, ModelSize]:
    """Return the size of the model in `folder`, keyed by the folder's name. Without a folder,
    return {}. Raises UserError if the model is not a dense decoder."""
    if folder is None:
        return {}
    document = read_config(folder)
    file = folder / CONFIG_FILE

    def measure() -> str:
        try:
            _check_model_type(document)
            return TypeAdapter(ModelSize).dump_json(_measure(document)).decode()
        except UnsupportedError as error:
            what = f"{file}: model_type {shown(document.get('model_type'))} {error}"
            raise UserError(what, SUPPORTED) from None
        except Exception as error:  # transformers may raise any exception for a wrong value
            what = f"transformers cannot build a model from {file}"
            raise UserError(what, describe(error)) from None

    text = json.dumps(document, sort_keys=True)
    key = f"{_VERSION} {version('torch')} {version('transformers')} {text}"
    size_text = cached_json(key, measure)
    size = TypeAdapter(ModelSize).validate_json(size_text)
    tied = is_tied(folder, size.tied, size.config["embedding"])
    return {folder.name: replace(size, tied=tied)}


class UnsupportedError(Exception):
    """Raised for an unsupported model. The message continues a sentence that begins with the
    model's type."""


def _check_model_type(document: dict[str, Any]) -> None:
    """Raise UnsupportedError if the model's type or weight format is not supported."""
    from transformers.models.auto import modeling_auto as auto

    model_type = document.get("model_type")
    if document.get("auto_map"):
        raise UnsupportedError("comes with custom code, which is never run")
    if document.get("quantization_config"):
        raise UnsupportedError("has quantized weights. Use an unquantized version of the model")
    for key in sorted(document, reverse=True):
        if _OTHER_PARTS.match(key):
            raise UnsupportedError(f"has a {key}. Use only its text model")
    if document.get("is_encoder_decoder"):
        raise UnsupportedError("is an encoder-decoder")
    is_causal = model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_causal or model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise UnsupportedError("is not a decoder that transformers supports")


def _check_layers(config: Any) -> None:
    """Raise UnsupportedError if a model has layers other than full or sliding-window attention."""
    types = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in types and not getattr(config, "sliding_window", None):
        raise UnsupportedError("has sliding-window layers but no sliding_window")
    if not getattr(config, "num_attention_heads", 0):
        raise UnsupportedError("has no attention heads")
    unknown_types = types - _LAYER_TYPES
    if unknown_types:
        raise UnsupportedError(f"has layers of type {', '.join(sorted(unknown_types))}")


def _measure(document: dict[str, Any]) -> ModelSize:
    """Return a model's size, measured by building its first blocks and tracing one of them. Raises
    UnsupportedError if the model is not a dense decoder or its blocks differ in shape."""
    from distributed_training.models.hub import model
    from distributed_training.models.hub.attention import receives_documents
    from distributed_training.models.hub.trace import trace

    config = model.make_config(document)
    _check_layers(config)
    net = model.build_net(model.make_config(document, max_layers=_FIRST_BLOCKS))
    path, inner, blocks = model.find_blocks(net)
    _check_stored_tensors(net)
    matrices = _measure_matrices(blocks, config.num_attention_heads)
    head = net.get_output_embeddings()
    if head is None:
        raise UnsupportedError("has no output layer")
    names = {parameter: name for name, parameter in net.named_parameters()}
    embedding = net.get_input_embeddings().weight
    vocab_size = len(head.weight)
    hidden_size = embedding.shape[1]
    tied = head.weight is embedding
    block_tensors = list(blocks[0].parameters())
    block_parameters = sum(parameter.numel() for parameter in block_tensors)
    matrix_parameters = sum(rows * columns for rows, columns in matrices.values())
    other_parameters = sum(parameter.numel() for parameter in names)
    other_parameters -= len(blocks) * block_parameters
    num_tables = 1 if tied else 2
    return ModelSize(
        vocab_size=vocab_size,
        num_positions=model.read_num_positions(config),
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        hidden_size=hidden_size,
        block_matrices=tuple(matrices.values()),
        hf_matrices={name: {name: rows} for name, (rows, _) in matrices.items()},
        block_parameters=block_parameters,
        block_parameters_split=matrix_parameters,
        block_norm_parameters=block_parameters - matrix_parameters,
        block_tensors=len(block_tensors),
        final_norm_parameters=other_parameters - num_tables * vocab_size * hidden_size,
        tied=tied,
        **trace(document),
        splits=False,
        packs=receives_documents(inner.to("meta")),
        config={
            "document": document,
            "blocks": path,
            "embedding": names[embedding],
            "head": model.read_logit_transform(net),
        },
    )


def _check_stored_tensors(net: Any) -> None:
    """Raise UnsupportedError if a model has experts, or stores tensors other than parameters."""
    for module in net.modules():
        if _MIXTURE.search(type(module).__name__):
            raise UnsupportedError("is a mixture of experts")
    stored = net.state_dict()
    for name, _ in net.named_buffers():
        if name in stored:
            raise UnsupportedError(f"saves {name}, which is not a parameter")


def _measure_matrices(blocks: Any, num_heads: int) -> dict[str, tuple[int, int]]:
    """Return the names and shapes of the matrices in each of the blocks. Raises UnsupportedError if
    a matrix does not belong to a linear layer, or if the blocks differ in shape."""
    from distributed_training.models.hub.model import LINEAR_CLASSES

    matrices = {
        name: tuple(module.weight.shape)
        for name, module in blocks[0].named_modules()
        if type(module).__name__ in LINEAR_CLASSES
    }
    shapes = {name: parameter.shape for name, parameter in blocks[0].named_parameters()}
    for name, shape in shapes.items():
        # Small tables, such as a bias for each head, are not matrices.
        is_table = len(shape) == 2 and min(shape) <= num_heads
        is_linear = name.rpartition(".")[0] in matrices
        if len(shape) > 1 and not is_table and not is_linear:
            raise UnsupportedError(f"has a matrix outside its linear layers: {name}")
    for block in blocks:
        if {name: parameter.shape for name, parameter in block.named_parameters()} != shapes:
            raise UnsupportedError("has blocks of different shapes")
    if not matrices:
        raise UnsupportedError("has no linear layers")
    return matrices


def build(size: ModelSize, *, dropout: float) -> Decoder:
    """Build the model in fp32. Its caller sets the device and the initial weights."""
    from distributed_training.models.hub.model import HubDecoder

    return HubDecoder(size, dropout)


def to_hf(
    our_name: str,
    tensor: torch.Tensor,
    size: ModelSize,
) -> dict[str, torch.Tensor]:
    """Return a dict that contains only `tensor`, keyed by its name in transformers."""
    if our_name.startswith("blocks."):
        return {f"{size.config['blocks']}.{our_name.removeprefix('blocks.')}": tensor}
    return {our_name.removeprefix("net."): tensor}


def map_tensor_names(
    names: Iterable[str],
    size: ModelSize,
) -> dict[str, str]:
    """Map the names of tensors in a file to their names in the model. Tensors that transformers
    ignores are omitted. Raises UserError for a tensor that transformers would convert while
    loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    from distributed_training.models.private import is_ignored

    net = _build_one_block_net(json.dumps(size.config["document"]))
    mapping: list[Any] = get_model_conversion_mapping(net)
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    conversions = [item for item in mapping if not isinstance(item, WeightRenaming)]
    names_in_model = {}
    for name in names:
        new_name, converted = rename_source_key(name, renamings, conversions)
        if converted is not None:
            what = f"{name} is stored in a format that transformers converts while loading"
            raise UserError(what, fix="save the model again with a current transformers")
        if not is_ignored(net, new_name):
            names_in_model[name] = new_name
    return names_in_model


def file_name(name: str, size: ModelSize) -> str:
    """Return the name that the model's tensor `name` has in weight files."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    net = _build_one_block_net(json.dumps(size.config["document"]))
    (stored_name,) = revert_weight_conversion(net, {name: torch.empty(0)})
    return stored_name


@functools.cache
def _build_one_block_net(text: str) -> Any:
    """Return a model without weights and with only its first block. `text` is the model's config as
    JSON."""
    from distributed_training.models.hub.model import build_net, make_config

    return build_net(make_config(json.loads(text), max_layers=1))


def to_config(size: ModelSize, eos_token_id: int) -> dict[str, Any]:
    """Return the config.json from which the model was read, with `tie_word_embeddings` set to
    `size.tied`. If the config has no end-of-text token, add `eos_token_id`."""
    document = {**size.config["document"], "tie_word_embeddings": size.tied}
    if document.get("eos_token_id") is None:
        document["eos_token_id"] = eos_token_id
    return document
