"""Measure the time and memory needed to read, tokenize and cache a text file of any size.

    python -m results.lab.corpus.text 10GB OUT.json [--tokenizer FOLDER] [--work FOLDER]

The program writes a file of the given size: copies of the embedded corpus with shuffled lines and
digits. A separate process prepares the file three times: without a cache, with the cache, and by
memory-mapping the cache as each process in a training run does. Ten times per second, the program
adds up the memory (PSS and RSS) of the separate process and its children. The record contains the
largest value of each sum.
"""

import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from distributed_training.data.cache import tokenize
from distributed_training.data.corpus import find_corpus, read_embedded
from distributed_training.data.samples import cut_samples
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.files import ROOT
from distributed_training.settings.request import build_config
from results.lab import checkout

UNITS = {"MB": 10**6, "GB": 10**9}
LINES_PER_CHUNK = 50  # Shuffling keeps these lines together.
PREPARE_CODE = "import sys; from results.lab.corpus import text; text.prepare(*sys.argv[1:])"


def write_text(file: Path, size: int) -> None:
    """Write shuffled copies of the embedded corpus until the file has `size` bytes."""
    rng = random.Random(0)
    digits = string.digits.encode()
    lines = "\n".join(read_embedded()).encode().splitlines(keepends=True)
    starts = range(0, len(lines), LINES_PER_CHUNK)
    chunks = [b"".join(lines[start : start + LINES_PER_CHUNK]) for start in starts]
    with file.open("wb") as out:
        while out.tell() < size:
            rng.shuffle(chunks)
            shuffled = bytes(rng.sample(digits, len(digits)))
            out.write(b"".join(chunks).translate(bytes.maketrans(digits, shuffled)))
        out.truncate(size)


def prepare(file: str, tokenizer_dir: str, cache_dir: str, cached_folder: str = "") -> None:
    """Prepare the file and print the time and memory as JSON. If `cached_folder` names a folder in
    the cache, only memory-map that folder's files, as each process in a run does."""
    config = build_config({"dataset": file})
    tokenizer = Tokenizer(Path(tokenizer_dir))
    cache = Path(cache_dir)
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    folder = (
        cache / cached_folder
        if cached_folder
        else tokenize(find_corpus(file), tokenizer, config, cache)
    )
    data = cut_samples(folder, tokenizer, config)
    measured = {
        "seconds": time.perf_counter() - start,
        "rss_grew_bytes": psutil.Process().memory_info().rss - before,
        "memory_mapped": isinstance(data.train.tokens, np.memmap),
        "tokens": len(data.train.tokens), "folder": data.cache,
    }  # fmt: skip
    print(json.dumps(measured))


def run_and_measure(command: list[str]) -> dict[str, Any]:
    """Run a command. Return the JSON that it printed, together with four peaks over time: the
    number of processes, the number of threads, and the total PSS and RSS of all processes."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    peaks = dict[str, int]()
    while process.poll() is None:
        sums = dict.fromkeys(("pss", "rss", "processes", "threads"), 0)
        try:
            parent = psutil.Process(process.pid)
            for member in (parent, *parent.children(recursive=True)):
                memory = member.memory_full_info()
                sizes = (memory.pss, memory.rss, 1, member.num_threads())
                sums = {key: sums[key] + size for key, size in zip(sums, sizes, strict=True)}
        except psutil.Error:  # a process has just ended
            continue
        peaks = {f"most_{key}": max(peaks.get(f"most_{key}", 0), sums[key]) for key in sums}
        time.sleep(0.1)
    assert process.stdout is not None
    assert process.returncode == 0, "the process has printed the reason"
    return json.loads(process.stdout.read()) | peaks


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("size", help="size of the text, such as 200MB or 10GB")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=EMBEDDED_DIR,
        help="tokenizer folder (default: the embedded tokenizer)",
    )
    parser.add_argument(
        "--work", type=Path, help="folder for the text and the cache (default: one in /tmp)"
    )
    arguments = parser.parse_args(argv)
    size = int(arguments.size[:-2]) * UNITS[arguments.size[-2:]]
    results = dict[str, Any]()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        file = Path(folder, "text.txt")
        cache = Path(folder, "cache")
        write_text(file, size)
        print(f"Wrote {arguments.size} of text.", flush=True)
        command = [
            sys.executable,
            "-c",
            PREPARE_CODE,
            str(file),
            str(arguments.tokenizer.resolve()),
            str(cache),
        ]
        for case in ("first", "again", "mapped"):
            row = run_and_measure(
                [*command, results["first"]["folder"]] if case == "mapped" else command
            )
            results[case] = row | {"mb_per_s": size / row["seconds"] / 1e6}
            print(f"{case}: {row['seconds']:.1f} s, {row['most_pss'] / 2**30:.2f} GiB", flush=True)
        cache_bytes = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    cpus = len(os.sched_getaffinity(0))
    header = {
        **provenance(f"python -m results.lab.corpus.text {arguments.size} OUT.json"),
        "tokenizer": arguments.tokenizer.name,
    }
    sizes = {"text_bytes": size, "cache_bytes": cache_bytes, "num_cpus": cpus}
    write_json(arguments.out, {**header, **sizes, **results})
    return 0


if __name__ == "__main__":
    checkout.run(main)
