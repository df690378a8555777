"""Choose the model size and the number of tokens for a compute budget or for a target loss.

    python results/lab/budget.py "8xH200 24h"
    python results/lab/budget.py --target_loss 2.5 --cluster 8xH200

A model with N parameters that is trained once over D tokens has a loss of
`E + A / N^alpha + B / D^beta` nats per token (Hoffmann et al., 2203.15556, approach 3). Training
costs `6 N D` FLOPs. scaling.json contains two fits for the same corpus, vocabulary and recipe.
For other data, the fits show how the loss changes with N and D, but not its value."""

import argparse
import contextlib
import functools
import math
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import checkout
from tabulate import tabulate

from distributed_training import cli
from distributed_training.planner.make_plan import draft_plan
from distributed_training.planner.sort import sort_by_speed, sort_layouts
from distributed_training.predict.predict import Cluster, Prediction, parse_cluster
from distributed_training.records.display import format_count, format_duration
from distributed_training.settings.config import AUTO, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, load_json, shown
from distributed_training.settings.keys import Parser
from real_model_example import CONFIG

UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BUDGET = re.compile(rf"(\S+)\s+(\d+\.?\d*|\.\d+)\s*({'|'.join(UNITS)})", re.IGNORECASE)
MAX_LOSS = 12  # loss of an untrained model with a vocabulary of 160,000
MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A fit of the loss formula."""

    name: str
    source: str
    uncertainty: str  # published description of the uncertainty
    irreducible: float  # E
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss in nats per token."""
        return self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return the numbers of parameters and tokens that give the lowest loss for `6 N D = flops`
        (Hoffmann et al., equation 4)."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / 6 / parameters

    def tokens_for(self, parameters: float) -> float:
        """Return the number of tokens for which `parameters` is the best model size."""
        power = self.beta * self.b / (self.alpha * self.a) * parameters**self.alpha
        return power ** (1 / self.beta)

    def flops_for(self, loss: float) -> float:
        """Return the smallest number of FLOPs that reaches `loss`. Raises UserError if no model can
        reach it."""
        if not self.irreducible < loss < MAX_LOSS:
            what = f"no model reaches --target_loss {loss:g}"
            why = f"{self.name}'s fit never goes below {self.irreducible}"
            min_loss = max(fit.irreducible for fit in FITS)
            raise UserError(what, why, f"set a loss above {min_loss} and below {MAX_LOSS}")
        # At the optimum, both terms fall with the same power of the FLOPs.
        reducible = self.loss(*self.optimum(6.0)) - self.irreducible
        power = self.alpha * self.beta / (self.alpha + self.beta)
        return 6 * (reducible / (loss - self.irreducible)) ** (1 / power)


_FITS_FILE = Path(__file__).with_name("scaling.json")
FITS = tuple(Fit(**entry) for entry in load_json(_FITS_FILE, "the scaling laws"))


def parse_budget(text: str, gpu: str | None = None) -> tuple[Cluster, float]:
    """Parse a string such as "8xH200 24h" into (cluster, seconds). Raises UserError if the string
    cannot be parsed."""
    match = _BUDGET.fullmatch(text.strip())
    seconds = float(match[2]) * UNITS[match[3].lower()] if match else 0.0
    if not match or seconds <= 0:
        fix = 'write GPUs and a time, such as "8xH200 24h" or "2x8xH100-80GB 3d"'
        raise UserError(f"the budget {shown(text)} is not valid", fix=fix)
    return parse_cluster(match[1], gpu), seconds


def flops_per_s(choice: Prediction) -> float:
    """Return the predicted FLOPs per second, counted as 6 FLOPs per parameter and token."""
    return 6 * choice.plan.size.num_parameters * (choice.tokens_per_s or 0.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are not keys of CONFIG."""
    parser.usage = 'python results/lab/budget.py "8xH200 24h" [OPTIONS] [--KEY VALUE ...]'
    add = parser.add_argument
    add("budget", nargs="?", metavar='"8xH200 24h"', help="GPUs and a duration")
    loss = "print the cheapest model that reaches this loss and, with --cluster, its training time"
    add("--target_loss", type=float, metavar="NATS", help=loss)


def main() -> int:
    """Print the best use of a budget or the cost of reaching a loss. Return the exit code."""
    script = ROOT / "real_model_example.py"
    folder = ROOT / "runs"
    program = cli.Program(config=CONFIG, script=script, description=__doc__, output_dir=folder)
    parser = Parser(description=__doc__.partition("\n")[0])
    add_options(parser)
    cli.add_keys(parser)
    arguments = cli.read_options(parser, sys.argv[1:])
    loss = arguments.target_loss
    if (arguments.budget is None) == (loss is None):
        raise UserError("give either a budget or --target_loss", fix='write "8xH200 24h"')

    def build(strategy: str | None) -> Request:
        override = {} if strategy is None else {"strategy": strategy}
        return cli.configure(arguments, program, arguments.overrides | override)

    chooses_batch_size = "batch_size" not in arguments.overrides
    if arguments.budget is not None:
        if arguments.cluster is not None or arguments.num_gpus is not None:
            what = "the budget already specifies the GPUs"
            raise UserError(what, fix="leave out --cluster and --num_gpus")
        cluster, seconds = parse_budget(arguments.budget, arguments.gpu)
        lines = describe_budget(
            fastest_layouts(build, cluster, chooses_batch_size), cluster, seconds
        )
    else:
        lines = describe_loss(loss, build, arguments, chooses_batch_size)
    sources = [f"{fit.name}: {fit.source}. {fit.uncertainty}." for fit in FITS]
    sources.append("Losses are for MassiveText with its own tokenizer, with each text seen once.")
    print("\n".join([*lines, "", *(textwrap.fill(line, 80) for line in sources)]))
    return 0


def describe_loss(
    loss: float,
    build: Callable[[str | None], Request],
    arguments: argparse.Namespace,
    chooses_batch_size: bool,
) -> list[str]:
    """Describe the cheapest way to reach a loss and, with --cluster, the training time."""
    flops_by_fit = [(fit, fit.flops_for(loss)) for fit in FITS]
    lines = [f"a loss of {loss:g} nats per token, perplexity {math.exp(loss):.1f}:", ""]
    lines.append(_optima(flops_by_fit))
    if arguments.cluster is not None:
        cluster = parse_cluster(arguments.cluster, arguments.gpu)
        choices = fastest_layouts(build, cluster, chooses_batch_size)
        for fit, flops in flops_by_fit:
            nearest = min(choices, key=functools.partial(_size_mismatch, fit, flops))
            time = f"{format_duration(flops / flops_per_s(nearest))} on {arguments.cluster}"
            speed = f"at {nearest.plan.config.model}'s predicted speed"
            lines.append(f"according to {fit.name}: {time}, {speed}")
    return lines


def fastest_layouts(
    build: Callable[[str | None], Request], cluster: Cluster, chooses_batch_size: bool
) -> list[Prediction]:
    """Return a prediction for each model that fits on the cluster, with the model's fastest layout.
    Predictions are ordered from the smallest model to the largest. Raises UserError if no model
    fits."""
    fastest = []
    requested = build(None).model
    models = MODELS if requested == AUTO else (requested,)
    for model in models:
        with contextlib.suppress(UserError):  # Skip models that do not fit.
            config = with_values(build(None), model=model)
            values = {"model": model, "batch_size": config.batch_size}
            if chooses_batch_size:  # Choose the smallest batch that keeps a GPU busy.
                config = with_values(config, strategy=AUTO, batch_size=AUTO)
                values["batch_size"] = draft_plan(config, cluster).config.batch_size

            choices = sort_layouts(with_values(build(AUTO), **values), cluster)
            choice = sort_by_speed(choices)[0]
            if choice.fits:
                fastest.append(choice)
    if not fastest:
        fix = "set a smaller batch_size or activation_checkpointing=full"
        raise UserError(f"none of {', '.join(models)} fits on the cluster", fix=fix)
    return fastest


def _size_mismatch(fit: Fit, flops: float, choice: Prediction) -> float:
    """Return by how much the chosen model's size differs from the best size for `flops`, as the
    absolute logarithm of their ratio."""
    best, _ = fit.optimum(flops)
    return abs(math.log(best / choice.plan.size.num_parameters))


def describe_budget(choices: Sequence[Prediction], cluster: Cluster, seconds: float) -> list[str]:
    """Describe the best model size and number of tokens for the given time on a cluster, and the
    loss of each model."""
    nearest = min(
        choices, key=lambda choice: _size_mismatch(FITS[-1], flops_per_s(choice) * seconds, choice)
    )
    flops = flops_per_s(nearest) * seconds
    config = nearest.plan.config
    mfu = f" (MFU {100 * nearest.mfu:.0f}%)" if nearest.mfu else ""
    tflops = flops_per_s(nearest) / cluster.num_processes / 1e12
    summary = (
        f"{cluster.num_processes} x {cluster.machine.gpu_name} for {format_duration(seconds)}: "
    )
    summary += f"{flops:.2e} FLOPs, at the "
    summary += f"{tflops:.0f} TFLOP/s per GPU{mfu} predicted for {config.model} with "
    summary += f"{config.batch_size} x {config.max_length} tokens per GPU"
    names = " / ".join(fit.name for fit in FITS)
    caption = 'Each model, trained for that time. "best at" is the number of tokens for which\n'
    caption += f"the model's size is optimal. Fits: {names}."
    rows = []
    for choice in choices:
        parameters = choice.plan.size.num_parameters
        tokens_per_s = choice.tokens_per_s or 0.0
        tokens = tokens_per_s * seconds
        best = " / ".join(format_count(fit.tokens_for(parameters)) for fit in FITS)
        loss = " / ".join(f"{fit.loss(parameters, tokens):.3f}" for fit in FITS)
        counts = [format_count(tokens_per_s), format_count(tokens)]
        rows.append([choice.plan.config.model, *counts, best, loss])
    headers = ["model", "tokens/s", "tokens", "best at", "loss"]
    table = tabulate(rows, headers, disable_numparse=True)
    optima = _optima([(fit, flops) for fit in FITS])
    return [textwrap.fill(summary, 80), "", optima, "", caption, "", table]


def _optima(flops_by_fit: Sequence[tuple[Fit, float]]) -> str:
    rows = []
    for fit, flops in flops_by_fit:
        parameters, tokens = fit.optimum(flops)
        ratio = f"{tokens / parameters:.0f}"
        loss = f"{fit.loss(parameters, tokens):.3f}"
        counts = [format_count(parameters), format_count(tokens)]
        rows.append([fit.name, f"{flops:.2e}", *counts, ratio, loss])
    headers = ["fit", "FLOPs", "parameters", "tokens", "tokens per parameter", "loss"]
    return tabulate(rows, headers, disable_numparse=True)


if __name__ == "__main__":
    checkout.run(main)
