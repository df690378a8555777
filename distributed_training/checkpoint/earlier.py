"""Check data fingerprints in checkpoints that earlier versions wrote, so that runs can resume from
these checkpoints. This module does not import torch."""

import hashlib
import json
from functools import partial

from distributed_training.data.corpus import find_corpus
from distributed_training.data.files import BLOCK_SIZE, open_file
from distributed_training.data.hub import TOKENIZER_FILES
from distributed_training.data.pieces import RUNNING
from distributed_training.data.samples import Data
from distributed_training.settings.config import RunConfig

_VERSION = 4  # version of the token cache in which fingerprints were computed from the raw files


def is_earlier_fingerprint(fingerprint: str, config: RunConfig, data: Data) -> bool:
    """Return whether an earlier version computed `fingerprint` for `data`. This function reads all
    files of the dataset that `config` names.

    Return False if the dataset contains records instead of running text, or if the tokenizer is not
    GPT-2's. In these cases, token ids have changed since that version."""
    if data.form != RUNNING or not data.tokenizer.is_gpt2:
        return False
    corpus = find_corpus(config.dataset, config.validation_dataset)
    digests = []
    for split in ("train", "validation"):
        source = corpus.get(split)
        digest = hashlib.sha256(RUNNING.encode())
        for file in source.files if source else ():
            contents = hashlib.sha256()
            with open_file(file) as stream:
                for block in iter(partial(stream.read, BLOCK_SIZE), b""):
                    contents.update(block)
            digest.update(contents.digest())
        for text in source.texts if source else ():
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digests.append(digest.hexdigest() if source else "")
    texts = hashlib.sha256(" ".join(digests).encode()).hexdigest()
    files = b"".join((data.tokenizer.folder / name).read_bytes() for name in TOKENIZER_FILES)
    settings = [_VERSION, texts, hashlib.sha256(files).hexdigest(), config.pack]
    cache = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    identity = f"{cache} {config.max_length} {len(data.train)}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16] == fingerprint
