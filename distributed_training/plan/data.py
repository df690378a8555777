"""The text of a planned run, cut into samples, and what follows for the plan. No torch import."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from distributed_training.data.cache import is_whole
from distributed_training.data.corpus import is_hub_name, read_corpus
from distributed_training.data.hub import ask_for_dataset
from distributed_training.data.samples import AUTO_SAMPLES, Data, cut_samples, prepare_data
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.plan.plan import Plan
from distributed_training.settings.config import AUTO, with_values
from distributed_training.settings.errors import UserError

QUICKLY_CUT = 4_000_000  # bytes


def peek_data(plan: Plan) -> Data | None:
    """What `load_plan_data` would give, leaving nothing behind; None where that would take long."""
    config = plan.config
    tokenizer = Tokenizer(plan.tokenizer_dir)
    named = {"dataset": config.dataset, "validation_dataset": config.validation_dataset}
    on_hub = {key: name for key, name in named.items() if name and is_hub_name(name)}
    for key, name in on_hub.items():
        ask_for_dataset(key, name, download=False)
    if on_hub:
        return None
    corpus = read_corpus(config.dataset, config.validation_dataset)
    if sum(source.num_bytes for source in corpus.values()) > QUICKLY_CUT:
        return None
    with TemporaryDirectory() as folder:
        return prepare_data(corpus, tokenizer, config, Path(folder))


def cut_data(plan: Plan) -> Data:
    """The samples; tokenised once, into the cache that all processes read."""
    return load_plan_data(plan)[0]


def load_plan_data(plan: Plan) -> tuple[Data, Tokenizer]:
    """The samples, from the cache that the plan filled; read and tokenised again where there is
    none, as on a machine with a disk of its own."""
    config = plan.config
    tokenizer = Tokenizer(plan.tokenizer_dir)
    cache_dir = plan.output_dir / ".cache" / "tokens"
    if plan.cache and is_whole(cache_dir / plan.cache):
        return cut_samples(cache_dir / plan.cache, tokenizer, config), tokenizer
    corpus = read_corpus(config.dataset, config.validation_dataset)
    return prepare_data(corpus, tokenizer, config, cache_dir), tokenizer


def fit_to_data(plan: Plan, data: Data) -> Plan:
    """The number of samples and of steps, and no more warm-up than there are."""
    config = plan.config
    notes = list(plan.notes)
    num_samples = len(data.train)
    if config.num_samples == AUTO and num_samples < AUTO_SAMPLES:
        notes.append(f"the text has {num_samples} samples to train on, not {AUTO_SAMPLES}")
    if data.train.loss_mask is not None:
        share = f"{100 * data.train.learnt_share:.1f}% of the tokens"
        notes.append(f"only the answers are learnt and count in the loss: {share}")
    num_steps = config.epochs * math.ceil(num_samples / plan.batch.global_batch_size)
    if config.max_steps != -1:
        num_steps = min(num_steps, config.max_steps)
    if config.profile >= num_steps:
        what = f"profile={config.profile} does not fit into the {num_steps} steps of this run"
        raise UserError(what, "the first is never traced", "lower profile, or train more steps")
    warmup_steps = config.warmup_steps
    if warmup_steps >= num_steps:
        warmup_steps = num_steps // 2
        notes.append(f"warm-up is {warmup_steps} of {num_steps} steps, not {config.warmup_steps}")
    decided = {"num_samples": num_samples} if config.num_samples == AUTO else {}
    config = with_values(config, warmup_steps=warmup_steps, **decided)
    return replace(plan, config=config, num_steps=num_steps, notes=notes, cache=data.cache)
