"""Load the tokenizer and the samples of a plan. plan.py does not import this module, because
predictions need neither. This module does not import torch."""

from pathlib import Path

from distributed_training.data.cache import read_meta, token_cache_dir, tokenize
from distributed_training.data.corpus import find_corpus
from distributed_training.data.samples import Data, cut_samples
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.plan.plan import Draft, Plan


def build_tokenizer(draft: Draft, folder: Path) -> Tokenizer:
    """Return the tokenizer in `folder`, which renders chats as CONFIG says, for the run's model and
    date."""
    config = draft.config
    return Tokenizer(
        folder, draft.model.class_keys, draft.requested.date, config.chat_template, config.system
    )


def load_data(plan: Plan) -> Data:
    """Return a run's samples. The planner has verified the folder `cache` in the token cache, so
    that ranks do not read all tokens again. If there is no such folder, read the text."""
    config = plan.config
    tokenizer = build_tokenizer(plan, plan.tokenizer_dir)
    if plan.cache is not None and (folder := token_cache_dir() / plan.cache).is_dir():
        tokenizer.restore_facts(read_meta(folder)["tokenizer"])
    else:
        corpus = find_corpus(config)
        folder = tokenize(
            corpus, tokenizer, config, token_cache_dir(), embedding_rows=plan.size.vocab_size
        )
    return cut_samples(folder, tokenizer, config, can_pack=plan.size.packs)
