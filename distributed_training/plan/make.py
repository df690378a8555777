"""From CONFIG and a machine to the plan of a run: "auto" becomes what machine and network can do.

No torch import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from distributed_training.data import hub
from distributed_training.data.corpus import EMBEDDED, WIKITEXT
from distributed_training.data.samples import Data
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.models import ModelSpec, find_model
from distributed_training.plan import claims
from distributed_training.plan.checks import run_checks
from distributed_training.plan.choose import choose_model, choose_settings
from distributed_training.plan.cluster import machine_rates
from distributed_training.plan.data import fit_to_data
from distributed_training.plan.deepspeed_json import fill_deepspeed_json
from distributed_training.plan.draft import lay_out
from distributed_training.plan.machine import Machine
from distributed_training.plan.mesh import fill_mesh
from distributed_training.plan.plan import PLAN_AS_JSON, PLAN_FILE, Plan
from distributed_training.plan.predict import predict
from distributed_training.plan.rank import choose_spread
from distributed_training.plan.resume import describe_change, find_resume, identity, read_meta
from distributed_training.plan.stages import with_orders
from distributed_training.records.record import new_run_dir
from distributed_training.settings.config import AUTO, RunConfig, describe_work
from distributed_training.settings.config import replace as with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import user_path
from distributed_training.settings.strategies import load_strategy

LATEST = "latest"  # in output_dir, a link to the newest run's folder


def make_plan(
    config: RunConfig,
    machine: Machine,
    *,
    num_processes: int,
    processes_here: int,
    cut: Callable[[Plan], Data | None] = lambda plan: None,
) -> Plan:
    """Decide and check everything about a run; raise UserError at the first obstacle.

    What may have to be downloaded comes last. `cut` gives the run's samples, where they are wanted.
    """
    plan = with_prediction(draft_plan(config, machine, num_processes, processes_here))
    run_checks(plan)
    config, tokenizer_dir, weights_dir = find_sources(plan.config, plan.notes)
    if weights_dir is not None:
        plan.model.check_weights(weights_dir)
    plan = replace(
        plan,
        config=config,
        tokenizer_dir=tokenizer_dir,
        weights_dir=weights_dir,
        work=describe_work(config, plan.batch.global_batch_size),
    )
    there = {path.name for path in (plan.output_dir / ".cache" / "tokens").glob("*")}
    if data := cut(plan):
        plan = fit_to_data(plan, data)
        if plan.cache in there:
            plan = with_prediction(plan, tokenised=True)
    return _with_deepspeed_json(_at_checkpoint(with_orders(plan)))


def _at_checkpoint(plan: Plan) -> Plan:
    """The plan as it goes on from an earlier run, where `resume` says so and there is one."""
    resume, ranks = plan.config.resume, plan.ranks_beside(0)
    found = find_resume(resume, plan.output_dir, plan.work, plan.spread, ranks)
    if found is None:
        return plan
    plan = replace(plan, run_dir=found[0], checkpoint=found[1])
    if change := describe_change(read_meta(found[1]).spread, plan.spread):
        plan.notes.append(change)
    return plan


def draft_plan(
    config: RunConfig, machine: Machine, num_processes: int, processes_here: int
) -> Plan:
    """Decide what follows from CONFIG and the machine; check only that the layout exists."""
    requested, notes = config, list[str]()
    config = choose_model(config, machine, notes)
    config = choose_spread(config, machine, num_processes, processes_here, notes)
    strategy = load_strategy(config)
    mesh = fill_mesh(strategy, num_processes, config)
    config = choose_settings(config, machine, strategy, mesh, notes)
    plan = lay_out(config, strategy, mesh, machine, processes_here)
    return replace(plan, requested=requested, notes=[*notes, *plan.notes])


def with_prediction(plan: Plan, *, tokenised: bool = False) -> Plan:
    """The plan with what it is predicted to need and take."""
    rates = machine_rates(plan.machine, plan.processes_here)
    found = predict(plan, rates, tokenised=tokenised)
    return replace(plan, prediction=found.as_record())


def _with_deepspeed_json(plan: Plan) -> Plan:
    if not plan.strategy.traits.takes_deepspeed_json:
        return plan
    document = fill_deepspeed_json(plan.strategy, plan.config, plan.batch, str(plan.offload_dir))
    return replace(plan, deepspeed_json=document)


def reserve_run_dir(plan: Plan) -> Plan:
    """Make the run's folder, under the next free name where another run was quicker, write the plan
    into it, and let <output_dir>/latest point to it. Raises UserError where it would be a run that
    another process has, also one that began since the plan was made.
    """
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(plan.output_dir / ".lock"):
        if plan.config.resume == AUTO:
            plan = _with_deepspeed_json(_at_checkpoint(plan))
        return _reserve(plan)


def _reserve(plan: Plan) -> Plan:
    while plan.checkpoint is None:
        try:
            plan.run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            label, count = plan.model.label, plan.num_processes
            run_dir = new_run_dir(plan.output_dir, plan.strategy.name, label, count)
            offload_dir = plan.offload_dir and plan.offload_dir.with_name(run_dir.name)
            plan = _with_deepspeed_json(replace(plan, run_dir=run_dir, offload_dir=offload_dir))
    claims.claim(plan.run_dir, identity(plan.work, plan.spread))
    (plan.run_dir / PLAN_FILE).write_bytes(PLAN_AS_JSON.dump_json(plan, indent=2))
    with contextlib.suppress(OSError):  # a file system without links
        latest = plan.output_dir / f".latest-{plan.run_dir.name}"
        latest.symlink_to(plan.run_dir.name)
        latest.replace(plan.output_dir / LATEST)
    return plan


def find_sources(config: RunConfig, notes: list[str]) -> tuple[RunConfig, Path, Path | None]:
    """(CONFIG without "auto", tokenizer's folder, weights' folder or None for random ones): decide
    what is left, and download what is asked for by name.

    Raises UserError where an explicit value is not available.
    """
    spec = find_model(config.model)
    tokenizer, tokenizer_dir = _choose_tokenizer(config, spec, notes)
    num_tokens = Tokenizer(tokenizer_dir).num_tokens
    if num_tokens > spec.size.vocab_size:
        what = f"tokenizer={tokenizer!r} has {num_tokens} tokens"
        why = f"{config.model} knows {spec.size.vocab_size}"
        raise UserError(what, why, 'set tokenizer to "embedded" or choose a larger model')
    weights, weights_dir = _choose_weights(config, spec, tokenizer, notes)
    dataset, rate = config.dataset, config.learning_rate
    if dataset in (AUTO, WIKITEXT):
        note = "WikiText-2 is not available ({}): training on the embedded corpus, the sources and "
        note += "help topics of this Python"
        named = (WIKITEXT, hub.WIKITEXT_COMMAND) if dataset == WIKITEXT else None
        there = _fetch("dataset", hub.fetch_wikitext, named, note, notes)
        dataset = WIKITEXT if there else EMBEDDED
    if rate == AUTO:
        rate = 5e-5 if weights_dir else 3e-3 if config.model == "gpt2-tiny" else 3e-4
    found = {"tokenizer": tokenizer, "weights": weights, "dataset": dataset}
    if spec.weights_dir is not None:  # runs/latest is another run's from now on
        found["model"] = str(spec.weights_dir)
    return with_values(config, **found, learning_rate=rate), tokenizer_dir, weights_dir


def _choose_tokenizer(config: RunConfig, spec: ModelSpec, notes: list[str]) -> tuple[str, Path]:
    asked, own = config.tokenizer, spec.weights_dir
    if asked == AUTO and own is not None and (own / "vocab.json").is_file():
        return str(own), own
    if asked == EMBEDDED or (asked == AUTO and config.model == "gpt2-tiny"):
        return EMBEDDED, EMBEDDED_DIR
    if asked not in (AUTO, "gpt2"):
        folder = user_path("tokenizer", asked)
        if not folder.is_dir():
            fix = 'give one with vocab.json and merges.txt, or "auto", "gpt2", "embedded"'
            raise UserError(f"tokenizer={asked!r} is not a folder", fix=fix)
        return str(folder), folder.resolve()
    note = "GPT-2's tokenizer is not available ({}): using the small one that is shipped; "
    note += "perplexities compare only with runs that do the same"
    by_name = asked != AUTO or config.weights == "pretrained"
    named = ("gpt2", hub.TOKENIZER_COMMAND) if by_name else None
    fetch = partial(hub.fetch_folder, hub.TOKENIZER_ID, hub.TOKENIZER_FILES)
    found = _fetch("tokenizer", fetch, named, note, notes)
    return ("gpt2", found) if found else (EMBEDDED, EMBEDDED_DIR)


def _choose_weights(
    config: RunConfig, spec: ModelSpec, tokenizer: str, notes: list[str]
) -> tuple[str, Path | None]:
    asked, model, hub_id = config.weights, config.model, spec.hub_id
    if asked == "random":
        return "random", None
    if asked not in (AUTO, "pretrained"):
        return asked, user_path("weights", asked).resolve()
    if spec.weights_dir is not None and (spec.weights_dir / "model.safetensors").is_file():
        return str(spec.weights_dir), spec.weights_dir
    if hub_id is None or tokenizer == EMBEDDED:
        why = "they need GPT-2's tokenizer" if hub_id else f"{model} is not published"
        if asked == "pretrained":
            what = f"weights='pretrained' is impossible with {model=}, {tokenizer=}"
            raise UserError(what, why, "set weights to random, or model and tokenizer to gpt2")
        notes.append(f"weights are random: {why}")
        return "random", None
    note = "pretrained weights are not available ({}): weights are random, so this trains from "
    note += "scratch instead of fine-tuning"
    command = f"hf download {hub_id} {' '.join(hub.WEIGHT_FILES)}"
    named = (f"pretrained ({model})", command) if asked == "pretrained" else None
    fetch = partial(hub.fetch_folder, hub_id, hub.WEIGHT_FILES)
    found = _fetch("weights", fetch, named, note, notes)
    return ("pretrained" if found else "random"), found


def _fetch(
    key: str, fetch: Callable[[], Any], named: tuple[str, str] | None, note: str, notes: list[str]
) -> Any:
    """What `fetch` finds; else None and a note, or UserError where it was asked for by name:
    `named` is then the value and the command that downloads it.
    """
    try:
        return fetch()
    except OSError as error:
        if named is not None:
            raise hub.cannot_fetch(key, named[0], error, named[1]) from None
        notes.append(note.format(error))
        return None
