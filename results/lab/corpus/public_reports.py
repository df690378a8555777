"""Inputs built from public bug reports, through `data --json`, against transformers.

    python -m results.lab.corpus.public_reports CASES    (make_inputs.py CASES builds them)

For each case: the ids of each sample must be those of `apply_chat_template` for the conversation or
a part of it that ends with an answer, or of `tokenizer(text)`; what is in the loss must hold each
answer once; the counts must add up. Or the case is refused in a line. Exit code 1 if one is not."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import real_model_example
from distributed_training import cli

REFUSED = {
    "no-tokenizer-json": "cannot be read", "gpt2-vocab-txt": "no vocabulary",
    "one-token-more-than-rows": "'<pad>'",
}  # fmt: skip
NOT_TEXT = {"template", "lengths", "folders", "system-in-last-message", "thoughts-stripped"}


def show(model: Path, data: Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `data --json`."""
    sys.argv = ["real_model_example.py", "data", "--model", str(model), "--dataset", str(data)]
    sys.argv += ["--json", "--show", "9999", "--pack", "False", "--max_length", "512"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        script = str(real_model_example.__file__)
        code = cli.main(real_model_example.CONFIG, str(real_model_example.__doc__), script)
    return code, out.getvalue(), err.getvalue()


def check(case: str, model: Path, data: Path) -> str:
    """What is wrong with a case; nothing if it is right."""
    from transformers import AutoTokenizer

    code, out, err = show(model, data)
    if case in REFUSED:
        return "" if code == 2 and REFUSED[case] in err else f"not refused: {code} {err}"
    if code:
        return err
    found: dict[str, Any] = json.loads(out)
    counts = found["counts"]
    if counts["used"] + sum(counts["left_out"].values()) != counts["records"]:
        return f"counts do not add up: {counts}"
    if case in NOT_TEXT or data.suffix != ".jsonl":
        return ""
    theirs: Any = AutoTokenizer.from_pretrained(model)
    expected = []
    answers = []
    for row in map(json.loads, data.read_text().splitlines()):
        if "text" in row:
            ids = theirs(row["text"])["input_ids"]
            expected += [ids, [*ids, theirs.eos_token_id]]
            continue
        messages = [{**m, "content": m["content"] or ""} for m in row["messages"]]
        for message in messages:
            message["role"] = {"model": "assistant"}.get(message["role"], message["role"])
        for end, message in enumerate(messages, 1):
            if message["role"] == "assistant":
                options = {"tools": row.get("tools")}
                expected.append(theirs.apply_chat_template(messages[:end], **options)["input_ids"])
                if message.get("weight") != 0:
                    answers.append(message["content"])
    learned = []
    for sample in found["samples"]:
        if sample["ids"] not in expected:
            return f"ids are not transformers': {sample['text']!r}"
        part = list[int]()
        for token, is_target in zip(sample["ids"], [*sample["loss_mask"][:-1], False], strict=True):
            if is_target:
                part.append(token)
            elif part:
                learned.append(theirs.decode(part))
                part = []
    if not answers:
        return ""
    missing = [a for a, b in zip(sorted(answers), sorted(learned), strict=False) if a not in b]
    return f"not in the loss: {missing[:3]}" if missing or len(answers) != len(learned) else ""


def main(cases: Path) -> int:
    """Check all cases of a folder; the exit code."""
    wrong = 0
    for model in sorted(cases.glob("*/model")):
        for data in sorted(file for file in model.parent.iterdir() if file != model):
            said = check(model.parent.name, model, data)
            print(f"{model.parent.name}/{data.name}: {said or 'right'}", flush=True)
            wrong += bool(said)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
