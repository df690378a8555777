"""Any dense decoder from the Hugging Face Hub, computed by transformers' own modeling code.

Unlike the other families, reading a model's size imports torch: the first blocks are built on the
device "meta" and one of them is traced. The results become part of ModelSize and of the plan."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from distributed_training.models import ModelSize
from distributed_training.models.config_file import CONFIG_FILE, keep_answer, read_config
from distributed_training.models.weights import is_tied
from distributed_training.settings.cache import cache_folder
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

if TYPE_CHECKING:
    import torch

    from distributed_training.models.decoder import Decoder

MODEL_TYPES = ()  # this family accepts every model_type that no other family claims
HUB_IDS: dict[str, str] = {}
STORES_TRANSPOSED = False
SUPPORTED = "only dense text decoders are supported, such as gemma2, phi3, olmo2 or gpt_neox"
_VERSION = 4  # format of the sizes in the user's cache
_MAX_LAYERS = 4096
# Number of blocks to inspect: layer patterns repeat within fewer blocks
_FIRST_BLOCKS = 12
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OTHER_PARTS = re.compile(r"(vision|audio|text|speech).*_config$")
_MIXTURE = re.compile(r"(?i)expert|router|moe|mixture")


def sizes(folder: Path | None = None) -> dict[str, ModelSize]:
    """Return the size of the model in `folder`, by the folder's name, or {} without a folder.
    Raises UserError if the model is not a dense decoder."""
    if folder is None:
        return {}
    text = json.dumps(read_config(folder), sort_keys=True)
    size = TypeAdapter(ModelSize).validate_json(_measured_size(text, str(folder / CONFIG_FILE)))
    tied = is_tied(folder, size.tied, size.config["embedding"]) if size.tied else False
    return {folder.name: replace(size, tied=tied)}


@functools.cache
def _measured_size(text: str, file: str) -> str:
    """Return the size of a model as JSON, from the `text` of its config.

    Building and tracing a block takes seconds, so the user's cache keeps the answer for later
    processes and runs."""
    releases = " ".join(map(version, ("torch", "transformers")))
    key = hashlib.sha256(f"{_VERSION} {releases} {text}".encode()).hexdigest()
    cached = cache_folder() / "configs" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        cached_answer = cached.read_text()
        TypeAdapter(ModelSize).validate_json(cached_answer)
        return cached_answer
    document = json.loads(text)
    try:
        _check_model_type(document, file)
        size = _measure(document, file)
    except UserError:
        raise
    except Exception as error:  # transformers raises anything for a wrong value
        why = f"{type(error).__name__}: {shown(' '.join(str(error).split())[:300])[1:-1]}"
        raise UserError(f"transformers cannot build a model from {file}", why) from None
    answer = TypeAdapter(ModelSize).dump_json(size).decode()
    keep_answer(answer, cached)
    return answer


def _check_model_type(document: dict[str, Any], file: str) -> None:
    """Raise UserError if the config's type of model is not supported."""
    from transformers.models.auto import modeling_auto as auto

    model_type = document.get("model_type")
    what = f"{file}: model_type {shown(model_type)}"
    if document.get("auto_map"):
        raise UserError(f"{what} has code of its own, which is never run", SUPPORTED)
    if document.get("quantization_config"):
        fix = "use the folder of the model without quantization"
        raise UserError(f"{what} has quantized weights, which cannot be trained", fix=fix)
    if part := max(filter(_OTHER_PARTS.match, document), default=None):
        fix = f"use the text model alone: {SUPPORTED}"
        raise UserError(f"{what} has a {part}", "it is more than a text model", fix)
    if document.get("is_encoder_decoder"):
        raise UserError(f"{what} is an encoder-decoder", SUPPORTED)
    is_causal = model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_masked = model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if not is_causal or is_masked:
        raise UserError(f"{what} is not a decoder that transformers knows", SUPPORTED)


def _measure(document: dict[str, Any], file: str) -> ModelSize:
    """Build and trace the first blocks of a model. Raises UserError for a model that is not dense,
    or whose blocks differ in shape."""
    from transformers import CONFIG_MAPPING

    from distributed_training.models.hub.attention import receives_documents
    from distributed_training.models.hub.model import (
        LINEARS,
        build_net,
        find_blocks,
        read_head,
        read_num_positions,
    )
    from distributed_training.models.hub.trace import UnusedParameterError, trace

    what = f"{file}: model_type {shown(document['model_type'])}"
    config = CONFIG_MAPPING[document["model_type"]].from_dict(document)
    if not getattr(config, "num_attention_heads", 0):
        raise UserError(f"{what} has no attention heads", SUPPORTED)
    types = getattr(config, "layer_types", None) or ()
    if unknown_types := set(types) - _LAYER_TYPES:
        listed = ", ".join(sorted(unknown_types))
        raise UserError(f"{what} has layers of type {listed}", SUPPORTED)
    if "sliding_attention" in types and not getattr(config, "sliding_window", None):
        fix = "add sliding_window to the config, or correct layer_types"
        raise UserError(f"{what} has sliding-window layers but no sliding_window", fix=fix)
    num_layers = config.num_hidden_layers
    if not 1 <= num_layers <= _MAX_LAYERS:
        raise UserError(f"{what} has {num_layers} layers", f"1 to {_MAX_LAYERS} are accepted")
    num_positions = read_num_positions(config)
    if num_positions < 1:
        raise UserError(f"{what} has {num_positions} positions", "at least 1 is accepted")
    net = build_net(document, 0.0, min(num_layers, _FIRST_BLOCKS))
    path, blocks = find_blocks(net)
    for module in net.modules():
        if _MIXTURE.search(type(module).__name__):
            raise UserError(f"{what} is a mixture of experts", SUPPORTED)
    for name, _ in net.named_buffers():
        if name in net.state_dict():
            raise UserError(f"{what} saves {name}, which is not a parameter", SUPPORTED)
    matrices: dict[str, tuple[int, int]] = {}
    for name, module in blocks[0].named_modules():
        if type(module).__name__ in LINEARS:
            matrices[name] = tuple(module.weight.shape)
            continue
        for key, value in module._parameters.items():
            if value is not None and _is_matrix(value, config):
                reason = f"{name}.{key} in its blocks is a matrix, but not of a linear layer"
                raise UserError(f"{what} is not supported: {reason}", SUPPORTED)
    shapes = [{n: p.shape for n, p in block.named_parameters()} for block in blocks]
    if any(block_shapes != shapes[0] for block_shapes in shapes):
        raise UserError(f"{what} has blocks of different shapes", SUPPORTED)
    embedding = net.get_input_embeddings().weight
    head = net.get_output_embeddings()
    if head is None or not matrices:
        raise UserError(f"{what} has no linear layers or no output layer", SUPPORTED)
    names = [name for name, value in net.named_parameters() if value is embedding]
    all_parameters = sum(p.numel() for p in net.parameters())
    in_blocks = sum(p.numel() for p in blocks.parameters())
    in_tables = len(head.weight) * embedding.shape[1] * (1 if head.weight is embedding else 2)
    block_parameters = sum(p.numel() for p in blocks[0].parameters())
    in_matrices = sum(rows * columns for rows, columns in matrices.values())
    try:
        traced = trace(document)
    except UnusedParameterError as error:
        raise UserError(f"{what} has blocks that do not use {error}", SUPPORTED) from None
    packs = receives_documents(net.to("meta").get_submodule(path.rpartition(".")[0]))
    return ModelSize(
        vocab_size=len(head.weight),
        num_positions=num_positions,
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        hidden_size=embedding.shape[1],
        block_matrices=tuple(matrices.values()),
        matrix_names=tuple(matrices),
        block_parameters=block_parameters,
        block_parameters_split=in_matrices,
        block_norm_parameters=block_parameters - in_matrices,
        block_tensors=len(shapes[0]),
        final_norm_parameters=all_parameters - in_blocks - in_tables,
        tied=head.weight is embedding,
        traced=traced,
        splits=False,
        packs=packs,
        config={
            "document": document,
            "head": read_head(net),
            "blocks": path,
            "embedding": names[0],
        },
    )


def _is_matrix(value: torch.Tensor, config: Any) -> bool:
    """Return whether a parameter is a matrix with more rows and columns than there are heads."""
    return value.dim() > 2 or (value.dim() == 2 and min(value.shape) > config.num_attention_heads)


def build(size: ModelSize, *, dropout: float, seed: int) -> Decoder:
    """Build the model on the CPU in fp32, with random weights as transformers draws them."""
    from distributed_training.models.decoder import build_decoder
    from distributed_training.models.hub.model import HubDecoder

    return build_decoder(HubDecoder, size, dropout, seed)


def to_hf(ours: str, tensor: torch.Tensor, size: ModelSize) -> dict[str, torch.Tensor]:
    """Return the tensor under its name in transformers."""
    if ours.startswith("blocks."):
        return {f"{size.config['blocks']}.{ours.removeprefix('blocks.')}": tensor}
    return {ours.removeprefix("net."): tensor}


def to_config(size: ModelSize, eos_token_id: int) -> dict[str, Any]:
    """Return the config.json that the model was read from. If it names no end-of-text token, add
    `eos_token_id`."""
    document: dict[str, Any] = {**size.config["document"], "tie_word_embeddings": size.tied}
    if document.get("eos_token_id") is None:
        document["eos_token_id"] = eos_token_id
    return document


def module_names(names: Iterable[str], size: ModelSize) -> dict[str, str]:
    """Map names of tensors in files to their names in transformers' modules."""
    from distributed_training.models.hub import names as names_of_files

    return names_of_files.module_names(names, size.config["document"])


def file_name(name: str, size: ModelSize) -> str:
    """Return the name that a tensor of transformers' modules has in files."""
    from distributed_training.models.hub import names

    return names.file_name(name, size.config["document"])
