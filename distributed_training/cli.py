"""Define the command line. Each value of COMMANDS is a function that adds the options of one
command to a parser and returns the function that runs the command. This module does not import
torch."""

import argparse
import importlib
import itertools
import logging
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from distributed_training.settings import strategies
from distributed_training.settings.cache import use_private_caches
from distributed_training.settings.config import KEYS, Request
from distributed_training.settings.errors import UserError, print_stderr, run_and_report_errors
from distributed_training.settings.files import IS_INSTALLED, did_you_mean, one_of, shown
from distributed_training.settings.keys import Key, Parser, advise_on_name, at_least, read_keys
from distributed_training.settings.launchers import CPU_PROCESSES, PLANNED_OPTION
from distributed_training.settings.request import build_config
from distributed_training.start.streams import (
    open_closed_streams,
    open_lasting,
    replace_unencodable,
)

# Commands that accept CONFIG's keys, beside train, and their purposes
TOOLS = {
    "plan": "Answer whether a run fits, how fast it is and what fits instead, without training.",
    "compare": "Train the same model on the same data under several strategies, and compare.",
    "parity": "Check that every layout computes the same results as a single process.",
    "data": "Show the first training samples, mark the tokens in the loss, and print counts.",
}
# Keys in the documents from which this project started -> current names
FORMER_KEYS = {"model_name": "model", "num_epochs": "epochs"}
LAST_HELP = "use the last weights instead of those with the lowest validation loss"
Act = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Script that the user runs, with its CONFIG and its command line."""

    config: Mapping[str, Any]
    script: Path
    description: str
    output_dir: Path  # CONFIG's output_dir
    argv: tuple[str, ...] = ()  # arguments after the command

    @property
    def name(self) -> str:
        return "trainplan" if IS_INSTALLED else self.script.name


def format_key_help(key: Key, *details: str) -> str:
    """Return a key's help, followed by its choices and `details` in parentheses."""
    notes = list(details)
    if key.name == "strategy":  # the choices are the folders in strategies/
        notes.insert(0, ", ".join(strategies.list_strategies()))
    elif all(s.keys() & {"enum", "const"} or s["type"] == "null" for s in key.schemas):
        notes.insert(0, one_of(key.choices))
    return f"{key.help} ({'; '.join(notes)})" if notes else key.help


def add_keys(parser: Parser) -> None:
    """Add an option for each key of CONFIG and of the strategies' engines, and the options that
    control how a run is started."""
    parser.formatter_class = partial(argparse.HelpFormatter, max_help_position=28)
    add = parser.add_argument
    preset_help = "preset that overrides CONFIG: a name in configs/presets/, or a path"
    add("--preset", metavar="NAME", help=preset_help)
    num_gpus_help = (
        f"start N processes. all: one process per GPU, or {CPU_PROCESSES} processes without GPUs"
    )
    add("--num_gpus", metavar="N", help=num_gpus_help)
    add(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="check the run and print its settings without training",
    )
    explain_help = "with plan or --dry-run: also print tables and settings"
    add("--explain", action="store_true", help=explain_help)
    cluster_help = "with plan or --dry-run: plan for N nodes of M GPUs, such as 2x8xH100-80GB"
    add("--cluster", metavar="NxMxGPU", help=cluster_help)
    gpu_help = "with plan or --dry-run: plan for this GPU, given by its name or as JSON"
    add("--gpu", metavar="GPU", help=gpu_help)
    add(
        "--force",
        action="store_true",
        help="start the run even if it is predicted not to fit in GPU memory",
    )
    strict_help = (
        "fail if the data, weights or tokenizer are missing, instead of using the embedded data "
        "and tokenizer, and random weights"
    )
    add("--strict", action="store_true", help=strict_help)
    keys = dict(KEYS)
    for strategy in strategies.list_strategies():
        keys |= read_keys(strategies.strategy_options(strategy))
    for title, members in itertools.groupby(keys.values(), lambda key: key.group):
        group = parser.add_argument_group(title)
        for key in members:
            text = format_key_help(key, f"default {key.default!r}").replace("%", "%%")
            group.add_argument(f"--{key.name}", default=argparse.SUPPRESS, metavar="", help=text)
    parser.keys = keys.keys()


def read_options(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. `overrides` in the result maps the names of the given keys to their
    text. Raises UserError for an unknown option."""
    names = [name.removeprefix("--") for name in parser._option_string_actions]
    argv = [replace_dashes(word, names) for word in argv]
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        fix = ""
        if parser.keys:
            word = unknown[0].removeprefix("--").partition("=")[0]
            fix = _advise_on_file(unknown[0]) or advise_on_name(word, names)
            if not fix and not unknown[0].startswith("-"):
                fix = "put a value of several words in quotes"
        raise UserError(f"{shown(unknown[0])} is not an option", fix=fix or "see --help")
    typed = vars(arguments).items()
    arguments.overrides = {name: text for name, text in typed if name in parser.keys}
    return arguments


def replace_dashes(word: str, names: Sequence[str]) -> str:
    """Return --batch_size=8 for --batch-size=8, if `names` contains batch_size."""
    option, equals, value = word.partition("=")
    name = option.removeprefix("--").replace("-", "_")
    return f"--{name}{equals}{value}" if option.startswith("--") and name in names else word


def _advise_on_file(word: str) -> str:
    if not Path(word).is_file():
        return ""
    return f"use --dataset {shlex.quote(word)}, and put several datasets in quotes"


def configure(
    arguments: argparse.Namespace, program: Program, overrides: Mapping[str, Any]
) -> Request:
    """Merge CONFIG, the preset and the values of `overrides` into a Request. Raises UserError if a
    value is not accepted."""
    return build_config(
        program.config,
        preset=arguments.preset,
        overrides=overrides,
        force=arguments.force,
        strict=arguments.strict,
    )


def _load(module: str) -> Any:
    """Import and return a module that only some commands need."""
    return importlib.import_module(f"distributed_training.{module}")


def refuse_planned_machines(arguments: argparse.Namespace) -> None:
    """Raise UserError if an option describes the machines of a plan."""
    for option in ("cluster", "gpu"):
        if getattr(arguments, option) is not None:
            what = f"--{option} describes machines to plan for"
            raise UserError(what, fix="add --dry-run to a training command, or use plan")


def train(parser: Parser, program: Program) -> Act:
    """Train with CONFIG, a preset and the command line. With --dry-run, print the plan."""
    name = program.name
    parser.usage = f"{name} [train] [--KEY VALUE ...] [--preset NAME]"
    parser.description = program.description
    parser.epilog = f"Other launchers also work: deepspeed --num_gpus=N {name}"
    add_keys(parser)

    def act(arguments: argparse.Namespace) -> int:
        if not arguments.dry_run:
            refuse_planned_machines(arguments)
        request = configure(arguments, program, arguments.overrides)
        launch = _load("start.launch")
        process = launch.launched_process(arguments.num_gpus)
        if arguments.dry_run:
            return _load("tools.dry_run").print_plan(request, process, program.script, arguments)
        if process is None or process.rank == 0:
            print("planning the run and importing torch ...", flush=True)
        if process is not None:  # rank 0 plans, and the others receive the plan
            return launch.run_launched(request, process)
        cluster = _load("start.local").requested_cluster(request, arguments.num_gpus)
        return launch.start(request, cluster, program.script)

    return act


def tool_command(name: str, parser: Parser, program: Program) -> Act:
    """Add the options of the command `name` in tools/, which accepts CONFIG's keys in addition to
    its own options."""
    tool = _load(f"tools.{name}")
    parser.usage = f"{program.name} {name} [OPTIONS] [--KEY VALUE ...]"
    tool.add_options(parser)
    add_keys(parser)

    def act(arguments: argparse.Namespace) -> int:
        if name != "plan":
            refuse_planned_machines(arguments)
        return tool.run(arguments, partial(configure, arguments, program), program.script)

    return act


def report(parser: Parser, program: Program) -> Act:
    """Compare runs in tables."""
    add = parser.add_argument
    add(
        "paths",
        nargs="*",
        type=Path,
        help="runs, folders of runs, or records (default: output_dir)",
    )
    return lambda a: _load("records.report").main(a, program.output_dir)


def doctor(parser: Parser, program: Program) -> Act:
    """Check whether this machine is ready for training."""
    return lambda a: _load("tools.doctor").main(program.output_dir)


def generate(parser: Parser, program: Program) -> Act:
    """Generate text with a trained model."""
    add = parser.add_argument
    add(
        "run",
        help="folder of a run, such as runs/latest, folder of a model in "
        "Hugging Face format, or name of a model on the Hub",
    )
    prompt_help = "question, or text to continue (default: read lines from standard input. On a "
    prompt_help += "terminal, they form one conversation)"
    add("--prompt", help=prompt_help)
    add("--last", action="store_true", help=LAST_HELP)
    num_tokens_help = "maximum number of tokens to generate (default: 100)"
    add(
        "--num_tokens",
        "--max_new_tokens",
        metavar="N",
        type=at_least(1),
        default=100,
        help=num_tokens_help,
    )
    add("--system", metavar="TEXT", help="system prompt (default: the chat template's own)")
    temperature_help = "sampling temperature. 0: always choose the most likely token (default: 0 "
    temperature_help += "for answers, 0.7 for other text)"
    add("--temperature", type=at_least(0.0), help=temperature_help)
    add("--seed", type=int, default=42, help="random seed for sampling (default: 42)")
    return lambda a: _load("tools.models").generate(a)


def eval_(parser: Parser, program: Program) -> Act:
    """Evaluate a model on a dataset: loss, perplexity, bits per byte."""
    add = parser.add_argument
    run_help = "folder of a run, such as runs/latest, or folder or Hub name of another model"
    add("run", help=run_help)
    dataset_help = (
        "data to evaluate on. If the data has a validation split, that split is used (default: the "
        "run's validation samples)"
    )
    add("--dataset", metavar="D", help=dataset_help)
    columns_help = "columns of the dataset to use, such as prompt=question,completion=answer"
    add("--columns", metavar="NAME=COLUMN", help=columns_help)
    length_help = "tokens per sample (default: as in the run, or with --dataset at most 1024)"
    add("--max_length", metavar="N", type=at_least(1), help=length_help)
    add("--last", action="store_true", help=LAST_HELP)
    return lambda a: _load("tools.models").evaluate(a)


def export(parser: Parser, program: Program) -> Act:
    """Export the weights of a checkpoint, or of an interrupted run, in Hugging Face format."""
    add = parser.add_argument
    add("run", help="folder of a checkpoint, or of a run, whose newest checkpoint is exported")
    add("--to", metavar="FOLDER", help="folder to write (default: hf/ in the run's folder)")
    merge_help = "merge a run's exported adapters into the whole model (default folder: merged/)"
    add("--merge", action="store_true", help=merge_help)
    add("--text", action="store_true", help="write only the text decoder of a multimodal model")
    return lambda a: _load("tools.models").export_checkpoint(a)


COMMANDS: dict[str, Callable[[Parser, Program], Act]] = {
    "train": train,
    **{name: partial(tool_command, name) for name in TOOLS},
    "report": report,
    "doctor": doctor,
    "generate": generate,
    "eval": eval_,
    "export": export,
}


def describe_command(name: str) -> str:
    """Return the purpose of a command in one line."""
    return TOOLS.get(name) or str(COMMANDS[name].__doc__).partition("\n")[0]


def short_help(program: Program) -> str:
    """Return one page: the commands with their purposes, and the first keys of CONFIG."""
    lines = [program.description, "", f"{program.name} COMMAND [OPTIONS]", ""]
    rows = [(name, describe_command(name)) for name in COMMANDS]
    keys = [KEYS[name] for name in program.config if name in KEYS][:13]
    rows += [(f"--{key.name}", key.help) for key in keys]
    lines += [
        f"  {name:<18} {textwrap.shorten(text, 58, placeholder=' ...')}" for name, text in rows
    ]
    lines += ["", "--help all lists all options, and COMMAND --help the options of one command."]
    return "\n".join(lines)


def run_command(name: str, program: Program) -> int:
    """Parse the options of a command and run it. Return the exit code."""
    if name == "train" and set(program.argv[:1]) & {"-h", "--help"}:
        print(short_help(program))
        if program.argv[1:] != ("all",):
            return 0
        program = replace(program, argv=("--help",))
    parser = Parser(prog=f"{program.name} {name}", description=describe_command(name))
    act = COMMANDS[name](parser, program)
    arguments = read_options(parser, program.argv)
    if name != "plan":
        use_private_caches()
    return act(arguments)


def _prepare_training() -> None:
    """Prepare the process for commands that run a model. Raises UserError unless it runs on
    Linux."""
    if sys.platform != "linux":
        fix = "use a Linux machine, WSL 2 or a container"
        raise UserError(f"this suite runs on Linux, not on {sys.platform}", fix=fix)
    # transformers and PEFT import torchao if it is installed. torchao then warns about kernels that
    # this machine lacks and about deprecated functions of torch.
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # If SIGCHLD is ignored, the exit codes of child processes are lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def with_current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return CONFIG with current names and values for those of the documents from which this
    project started, and print a note if it has any."""
    current = {FORMER_KEYS.get(name, name): value for name, value in config.items()}
    if current.get("num_samples", -1) is None:
        current["num_samples"] = -1
    if current != config and os.environ.get("RANK", "0") == "0":
        print_stderr(
            f"note: CONFIG uses former names. Write {', '.join(map(repr, FORMER_KEYS.values()))}, "
            'and "num_samples": -1 for all samples.'
        )
    return current


def main(config: Mapping[str, Any], description: str, script: str) -> int:
    """Run the command given on the command line and return the exit code. `description` is
    the docstring of the user's script, and `script` is the path of the script."""
    file = Path(script).resolve()
    # CONFIG's output_dir is relative to the script. On the command line, output_dir is relative to
    # the current folder.
    output_dir = file.parent / str(config.get("output_dir", "runs"))
    config = {**with_current_names(config), "output_dir": str(output_dir)}
    description = description.splitlines()[0]
    open_closed_streams()
    replace_unencodable()
    name = "train"
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-"):
        name, *argv = argv
    if name == "train":
        sys.stdout = open_lasting(sys.stdout)
    sys.stderr = open_lasting(sys.stderr)

    def act() -> int:
        if name != "plan":  # plan only calculates, on any system
            _prepare_training()
        if argv[:1] == [PLANNED_OPTION]:
            return _load("start.launch").run_planned_rank(*argv[1:])
        if name not in COMMANDS:
            why = f"the commands are {', '.join(COMMANDS)}. Options begin with --"
            advice = did_you_mean(name, COMMANDS) or why
            fix = _advise_on_file(name) or "see --help"
            raise UserError(f"{shown(name)} is not a command", advice, fix)
        program = Program(
            config=config,
            script=file,
            description=description,
            output_dir=output_dir,
            argv=tuple(argv),
        )
        return run_command(name, program)

    return run_and_report_errors(act)


def command() -> int:
    """Run the command `trainplan`, in whose CONFIG every key has its default."""
    description = "Plan the training of a language model, then train it under any strategy."
    try:
        return main({"output_dir": os.path.abspath("runs")}, description, __file__)
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("distributed_training"):
            raise
        what = f"{error.name} is not installed. Training needs it, and so does planning for models "
        print_stderr(f"error: {what}of other families. Run:\n  pip install 'trainplan[train]'")
        return UserError.exit_code


if __name__ == "__main__":
    raise SystemExit(command())
