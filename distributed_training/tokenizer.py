"""Byte-level BPE tokenizers in GPT-2's file format. No torch or transformers import.

Run as a module, this trains the small tokenizer that the repository ships:

    python -m distributed_training.tokenizer --output distributed_training/assets/bpe-2048
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from distributed_training.errors import UserError
from distributed_training.files import check_unicode, parse_json

END_OF_TEXT = "<|endoftext|>"
EMBEDDED_DIR = Path(__file__).parent / "assets" / "bpe-2048"
FILES = ("vocab.json", "merges.txt")


class Tokenizer:
    """Text to token ids and back, from a folder with vocab.json and merges.txt."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError when the folder holds no such tokenizer."""
        from tokenizers import ByteLevelBPETokenizer

        self.folder = folder
        for name in FILES:
            if not (folder / name).is_file():
                raise UserError(
                    f"tokenizer {folder} has no {name}",
                    "a GPT-2 tokenizer is a folder with vocab.json and merges.txt",
                    "give such a folder or set tokenizer to auto",
                )
        try:
            vocabulary = parse_json((folder / "vocab.json").read_text(encoding="utf-8"))
            self._bpe = ByteLevelBPETokenizer(
                str(folder / "vocab.json"), str(folder / "merges.txt")
            )
        except Exception as error:  # the Rust library raises plain Exception
            raise UserError(f"tokenizer {folder} cannot be read", str(error)) from None
        if not all(type(index) is int and index >= 0 for index in vocabulary.values()):
            raise UserError(
                f"tokenizer {folder} cannot be read",
                "vocab.json gives a token something else than a whole number",
            )
        if END_OF_TEXT not in vocabulary:
            raise UserError(f"tokenizer {folder} has no {END_OF_TEXT} token")
        self.eos_id: int = vocabulary[END_OF_TEXT]
        self.num_tokens: int = max(vocabulary.values()) + 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the two files: equal tokenizers have equal fingerprints."""
        digest = hashlib.sha256()
        for name in FILES:
            digest.update((self.folder / name).read_bytes())
        return digest.hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One int32 array of ids per text; no special tokens are added.

        Raises UserError for a text with half of a surrogate pair.
        """
        for text in texts:
            check_unicode("a text", text)
        return [
            np.array(encoding.ids, dtype=np.int32) for encoding in self._bpe.encode_batch(texts)
        ]

    def decode(self, ids: list[int]) -> str:
        """Text for a list of ids, end-of-text left out."""
        return self._bpe.decode([i for i in ids if i != self.eos_id])

    def save(self, folder: Path) -> None:
        """Copy the files, so that `AutoTokenizer.from_pretrained(folder)` opens them."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(self.folder / name, folder / name)
        settings = {
            "tokenizer_class": "GPT2Tokenizer",
            **{f"{role}_token": END_OF_TEXT for role in ("bos", "eos", "unk")},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def train(output: Path, vocab_size: int) -> None:
    """Train a byte-level BPE on the embedded corpus of this Python and save it in `output`."""
    from tokenizers import ByteLevelBPETokenizer

    from distributed_training.corpus import read_embedded

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        read_embedded(), vocab_size=vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT]
    )
    output.mkdir(parents=True, exist_ok=True)
    bpe.save_model(str(output))
    Tokenizer(output).save(output / "check")  # proves that the files can be read back
    shutil.move(output / "check" / "tokenizer_config.json", output / "tokenizer_config.json")
    shutil.rmtree(output / "check")


def main() -> None:
    """Command line of the training script."""
    import argparse

    parser = argparse.ArgumentParser(description="Train the small tokenizer that is shipped.")
    parser.add_argument("--output", type=Path, default=EMBEDDED_DIR)
    parser.add_argument("--vocab_size", type=int, default=2048)
    arguments = parser.parse_args()
    train(arguments.output, arguments.vocab_size)
    print(f"wrote {arguments.output}: {Tokenizer(arguments.output).num_tokens} tokens")


if __name__ == "__main__":
    main()
