"""Plan the training of a language model from a program: whether it fits, how fast it is, what it
costs and what fits instead. Models in the table of open models need neither torch nor a network."""

from collections.abc import Mapping
from typing import Any

from distributed_training.planner.answer import Price, answer
from distributed_training.predict.predict import parse_cluster
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import UserError
from distributed_training.settings.request import build_config
from distributed_training.tools.plan import list_largest

__all__ = ["UserError", "plan"]


def plan(
    cluster: str,
    model: str = AUTO,
    settings: Mapping[str, Any] | None = None,
    tokens: float | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """Return whether a model can be trained on GPUs, the fastest way to do so, its memory, speed
    and cost, and what fits instead.

    `cluster` names the GPUs, as in "RTX-4090", "dual 3090" or "2x8xH100-80GB". `model` is the name
    of an open model in any spelling, or the path of a config.json; without it, the answer lists the
    largest models that fit. `settings` are those of training, such as {"lora_rank": 16,
    "base_dtype": "nf4", "max_length": 4096, "batch_size": "auto"}. `tokens` is the number of tokens
    to train on, and `price` that of a GPU-hour. The fields are those of the command `plan --json`.
    Raises UserError, whose text says what to change."""
    request = build_config({}, overrides={"strategy": AUTO, "model": model, **(settings or {})})
    hardware = parse_cluster(cluster)
    if request.model == request.weights == AUTO:
        return list_largest(request, hardware)
    price_per_hour = None if price is None else Price("", price, "")
    return answer(request, hardware, num_tokens=tokens, price=price_per_hour).as_dict()
