"""Names of weights in files, and how transformers maps them to names in its modules."""

import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from distributed_training.models.hub.model import build_net
from distributed_training.settings.errors import UserError

Rename = Callable[[str], tuple[str, str | None]]


def module_names(names: Iterable[str], document: dict[str, Any]) -> dict[str, str]:
    """Map names in a file to names in the model, without the tensors that transformers ignores.
    Raises UserError for a tensor that transformers would convert to another shape."""
    rename, _, ignored = _mapping(json.dumps(document))
    module_names = {}
    for name in names:
        new_name, converted = rename(name)
        if converted is not None:
            what = f"{name} is stored in a format that transformers converts while loading"
            raise UserError(what, fix="save the model again with a current transformers")
        if ignored is None or not ignored.search(new_name):
            module_names[name] = new_name
    return module_names


def file_name(name: str, document: dict[str, Any]) -> str:
    """Return the name that a tensor of the model has in a file."""
    return _mapping(json.dumps(document))[1](name)[0]


@functools.cache
def _mapping(text: str) -> tuple[Rename, Rename, re.Pattern[str] | None]:
    """Return the renaming from file to model, its reverse, and a pattern of ignored names, for the
    config whose JSON is `text`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

    net = build_net(json.loads(text), 0.0, 1)

    def renamer(transforms: list[Any], *, reverse: bool) -> Rename:
        renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
        conversions = [item for item in transforms if not isinstance(item, WeightRenaming)]
        return lambda name: rename_source_key(name, renamings, conversions, reverse=reverse)

    saved = get_model_conversion_mapping(net, add_legacy=False)
    backward = [
        item.reverse_transform() for item in reversed(saved) if not isinstance(item, PrefixChange)
    ]
    ignored = "|".join(f"({pattern})" for pattern in net._keys_to_ignore_on_load_unexpected)
    return (
        renamer(get_model_conversion_mapping(net), reverse=False),
        renamer(backward, reverse=True),
        re.compile(ignored) if ignored else None,
    )
