"""The command line: one parser, from the same description of every key as CONFIG itself. A command
is an entry of COMMANDS. No torch import before training begins."""

import argparse
import importlib
import itertools
import logging
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from distributed_training.settings import strategies
from distributed_training.settings.cache import use_private_caches
from distributed_training.settings.config import KEYS, Request, build_config
from distributed_training.settings.errors import UserError, exit_code
from distributed_training.settings.files import did_you_mean, require_writable, shown
from distributed_training.settings.keys import (
    Key,
    Parser,
    at_least,
    foreign_key,
    nearest_key,
    read_keys,
)
from distributed_training.settings.machine import detect_machine
from distributed_training.settings.own_code import name_families, refuse_unnamed_family
from distributed_training.start import launch
from distributed_training.start.ranks import current_process, run_ranks
from distributed_training.start.streams import LastingStream, fill_closed, replace_unwritable

OWN_OPTIONS = (
    "preset", "set", "num_gpus", "max_restarts", "dry-run", "force", "strict", "cluster", "gpu",
    "help",
)  # fmt: skip
DRY_RUN = ("--dry-run", "--dry_run")
MODEL_NAMES = ("model", *KEYS["model"].aliases)
Add = Callable[..., argparse.Action]  # of a parser
Act = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The script that a command runs for."""

    config: Mapping[str, Any]
    script: Path
    about: str
    output_dir: Path  # CONFIG's


class AddOverride(argparse.Action):
    """Keep an option of a key as `key=value`, in the order of the command line."""

    def __call__(self, _: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        assert option is not None
        namespace.overrides.append(f"{option.removeprefix('--')}={value}")


def about_key(key: Key, *more: str) -> str:
    """A key's help, then in brackets the words of which it takes one, and `more`."""
    words = list(more)
    if key.name == "strategy":  # the strategies are folders
        words.insert(0, ", ".join(strategies.list_strategies()))
    elif any("enum" in form for form in key.forms):
        words.insert(0, key.accepts())
    return f"{key.help} ({'; '.join(words)})" if words else key.help


def parse(argv: Sequence[str], program: Program, own: Any = None) -> argparse.Namespace:
    """`preset`, `overrides` (`key=value` texts, in the order of the command line), `num_gpus`,
    `dry_run`, and the options of `own`, a module of tools/; each name of a key is an option."""
    name = program.script.name
    others = [f"{name} {other} --help" for other in COMMANDS if other != "train"]
    parser = Parser(
        prog=name,
        description=program.about,
        usage="\n       ".join([f"{name} [train] [--KEY VALUE ...] [--preset NAME]", *others]),
        epilog=f"Other launchers work, too: deepspeed --num_gpus=N {name}",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
    )
    if own is not None:
        command = own.__name__.rpartition(".")[2]
        parser.usage = f"{name} {command} [OPTIONS] [--KEY VALUE ...]"
        parser.description = own.__doc__.partition("\n")[0]
        own.add_options(parser)
    parser.set_defaults(overrides=[])
    add = parser.add_argument
    add("--preset", metavar="NAME", help="a file of configs/presets/, or a path; over CONFIG")
    add("--set", metavar="KEY=VALUE", nargs="+", action="extend", dest="overrides",
        help="several keys at once")  # fmt: skip
    processes = f"start N processes; all: one per GPU, or {launch.CPU_PROCESSES} without GPUs"
    add("--num_gpus", metavar="N", help=processes)
    restarts = "after a failure, start again from the last checkpoint, N times (default 0)"
    add("--max_restarts", metavar="N", type=at_least(0), default=0, help=restarts)
    add(*DRY_RUN, action="store_true", help="check and print what would run, start nothing")
    elsewhere = "plan, or --dry-run, for machines that are not here, such as 2x8xH100-80GB"
    add("--cluster", metavar="NxMxGPU", help=elsewhere)
    add("--gpu", metavar="GPU", help="with --cluster NxM: a known GPU, or JSON that describes one")
    add("--force", action="store_true", help="run what is predicted not to fit")
    strict = "fail if data, weights or tokenizer are missing, instead of using the ones shipped"
    add("--strict", action="store_true", help=strict)
    keys = dict(KEYS)
    for strategy in strategies.list_strategies():  # an engine in a strategy's folder may add some
        keys |= read_keys(strategies.strategy_options(strategy))
    for title, members in itertools.groupby(keys.values(), attrgetter("group")):
        group = parser.add_argument_group(title)
        for key in members:
            text = about_key(key, f"default {key.default!r}").replace("%", "%%")
            for option in (key.name, *key.aliases):
                group.add_argument(
                    f"--{option}", action=AddOverride, dest="overrides", metavar="",
                    help=text if option == key.name else argparse.SUPPRESS,
                )  # fmt: skip
    # --batch-size=8 is --batch_size=8
    dashed = re.compile(r"^--[\w-]+(?==|\Z)")
    argv = [dashed.sub(lambda match: "--" + match[0][2:].replace("-", "_"), word) for word in argv]
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].lstrip("-").partition("=")[0]
        is_option = unknown[0].startswith("--")
        hint = nearest_key(word, keys.values(), OWN_OPTIONS) if is_option else None
        fix = f"did you mean --{hint}?" if hint else "see --help"
        fix = (foreign_key(word) if is_option else None) or fix
        raise UserError(f"{shown(unknown[0])} is not an option", fix=fix)
    pairs = (text.partition("=") for text in arguments.overrides)
    name_families(value for key, _, value in pairs if key.strip() in MODEL_NAMES)
    if arguments.cluster is not None and arguments.num_gpus is not None:
        raise UserError("--cluster says how many GPUs there are", fix="leave out --num_gpus")
    return arguments


def configure(arguments: argparse.Namespace, program: Program, overrides: Sequence[str]) -> Request:
    """CONFIG, preset and `key=value` texts merged."""
    config = build_config(
        program.config, preset=arguments.preset, overrides=overrides,
        defaults=strategies.strategy_defaults, options=strategies.strategy_options,
    )  # fmt: skip
    refuse_unnamed_family(config.model)
    return config.model_copy(update={"force": arguments.force, "strict": arguments.strict})


def over_config(name: str, argv: Sequence[str], program: Program) -> int:
    """A command that takes CONFIG's keys beside its own options: a module of tools/."""
    own = _load(f"tools.{name}")
    arguments = parse(argv, program, own)
    if name != "plan" and (arguments.cluster is not None or arguments.gpu is not None):
        option = "--cluster" if arguments.cluster is not None else "--gpu"
        raise UserError(f"{option} only plans, and {name} trains", fix="leave it out, or type plan")
    return own.run(arguments, partial(configure, arguments, program), program.script)


def _load(module: str) -> Any:
    """A module that only its command needs."""
    return importlib.import_module(f"distributed_training.{module}")


def train(argv: Sequence[str], program: Program) -> int:
    """Train: CONFIG, preset and command line become a plan and the plan's processes."""
    if launch.PLANNED in argv:
        return launch.start_planned()
    arguments = parse(argv, program)
    for name in ("cluster", "gpu"):
        if getattr(arguments, name) is not None and not arguments.dry_run:
            raise UserError(f"--{name} only plans", fix="add --dry-run, or type plan")
    own: set[str] = {*DRY_RUN}
    for name, value in (("--cluster", arguments.cluster), ("--gpu", arguments.gpu)):
        own |= {name, f"{name}={value}"} | ({value} if value else set())
    words = [text for text in argv if text not in own]
    config = configure(arguments, program, arguments.overrides)
    return launch.start(config, program.script, words, arguments)


def own_options(
    command: Callable[[Add, Program], Act], argv: Sequence[str], program: Program
) -> int:
    """A command without CONFIG's keys: `command` adds its options and says what to do with them."""
    parser = Parser(
        prog=f"{program.script.name} {command.__name__.rstrip('_')}", description=command.__doc__
    )
    act = command(parser.add_argument, program)
    arguments = parser.parse_args(argv)
    name_families([getattr(arguments, "model", None)])
    return act(arguments)


def add_model(add: Add) -> None:
    """The option of commands that read a run, whose model may be code of the user's own."""
    family = "folder of the model family, if the run's model is code of your own"
    add("--model", metavar="FOLDER", help=family)


def report(add: Add, program: Program) -> Act:
    """Tables and plots from run records."""
    add("paths", nargs="*", type=Path, help="runs, folders of runs, or records")
    add("--all", action="store_true", help="every kind of work, not only the newest")
    add("--plots", type=Path, default=Path("report"), help="folder for the plots")
    add("--html", type=Path, metavar="FILE", help="tables and plots in one page instead")
    return lambda a: _load("records.report").main(a, program.output_dir)


def doctor(add: Add, program: Program) -> Act:
    """What this machine has and lacks for training; --nodes: the links between processes."""
    add("--nodes", action="store_true", help="measure the links between processes instead")
    add("--num_gpus", metavar="N", help="with --nodes: start N processes; under torchrun, none")

    def act(a: argparse.Namespace) -> int:
        if a.nodes:
            return in_processes(program, a.num_gpus, lambda: _load("tools.links").check_nodes())
        return _load("tools.doctor").main(program.output_dir)

    return act


def links(add: Add, program: Program) -> Act:
    """How fast processes talk to each other: six operations over every group of the mesh."""
    add("--num_gpus", metavar="N", help="processes (default: all, one per GPU, or 2 without GPUs)")
    for axis in ("pp", "dp_shard", "tp"):
        size = f"processes along {axis}; what is left is dp_replicate"
        add(f"--{axis}", metavar="N", type=int, default=1, help=size)
    largest = "largest tensor; 1024 on GPUs, 16 without"
    add("--largest", metavar="MIB", type=at_least(1), help=largest)
    add("--seconds", metavar="S", type=float, default=0.15, help="for a figure (default 0.15)")
    folder = program.output_dir / "links"
    add("--out", metavar="FOLDER", type=Path, default=folder, help="of the record and picture")

    def act(a: argparse.Namespace) -> int:
        process = current_process()
        if process is None or process.rank == 0:
            fix = "name another folder with --out"
            require_writable(a.out, fix, "links.json", "links.png")
        return in_processes(program, a.num_gpus, lambda: _load("tools.links").main(a))

    return act


def in_processes(program: Program, num_gpus: str | None, work: Callable[[], int]) -> int:
    """Do `work` as one of this command's processes, or start them, as many as there can be here
    unless `num_gpus` says otherwise; the exit code."""
    if current_process() is not None:
        return work()
    count = launch.requested_processes(num_gpus or "all", detect_machine(), {})
    if count == 1:
        fix = "type --num_gpus 2, or start with torchrun on the nodes"
        raise UserError("one process has no links", fix=fix)
    return run_ranks([str(program.script), *sys.argv[1:]], count).exit_code


def generate(add: Add, program: Program) -> Act:
    """Text from a trained model."""
    add("run", help="a run's folder, such as runs/latest, or a model in Hugging Face's format")
    add_model(add)
    add("--prompt", help="what the text begins with; without it, each line that you type")
    add("--best", action="store_true", help="the weights that keep_best kept, not the last")
    length = "length of the text (default 100)"
    add("--num_tokens", "--max_new_tokens", type=at_least(1), default=100, help=length)
    likeliest = "0: always the likeliest (default 0.7)"
    add("--temperature", type=at_least(0.0), default=0.7, help=likeliest)
    add("--top_k", type=at_least(1), default=40, help="choose among so many tokens (default 40)")
    add("--seed", type=int, default=42, help="another seed, another text (default 42)")
    return lambda a: _load("tools.models").generate(a)


def eval_(add: Add, program: Program) -> Act:
    """Loss, perplexity and bits per byte of a model on a dataset; --tasks: what lm-eval says."""
    add("run", help="a run's folder, such as runs/latest, its hf/, adapters, or a model")
    add_model(add)
    dataset = "text or records to evaluate on, or their validation split if they have one; "
    add("--dataset", metavar="D", help=f"{dataset}default: the samples that validated the run")
    add(
        "--columns", metavar="OURS=THEIRS", help="as in training: prompt=question,completion=answer"
    )
    length = "tokens of a sample (default: the run's, else at most 1024)"
    add("--max_length", metavar="N", type=at_least(1), help=length)
    add("--best", action="store_true", help="the weights that keep_best kept, not the last")
    add("--tasks", metavar="NAMES", help="tasks of lm-eval, such as arc_easy,hellaswag; install it")
    return lambda a: _load("tools.models").evaluate(a)


def export(add: Add, program: Program) -> Act:
    """A checkpoint's weights in Hugging Face's format; the run may have been interrupted."""
    add("run", help="a run's folder, for its newest checkpoint, or a checkpoint's")
    add_model(add)
    add("--to", metavar="FOLDER", help="default: hf/ in the run's folder")
    merge = "of a run with lora_rank: the whole model instead of the adapters"
    add("--merge", action="store_true", help=merge)
    return lambda a: _load("tools.models").export_checkpoint(a.run, a.to, merge=a.merge)


def push(add: Add, program: Program) -> Act:
    """A run's model to the Hub."""
    add("run", help="a run's folder, such as runs/latest, or its hf/")
    add("name", help="user/name on the Hub")
    add_model(add)
    add("--best", action="store_true", help="the weights that keep_best kept")
    return lambda a: _load("tools.models").push(a.run, a.name, best=a.best)


def calibrate(add: Add, program: Program) -> Act:
    """What `plan --calibrate` runs in its processes."""
    add("file", type=Path, help="where the JSON goes")
    return lambda a: _load("tools.calibrate").main(a.file)


COMMANDS: dict[str, Callable[[Sequence[str], Program], int]] = {
    "train": train,
    **{name: partial(over_config, name) for name in ("plan", "compare", "parity", "data")},
    **{
        command.__name__.rstrip("_"): partial(own_options, command)
        for command in (report, doctor, generate, eval_, export, push, links, calibrate)
    },
}


def main(config: Mapping[str, Any], about: str, script: str) -> int:
    """Run the command that the command line names; `about` is the script's docstring."""
    file = Path(script).resolve()
    # CONFIG's folders are relative to the script, those of the command line to where one stands.
    names = [name for name in KEYS["output_dir"].aliases if name in config]
    folder = names[0] if names else "output_dir"
    output_dir = file.parent / str(config.get(folder, "runs"))
    config = {**config, folder: str(output_dir)}
    about = about.splitlines()[0]
    program = Program(config=config, script=file, about=about, output_dir=output_dir)
    name_families(config.get(name) for name in MODEL_NAMES)
    fill_closed()
    replace_unwritable()
    # transformers and PEFT import torchao if it is installed. It then names the kernels that this
    # machine lacks, and what torch deprecates.
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides how processes end
    name = "train"
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-"):
        name, *argv = argv
    if name == "train":
        sys.stdout = LastingStream(sys.stdout)  # type: ignore[assignment]
        sys.stderr = LastingStream(sys.stderr)  # type: ignore[assignment]

    def act() -> int:
        if sys.platform != "linux":
            fix = "use WSL 2" if sys.platform == "win32" else "use a Linux machine or a container"
            raise UserError(f"this suite runs on Linux, not on {platform.system()}", fix=fix)
        try:
            os.getcwd()
        except FileNotFoundError:
            fix = "cd to another folder"
            raise UserError("the current folder has been removed", fix=fix) from None
        if name not in COMMANDS:
            why = f"the commands are {', '.join(COMMANDS)}; options begin with --"
            fix = did_you_mean(name, COMMANDS, "see --help")
            raise UserError(f"{shown(name)} is not a command", why, fix)
        use_private_caches()
        return COMMANDS[name](argv, program)

    return exit_code(act, trains=name == "train")
