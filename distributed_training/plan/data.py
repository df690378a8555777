"""The text of a planned run, cut into samples, and what follows for the plan. No torch import."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from distributed_training.data.corpus import read_corpus
from distributed_training.data.samples import AUTO_SAMPLES, Data, prepare_data
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.plan.plan import Plan
from distributed_training.settings.config import AUTO, describe_work
from distributed_training.settings.config import replace as with_values

QUICKLY_CUT = 4_000_000  # characters


def peek_data(plan: Plan) -> Data | None:
    """What `load_plan_data` would give, leaving nothing behind; None where that would take long."""
    tokenizer, corpus = Tokenizer(plan.tokenizer_dir), read_corpus(plan.config.dataset)
    if sum(map(len, corpus.train)) > QUICKLY_CUT:
        return None
    with TemporaryDirectory() as folder:
        return prepare_data(corpus, tokenizer, plan.config, Path(folder))


def cut_data(plan: Plan) -> Data:
    """The samples; tokenised once, into the cache that all processes read."""
    return load_plan_data(plan)[0]


def load_plan_data(plan: Plan) -> tuple[Data, Tokenizer]:
    """Read, tokenise (or find in <output_dir>/.cache) and cut the corpus that the plan names."""
    tokenizer, corpus = Tokenizer(plan.tokenizer_dir), read_corpus(plan.config.dataset)
    cache_dir = plan.output_dir / ".cache" / "tokens"
    return prepare_data(corpus, tokenizer, plan.config, cache_dir), tokenizer


def fit_to_data(plan: Plan, data: Data) -> Plan:
    """The number of samples and of steps, and no more warm-up than there are."""
    config, notes, there = plan.config, list(plan.notes), len(data.train)
    if config.num_samples == AUTO:
        if there < AUTO_SAMPLES:
            notes.append(f"the text has {there} samples to train on, not {AUTO_SAMPLES}")
        config = with_values(config, num_samples=there)
    num_steps = config.epochs * math.ceil(there / plan.batch.global_batch_size)
    if config.max_steps != -1:
        num_steps = min(num_steps, config.max_steps)
    if config.warmup_steps >= num_steps:
        warmup = num_steps // 2
        notes.append(f"warm-up is {warmup} of {num_steps} steps, not {config.warmup_steps}")
        config = with_values(config, warmup_steps=warmup)
    work = describe_work(config, plan.batch.global_batch_size)
    return replace(plan, config=config, work=work, num_steps=num_steps, notes=notes)
