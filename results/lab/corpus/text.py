"""Reading, tokenising and caching a text of any size: time, memory, and what a second open takes.

    python -m results.lab.corpus.text 10GB OUT.json [--tokenizer FOLDER] [--work FOLDER]

Writes a text of that size, the embedded corpus over and over with its lines and digits mixed, which
a process of its own then reads as a run would. Its peak is the sum of the proportional set sizes
(and of the resident ones) of it and its children, looked at ten times a second.
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
from distributed_training.data.corpus import read_corpus, read_embedded
from distributed_training.data.samples import cut_samples
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.config import build_config
from distributed_training.settings.files import ROOT
from results.lab import checkout

UNITS = {"MB": 10**6, "GB": 10**9}
LINES = 50  # that stay together
CHILD = "import sys; from results.lab.corpus import text; text.prepare(*sys.argv[1:])"


def write_text(file: Path, size: int) -> None:
    """The embedded corpus, mixed anew each time, until there are `size` bytes."""
    draw = random.Random(0)
    digits = string.digits.encode()
    lines = "\n".join(read_embedded()).encode().splitlines(keepends=True)
    parts = [b"".join(lines[first : first + LINES]) for first in range(0, len(lines), LINES)]
    with file.open("wb") as out:
        while out.tell() < size:
            draw.shuffle(parts)
            others = bytes(draw.sample(digits, len(digits)))
            out.write(b"".join(parts).translate(bytes.maketrans(digits, others)))
        out.truncate(size)


def prepare(file: str, tokenizer_dir: str, cache_dir: str, known: str = "") -> None:
    """Print, as JSON, what preparing the text took; or, as each process of a run does, mapping the
    folder of the cache that is `known`."""
    config = build_config({"dataset": file})
    tokenizer = Tokenizer(Path(tokenizer_dir))
    cache = Path(cache_dir)
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    folder = cache / known if known else tokenize(read_corpus(file), tokenizer, config, cache)
    data = cut_samples(folder, tokenizer, config)
    found = {
        "seconds": time.perf_counter() - start,
        "rss_grew_bytes": psutil.Process().memory_info().rss - before,
        "memory_mapped": isinstance(data.train.tokens, np.memmap),
        "tokens": len(data.train.tokens), "folder": data.cache,
    }  # fmt: skip
    print(json.dumps(found))


def watch(command: list[str]) -> dict[str, Any]:
    """What a process printed, with the peaks over it and its children."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    peaks = dict[str, int]()
    while process.poll() is None:
        sums = dict.fromkeys(("pss", "rss", "processes", "threads"), 0)
        try:
            own = psutil.Process(process.pid)
            for one in (own, *own.children(recursive=True)):
                memory = one.memory_full_info()
                now = (memory.pss, memory.rss, 1, one.num_threads())
                sums = {key: sums[key] + more for key, more in zip(sums, now, strict=True)}
        except psutil.Error:  # it has just ended
            continue
        peaks = {f"most_{key}": max(peaks.get(f"most_{key}", 0), sums[key]) for key in sums}
        time.sleep(0.1)
    assert process.stdout is not None
    assert process.returncode == 0, "it has said why"
    return json.loads(process.stdout.read()) | peaks


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("size", help="of the text, such as 200MB or 10GB")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=EMBEDDED_DIR, help="a folder")
    parser.add_argument("--work", type=Path, help="for text and cache (default: one in /tmp)")
    a = parser.parse_args(argv)
    size = int(a.size[:-2]) * UNITS[a.size[-2:]]
    found = dict[str, Any]()
    with tempfile.TemporaryDirectory(dir=a.work) as folder:
        file = Path(folder, "text.txt")
        cache = Path(folder, "cache")
        write_text(file, size)
        print(f"wrote {a.size}", flush=True)
        command = [sys.executable, "-c", CHILD, str(file), str(a.tokenizer.resolve()), str(cache)]
        for part in ("first", "again", "mapped"):
            row = watch([*command, found["first"]["folder"]] if part == "mapped" else command)
            found[part] = row | {"mb_per_s": size / row["seconds"] / 1e6}
            print(f"{part}: {row['seconds']:.1f} s, {row['most_pss'] / 2**30:.2f} GiB", flush=True)
        cached = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    cpus = len(os.sched_getaffinity(0))
    about = {
        **provenance(f"python -m results.lab.corpus.text {a.size} OUT.json"),
        "tokenizer": a.tokenizer.name,
    }
    sizes = {"text_bytes": size, "cache_bytes": cached, "num_cpus": cpus}
    write_json(a.out, {**about, **sizes, **found})
    return 0


if __name__ == "__main__":
    checkout.run(main)
