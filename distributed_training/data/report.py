"""What a run trains on, in numbers: records used and left out, lengths, shares; and its samples."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.data.cache import load_tokens, read_meta
from distributed_training.data.pieces import RUNNING
from distributed_training.data.samples import find_parts
from distributed_training.settings.config import RunConfig

QUANTILES = {"median": 0.5, "90%": 0.9, "99%": 0.99, "maximum": 1.0}
FILLED = "prompt fills max_length"


def summarise(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Counts of the training split: `records` read, of them `used` and `left_out` by reason;
    `samples` made of them, `cut` at max_length, `ends_cut` of which an answer's end is cut off;
    quantiles of the `tokens` of a record; `loss_share` of the tokens that are seen;
    `longest_prompt` in tokens; `notes` by what they say."""
    meta = read_meta(folder)
    counts = meta["counts"]["train"]
    split = load_tokens(folder)[1][0]
    lengths = np.diff(split["starts"])
    starts, seen = find_parts(split, meta["form"], config)
    limit = config.max_length + 1  # the last is a target only
    targets = seen
    is_cut = np.zeros(0, bool)
    ends_cut = longest_prompt = 0
    left_out = dict(counts["left_out"])
    if "loss_mask" in split:
        learnt = np.concatenate([[0], np.cumsum(split["loss_mask"], dtype=np.int64)])
        targets = learnt[starts + seen + 1] - learnt[starts + 1]
        is_cut = lengths > limit
        targets_of_all = learnt[split["starts"][1:]] - learnt[split["starts"][:-1] + 1]
        targets_of_seen = learnt[split["starts"][:-1] + np.minimum(lengths, limit)]
        targets_of_seen = targets_of_seen - learnt[split["starts"][:-1] + 1]
        ends_cut = int(((targets_of_seen > 0) & (targets_of_seen < targets_of_all)).sum())
        if filled := int((targets_of_seen <= 0).sum()):
            left_out[FILLED] = filled
            is_cut = is_cut & (targets_of_seen > 0)
        if split["loss_mask"].any():
            longest_prompt = int(_first_targets(split).max())
    elif meta["form"] != RUNNING or config.pack is False:
        is_cut = lengths > limit
    tokens = np.quantile(lengths, list(QUANTILES.values())) if len(lengths) else np.zeros(4)
    return {
        "form": meta["form"],
        "records": counts["records"],
        "used": counts["records"] - sum(left_out.values()),
        "left_out": left_out,
        "samples": int((targets > 0).sum()),
        "cut": int(is_cut.sum()),
        "ends_cut": ends_cut,
        "longest_prompt": longest_prompt,
        "tokens": {name: int(count) for name, count in zip(QUANTILES, tokens, strict=True)},
        "loss_share": float(targets.sum() / max(1, (seen[targets > 0] + 1).sum())),
        "notes": {note: count for note, count in counts["notes"].items() if count},
    }


def describe(counts: dict[str, Any], max_length: int) -> list[str]:
    """A line for each thing that is left out, cut or read otherwise than one may think."""
    notes = []
    for reason, count in counts["left_out"].items():
        more = ""
        if reason == FILLED:
            more = f": a larger max_length, up to {counts['longest_prompt'] + 1}, keeps them"
        notes.append(f"{count:,} of {counts['records']:,} records are left out: {reason}{more}")
    if counts["cut"]:
        longest = counts["tokens"]["maximum"]
        why = f"{counts['cut']:,} samples are cut at max_length={max_length}"
        if counts["ends_cut"]:
            why += f"; {counts['ends_cut']:,} of them lose the end of an answer, which is then not "
            why += "in the loss"
        notes.append(f"{why} (the longest has {longest:,} tokens)")
    notes += [f"{count:,} {note}" for note, count in counts["notes"].items()]
    return notes


def read_samples(
    folder: Path, config: RunConfig, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, whether each is a target) of the first samples: of records each by itself."""
    split = load_tokens(folder)[1][0]
    for start, length in zip(*find_parts(split, read_meta(folder)["form"], config), strict=True):
        inside = slice(start, start + length + 1)
        mask = np.ones(length + 1, bool)
        if "loss_mask" in split:
            mask = np.array(split["loss_mask"][inside])
        mask[0] = False  # nothing comes before it
        if mask.any() and count > 0:
            count -= 1
            yield split["ids"][inside], mask


def _first_targets(split: dict[str, np.ndarray]) -> np.ndarray:
    """Tokens of each record before the first that is a target."""
    targets = np.flatnonzero(split["loss_mask"])
    starts = split["starts"][:-1]
    firsts = np.searchsorted(targets, starts + 1)
    return targets[np.minimum(firsts, len(targets) - 1)] - starts
