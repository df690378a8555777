"""Trace the steps of other trainers for which the planner's page has an answer, into traced.json:
`PYTHON -m results.lab.planner_page.trace`. PYTHON has trl, peft, bitsandbytes and what this suite
needs. What was traced by the same program with the same packages is kept. Otherwise, it takes an
hour on two cores."""

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from distributed_training.records.record import provenance
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import JsonObject
from distributed_training.tools import plan_for
from results.lab.planner_page import ask as page

SMALL = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B")
LARGE = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B")
METHODS = ("", "--lora_rank 16", "--lora_rank 16 --base_dtype nf4")
MODES = {"trl": ("full",), "trainer": ("none", "full"), "axolotl": ("none", "full")}
MODES["llamafactory"] = ("full",)
LENGTH = 2048  # of the page's form
BATCH_SIZES = (1, 4, 2)


def list_questions() -> Iterator[list[str]]:
    """Yield the options of each question. All weights of a large model are traced with one sample
    only, because even this fits on few cards."""
    questions = itertools.product(MODES.items(), BATCH_SIZES, SMALL + LARGE, METHODS)
    for (trainer, modes), batch_size, model, method in questions:
        if model in LARGE and not method and batch_size > 1:
            continue
        options = f"--for {trainer} --model {model} {method} --max_length {LENGTH}"
        for mode in modes:
            line = f"{options} --batch_size {batch_size} --activation_checkpointing {mode}"
            yield line.split()


def find_steps() -> dict[str, JsonObject]:
    """Return the questions for others/trace_step.py that the page's questions need."""
    steps: dict[str, JsonObject] = {}

    def collect(question: JsonObject, python: str) -> JsonObject:
        steps[page.name_question(question)] = question
        raise UserError("only the question is wanted")

    look_up, page.look_up = page.look_up, collect
    for options in list_questions():
        page.ask("--cluster", "RTX-4090", *options)
    page.look_up = look_up
    return steps


def trace(question: JsonObject) -> Any:
    """Run others/trace_step.py in this process."""
    import trace_step  # type: ignore[import-not-found]

    output = io.StringIO()
    sys.stdin = io.StringIO(json.dumps(question))
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(output):
        trace_step.main()
    return json.loads(output.getvalue())


def main() -> None:
    sys.path.append(str(plan_for.OTHERS))
    for name in ("trace_step", "transformers.masking_utils", "peft", "trl"):
        import_module(name)  # once, for all processes
    steps = find_steps()
    answered = page.TRACED.exists() and json.loads(page.TRACED.read_text())
    rows = {key: row for key, row in answered["rows"].items() if key in steps} if answered else {}
    document: Any = provenance("python -m results.lab.planner_page.trace")
    names = ", ".join(name.partition("/")[2] for name in SMALL + LARGE)
    document["scope"] = f"{names} with 1, 2 or 4 samples of {LENGTH:,} tokens"
    # A process of its own for each step, as `plan --for` does
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        missing = {key: question for key, question in steps.items() if key not in rows}
        for key, answer in zip(missing, pool.imap(trace, missing.values()), strict=True):
            sizes = {k: n for k, n in answer["sizes"].items() if not k.startswith("peak:")}
            rows[key] = {"sizes": sizes, "used": answer["used"]}
            print(len(rows), "of", len(steps), flush=True)
            write(document | {"versions": answer["versions"]}, rows)


def write(document: JsonObject, rows: dict[str, JsonObject]) -> None:
    """Write the table with one row per line."""
    lines = [f'  "{key}": {json.dumps(row)}' for key, row in rows.items()]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    page.TRACED.write_text(head + ',\n "rows": {\n' + ",\n".join(lines) + "\n }\n}\n")


if __name__ == "__main__":
    main()
