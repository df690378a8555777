"""Which runs `compare` is to do, and what came of them by layout. No torch import."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.plan.machine import detect_machine
from distributed_training.records.comparison import Comparison, Layout
from distributed_training.records.record import Record
from distributed_training.run.launch import requested_processes
from distributed_training.settings.config import AUTO, KEYS, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import did_you_mean, load_json, shown, user_path
from distributed_training.settings.strategies import list_strategies, strategy_options

# Not part of what is compared; a key that is typed or in the plan stays as it is.
QUIETLY = {"checkpoint_every": 0, "export": False, "generate": None}
SIZE_OF_STEP = ("batch_size", "grad_accum_steps")  # work, though not marked as such
Build = Callable[[Sequence[str]], RunConfig]  # "key=value" texts -> CONFIG with them
Values = Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class Run:
    """One training that is wanted, and what came of it."""

    values: Values  # CONFIG keys over CONFIG, strategy and seed among them
    config: RunConfig | None  # None: refused before it was started
    record: Record | None = None
    why: str = ""  # there is no finished record

    @property
    def texts(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]

    @property
    def layout(self) -> Values:
        """What is compared: all but the seed."""
        return {key: value for key, value in self.values.items() if key != "seed"}

    def describe(self, seeds: bool) -> str:
        return self.values["strategy"] + f", seed {self.values['seed']}" * seeds


@dataclass(kw_only=True, slots=True)
class Wanted:
    """All runs of a comparison and where they go."""

    runs: list[Run]
    out: Path
    num_processes: int
    script: Path
    options: list[str]  # of every run besides its values
    git_commit: str | None
    durations_s: list[float] = field(default_factory=list)

    @property
    def left(self) -> list[Run]:
        """Neither finished nor failed."""
        return [run for run in self.runs if run.record is None and not run.why]


def plan_runs(arguments: argparse.Namespace, build: Build, script: Path) -> Wanted:
    """Which runs are wanted. Raises UserError where nothing can be compared."""
    typed = by_name(dict(text.partition("=")[::2] for text in arguments.overrides))
    plan, asked, several = dict[str, Any](), arguments.num_gpus, arguments.strategies
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds} is not at least 1")
    if (arguments.plan is None) == (several is None):
        what = "compare takes a plan, or --strategies"
        raise UserError(what, fix="type compare --strategies dp,fsdp or compare PLAN.json")
    if arguments.plan is not None:
        plan, name = read_plan(user_path("the plan", arguments.plan)), Path(arguments.plan).stem
        common = QUIETLY | by_name(plan.get("common", {}))
        layouts = [common | by_name(run) | typed for run in plan["runs"]]
    else:
        names = [known_strategy(word.strip()) for word in several.split(",")]
        layouts = [QUIETLY | known_to(name, typed, names) | {"strategy": name} for name in names]
        name = "-".join(names)
    if arguments.cluster is not None:
        raise UserError("--cluster only plans, and compare trains", fix="leave it out")
    machine = detect_machine()
    count = requested_processes(str(asked or plan.get("num_gpus", "all")), machine, {})
    runs = [run for seed in range(arguments.seeds) for run in with_seed(layouts, seed, build)]
    built = next((run.config for run in runs if run.config is not None), None)
    if built is None:
        raise UserError(runs[0].why if runs else "the plan has no runs")
    default = Path(built.output_dir) / f"compare-{name}-x{count}"
    options = [f"--num_gpus={count}", *["--force"] * arguments.force]
    options += [f"--preset={arguments.preset}"] * (arguments.preset is not None)
    return Wanted(
        runs=runs, num_processes=count, script=script, options=options,
        out=user_path("--out", arguments.out) if arguments.out else default,
        git_commit=arguments.git_commit,
    )  # fmt: skip


def read_plan(path: Path) -> dict[str, Any]:
    """A plan's JSON. Raises UserError for what is not a plan."""
    plan = load_json(path, "plan")
    runs = plan.get("runs") if isinstance(plan, dict) else None
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        fix = 'write {"num_gpus": N, "common": {...}, "runs": [{...}, ...]}'
        raise UserError(f"{path} is not a plan of runs", fix=fix)
    return plan


def known_strategy(name: str) -> str:
    """The name; raises UserError for one that is not a strategy."""
    known = (*list_strategies(), AUTO)
    if name not in known:
        fix = did_you_mean(name, known, f"choose from {', '.join(known)}")
        raise UserError(f"--strategies: {shown(name)} is not a strategy", fix=fix)
    return name


def known_to(strategy: str, typed: Values, names: Sequence[str]) -> dict[str, Any]:
    """What is typed, without the keys that only the engines of other strategies have."""
    own = {name: set(strategy_options(name).model_fields) for name in names}
    foreign = set().union(*own.values()) - own[strategy]
    return {key: value for key, value in typed.items() if key not in foreign}


def by_name(values: Values) -> dict[str, Any]:
    """The values under their keys' own names."""
    names = {alias: key.name for key in KEYS.values() for alias in key.aliases}
    return {names.get(name.strip(), name.strip()): value for name, value in values.items()}


def with_seed(layouts: Sequence[Values], more: int, build: Build) -> list[Run]:
    """Runs of all layouts with the seed that CONFIG gives them and `more`."""
    found = []
    for layout in layouts:
        try:
            config = build([f"{key}={value}" for key, value in layout.items()])
            if config.batch_size == AUTO:
                what = "compare needs a batch_size: each strategy would choose its own"
                raise UserError(what, fix="add --batch_size 8")
            values = {**layout, "strategy": config.strategy, "seed": config.seed + more}
            config = config.model_copy(update={"seed": config.seed + more})
            found.append(Run(values=values, config=config))
        except UserError as error:
            values = {"strategy": "?", **layout, "seed": more}
            found.append(Run(values=values, config=None, why=str(error)))
    return found


def comparisons_of(wanted: Wanted) -> list[Comparison]:
    """The runs by what they were to do, then by layout."""
    groups: dict[str, list[Run]] = {}
    for run in wanted.runs:
        done = {
            key: value
            for key, value in run.layout.items()
            if (key in KEYS and KEYS[key].work) or key in SIZE_OF_STEP
        }
        groups.setdefault(", ".join(f"{k} {v}" for k, v in done.items()), []).append(run)
    return [Comparison(work=work, layouts=layouts_of(runs)) for work, runs in groups.items()]


def layouts_of(runs: Sequence[Run]) -> list[Layout]:
    """Runs by layout, each named by what tells it from the others."""
    keys = dict.fromkeys(key for run in runs for key in run.layout)
    telling = [key for key in keys if len({repr(run.layout.get(key)) for run in runs}) > 1]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        words = [f"{key}={run.layout[key]}" for key in telling
                 if key != "strategy" and key in run.layout]  # fmt: skip
        groups.setdefault(" ".join([run.values["strategy"], *words]), []).append(run)
    return [
        Layout(
            name=name,
            records=[run.record for run in members if run.record is not None],
            num_runs=len(members),
            why=next((run.why for run in members if run.why), ""),
        )
        for name, members in groups.items()
    ]
