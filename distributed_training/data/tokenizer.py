"""Byte-level BPE tokenizers in GPT-2's file format. No torch or transformers import."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np

from distributed_training.data.hub import TOKENIZER_FILES
from distributed_training.settings.errors import UserError

END_OF_TEXT = "<|endoftext|>"
EMBEDDED_DIR = Path(__file__).parent / "assets" / "bpe-2048"
CHAT_TEMPLATE = Path(__file__).parent / "assets" / "chat" / "chat_template.jinja"
SETTINGS = EMBEDDED_DIR / "tokenizer_config.json"  # for transformers; every GPT-2 tokenizer's


class Tokenizer:
    """Text to token ids and back, from a folder with vocab.json and merges.txt, or UserError."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        self.folder = folder
        try:
            model = models.BPE.from_file(*(str(folder / name) for name in TOKENIZER_FILES))
        except Exception as error:  # the Rust library raises plain Exception
            fix = "give a folder with vocab.json and merges.txt, or set tokenizer to auto"
            raise UserError(f"tokenizer {folder} cannot be read", str(error), fix) from None
        self._bpe = Tokenizer(model)
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = decoders.ByteLevel()
        vocabulary = self._bpe.get_vocab()
        if END_OF_TEXT not in vocabulary:
            raise UserError(f"tokenizer {folder} has no {END_OF_TEXT} token")
        self.eos_id = vocabulary[END_OF_TEXT]
        self.num_tokens = max(vocabulary.values()) + 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the two files: equal tokenizers have equal fingerprints."""
        contents = b"".join((self.folder / name).read_bytes() for name in TOKENIZER_FILES)
        return hashlib.sha256(contents).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One int32 array of ids per text; no special tokens are added."""
        # "Fast" leaves out where in the text each token is, which takes as long as all the rest.
        found = self._bpe.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(coded.ids, dtype=np.int32) for coded in found]

    def decode(self, ids: list[int]) -> str:
        """Text for a list of ids, end-of-text left out."""
        return self._bpe.decode([i for i in ids if i != self.eos_id])

    def save(self, folder: Path, *, chat: bool = False) -> None:
        """Copy the files, so that `AutoTokenizer.from_pretrained(folder)` opens them; with `chat`
        it has the template of data/pieces.py."""
        folder.mkdir(parents=True, exist_ok=True)
        own = [self.folder / name for name in TOKENIZER_FILES]
        for file in (*own, SETTINGS, *([CHAT_TEMPLATE] if chat else [])):
            shutil.copyfile(file, folder / file.name)


def is_chat(folder: Path) -> bool:
    """Whether a model in this folder was trained on chats in our template."""
    file = folder / CHAT_TEMPLATE.name
    return file.is_file() and file.read_bytes() == CHAT_TEMPLATE.read_bytes()
