"""Scaling laws: what a budget of compute is best spent on, and what a loss costs.

    python results/lab/budget.py "8xH200 24h"
    python results/lab/budget.py --target_loss 2.5 --cluster 8xH200

The loss of N parameters trained once over D tokens is E + A / N^alpha + B / D^beta nats a token
(Hoffmann et al., 2203.15556, approach 3), and training costs 6 N D FLOPs. Both fits, scaling.json,
are of one corpus, vocabulary and recipe; of another they tell how things grow rather than the loss
itself."""

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
from distributed_training.planner.rank import choose_spread, rank_layouts, with_progress
from distributed_training.predict.predict import Cluster, Prediction, parse_cluster
from distributed_training.settings.config import AUTO, KEYS, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, load_json, shown
from distributed_training.settings.keys import Parser
from distributed_training.tools.plan_table import count, duration
from real_model_example import CONFIG

UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BUDGET = re.compile(rf"(\S+)\s+(\d+\.?\d*|\.\d+)\s*({'|'.join(UNITS)})", re.IGNORECASE)
MOST_LOSS = 12  # an untrained model's, with a vocabulary of 160,000
MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One fit of the law."""

    name: str
    source: str
    uncertainty: str  # as published
    irreducible: float  # E
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats a token."""
        return self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """(parameters, tokens) of lowest loss for 6 N D = `flops` (Hoffmann et al., equation 4)."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / 6 / parameters

    def tokens_for(self, parameters: float) -> float:
        """Tokens for which so many parameters are the best size."""
        power = self.beta * self.b / (self.alpha * self.a) * parameters**self.alpha
        return power ** (1 / self.beta)

    def flops_for(self, loss: float) -> float:
        """The fewest FLOPs that reach `loss`; raise UserError for one that none reach."""
        if not self.irreducible < loss < MOST_LOSS:
            what = f"--target_loss {loss:g} is reached by no model"
            why = f"{self.name}'s fit never goes below {self.irreducible}"
            least = max(fit.irreducible for fit in FITS)
            raise UserError(what, why, f"ask for more than {least}, and less than {MOST_LOSS}")
        # At the optimum both terms fall with one power of the FLOPs.
        one = self.loss(*self.optimum(6.0)) - self.irreducible
        power = self.alpha * self.beta / (self.alpha + self.beta)
        return 6 * (one / (loss - self.irreducible)) ** (1 / power)


_FILE = Path(__file__).with_name("scaling.json")
FITS = tuple(Fit(**entry) for entry in load_json(_FILE, "the scaling laws"))


def parse_budget(text: str, gpu: str | None = None) -> tuple[Cluster, float]:
    """(machines, seconds) of a text such as "8xH200 24h"; raise UserError for any other."""
    found = _BUDGET.fullmatch(text.strip())
    seconds = float(found[2]) * UNITS[found[3].lower()] if found else 0.0
    if not found or seconds <= 0:
        form = 'write GPUs and a time, such as "8xH200 24h" or "2x8xH100-80GB 3d"'
        raise UserError(f"the budget {shown(text)} is not understood", fix=form)
    return parse_cluster(found[1], gpu), seconds


def flops_per_s(choice: Prediction) -> float:
    """By the count of the law, 6 N a token."""
    return 6 * choice.plan.size.num_parameters * (choice.tokens_per_s or 0.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options besides CONFIG's keys."""
    parser.usage = 'python results/lab/budget.py "8xH200 24h" [OPTIONS] [--KEY VALUE ...]'
    add = parser.add_argument
    add("budget", nargs="?", metavar='"8xH200 24h"', help="GPUs and a time")
    loss = "print the cheapest way to a loss instead; with --cluster also how long it takes"
    add("--target_loss", type=float, metavar="NATS", help=loss)


def main() -> int:
    """Print how a budget is best spent, or the cost of a loss; return the exit code."""
    script = ROOT / "real_model_example.py"
    folder = ROOT / "runs"
    program = cli.Program(config=CONFIG, script=script, about=__doc__, output_dir=folder)
    parser = Parser(description=__doc__.partition("\n")[0])
    add_options(parser)
    cli.add_keys(parser)
    arguments = cli.read_options(parser, sys.argv[1:])
    loss = arguments.target_loss
    if (arguments.budget is None) == (loss is None):
        raise UserError("give either a budget or --target_loss", fix='write "8xH200 24h"')

    def build(strategy: str | None) -> Request:
        chosen = [] if strategy is None else [f"strategy={strategy}"]
        return cli.configure(arguments, program, [*arguments.overrides, *chosen])

    names = {"batch_size", *KEYS["batch_size"].aliases}
    open_batch = names.isdisjoint(text.partition("=")[0] for text in arguments.overrides)
    if arguments.budget is not None:
        if arguments.cluster is not None or arguments.num_gpus is not None:
            raise UserError("the budget names the GPUs", fix="leave out --cluster and --num_gpus")
        cluster, seconds = parse_budget(arguments.budget, arguments.gpu)
        lines = describe_budget(speeds(build, cluster, open_batch), cluster, seconds)
    else:
        lines = describe_loss(loss, build, arguments, open_batch)
    sources = [f"{fit.name}: {fit.source}; {fit.uncertainty}." for fit in FITS]
    sources.append("Losses are those of MassiveText by its own tokenizer, each text seen once.")
    print("\n".join([*lines, "", *(textwrap.fill(line, 80) for line in sources)]))
    return 0


def describe_loss(
    loss: float,
    build: Callable[[str | None], Request],
    arguments: argparse.Namespace,
    open_batch: bool,
) -> list[str]:
    """Return lines about the cheapest way to a loss and, for a --cluster, how long it takes."""
    needed = [(fit, fit.flops_for(loss)) for fit in FITS]
    lines = [f"a loss of {loss:g} nats a token, perplexity {math.exp(loss):.1f}:", ""]
    lines.append(_optima(needed))
    if arguments.cluster is not None:
        cluster = parse_cluster(arguments.cluster, arguments.gpu)
        found = speeds(build, cluster, open_batch)
        for fit, flops in needed:
            at = min(found, key=functools.partial(_misfit, fit, flops))
            said = f"by {fit.name} {duration(flops / flops_per_s(at))} on {cluster.name}"
            lines.append(f"{said}, at {at.plan.config.model}'s predicted speed")
    return lines


def speeds(
    build: Callable[[str | None], Request], cluster: Cluster, open_batch: bool
) -> list[Prediction]:
    """The quickest layout of each model that fits, smallest first."""
    found = []
    asked = build(None).model
    models = MODELS if asked == AUTO else (asked,)
    for model in with_progress(models, "layouts of each model"):
        with contextlib.suppress(UserError):  # a model that fits nowhere
            config = with_values(build(None), model=model)
            if open_batch:  # the smallest that keeps a GPU busy
                config = with_values(config, strategy=AUTO, batch_size=AUTO)
                config, _ = choose_spread(config, cluster, None, [])
            own = {"model": model, "batch_size": config.batch_size}
            choices = rank_layouts(lambda name, own=own: with_values(build(name), **own), cluster)  # type: ignore[misc]
            if choices and choices[0].fits:
                found.append(choices[0])
    if not found:
        fix = "set a smaller batch_size or activation_checkpointing=full"
        raise UserError(f"none of {', '.join(models)} fits on {cluster.name}", fix=fix)
    return found


def _misfit(fit: Fit, flops: float, choice: Prediction) -> float:
    """How far a model's size is from that on which the FLOPs are best spent."""
    best, _ = fit.optimum(flops)
    return abs(math.log(best / choice.plan.size.num_parameters))


def describe_budget(found: Sequence[Prediction], cluster: Cluster, seconds: float) -> list[str]:
    """What the time is best spent on, and what it means for each model that is there."""
    at = min(found, key=lambda choice: _misfit(FITS[-1], flops_per_s(choice) * seconds, choice))
    flops = flops_per_s(at) * seconds
    config = at.plan.config
    mfu = f" (MFU {100 * at.mfu:.0f}%)" if at.mfu else ""
    said = f"{cluster.name} for {duration(seconds)}: {flops:.2e} FLOPs, at the "
    said += f"{flops_per_s(at) / cluster.num_processes / 1e12:.0f} TFLOP/s a GPU{mfu} that "
    said += f"{config.model} is predicted to reach with {config.batch_size} x "
    said += f"{config.max_length} tokens on each"
    names = " / ".join(fit.name for fit in FITS)
    each = (
        f"each model in that time, and for how many tokens it would be the best size,\nby {names}:"
    )
    rows = []
    for choice in found:
        parameters = choice.plan.size.num_parameters
        tokens_per_s = choice.tokens_per_s or 0.0
        tokens = tokens_per_s * seconds
        best = " / ".join(count(fit.tokens_for(parameters)) for fit in FITS)
        loss = " / ".join(f"{fit.loss(parameters, tokens):.3f}" for fit in FITS)
        rows.append([choice.plan.config.model, count(tokens_per_s), count(tokens), best, loss])
    headers = ["model", "tokens/s", "sees", "is best at", "loss"]
    table = tabulate(rows, headers, disable_numparse=True)
    optima = _optima([(fit, flops) for fit in FITS])
    return [textwrap.fill(said, 80), "", optima, "", each, "", table]


def _optima(needed: Sequence[tuple[Fit, float]]) -> str:
    rows = []
    for fit, flops in needed:
        parameters, tokens = fit.optimum(flops)
        each = f"{tokens / parameters:.0f}"
        loss = f"{fit.loss(parameters, tokens):.3f}"
        rows.append([fit.name, f"{flops:.2e}", count(parameters), count(tokens), each, loss])
    headers = ["fit", "FLOPs", "parameters", "tokens", "tokens each", "loss"]
    return tabulate(rows, headers, disable_numparse=True)


if __name__ == "__main__":
    checkout.run(main)
