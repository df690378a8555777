"""Load the tokenizer and the samples of a plan. plan.py does not import this module, because
predictions need neither. This module does not import torch."""

from pathlib import Path

from distributed_training.data import samples
from distributed_training.data.samples import Data
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.plan.plan import Draft, Plan


def build_tokenizer(draft: Draft, folder: Path) -> Tokenizer:
    """Return the tokenizer in `folder`, which renders chats as CONFIG says, for the run's model and
    date."""
    config = draft.config
    return Tokenizer(
        folder,
        draft.model.class_keys,
        draft.requested.date,
        config.chat_template,
        config.system,
    )


def load_data(plan: Plan) -> Data:
    """Return a run's samples. They are tokenized if the token cache does not have them."""
    return samples.load_data(
        plan.cache,
        build_tokenizer(plan, plan.tokenizer_dir),
        plan.config,
        can_pack=plan.size.packs,
        embedding_rows=plan.size.vocab_size,
    )
