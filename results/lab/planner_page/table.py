"""Print the parts of the planner's page that come from the planner: `python -m
results.lab.planner_page.table models`, `gpus` or `answers`. `make docs` runs it."""

import itertools
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

sys.modules["torch"] = None  # type: ignore[assignment]  # the page has none

from distributed_training.models import gpt2  # noqa: E402
from distributed_training.models.table import read_table  # noqa: E402
from distributed_training.settings.machine import GPUS  # noqa: E402
from results.lab.planner_page.ask import ask  # noqa: E402

MODELS = (
    "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-9B",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3-30B-A3B",
)
CARDS = (
    "RTX-3060",
    "RTX-4060-Ti-16GB",
    "RTX-3090",
    "RTX-4090",
    "RTX-5090",
    "T4",
    "A100-80GB",
    "H100-80GB",
)
DEFAULTS = "--max_length 2048 --batch_size auto"  # of the page's form


def list_options(names: Iterable[str]) -> Iterator[str]:
    """Yield the suggestions of a field, about 100 characters per line."""
    options = " ".join(f'<option value="{name}">' for name in names)
    yield from textwrap.wrap(options, 100)


def find_row(question: tuple[str, str]) -> str:
    """Return the row of HTML that answers a question (model, GPU)."""
    model, card = question
    options = f"--cluster {card} --model {model} {DEFAULTS}"
    verdict = json.loads(ask(*options.split()))["verdict"]
    return f'<tr><th>{card}</th><td data-options="{options}">{verdict}</td></tr>'


def list_answers() -> Iterator[str]:
    with ProcessPoolExecutor() as pool:
        rows = pool.map(find_row, itertools.product(MODELS, CARDS))
        for model in MODELS:
            yield f'<tbody><tr><th colspan="2">{model}</th></tr>'
            yield from itertools.islice(rows, len(CARDS))


if __name__ == "__main__":
    models = [*read_table(), *gpt2.HUB_IDS.values()]
    parts = {
        "models": list_options(sorted(models)),
        "gpus": list_options("DGX Spark" if name == "GB10" else name for name in GPUS),
        "answers": list_answers(),
    }
    print("\n".join(parts[sys.argv[1]]))
