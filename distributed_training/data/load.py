"""Load the samples of a run from the token cache, or from the text. This module does not import
torch."""

from pathlib import Path

from distributed_training.data.cache import read_meta, token_cache_dir, tokenize
from distributed_training.data.corpus import Corpus, find_corpus
from distributed_training.data.samples import Data, cut_samples
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.config import RunConfig


def load_data(
    cache: str | None,
    tokenizer: Tokenizer,
    config: RunConfig,
    *,
    can_pack: bool,
    embedding_rows: int,
) -> Data:
    """Return a run's samples. `cache` is the name of their folder in the token cache, which the
    planner has verified, so that ranks do not read all tokens again. If there is no such folder,
    read the text. The last arguments are those of `cut_samples` and `tokenize`."""
    if cache is not None:
        folder = token_cache_dir() / cache
        if folder.is_dir():
            tokenizer.restore_facts(read_meta(folder)["tokenizer"])
            return cut_samples(folder, tokenizer, config, can_pack=can_pack)
    corpus = find_corpus(config.dataset, config.validation_dataset, config.columns)
    return read_data(
        corpus,
        tokenizer,
        config,
        token_cache_dir(),
        can_pack=can_pack,
        embedding_rows=embedding_rows,
    )


def read_data(
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: RunConfig,
    cache_dir: Path,
    *,
    can_pack: bool,
    embedding_rows: int,
) -> Data:
    """Return the samples of a text. Tokenize it if its tokens are not in `cache_dir`."""
    folder = tokenize(corpus, tokenizer, config, cache_dir, embedding_rows=embedding_rows)
    return cut_samples(folder, tokenizer, config, can_pack=can_pack)
