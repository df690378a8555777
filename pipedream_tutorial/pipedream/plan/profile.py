"""Measure or load the cost of each layer: seconds, activation bytes and weight bytes.

PipeDream (arXiv 1806.03377) plans with these three numbers per layer. Loading a profile does not
import torch.
"""

import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from pipedream.config import Rule
from pipedream.errors import UserError, nearest

Number = int | float | Fraction


class Layer(NamedTuple):
    """Cost of one layer for one microbatch."""

    name: str
    forward_s: Number
    backward_s: Number  # for the whole backward pass: input gradient and weight gradients
    activation_bytes: Number  # of the output, which is sent if another worker has the next layer
    weight_bytes: Number


class Profile(NamedTuple):
    """Layers in the order of the forward pass, and the machine and settings of the measurement."""

    model: str
    device: str
    torch: str  # torch version
    dtype: str
    batch: int  # sequences in a microbatch
    sequence: int  # tokens in a sequence
    threads: int  # number of CPU threads that torch used
    command: str  # command that repeats the measurement
    layers: tuple[Layer, ...]


_TEXT = Rule(kind=str)
_COUNT = Rule(kind=int, low=1, high=10**9)
_AMOUNT = Rule(kind=float, low=0, high=10**18)
_LAYER = dict.fromkeys(Layer._fields, _AMOUNT) | {"name": _TEXT}
_PROFILE = dict.fromkeys(Profile._fields[:-1], _TEXT)
_PROFILE |= dict.fromkeys(("batch", "sequence", "threads"), _COUNT)


def load_profile(path: Path) -> Profile:
    """Read and check a profile's JSON file. Raises UserError if the file cannot be read or the
    profile is not valid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    # Not text, not JSON, or nested too deeply
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: {reason}", "give the path of a profile's JSON") from None
    layers = content.pop("layers", None) if isinstance(content, dict) else None
    if not isinstance(layers, list) or not layers:
        raise UserError(f"{path} has no list of layers", f"give {', '.join(Profile._fields)}")
    profile_values = _check_values(content, _PROFILE, str(path))
    checked_layers = [
        _check_values(layer, _LAYER, f"{path}: layers[{i}]") for i, layer in enumerate(layers)
    ]
    return Profile(**profile_values, layers=tuple(Layer(**layer) for layer in checked_layers))


def _check_values(content: object, rules: Mapping[str, Rule], where: str) -> dict[str, Any]:
    """Return the checked values. Raises UserError if a key is missing or unknown, or if a value is
    not accepted."""
    values = content if isinstance(content, dict) else {}
    for key in values:
        if key not in rules:
            raise UserError(f"{where}: unknown key {key!r}", nearest(key, rules))
    missing = [key for key in rules if key not in values]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}", f"it needs {', '.join(rules)}")
    return {key: rule.check(f"{where}: {key}", values[key]) for key, rule in rules.items()}


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile that load_profile can read. The numbers in the profile must be int or
    float."""
    values = profile._asdict() | {"layers": [layer._asdict() for layer in profile.layers]}
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def measure_profile(
    layers: Sequence[tuple[str, Any]], example: Any, *, targets: Any, repeats: int
) -> list[Layer]:
    """Time the forward and backward passes of each layer on the device that holds the weights and
    `example`. `layers` contains the name and the module of each layer.

    The tensor `example` is one microbatch, the first layer's input. Each layer's output is the next
    layer's input. The last layer also receives `targets` and returns a loss. The reported times are
    medians over `repeats`, rounded to 0.1 us. Before the timed repeats, a third as many warm-up
    repeats run. Each repeat runs all layers, so a disturbance slows one repeat of several layers,
    not all repeats of one layer.
    """
    import torch

    def clock() -> float:
        """Return the time in seconds, after the device has finished all launched work."""
        if example.device.type == "cuda":
            torch.cuda.synchronize(example.device)
        return time.perf_counter()

    warmup = -(-repeats // 3)
    samples: list[list[tuple[float, float, int]]] = [[] for _ in layers]
    for _ in range(warmup + repeats):
        x = example.detach()
        for index, (_, module) in enumerate(layers):
            inputs = (x, targets) if index == len(layers) - 1 else (x,)
            # The gradient of the model's input is not needed, so it is not computed.
            x.requires_grad_(index > 0)
            started = clock()
            output = module(*inputs)
            forward_s = clock() - started
            gradient = torch.ones_like(output)
            started = clock()
            torch.autograd.backward(output, gradient)
            backward_s = clock() - started
            for tensor in (x, *module.parameters()):
                tensor.grad = None  # free the gradients
            x = output.detach()
            samples[index].append((forward_s, backward_s, x.nbytes))
    measured = []
    for (name, module), layer_samples in zip(layers, samples, strict=True):
        forwards, backwards, sizes = zip(*layer_samples[warmup:], strict=True)
        measured.append(
            Layer(
                name=name,
                forward_s=round(statistics.median(forwards), 7),
                backward_s=round(statistics.median(backwards), 7),
                activation_bytes=sizes[0],
                weight_bytes=sum(weight.nbytes for weight in module.parameters()),
            )
        )
    return measured


def device_name(device: Any) -> str:
    """Return the name of a GPU. For a CPU, return the name that Linux reports."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", info.read_text()) if info.is_file() else None
    return f"CPU, {model[1]}" if model else "CPU"
