"""Make the plan for a run from CONFIG and a machine. This module does not import torch."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distributed_training.data.cache import token_cache_dir
from distributed_training.data.corpus import check_dataset_path
from distributed_training.data.samples import Data
from distributed_training.plan.layout import Amount
from distributed_training.plan.plan import Draft, Plan, load_plan
from distributed_training.planner.answer import describe_total, describe_verdict
from distributed_training.planner.checks import check_run
from distributed_training.planner.data import find_sources, resolve_data_values
from distributed_training.planner.deepspeed_json import fill_deepspeed_json, other_settings
from distributed_training.planner.layouts import OPEN_BATCH, OPEN_SETTINGS
from distributed_training.planner.sort import (
    SIMPLE,
    choose_batch_size,
    choose_layout,
    suggest_settings,
)
from distributed_training.predict.predict import Cluster, Prediction
from distributed_training.predict.simulate import ideal_bubble
from distributed_training.predict.speed import predict_ends
from distributed_training.records.folder import named_checkpoint
from distributed_training.settings.config import AUTO, KEYS, Request, RunConfig, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import JsonObject
from distributed_training.settings.machine import GIB

# Assumptions about writing a model to disk: fixed time and speed
EXPORT_S = 0.1
EXPORT_BYTES_PER_S = 5e8
MAX_BEST_SHARE = 0.05  # largest share of the training time in which the best weights are saved
BATCH_KEYS = ("batch_size", "grad_accum_steps")


def make_plan(
    request: Request,
    cluster: Cluster,
    read: Callable[[Draft, Path], Data | None] = lambda draft, tokenizer_dir: None,
    *,
    needs_weights: bool = True,
) -> Plan:
    """Return the plan for a run, after checking that the run can start. Files are downloaded only
    after the machine has passed the checks. `read` returns the run's samples, or None if the plan
    does not need them. Unless `needs_weights` is set, missing weights are only a note. Raises
    UserError for the first problem found."""
    notes: list[str] = []
    typed_batch = {name: getattr(request, name) for name in BATCH_KEYS if request.is_set(name)}
    request = inherit_settings(request, cluster.num_processes, notes)
    # Check the paths before any slow step or download.
    for key in ("dataset", "validation_dataset"):
        if dataset := getattr(request, key):
            check_dataset_path(dataset, key)
    draft = draft_plan(request, cluster, notes)
    # If the run is resumed again, its typed batch is compared with the batch that was typed here.
    draft = replace(draft, requested=draft.requested.model_copy(update=typed_batch))
    check_run(Prediction(draft, cluster.rates), cluster, notes)
    draft, folders = find_sources(draft, notes, needs_weights=needs_weights)
    cached_names = {path.name for path in token_cache_dir().glob("*")}
    data = read(draft, folders["tokenizer_dir"])
    amount = None
    if data is not None:
        draft, amount = resolve_data_values(draft, data, notes)
        # Samples of chats need the tokenizer even if the text is tokenized.
        tokenized = data.cache in cached_names and not data.is_chat
        draft = replace(draft, tokenized=tokenized)
    prediction = Prediction(draft, cluster.rates)
    fields = {
        **vars(draft),
        **folders,
        "config": _resolve_rest(prediction, amount, notes),
        "operation_ends": predict_ends(draft, cluster.rates),
        **_deepspeed_fields(draft, notes),
        **_statements(prediction, cluster, amount),
    }
    if prediction.memory_fit in ("tight", "unlikely"):
        most_gib = prediction.memory.likely_bytes[1] / GIB
        notes.append(f"memory is tight: the run may need up to {most_gib:.1f} GiB per GPU")
    return Plan(
        **fields,
        cache=data.cache if data else None,
        data_fingerprint=data.fingerprint if data else "",
        amount=amount,
        form=data.form if data else "",
        num_steps=None if amount is None or amount.error else amount.num_steps,
        notes=tuple(notes),
    )


def _deepspeed_fields(draft: Draft, notes: list[str]) -> JsonObject:
    """Return the plan's fields for DeepSpeed."""
    if not draft.strategy.traits.uses_zero:
        return {}
    deepspeed_json = fill_deepspeed_json(draft)
    changes = other_settings(deepspeed_json)
    if changes:
        notes.append(
            f"{draft.strategy.source.name} sets {', '.join(changes)}, which the predictions "
            "ignore. DeepSpeed also ignores a section that it does not know."
        )
    return {"deepspeed_json": deepspeed_json, "deepspeed_changes": changes}


def _statements(prediction: Prediction, cluster: Cluster, amount: Amount | None) -> JsonObject:
    """Return the plan's fields for what a run says about its costs."""
    draft = prediction.plan
    return {
        "prediction": prediction.as_record(),
        "verdict": describe_verdict(prediction, prediction, {})
        + describe_total(prediction, amount or ""),
        "state_bytes": prediction.memory.state,
        "ideal_bubble": ideal_bubble(
            draft.config.pipeline_schedule, draft.mesh["pp"], draft.batch.num_microbatches
        ),
        "lighter_settings": _suggest_lighter_settings(prediction, cluster),
    }


def _resolve_rest(prediction: Prediction, amount: Amount | None, notes: list[str]) -> RunConfig:
    """Return CONFIG without "auto"."""
    draft = prediction.plan
    values = dict(draft.config)
    if values["keep_best"] == AUTO:
        values["keep_best"] = _keeps_best(prediction, amount, notes)
    if values["pack"] == AUTO:  # the data has not been read
        values["pack"] = draft.size.packs and not draft.config.has_pairs
    return RunConfig(**values)


def _suggest_lighter_settings(prediction: Prediction, cluster: Cluster) -> str:
    """Return settings to set if GPU memory runs out although the run was predicted to fit. Only
    layouts that need no long search are tried."""
    machine = cluster.machine
    if not machine.num_gpus:
        return ""
    # Only settings that are predicted to need clearly less memory than this plan can help.
    max_bytes = min(machine.gpu_memory_bytes, prediction.memory.likely_bytes[0] - 1)
    machine = replace(machine, gpu_memory_bytes=max_bytes)
    return suggest_settings(prediction.plan, replace(cluster, machine=machine), SIMPLE)


def _keeps_best(prediction: Prediction, amount: Amount | None, notes: list[str]) -> bool:
    """Return whether a run keeps its best weights if `keep_best` is "auto"."""
    draft = prediction.plan
    config = draft.config
    if amount is None or not config.export:
        return False
    num_evaluations = math.ceil(amount.epochs)
    if config.eval_every:
        num_evaluations += amount.num_steps // config.eval_every
    if num_evaluations < 2:  # hf/ contains the only weights that are evaluated
        return False
    num_trained = draft.size.num_trained_parameters(config.lora_rank, config.lora_targets)
    save_s = EXPORT_S + 4 * num_trained / EXPORT_BYTES_PER_S
    if prediction.estimate is None:
        return True
    share = num_evaluations * save_s / (amount.num_steps * prediction.estimate.seconds)
    if share > MAX_BEST_SHARE:
        notes.append(
            f"the best weights are not kept, because saving them could take {share:.0%} of the "
            "training time. To keep them, add --keep_best True"
        )
    return share <= MAX_BEST_SHARE


def draft_plan(request: Request, cluster: Cluster, notes: list[str] | None = None) -> Draft:
    """Return a draft plan with the model, strategy, mesh, batch and switches that follow from
    CONFIG and the machine. Raises UserError if settings are incompatible. Memory and packages are
    checked later."""
    notes = [] if notes is None else notes
    config = choose_batch_size(request, cluster, notes)
    return replace(choose_layout(config, cluster, notes), requested=request)


def inherit_settings(request: Request, num_processes: int, notes: list[str]) -> Request:
    """Return CONFIG with the settings of the run that `resume` names. Keys that the user set are
    kept. If the layout changes, settings that depend on it are not inherited, and a note names
    them. If `resume` is None or "auto", return CONFIG unchanged. Raises UserError if the run is
    missing."""
    if request.resume in (None, AUTO):
        return request
    earlier = load_plan(named_checkpoint(str(request.resume)).parents[1])
    new, old = request.to_key_values(), earlier.requested.to_key_values()
    # The command that resumes a run repeats its options, so only other values count as new.
    kept = {key for key in new if request.is_set(key) and new[key] != old.get(key)}
    folder = earlier.model.weights_dir
    if "model" not in kept and folder is not None and not folder.is_dir():
        raise UserError(
            f"the model of the resumed run, {folder}, is not a folder",
            fix="if it was moved, add --model with its new path",
        )
    is_batch_new = not kept.isdisjoint(BATCH_KEYS)
    kept |= {"output_dir", "resume", *(BATCH_KEYS if is_batch_new else ())}
    lost = set[str]()
    if "strategy" in kept and request.strategy != earlier.strategy.name:
        lost = {*OPEN_SETTINGS, "checkpointed_blocks", *earlier.engine_options}
    elif num_processes != earlier.num_processes:
        lost = {*OPEN_SETTINGS, "checkpointed_blocks"} - {"deepspeed_config"}
    inherited = {key: value for key, value in earlier.settings.items() if key not in kept}
    changed = [key for key in inherited if new.get(key) != old[key]]
    for what, keys in {
        "come from the resumed run": [key for key in changed if key not in lost],
        "of the resumed run do not fit the new layout": [key for key in changed if key in lost],
    }.items():
        if keys:
            values = ", ".join(f"{key}={inherited[key]!r}" for key in keys)
            notes.append(f"these settings {what}: {values}")
    # Another machine may need another value of a key that does not change results.
    fixed = {"strategy", *BATCH_KEYS, *earlier.work}
    if "model" in kept:  # a moved folder, which also contains the weights and the tokenizer
        fixed -= {"weights", "tokenizer"}
    inherited = {
        key: AUTO if old[key] == AUTO and key not in fixed else value
        for key, value in inherited.items()
        if key not in lost
    }
    # Settings that the user made in the resumed run still count as the user's.
    set_keys = earlier.requested.set_keys & inherited.keys()
    engine_options = {key: inherited.pop(key) for key in inherited.keys() - KEYS.keys()}
    inherited["engine_options"] = request.engine_options | engine_options
    inherited["set_keys"] = set_keys | request.set_keys
    request = with_values(request, **inherited, date=earlier.requested.date)
    return request if is_batch_new else keep_global_batch(request, earlier, num_processes, notes)


def keep_global_batch(
    request: Request, earlier: Plan, num_processes: int, notes: list[str]
) -> Request:
    """Return CONFIG with the global batch of an earlier run, divided over `num_processes`
    processes. Raises UserError if the processes cannot share the batch evenly."""
    size = earlier.batch.global_batch_size
    per_process, remainder = divmod(size, num_processes)
    if remainder:
        raise UserError(
            f"{num_processes} processes cannot share the global batch of {size} evenly",
            f"the run in {earlier.run_dir} trained with this "
            f"batch on {earlier.num_processes} processes",
            f"use a number of processes that divides {size}",
        )
    max_batch_size = earlier.config.batch_size
    if max_batch_size * request.grad_accum_steps == per_process:
        return request
    batch_size = max(n for n in range(1, max_batch_size + 1) if per_process % n == 0)
    batch = {"batch_size": batch_size, "grad_accum_steps": per_process // batch_size}
    request = request.model_copy(update={**batch, **OPEN_BATCH})
    factors = " x ".join(f"{key} {value}" for key, value in batch.items())
    notes.append(f"the global batch stays {size}: {factors} x {num_processes} processes")
    return request
