"""Map names of weights between files and transformers modules."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from distributed_training.settings.errors import UserError

if TYPE_CHECKING:
    from distributed_training.models import ModelSize


def module_names(names: Iterable[str], size: ModelSize) -> dict[str, str]:
    """Map tensor names in a file to names in the model, except for tensors that transformers
    ignores. Raises UserError for a tensor that transformers would convert while loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    net = _outline(json.dumps(size.config["document"]))
    ignored = net._keys_to_ignore_on_load_unexpected
    mapping: list[Any] = get_model_conversion_mapping(net)
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    conversions = [item for item in mapping if not isinstance(item, WeightRenaming)]
    module_names = {}
    for name in names:
        new_name, converted = rename_source_key(name, renamings, conversions)
        if converted is not None:
            what = f"{name} is stored in a format that transformers converts while loading"
            raise UserError(what, fix="save the model again with a current transformers")
        if not any(re.search(pattern, new_name) for pattern in ignored):
            module_names[name] = new_name
    return module_names


def file_name(name: str, size: ModelSize) -> str:
    """Return the name that a tensor of the model has in a file."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    net = _outline(json.dumps(size.config["document"]))
    (stored_name,) = revert_weight_conversion(net, {name: torch.empty(0)})
    return stored_name


@functools.cache
def _outline(text: str) -> Any:
    """Return the model whose config is the JSON `text`, with only its first block and without
    weights."""
    from distributed_training.models.hub.model import build_net

    return build_net(json.loads(text), 0.0, 1)
