"""What a model's layers cost: seconds, activation bytes and weight bytes, measured or from a file.

PipeDream (arXiv 1806.03377) plans from these three per layer. Loading a profile imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedream.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

Number = int | float | Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer's cost for one microbatch."""

    name: str
    forward_s: Number
    backward_s: Number
    """Seconds of the whole backward pass: the input's and the weights' gradients."""
    activation_bytes: Number
    """Bytes of the layer's output, what is sent if the next layer lies on another worker."""
    weight_bytes: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The layers in the order of the forward pass, and what they were measured on."""

    model: str
    device: str
    torch: str
    """Version of torch."""
    dtype: str
    batch: int
    """Sequences in a microbatch."""
    sequence: int
    """Tokens in a sequence."""
    threads: int
    """CPU threads that torch computed with."""
    command: str
    """What makes the same measurement again."""
    layers: tuple[Layer, ...]


_LAYER_KEYS = tuple(field.name for field in dataclasses.fields(Layer))
_PROFILE_KEYS = tuple(field.name for field in dataclasses.fields(Profile))
_COUNTS = ("batch", "sequence", "threads")


def load_profile(path: Path) -> Profile:
    """Read and check a profile's JSON. Raises UserError that names the file and the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "give the path of a profile's JSON") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text", "give the path of a profile's JSON") from None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: line {error.lineno}, column {error.colno}: {error.msg}", "mend the JSON there"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deep nesting
        raise UserError(f"{path}: {error}", "write a profile as those in profiles/") from None
    values = dict(_check_keys(found, _PROFILE_KEYS, str(path)))
    for key in _COUNTS:
        values[key] = _count(values[key], f"{path}: key {key!r}")
    for key in set(_PROFILE_KEYS) - {*_COUNTS, "layers"}:
        values[key] = _text(values[key], f"{path}: key {key!r}")
    entries = values["layers"]
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: key 'layers' is {_shown(entries)}", "list one layer or more")
    values["layers"] = tuple(
        _layer(entry, f"{path}: layers[{place}]") for place, entry in enumerate(entries)
    )
    return Profile(**values)


def save_profile(profile: Profile, path: Path) -> None:
    """Write what load_profile reads, one line a layer. Its numbers have to be int or float."""
    values = dataclasses.asdict(profile)
    layers = ",\n".join("    " + json.dumps(layer) for layer in values.pop("layers"))
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in values.items()]
    text = "\n".join(["{", *lines, '  "layers": [', layers, "  ]", "}"])
    path.write_text(text + "\n", encoding="utf-8")


def _layer(entry: object, where: str) -> Layer:
    values = dict(_check_keys(entry, _LAYER_KEYS, where))
    values["name"] = _text(values["name"], f"{where}, key 'name'")
    for key in _LAYER_KEYS[1:]:
        values[key] = _amount(values[key], f"{where} ({values['name']}), key {key!r}")
    return Layer(**values)


def _check_keys(found: object, keys: Sequence[str], where: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise UserError(f"{where} is {_shown(found)}", f"write an object with {', '.join(keys)}")
    for key in found:
        if key not in keys:
            raise UserError(f"{where}: unknown key {_shown(key)}", nearest(key, keys))
    for key in keys:
        if key not in found:
            raise UserError(f"{where}: key {key!r} is missing", f"it needs {', '.join(keys)}")
    return found


def _amount(value: object, where: str) -> int | float:
    """A finite number from 0 on; the bounds keep what is computed from them finite, too."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (value == 0 or 1e-18 <= value <= 1e18)
    ):
        raise UserError(f"{where} is {_shown(value)}", "give 0, or a number from 1e-18 to 1e18")
    return value


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where} is {_shown(value)}", "give a whole number from 1 on")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise UserError(f"{where} is {_shown(value)}", "give one line of text")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def measure_profile(
    layers: Sequence[tuple[str, torch.nn.Module]],
    example: torch.Tensor,
    *,
    targets: torch.Tensor | None = None,
    repeats: int = 10,
    warmup: int = 3,
) -> list[Layer]:
    """Time each layer's forward and backward pass where its weights and `example` are.

    `example` is the first layer's input, one microbatch; each layer's output is the next one's
    input. `targets`, if given, is the last layer's second argument, and what it returns is a loss.
    Seconds are medians of `repeats` after `warmup` more that are not counted, rounded to 0.1 us.
    Each repeat goes through all layers, so that what else the machine does in between slows one
    repeat of every layer rather than every repeat of one. Raises ValueError for no layers or
    fewer than one repeat.
    """
    if not layers or repeats < 1:
        raise ValueError(f"{len(layers)} layers, {repeats} repeats: at least one of each is needed")
    sweeps = [_sweep(layers, example, targets) for _ in range(warmup + repeats)]
    found = []
    for (name, module), once in zip(layers, zip(*sweeps[warmup:], strict=True), strict=True):
        found.append(
            Layer(
                name=name,
                forward_s=round(statistics.median(forward_s for forward_s, _, _ in once), 7),
                backward_s=round(statistics.median(backward_s for _, backward_s, _ in once), 7),
                activation_bytes=once[0][2],
                weight_bytes=sum(weight.nbytes for weight in module.parameters()),
            )
        )
    return found


def _sweep(
    layers: Sequence[tuple[str, torch.nn.Module]],
    example: torch.Tensor,
    targets: torch.Tensor | None,
) -> list[tuple[float, float, int]]:
    """For each layer once: seconds of its forward and its backward pass, bytes of its output."""
    found, x = [], example.detach()
    for place, (_, module) in enumerate(layers):
        extra = (targets,) if targets is not None and place == len(layers) - 1 else ()
        # Nobody waits for the gradient of the model's input, so it is not computed.
        x.requires_grad_(place > 0)
        forward_s, backward_s, output = _time_once(module, x, extra)
        found.append((forward_s, backward_s, output.nbytes))
        x = output
    return found


def _time_once(
    module: torch.nn.Module, x: torch.Tensor, extra: tuple[torch.Tensor, ...]
) -> tuple[float, float, torch.Tensor]:
    """Seconds of one forward and one backward pass, and the output. Leaves no gradients behind."""
    import torch

    clock = _clock(x.device)
    started = clock()
    output = module(x, *extra)
    forward_s = clock() - started
    backward_s = 0.0
    if output.requires_grad:
        gradient = torch.ones_like(output)
        started = clock()
        torch.autograd.backward(output, gradient)
        backward_s = clock() - started
    for tensor in (x, *module.parameters()):
        tensor.grad = None
    return forward_s, backward_s, output.detach()


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds once the device has done all that was launched: launches are not the work."""
    import torch

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised if device.type == "cuda" else time.perf_counter


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's as Linux gives it."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {models[0]}" if models else "CPU"
