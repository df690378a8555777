"""From CONFIG to a plan that processes can carry out, in a folder of its own. No torch import."""

import contextlib
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed_training.advise.make import decide_plan
from distributed_training.data.samples import Data
from distributed_training.plan.plan import PLAN_AS_JSON, PLAN_FILE, Plan, load_plan
from distributed_training.predict.predict import Cluster
from distributed_training.records.record import FAULTS_FILE, free_path
from distributed_training.run.saving import claims, resume
from distributed_training.settings.config import AUTO, KEYS, RunConfig, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import defaults_for

LATEST = "latest"  # in output_dir, a link to the newest run's folder


def make_plan(
    config: RunConfig, cluster: Cluster, cut: Callable[[Plan], Data | None] = lambda plan: None
) -> Plan:
    """Decide and check everything about a run, what may have to be downloaded last; raise UserError
    at the first obstacle. `cut` gives the run's samples, where they are wanted."""
    notes = list[str]()
    if config.resume not in (None, AUTO):
        config, notes = take_over(config, cluster.num_processes)
    plan = decide_plan(config, cluster, cut)
    plan.notes.extend(notes)
    return plan


def take_over(config: RunConfig, num_processes: int) -> tuple[RunConfig, list[str]]:
    """CONFIG for so many processes with the work and strategy of the run that `resume` names, but
    for what was typed; and notes of what differs. Raises UserError where it names none."""
    before = load_plan(resume.named_checkpoint(str(config.resume)).parents[1])
    decided = before.config.to_user_words()
    open_keys = [name for name in ("strategy", *before.work) if name not in config.typed]
    words = config.to_user_words()
    asked = before.requested.to_user_words()
    own = [f"{name}={decided[name]!r}" for name in open_keys if words.get(name) != asked.get(name)]
    notes = [f"as in the run: {', '.join(own)}"] if own else []
    taken: dict[str, Any] = {name: decided[name] for name in open_keys if name in KEYS}
    if "dataset" in config.typed:  # from which these were decided, unless they were asked for
        of_data: dict[str, Any] = {
            name: asked[name] for name in ("num_samples", "pack") if name in taken
        }
        if decided["num_samples"] == -1:  # all: as asked for, or as without a GPU
            of_data.pop("num_samples", None)
        taken |= of_data
    if "strategy" in taken:
        taken |= defaults_for(config, before.strategy.name)
    if taken.get("strategy", config.strategy) == before.strategy.name:
        kept = {name: decided[name] for name in before.config.engine_work if name in open_keys}
        taken["engine_options"] = config.engine_options | kept
        taken["engine_work"] = before.config.engine_work
    batch = ("batch_size", "grad_accum_steps")
    if set(batch).intersection(config.typed):
        return with_values(config, **taken), notes
    taken |= {name: decided[name] for name in batch}
    config, cut = share_batch(with_values(config, **taken), before, num_processes)
    return config, notes + cut


def reserve_run_dir(plan: Plan) -> Plan:
    """Find the run to resume, or make a folder, under the next free name where another run was
    quicker; write the plan into it, and let <output_dir>/latest point to it. Raises UserError for a
    run that another process has, also one that began since the plan was made."""
    plan = replace(plan, command=shlex.join(["python", *sys.argv]))
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    with claims.one_at_a_time(plan.output_dir):
        plan = resume.at_checkpoint(plan)
        if plan.checkpoint is None:
            plan = replace(plan, run_dir=free_path(plan.output_dir, plan.run_dir.name))
            plan.run_dir.mkdir()
        claims.claim(plan.run_dir, resume.identity(plan))
        write_plan(plan)
        with contextlib.suppress(OSError):  # a file system without links
            latest = plan.output_dir / f".latest-{plan.run_dir.name}"
            latest.symlink_to(plan.run_dir.name)
            latest.replace(plan.output_dir / LATEST)
    return plan


def plan_as_text(make: Callable[[], Plan]) -> str:
    """What other processes are told: the plan that was made, or why there is none."""
    try:
        return PLAN_AS_JSON.dump_json(make()).decode()
    except UserError as error:
        said = str(error)
    except OSError as error:  # a full or read-only disk under the cache, most often
        said = f"preparing the data failed; {error}; set output_dir elsewhere"
    return json.dumps({"error": said})


def plan_from_text(text: str) -> Plan:
    """The plan; raises UserError with the words of the process that could make none."""
    answer = json.loads(text)
    if "error" in answer:
        raise UserError(answer["error"])
    return PLAN_AS_JSON.validate_json(text)


def write_plan(plan: Plan) -> None:
    """Put the plan into the run's folder, which says nothing of an earlier attempt's end then."""
    (plan.run_dir / FAULTS_FILE).unlink(missing_ok=True)
    (plan.run_dir / PLAN_FILE).write_bytes(PLAN_AS_JSON.dump_json(plan, indent=2))


def started_again(before: Plan, attempt: str = "") -> tuple[Path | None, str]:
    """Where a run that has begun goes on, and a note: its last checkpoint since it was planned, or
    where it was resumed from (later ones were passed over then); None: at the beginning."""
    planned_at = (before.run_dir / PLAN_FILE).stat().st_mtime
    saved = before.checkpoint
    for checkpoint in resume.list_checkpoints(before.run_dir):  # oldest first
        if checkpoint.stat().st_mtime >= planned_at:
            saved = checkpoint
    return saved, f"started again{attempt}, from {saved.name if saved else 'the beginning'}"


def share_batch(config: RunConfig, before: Plan, num_processes: int) -> tuple[RunConfig, list[str]]:
    """CONFIG for so many processes with the global batch of the run before, and a note where that
    is cut otherwise. Raises UserError where they cannot share it evenly."""
    size = before.batch.global_batch_size
    each, odd = divmod(size, num_processes)
    if odd:
        what = f"{num_processes} processes cannot share the global batch of {size} evenly"
        why = f"{before.run_dir} has it, of {before.num_processes} processes"
        raise UserError(what, why, "start a divisor of it")
    asked = before.config.batch_size if config.batch_size == AUTO else config.batch_size
    if int(asked) * config.grad_accum_steps == each:
        return config, []
    most = max(n for n in range(1, int(asked) + 1) if each % n == 0)
    batch = {"batch_size": most, "grad_accum_steps": each // most}
    config = with_values(config, **batch, micro_batch_size=AUTO, num_microbatches=AUTO)
    cut = " x ".join(f"{key} {value}" for key, value in batch.items())
    return config, [f"the global batch stays {size}: {cut} x {num_processes}"]
