"""Names of weights in files, which transformers maps to those of its modules."""

import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from distributed_training.models.hub.model import build_net
from distributed_training.settings.errors import UserError

Rename = Callable[[str], tuple[str, str | None]]


def module_names(names: Iterable[str], document: dict[str, Any]) -> dict[str, str]:
    """Return the names of a file with their names in the model, but for what transformers ignores.
    Raises UserError for tensors that it would convert."""
    rename, _, ignored = _mapping(json.dumps(document))
    found = {}
    for name in names:
        found[name], converted = rename(name)
        if converted is not None:
            what = f"transformers converts {name} as it loads it"
            raise UserError(what, fix="save the model with a current transformers")
    return {name: new for name, new in found.items() if ignored is None or not ignored.search(new)}


def file_name(name: str, document: dict[str, Any]) -> str:
    """Return the name in a file of a model's tensor."""
    return _mapping(json.dumps(document))[1](name)[0]


@functools.cache
def _mapping(text: str) -> tuple[Rename, Rename, re.Pattern[str] | None]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

    net = build_net(json.loads(text), 0.0, 1)

    def renamer(transforms: list[Any], *, reverse: bool) -> Rename:
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        others = [each for each in transforms if not isinstance(each, WeightRenaming)]
        return lambda name: rename_source_key(name, renamings, others, reverse=reverse)

    saved = get_model_conversion_mapping(net, add_legacy=False)
    backward = [
        each.reverse_transform() for each in reversed(saved) if not isinstance(each, PrefixChange)
    ]
    ignored = "|".join(f"({pattern})" for pattern in net._keys_to_ignore_on_load_unexpected)
    return (
        renamer(get_model_conversion_mapping(net), reverse=False),
        renamer(backward, reverse=True),
        re.compile(ignored) if ignored else None,
    )
