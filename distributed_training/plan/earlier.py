"""Convert plans that earlier versions wrote, so that their runs can be resumed, evaluated and
exported. This module does not import torch."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from distributed_training.models import find_model
from distributed_training.settings.config import KEYS, Request, RunConfig, validate
from distributed_training.settings.strategies import load_strategy


def convert_plan(document: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the contents of an old plan.json, which has no "model" entry, to the current form.

    Keys that no longer exist are dropped. Keys that were added later get their defaults. Raises
    UserError if a value in the plan is no longer valid."""
    model = find_model(document["config"]["model"])
    old_request = document["requested"]
    option_values = old_request["engine_options"]
    requested_values = {name: old_request[name] for name in KEYS if name in old_request}
    set_by = dict.fromkeys(KEYS.keys() & set(old_request["typed"]), "CONFIG")
    requested = validate(
        Request, requested_values | {"engine_options": option_values, "set_by": set_by}, KEYS
    )
    config_values = {name: document["config"][name] for name in requested_values}
    strategy = load_strategy(requested)
    engine_options = strategy.options(option_values)
    num_replicas = document["batch"]["num_replicas"]
    converted = {
        "requested": requested,
        "config": validate(RunConfig, config_values, KEYS),
        "strategy": strategy,
        "model": model,
        "engine_options": option_values,
        "from_defaults": [],
        "adapters_dir": None,
        "steps_between_exchanges": engine_options.steps_between_exchanges(),
        "engine_bytes_per_parameter": engine_options.bytes_per_parameter(num_replicas),
    }
    return {**document, **to_jsonable_python(converted)}
