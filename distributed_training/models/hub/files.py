"""Match the tensors of weight files with a model's tensors. transformers' own conversions rename,
merge, split and dequantize them, in both directions.

The text decoder of a multimodal model has other tensor names in its own class than in the class of
the whole model. Files have the names of the whole model, or earlier names of it. In this module,
`settings` are the `config` of a model's size."""

import copy
import functools
import json
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from distributed_training.models.hub import UnsupportedError, model, text_document
from distributed_training.models.private import is_ignored
from distributed_training.models.weights import DTYPE_CODES, TORCH_DTYPES, StoredTensor, dtype_name

Settings = Mapping[str, Any]
# dtype in safetensors -> dtype in torch, also for the parts of quantized tensors
_DTYPES = {
    **TORCH_DTYPES,
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "U8": "uint8",
}


class _Whole(NamedTuple):
    """Model of the class that weight files belong to, without weights."""

    net: Any
    text_prefix: str  # with which names of tensors begin in the class of the text decoder
    whole_prefix: str  # with which the names of the same tensors begin in `net`

    def name(self, text_name: str) -> str:
        """Return the name in `net` of a tensor of the text decoder."""
        if text_name.startswith(self.text_prefix):
            return self.whole_prefix + text_name.removeprefix(self.text_prefix)
        return text_name

    def text_name(self, name: str) -> str:
        """Return the name in the text decoder of a tensor of `net`."""
        if name.startswith(self.whole_prefix):
            return self.text_prefix + name.removeprefix(self.whole_prefix)
        return name


class StoredModel(NamedTuple):
    """Tensors of weight files."""

    text: dict[str, StoredTensor]  # by their names in the class of the text decoder
    # Name of each of these tensors in the files. Tensors that a conversion computes have none.
    file_names: dict[str, str]
    others: dict[str, StoredTensor]  # of other parts, such as a vision tower, by name in the files


def find_quantizer(document: dict[str, Any]) -> Any:
    """Return what transformers needs to read the quantized weights of a model, or None if they are
    not quantized. Raises UnsupportedError if transformers cannot dequantize them on a CPU."""
    quantization = document.get("quantization_config")
    if quantization is None:
        return None
    from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

    config: Any = AutoQuantizationConfig.from_dict(quantization)
    if not hasattr(config, "dequantize"):
        raise UnsupportedError(
            f"has {quantization.get('quant_method')} weights. Use an unquantized version"
        )
    config.dequantize = True
    return AutoHfQuantizer.from_config(config)


def find_whole(settings: Settings) -> _Whole:
    """Return the model of the class that weight files belong to."""
    net = _build(json.dumps(settings["document"]))
    weight = net.get_input_embeddings().weight
    whole_embedding = next(name for name, value in net.named_parameters() if value is weight)
    text_parts = settings["embedding"].split(".")
    whole_parts = whole_embedding.split(".")
    while text_parts and whole_parts and text_parts[-1] == whole_parts[-1]:
        text_parts.pop()
        whole_parts.pop()
    prefixes = ("".join(f"{part}." for part in parts) for parts in (text_parts, whole_parts))
    return _Whole(net, *prefixes)


def _text_net(settings: Settings) -> Any:
    return _build(json.dumps(text_document(settings["document"])))


@functools.cache  # by a config as JSON
def _build(document: str) -> Any:
    return model.build_whole_net(json.loads(document))


def match(stored: Mapping[str, StoredTensor], settings: Settings) -> StoredModel:
    """Match the tensors of weight files with the tensors of a text decoder. A tensor that
    transformers does not know keeps its name. Values are converted when they are read. Of the other
    parts, only quantized tensors are converted."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    whole = find_whole(settings)
    net = whole.net
    quantizer = find_quantizer(settings["document"])
    conversions: list[Any] = get_model_conversion_mapping(net, hf_quantizer=quantizer)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if not isinstance(item, WeightRenaming)]
    expected = net.state_dict()
    in_text = _text_net(settings).state_dict()
    result = StoredModel({}, {}, {})
    sources: dict[str, list[tuple[str, str]]] = {}  # converted tensor -> (name in files, pattern)

    def is_other(target: str) -> bool:
        is_known = target in expected
        return is_ignored(net, target) or (is_known and whole.text_name(target) not in in_text)

    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(
            name, renamings, converters, net.base_model_prefix, expected
        )
        if renamed not in expected and name in expected:
            renamed, pattern = name, None
        if pattern is not None:
            sources.setdefault(renamed, []).append((name, pattern))
        elif is_other(renamed):
            result.others[name] = stored[name]
        else:
            text_name = whole.text_name(renamed)
            result.text[text_name] = stored[name]
            result.file_names[text_name] = name
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}

    def convert(
        target: str, read: Callable[[StoredTensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors, by name, that transformers computes from several tensors in files."""
        parts = sources[target]
        conversion = copy.deepcopy(by_pattern[parts[0][1]])
        for name, pattern in parts:
            conversion.add_tensor(target, name, pattern, read(stored[name]))
        known_net = net if target in expected else None
        converted = conversion.convert(target, model=known_net, config=net.config)
        # Some conversions return lists of a single tensor.
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in converted.items()
        }

    def read_converted(target: str, name: str, *slices: slice) -> torch.Tensor:
        return convert(target, operator.methodcaller("read"))[name][slices]

    for target, parts in sources.items():
        tensors = {name: stored[name] for name, _ in parts}
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if is_other(target) and dtypes <= TORCH_DTYPES.keys():
            result.others.update(tensors)
            continue
        for name, tensor in convert(target, _meta_tensor).items():
            read = functools.partial(read_converted, target, name)
            code = DTYPE_CODES[dtype_name(tensor.dtype)]
            stored_tensor = StoredTensor(code, [*tensor.shape], read)
            if is_other(target):  # The first part is the quantized weight.
                result.others[parts[0][0]] = stored_tensor
            else:
                result.text[whole.text_name(name)] = stored_tensor
    return result


def to_files(
    text_name: str, tensor: torch.Tensor, settings: Settings, *, whole: bool = False
) -> dict[str, torch.Tensor]:
    """Return the tensors, by name, that files of the text decoder or of the whole model contain for
    the text decoder's tensor `text_name`."""
    from transformers.core_model_loading import revert_weight_conversion

    net = _text_net(settings)
    if whole:
        net = find_whole(settings).net
        text_name = find_whole(settings).name(text_name)
    return revert_weight_conversion(net, {text_name: tensor})  # type: ignore[no-any-return]


def adapter_renaming(settings: Settings) -> Callable[[str], str]:
    """Return a function that renames adapters of the text decoder between its names and the names
    in files. PEFT renames them as transformers renames weights. For some modules of Laguna, this
    changes the correct name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightRenaming,
        rename_source_key,
        revert_weight_conversion,
    )

    net = _text_net(settings)
    conversions = get_model_conversion_mapping(net)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    state = net.state_dict()

    def rename(name: str) -> str:
        module, separator, end = name.rpartition(".lora_")
        weight = f"{module}.weight"
        renamed, _ = rename_source_key(weight, renamings, [])
        if renamed in state:
            weight = renamed
        elif weight in state:
            (weight,) = revert_weight_conversion(net, {weight: state[weight]})
        return weight.removesuffix(".weight") + separator + end

    return rename


def is_multimodal(settings: Settings) -> bool:
    """Return whether the model is the text decoder of a multimodal model."""
    return "text_config" in settings["document"]


def check_round_trip(settings: Settings, layers: Collection[int]) -> None:
    """Raise UnsupportedError if weight files cannot contain each tensor of a model separately. Only
    the blocks with the indices `layers` are checked."""
    prefix = f"{settings['blocks']}."
    state = {}
    for name, tensor in _text_net(settings).state_dict().items():
        layer, _, _ = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or int(layer) in layers:
            state[name] = tensor
    stored: dict[str, StoredTensor] = {}
    for name, tensor in state.items():
        parts = to_files(name, tensor.to("meta"), settings, whole=True)
        for file_name, part in parts.items():
            if file_name in stored:  # such as the matrix of q, k and v
                raise _inseparable(name)
            code = DTYPE_CODES[dtype_name(part.dtype)]
            stored[file_name] = StoredTensor(code, [*part.shape], lambda part=part: part)
    text = match(stored, settings).text
    for name, tensor in state.items():
        if name not in text or text[name].shape != [*tensor.shape]:
            raise _inseparable(name)


def _inseparable(name: str) -> UnsupportedError:
    return UnsupportedError(f"has files that do not contain {name} as a separate tensor")


def _meta_tensor(tensor: StoredTensor) -> torch.Tensor:
    dtype = getattr(torch, _DTYPES[tensor.dtype])
    return torch.empty(tensor.shape, dtype=dtype, device="meta")
