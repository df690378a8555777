"""Train the package's tokenizer on the embedded corpus of this Python version.

python -m results.lab.corpus.tokenizer FOLDER
"""

import shutil
import sys
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from distributed_training.data.corpus import read_embedded
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer

END_OF_TEXT = "<|endoftext|>"


def train(folder: Path, vocab_size: int = 2048) -> Tokenizer:
    """Train a byte-level BPE tokenizer and write it to `folder`."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(read_embedded(), vocab_size, special_tokens=[END_OF_TEXT])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save_model(str(folder))
    shutil.copy(EMBEDDED_DIR / "tokenizer_config.json", folder)
    return Tokenizer(folder)


if __name__ == "__main__":
    num_tokens = train(Path(sys.argv[1])).num_tokens
    print(f"Wrote a tokenizer with {num_tokens} tokens to {sys.argv[1]}.")
