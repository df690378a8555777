"""Run decoders from the Hugging Face Hub with transformers' own modeling code. The size of a model
is measured by building it on the meta device and tracing one block of each kind. This measurement
imports torch unless its result is cached. The result becomes part of ModelSize and of the plan.

A multimodal model is accepted if transformers has a causal model for its text. `Document` in this
package means the values of a config.json."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import TypeAdapter

from distributed_training.models.config_file import (
    CONFIG_FILE,
    cached_json,
    complete_config,
    read_config,
    version,
)
from distributed_training.models.hub.dense import ModelType, dense_size
from distributed_training.models.size import ModelSize
from distributed_training.models.weights import is_tied
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ()  # this family accepts every model_type that no other family claims
SIZES: dict[str, ModelSize] = {}  # models/table.json has those of published models
HUB_IDS: dict[str, str] = {}
MODEL = "distributed_training.models.hub.model:HubDecoder"
STORES_TRANSPOSED = False
SUPPORTED = "use a decoder such as gemma2, phi3, olmo2, qwen3_5 or the text of gemma3"
_VERSION = 105  # version of the format of cached sizes
_OTHER_PARTS = re.compile(r"(vision|audio|text|speech).*_config$")


@functools.cache  # for later calls, because building it takes milliseconds
def _sizes() -> TypeAdapter[ModelSize]:
    """Return the converter between sizes and JSON."""
    return TypeAdapter(ModelSize)


def listed_size(entry: dict[str, Any]) -> ModelSize:
    """Return the size of a model in models/table.json."""
    if "size" in entry:
        return _sizes().validate_python(entry["size"])
    return dense_size(complete_config(entry["config"]), "models/table.json")


def read_size(folder: Path) -> ModelSize:
    """Return the size of the model in `folder`. Raises UserError if the model is not supported."""
    document = read_config(folder)
    file = folder / CONFIG_FILE
    size = wrong = None
    try:
        size = dense_size(document, file)
    except UserError as error:
        wrong = error

    def measure() -> str:
        try:
            return _sizes().dump_json(measure_size(document)).decode()
        except UnsupportedError as error:
            what = f"{file}: model_type {shown(document.get('model_type'))} {error}"
            raise UserError(what, SUPPORTED) from None
        except Exception:  # transformers may raise any exception for a wrong value
            if wrong and document.get("model_type") in get_args(ModelType):
                raise wrong from None
            raise

    if size is None:
        text = json.dumps(document, sort_keys=True)
        key = f"{_VERSION} {version('torch')} {version('transformers')} {text}"
        size = _sizes().validate_json(cached_json(key, measure))
    tied = is_tied(folder, size.tied, size.config["embedding"])
    return replace(size, tied=tied)


class UnsupportedError(Exception):
    """Raised for an unsupported model. The message continues a sentence that begins with the
    model's type."""


def text_document(document: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model's text decoder. In a multimodal model, whether the embedding is
    tied, and the end token, are those of the whole model."""
    text = document.get("text_config")
    if text is None:
        return document
    of_whole = {}
    for key in ("tie_word_embeddings", "eos_token_id", "dtype", "quantization_config"):
        if document.get(key) is not None:
            of_whole[key] = document[key]
    return {**text, **of_whole}


def _check_model_type(document: dict[str, Any]) -> None:
    """Raise UnsupportedError if the model's type or weight format is not supported."""
    from transformers.models.auto import modeling_auto as auto

    text = text_document(document)
    if any(text.get(key) for key in ("is_encoder_decoder", "add_cross_attention")) or (
        document.get("is_encoder_decoder")
    ):
        raise UnsupportedError("is an encoder-decoder")
    for key in sorted(text, reverse=True):
        if _OTHER_PARTS.match(key):
            raise UnsupportedError(f"has a {key} but no separate text model")
    causal = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    model_type = text.get("model_type")
    if model_type not in causal or model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise UnsupportedError("is not a decoder that transformers supports")


def measure_size(document: dict[str, Any]) -> ModelSize:
    """Return a model's size, measured by building it on the meta device and tracing its blocks.
    Raises UnsupportedError if the model is not supported."""
    _check_model_type(document)

    import torch

    from distributed_training.models.hub import files, model, packing
    from distributed_training.models.hub.trace import trace
    from distributed_training.models.private import peft_expert_targets

    config = model.make_config(text_document(document))
    # Transformers raises an exception if code reads a value that differs between blocks.
    for key in {"num_attention_heads", "sliding_window"}.intersection(
        getattr(config, "per_layer_attributes", None) or ()
    ):
        raise UnsupportedError(f"has blocks with different values of {key}")
    if not getattr(config, "num_attention_heads", 0):
        raise UnsupportedError("has no attention heads")
    if getattr(config, "attn_type", "") == "bi":  # XLNet
        raise UnsupportedError("has attention that is not causal")
    types = getattr(config, "layer_types", None) or ()
    if getattr(config, "output_router_logits", False):
        raise UnsupportedError("adds a loss for its router. Set output_router_logits to false")
    if "sliding_attention" in types and not getattr(config, "sliding_window", None):
        raise UnsupportedError("has sliding-window layers but no sliding_window")
    if getattr(config, "index_topk", None):
        raise UnsupportedError("has sparse attention (index_topk), whose code needs masks")
    net = model.build_net(config, torch.bfloat16)
    path, inner, blocks = model.find_blocks(net)
    head = net.get_output_embeddings()
    if head is None:
        raise UnsupportedError("has no output layer")
    names = {parameter: name for name, parameter in net.named_parameters()}
    embedding = net.get_input_embeddings().weight
    vocab_size = len(head.weight)
    hidden_size = embedding.shape[1]
    tied = head.weight is embedding
    num_parameters = sum(parameter.numel() for parameter in names)
    num_tables = 1 if tied else 2
    in_decoder = {*inner.parameters(), *head.parameters()}
    for parameter, name in names.items():
        if parameter not in in_decoder:
            raise UnsupportedError(f"has {name} beside its blocks and its output layer")
    settings = {
        "document": document,
        "class": type(net).__name__,
        "blocks": path,
        "embedding": names[embedding],
        "head": model.read_logit_transform(net, inner),
        # PEFT reads an adapter for each expert of both the text decoder and the whole model.
        "separate_experts": all(
            peft_expert_targets(name) for name in (config.model_type, document["model_type"])
        ),
    }
    if files.is_multimodal(settings):
        whole = files.find_whole(settings).net
        contains_class = any(isinstance(module, type(net)) for module in whole.modules())
        if not contains_class and (
            model.read_logit_transform(whole, whole.base_model) != settings["head"]
        ):
            raise UnsupportedError("computes other logits than the class of its text decoder")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # The router of a mixture may separate tokens only mostly.
        traced = trace(net, inner, blocks)
    kinds = traced.kinds
    if not any(kind.matrices for kind in kinds):
        raise UnsupportedError("has no linear layers")
    settings |= {"before_blocks": traced.before_blocks, "block_outputs": traced.block_outputs}
    max_generated = model.read_num_positions(config)
    window = getattr(config, "sliding_window", None)
    # The window of some models is only in their masks, which are not built.
    if window and not any(kind.window for kind in kinds):
        max_generated = min(max_generated, window)
    files.check_round_trip(settings, [kind.layers[0] for kind in kinds])
    in_blocks = sum(len(kind.layers) * kind.parameters for kind in kinds)
    return ModelSize(
        vocab_size=vocab_size,
        num_positions=min(max_generated, model.read_num_stable(config)),
        max_generated=max_generated,
        num_heads=config.num_attention_heads,
        hidden_size=hidden_size,
        kinds=kinds,
        final_norm_parameters=num_parameters - in_blocks - num_tables * vocab_size * hidden_size,
        tied=tied,
        num_kv_heads=text_document(document).get("num_key_value_heads"),
        unsplit=traced.unsplit,
        needs_whole_samples=traced.needs_whole_samples,
        packs=traced.packs,
        has_linear_attention=packing.has_linear_attention(net),
        config=settings,
    )


def to_hf(our_name: str, tensor: torch.Tensor, size: ModelSize) -> tuple[str, torch.Tensor]:
    """Return the name of `tensor` in transformers, and the tensor."""
    if our_name.startswith("blocks."):
        return f"{size.config['blocks']}.{our_name.removeprefix('blocks.')}", tensor
    return our_name.removeprefix("net."), tensor


def to_config(size: ModelSize, eos_token_id: int) -> dict[str, Any]:
    """Return the config.json of the text decoder, with `tie_word_embeddings` set to `size.tied`. If
    the config has no end-of-text token, add `eos_token_id`."""
    document = text_document(size.config["document"]) | {
        "architectures": [size.config["class"]],  # vLLM selects its class by this name
        "tie_word_embeddings": size.tied,
    }
    document.pop("quantization_config", None)
    if document.get("eos_token_id") is None:
        document["eos_token_id"] = eos_token_id
    return document
