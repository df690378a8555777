"""Where tokenizer, weights and text come from: what network and disk have. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distributed_training.data import hub
from distributed_training.data.corpus import EMBEDDED, WIKITEXT
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.models import ModelSpec
from distributed_training.models.gpt2 import HUB_IDS
from distributed_training.plan.plan import Plan
from distributed_training.settings.config import AUTO, RunConfig, with_values
from distributed_training.settings.errors import UserError


def find_sources(plan: Plan) -> Plan:
    """The plan with these and the learning rate; UserError where what is named is missing."""
    config = plan.config
    spec = plan.model
    notes = list(plan.notes)
    tokenizer, tokenizer_dir = _choose_tokenizer(config, spec, notes)
    num_tokens = Tokenizer(tokenizer_dir).num_tokens
    if num_tokens > spec.size.vocab_size:
        what = f"tokenizer={tokenizer!r} has {num_tokens} tokens"
        why = f"{config.model} knows {spec.size.vocab_size}"
        raise UserError(what, why, 'set tokenizer to "embedded" or choose a larger model')
    weights, weights_dir = _choose_weights(config, spec, tokenizer, notes)
    if config.lora_rank and weights_dir is None:
        notes.append("adapters beside random weights learn little; lora_rank=0 trains the weights")
    dataset = config.dataset
    if dataset in (AUTO, WIKITEXT):
        note = "WikiText-2 is not available ({}): training on the embedded corpus, the sources and "
        note += "help topics of this Python"
        named = (WIKITEXT, hub.WIKITEXT_COMMAND) if dataset == WIKITEXT else None
        there = _fetch("dataset", hub.fetch_wikitext, named, note, notes)
        dataset = WIKITEXT if there else EMBEDDED
    rate = config.learning_rate
    if rate == AUTO:
        rate = 3e-4
        if config.lora_rank:
            rate = 2e-4
        elif weights_dir is not None:
            rate = 5e-5
        elif config.model == "gpt2-tiny":
            rate = 3e-3
    decided = {"tokenizer": tokenizer, "weights": weights, "dataset": dataset}
    if spec.weights_dir is not None:  # runs/latest is another run's from now on
        decided["model"] = str(spec.weights_dir)
    config = with_values(config, learning_rate=rate, **decided)
    return replace(
        plan, config=config, notes=notes, tokenizer_dir=tokenizer_dir, weights_dir=weights_dir
    )


def _choose_tokenizer(config: RunConfig, spec: ModelSpec, notes: list[str]) -> tuple[str, Path]:
    asked = config.tokenizer
    own = spec.weights_dir
    files = (hub.TOKENIZER_JSON, hub.TOKENIZER_FILES[0])
    if asked == AUTO and own is not None and any((own / name).is_file() for name in files):
        return str(own), own
    if asked == EMBEDDED or (asked == AUTO and config.model == "gpt2-tiny"):
        return EMBEDDED, EMBEDDED_DIR
    folder = Path(asked)
    if asked not in (AUTO, "gpt2") and folder.is_dir():
        return str(folder), folder.resolve()
    repo_id = spec.hub_id if asked == AUTO else asked
    if repo_id in (None, "gpt2") or repo_id in HUB_IDS.values():
        repo_id = "gpt2"
        fetch = partial(hub.fetch_folder, hub.TOKENIZER_ID, hub.TOKENIZER_FILES)
        command = hub.TOKENIZER_COMMAND
    elif repo_id.count("/") == 1 and repo_id[0] not in "/.~":
        fetch = partial(hub.fetch_tokenizer, repo_id)
        command = f"hf download {repo_id} --include '*token*'"
    else:
        fix = "give one with tokenizer.json, or vocab.json and merges.txt, a model's name on the "
        fix += 'Hub, or "auto", "gpt2", "embedded"'
        raise UserError(f"tokenizer={asked!r} is not a folder", fix=fix)
    whose = "GPT-2" if repo_id == "gpt2" else repo_id
    note = f"{whose}'s tokenizer is not available ({{}}): using the small one that is shipped; "
    note += "perplexities compare only with runs that do the same"
    by_name = asked != AUTO or config.weights == "pretrained"
    found = _fetch("tokenizer", fetch, (repo_id, command) if by_name else None, note, notes)
    return (repo_id, found) if found else (EMBEDDED, EMBEDDED_DIR)


def _choose_weights(
    config: RunConfig, spec: ModelSpec, tokenizer: str, notes: list[str]
) -> tuple[str, Path | None]:
    asked = config.weights
    model = config.model
    hub_id = spec.hub_id
    if asked == "random":
        return "random", None
    if asked not in (AUTO, "pretrained"):
        return asked, Path(asked).resolve()
    if spec.has_weights:
        return str(spec.weights_dir), spec.weights_dir
    if hub_id is None or tokenizer == EMBEDDED:
        why = "they need their own tokenizer" if hub_id else f"{model} is not published"
        if asked == "pretrained":
            what = f"weights='pretrained' is impossible with {model=}, {tokenizer=}"
            raise UserError(
                what,
                why,
                "set weights to random, or model and tokenizer to those of a published one",
            )
        notes.append(f"weights are random: {why}")
        return "random", None
    note = "pretrained weights are not available ({}): weights are random, so this trains from "
    note += "scratch instead of fine-tuning"
    command = f"hf download {hub_id}"
    named = (f"pretrained ({model})", command) if asked == "pretrained" else None
    fetch = partial(hub.fetch_weights, hub_id)
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
