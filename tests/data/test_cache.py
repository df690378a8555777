"""Test that the token cache needs little memory, is written once, and stays usable if a process is
killed."""

import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from distributed_training.data import cache
from tests.data.test_samples import all_rows, cache_folders, make_corpus, prepare
from tests.support import small_text


def test_an_incomplete_cache_of_a_killed_process_is_rebuilt(tokenizer, tmp_path):
    expected = all_rows(prepare(tmp_path, tokenizer).train)
    (folder,) = cache_folders(tmp_path)
    partial = folder.rename(folder.with_name(f".writing-{folder.name}"))
    (partial / "train-ids.bin").write_bytes(b"longer than it is" * 1000)
    (partial / "of an earlier release").touch()
    np.testing.assert_array_equal(all_rows(prepare(tmp_path, tokenizer).train), expected)
    assert cache_folders(tmp_path) == [folder]
    assert not (folder / "of an earlier release").exists()


MEMORY = """
import sys
from pathlib import Path
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from tests.data.test_samples import prepare, corpus_of

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024  # of this program alone

tokenizer = Tokenizer(EMBEDDED_DIR)
tokenizer.facts  # imports transformers and torch, whose CUDA build takes 500 MiB by itself
before = peak()
data = prepare(Path(sys.argv[2]), tokenizer, corpus_of(sys.argv[1]))
print(before, peak(), len(data.train.tokens))
"""


@pytest.mark.processes
def test_a_long_text_takes_little_memory(tmp_path):
    """Text must be streamed. Without streaming, tokenizing 10 MB of text took 1 GiB of RAM."""
    text = small_text().read_text()
    (tmp_path / "a.txt").write_text(text * (5_000_000 // len(text)))
    command = [sys.executable, "-c", MEMORY, tmp_path / "a.txt", tmp_path / "cache"]
    output = subprocess.check_output(command, text=True)
    before, peak, num_tokens = map(float, output.split())
    assert num_tokens > 1_000_000
    assert peak - before < 200, output  # MiB


def test_an_existing_cache_may_be_read_only(tokenizer, tmp_path, monkeypatch):
    first = prepare(tmp_path, tokenizer)
    denied = PermissionError(13, "Permission denied")
    monkeypatch.setattr(cache, "FileLock", Mock(side_effect=denied))
    assert prepare(tmp_path, tokenizer).fingerprint == first.fingerprint
    with pytest.raises(PermissionError):
        prepare(tmp_path, tokenizer, make_corpus(seed=1))
