"""Any dense decoder of the Hugging Face Hub, through transformers' own modelling code.

Reading a model builds its first blocks on the device "meta" and traces one: this imports torch,
unlike the other families. The numbers become part of ModelSize, and of the plan."""

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

MODEL_TYPES = ()  # those that no other family has
HUB_IDS: dict[str, str] = {}
STORES_TRANSPOSED = False
_SUPPORTED = "dense decoders for text are supported, such as gemma2, phi3, olmo2 or gpt_neox"
_VERSION = 1  # of what is kept about a model
_MOST_LAYERS = 4096
_FIRST_BLOCKS = 12  # that are looked at: patterns of layers repeat sooner
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MIXTURE = re.compile(r"(?i)expert|router|moe|mixture")


def sizes(folder: Path | None = None) -> dict[str, ModelSize]:
    """Return a folder's size. Raises UserError for a model that is no dense decoder."""
    if folder is None:
        return {}
    text = json.dumps(read_config(folder), sort_keys=True)
    size = TypeAdapter(ModelSize).validate_json(_measured(text, str(folder / CONFIG_FILE)))
    tied = is_tied(folder, size.tied, size.config["embedding"]) if size.tied else False
    return {folder.name: replace(size, tied=tied)}


@functools.cache
def _measured(text: str, file: str) -> str:
    """Return a config's size as JSON. The user's cache keeps it for later processes and runs:
    building and tracing a block takes seconds."""
    releases = " ".join(map(version, ("torch", "transformers")))
    key = hashlib.sha256(f"{_VERSION} {releases} {text}".encode()).hexdigest()
    cached = cache_folder() / "configs" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        kept = cached.read_text()
        TypeAdapter(ModelSize).validate_json(kept)
        return kept
    document = json.loads(text)
    try:
        _check_kind(document, file)
        size = _measure(document, file)
    except UserError:
        raise
    except Exception as error:  # whatever a wrong value raises in transformers
        why = f"{type(error).__name__}: {shown(' '.join(str(error).split())[:300])[1:-1]}"
        raise UserError(f"transformers does not build {file}", why) from None
    answer = TypeAdapter(ModelSize).dump_json(size).decode()
    keep_answer(answer, cached)
    return answer


def _check_kind(document: dict[str, Any], file: str) -> None:
    """Raise UserError for a kind of model that is not supported."""
    from transformers.models.auto import modeling_auto as auto

    kind = document.get("model_type")
    what = f"{file}: model_type {shown(kind)}"
    if document.get("auto_map"):
        raise UserError(f"{what} has code of its own", f"it is never run; {_SUPPORTED}")
    if document.get("quantization_config"):
        raise UserError(f"{what} has quantized weights", "give the model without quantization")
    others = [key for key in ("vision_config", "audio_config", "text_config") if key in document]
    if others:
        fix = f"give the text model alone; {_SUPPORTED}"
        raise UserError(f"{what} has a {others[0]}", "it is more than a text model", fix)
    if document.get("is_encoder_decoder"):
        raise UserError(f"{what} is an encoder-decoder", _SUPPORTED)
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in masked:
        raise UserError(f"{what} is no decoder that transformers has", _SUPPORTED)


def _measure(document: dict[str, Any], file: str) -> ModelSize:
    from transformers import CONFIG_MAPPING

    from distributed_training.models.hub.attention import NAME
    from distributed_training.models.hub.model import LINEARS, build_net, find_blocks, read_head
    from distributed_training.models.hub.trace import trace

    what = f"{file}: model_type {shown(document['model_type'])}"
    config = CONFIG_MAPPING[document["model_type"]].from_dict(document)
    if not getattr(config, "num_attention_heads", 0):
        raise UserError(f"{what} has no attention heads", _SUPPORTED)
    types = getattr(config, "layer_types", None) or ()
    if others := set(types) - _LAYER_TYPES:
        raise UserError(f"{what} has layers of type {', '.join(sorted(others))}", _SUPPORTED)
    if "sliding_attention" in types and not getattr(config, "sliding_window", None):
        raise UserError(f"{what} has layers with a sliding window and no sliding_window")
    num_layers = config.num_hidden_layers
    if not 1 <= num_layers <= _MOST_LAYERS:
        raise UserError(f"{what} has {num_layers} layers", f"at most {_MOST_LAYERS} are accepted")
    net = build_net(document, 0.0, min(num_layers, _FIRST_BLOCKS))
    path, blocks = find_blocks(net)
    for module in net.modules():
        if _MIXTURE.search(type(module).__name__):
            raise UserError(f"{what} is a mixture of experts", _SUPPORTED)
    for name, _ in net.named_buffers():
        if name in net.state_dict():
            raise UserError(f"{what} saves a buffer, {name}", _SUPPORTED)
    matrices: dict[str, tuple[int, int]] = {}
    for name, module in blocks[0].named_modules():
        own = module._parameters.items()
        if type(module).__name__ in LINEARS:
            matrices[name] = tuple(module.weight.shape)
        elif odd := [key for key, value in own if value is not None and _is_matrix(value, config)]:
            raise UserError(f"{what} has {name}.{odd[0]} in its blocks", _SUPPORTED)
    shapes = [{n: p.shape for n, p in block.named_parameters()} for block in blocks]
    if any(other != shapes[0] for other in shapes):
        raise UserError(f"{what} has blocks of several shapes", _SUPPORTED)
    embedding = net.get_input_embeddings().weight
    head = net.get_output_embeddings()
    if head is None or not matrices:
        raise UserError(f"{what} is no decoder of matrices and an output layer", _SUPPORTED)
    names = [name for name, value in net.named_parameters() if value is embedding]
    around = sum(p.numel() for p in net.parameters()) - sum(p.numel() for p in blocks.parameters())
    around -= embedding.numel() * (1 if head.weight is embedding else 2)
    block = sum(p.numel() for p in blocks[0].parameters())
    norms = block - sum(rows * columns for rows, columns in matrices.values())
    return ModelSize(
        vocab_size=len(head.weight),
        num_positions=getattr(config, "max_position_embeddings", None) or 2**20,
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        hidden_size=embedding.shape[1],
        block_matrices=tuple(matrices.values()),
        matrix_names=tuple(matrices),
        block_parameters=block,
        block_parameters_split=block - norms,
        block_norm_parameters=norms,
        block_tensors=len(shapes[0]),
        final_norm_parameters=around,
        tied=head.weight is embedding,
        traced=trace(document),
        splits=False,
        packs=net.config._attn_implementation == NAME,
        config={
            "document": document,
            "head": read_head(net),
            "blocks": path,
            "embedding": names[0],
        },
    )


def _is_matrix(value: torch.Tensor, config: Any) -> bool:
    """Return whether a parameter is more than a vector, or one per head."""
    return value.dim() > 2 or (value.dim() == 2 and min(value.shape) > config.num_attention_heads)


def build(size: ModelSize, *, dropout: float, seed: int) -> Decoder:
    """The model on the CPU in fp32, with random weights as transformers draws them."""
    from distributed_training.models.decoder import build_decoder
    from distributed_training.models.hub.model import HubDecoder

    return build_decoder(HubDecoder, size, dropout, seed)


def to_hf(ours: str, tensor: torch.Tensor, size: ModelSize) -> dict[str, torch.Tensor]:
    """Return the tensor under its name in transformers."""
    if ours.startswith("blocks."):
        return {f"{size.config['blocks']}.{ours.removeprefix('blocks.')}": tensor}
    return {ours.removeprefix("net."): tensor}


def to_config(size: ModelSize, eos_token_id: int) -> dict[str, Any]:
    """Return the config.json that the model was read from, with its end of text if it had none."""
    document: dict[str, Any] = {**size.config["document"], "tie_word_embeddings": size.tied}
    if document.get("eos_token_id") is None:
        document["eos_token_id"] = eos_token_id
    return document


def module_names(names: Iterable[str], size: ModelSize) -> dict[str, str]:
    """Return the names of tensors in files with their names in transformers' modules."""
    from distributed_training.models.hub import names as names_of_files

    return names_of_files.module_names(names, size.config["document"])


def file_name(name: str, size: ModelSize) -> str:
    """Return the name in files of a tensor of transformers' modules."""
    from distributed_training.models.hub import names

    return names.file_name(name, size.config["document"])
