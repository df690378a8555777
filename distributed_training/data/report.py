"""Compute statistics for a training set: records used and left out, lengths, and the share of
tokens in the loss."""

from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.data.cache import load_tokens, read_meta
from distributed_training.data.pieces import MESSAGES, RUNNING
from distributed_training.data.samples import divide, read_samples
from distributed_training.settings.config import Config
from distributed_training.settings.files import plural, shown

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "maximum": 1.0}
TOO_LONG = "both answers with their prompts do not fit in max_length, so set a larger max_length"
FILLED = "prompt fills max_length, so set a larger max_length"


def summarize(folder: Path, config: Config, *, can_pack: bool) -> dict[str, Any]:
    """Return the statistics of the training split in a cache folder, as a dictionary:

    - `form`: form of the text (data/pieces.py);
    - `records`, `used`: number of records read, and number of records used;
    - `left_out`: number of records left out, by reason;
    - `samples`, `cut`: number of samples, and number of samples cut at max_length;
    - `held_out`: number of samples that are kept for validation;
    - `trained`, `unit`: number of samples that an epoch trains on, and their name;
    - `tokens`, `num_tokens`: quantiles of the number of tokens per record, and total number of
      tokens;
    - `loss_share`: number of tokens in the loss, divided by the number of tokens in all samples;
    - `notes`: number of occurrences of each note."""
    counts = read_meta(folder)["counts"]["train"]
    left_out = dict(counts["left_out"])
    notes = dict(counts["notes"])
    form, packs, splits = read_samples(folder, config, can_pack=can_pack)
    samples = splits[0]
    split = load_tokens(folder)[1][0]
    lengths = np.diff(split["starts"])
    if config.has_pairs:
        lengths = lengths.reshape(-1, 2).sum(axis=1)
    num_read = counts["records"] - sum(left_out.values())
    num_short = int((lengths < 2).sum())
    num_cut = 0
    if num_short and form != RUNNING:
        left_out["fewer than two tokens"] = num_short
    # Pairs are never cut. If texts are packed, long texts are split instead.
    if not config.has_pairs and ("loss_mask" in split or not packs):
        documents = np.searchsorted(split["starts"], samples.starts, "right") - 1
        num_cut = int((lengths[documents] - 1 > config.max_length).sum())
    if "loss_mask" in split:
        num_filled = len(lengths) - num_short - len(samples)
        # A record may have several samples, one per answer. Count omitted samples in a note then.
        if num_filled and len(lengths) == num_read:
            left_out[TOO_LONG if config.has_pairs else FILLED] = num_filled
        elif num_filled:
            notes[f"sample of a record with several answers left out ({FILLED})"] = num_filled
    num_used = counts["records"] - sum(left_out.values())
    num_sample_tokens = samples.lengths.sum()
    if packs and form == RUNNING:
        unit = "blocks"
    else:
        # The last token of a sample is only a target. Neighboring blocks of running text share it.
        num_sample_tokens += len(samples)
        unit = "samples"
        if config.has_pairs:
            unit = "pairs"
            num_sample_tokens += len(samples)
        elif len(samples) == num_used:
            unit = "chats" if form == MESSAGES else "records"
    train, validation = divide(splits, config)
    targets = samples.num_targets if samples.answer_targets is None else samples.answer_targets
    tokens = np.quantile(lengths, list(QUANTILES.values())).astype(int).tolist()
    return {
        "form": form,
        "records": counts["records"],
        "used": num_used,
        "left_out": left_out,
        "samples": len(samples),
        "held_out": len(validation),
        "trained": len(train),
        "unit": unit,
        "cut": num_cut,
        "tokens": dict(zip(QUANTILES, tokens, strict=True)),
        "num_tokens": int(lengths.sum()),
        "loss_share": float(targets.sum() / max(1, num_sample_tokens)),
        "notes": notes,
    }


def describe(counts: dict[str, Any], max_length: int) -> list[str]:
    """Return one line per note, preceded by lines about records that are left out, samples that are
    truncated, and files that are not read."""
    lines = [
        f"left out: {count:,} of {plural(counts['records'], 'record')} ({reason})"
        for reason, count in counts["left_out"].items()
    ]
    if counts["cut"]:
        line = f"truncated to max_length={max_length}: {plural(counts['cut'], 'sample')}"
        lines.append(f"{line}; the longest record has {counts['tokens']['maximum']:,} tokens")
    if unread := counts.get("unread"):
        more = ", ..." if len(unread) > 3 else ""
        names = ", ".join(shown(name)[1:-1] for name in unread[:3])
        count = f"files in the dataset's folder that are not read: {len(unread):,}"
        lines.append(f"{count} ({names}{more})")
    for note, count in counts["notes"].items():
        noun, _, rest = note.partition(" ")
        lines.append(f"{plural(count, noun)} {rest}")
    return lines
