"""Show the first training samples, mark the tokens in the loss, and print counts."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_training.data import report
from distributed_training.data.cache import token_cache_dir, tokenize
from distributed_training.data.chats.records import ANSWERS
from distributed_training.data.corpus import find_corpus, find_unread
from distributed_training.data.pieces import RUNNING
from distributed_training.data.samples import read_samples
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.planner.choose import choose_model
from distributed_training.planner.data import choose_dataset, choose_tokenizer
from distributed_training.records.display import Display
from distributed_training.settings.config import Config, Request, with_values
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.files import plural
from distributed_training.settings.keys import at_least

# Control characters, which could manipulate a terminal
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `data` that are not CONFIG keys."""
    shown = "number of samples to show (default: 3)"
    parser.add_argument("--show", metavar="N", type=at_least(0), default=3, help=shown)
    parser.add_argument("--json", action="store_true", help="print samples and counts as JSON")


def run(
    arguments: argparse.Namespace, configure: Callable[[dict[str, str]], Request], script: Path
) -> int:
    """Tokenize the dataset into the token cache, as a training run would. Show samples and counts.
    Return the exit code."""
    notes = list[str]()
    config = configure(arguments.overrides)
    config, spec = choose_model(config, detect_machine(), notes)
    dataset = choose_dataset(config.dataset, notes, strict=config.strict)
    config = with_values(config, dataset=dataset)
    tokenizer_name, tokenizer_dir = choose_tokenizer(config, config, spec, config.weights, notes)
    tokenizer = Tokenizer(
        tokenizer_dir, spec.class_keys, config.date, config.chat_template, config.system
    )
    corpus = find_corpus(config)
    folder = tokenize(
        corpus, tokenizer, config, token_cache_dir(), embedding_rows=spec.size.vocab_size
    )
    can_pack = spec.size.packs
    counts = report.summarize(folder, config, can_pack=can_pack)
    form, packs, splits = read_samples(folder, config, can_pack=can_pack)
    samples = splits[0]
    packed = samples.packed() if packs and form != RUNNING else samples
    counts["real_share"] = packed.real_share
    counts["unread"] = find_unread(config.dataset, corpus)
    counts["tokenizer"] = tokenizer.facts.kind
    counts["tokenizer_name"] = tokenizer_name
    counts["special_tokens"] = tokenizer.facts.special
    num_shown = min(arguments.show, len(samples))
    shown_samples = [*samples.documents(slice(num_shown))]
    names = ANSWERS if config.has_pairs else ("",)
    if arguments.json:
        sample_dicts = []
        for index, (ids, mask) in enumerate(shown_samples):
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            sample = {"ids": ids.tolist(), "loss_mask": mask.tolist(), "text": text}
            if config.has_pairs:
                sample["answer"] = ANSWERS[index % 2]
            sample_dicts.append(sample)
        print(json.dumps({"samples": sample_dicts, "counts": counts}, indent=1))
        return 0
    if shown_samples:
        print(
            "The loss covers the tokens between « and ». A sample's first token is only an input."
        )
    for index, (ids, mask) in enumerate(shown_samples):
        number, answer = divmod(index, len(names))
        name = f"{number + 1} {names[answer]}".rstrip()
        print(f"--- sample {name}: {len(ids)} tokens, {mask.sum()} in the loss")
        print(_mark_targets(tokenizer, ids.tolist(), mask.tolist()))
    display = Display(enabled=True)
    display.table(_rows(counts, config))
    for note in [*notes, *report.describe(counts, config.max_length)]:
        display.note(note)
    return 0


def escape_controls(text: str) -> str:
    """Escape the control characters in a string, except for tabs and line feeds."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def _mark_targets(tokenizer: Tokenizer, ids: list[int], mask: list[bool]) -> str:
    """Return the text of a sample with « and » around each part that is included in the loss."""
    text = ""
    first = 0
    for last in range(1, len(ids) + 1):
        if last == len(ids) or mask[last] != mask[first]:
            decoded = tokenizer.decode(ids[first:last], skip_special_tokens=False)
            span = escape_controls(decoded)
            text += f"«{span}»" if mask[first] else span
            first = last
    return text


def _rows(counts: dict[str, Any], config: Config) -> dict[str, str]:
    if counts["form"] == RUNNING:
        documents = plural(counts["records"], "document")
        rows = {"text": f"{documents} with {counts['num_tokens']:,} tokens"}
    else:
        lengths = [f"{name} {count:,}" for name, count in counts["tokens"].items()]
        rows = {
            "records": f"{counts['records']:,} read, {counts['used']:,} used",
            "tokens per record": ", ".join(lengths),
        }
    special_tokens = [f"{name} {token}" for name, token in counts["special_tokens"].items()]
    trained = f"{counts['trained']:,} {counts['unit']} trained on per epoch"
    held_out = f"{counts['held_out']:,} held out for validation"
    return rows | {
        "samples": f"{trained}, {held_out}, of up to {config.max_length:,} tokens",
        "in the loss": f"{100 * counts['loss_share']:.1f}% of the tokens",
        "padding": f"{100 * (1 - counts['real_share']):.1f}% of the positions",
        "tokenizer": f"{counts['tokenizer_name']} ({counts['tokenizer']})",
        "special tokens": ", ".join(special_tokens),
    }
