"""Compare our `data --json` command with transformers on inputs from public bug reports.

    python -m results.lab.corpus.public_reports CASES

CASES contains one folder per case, with a model in the folder `model` and with data files.
A case passes if the program rejects it with the expected message or if three conditions hold:

- The token IDs of each sample equal the output of `tokenizer(text)`, with or without a final EOS
  token. For a conversation, they equal the output of `apply_chat_template` for all messages up to
  one of the answers.
- The loss covers each answer once.
- The counts add up.

The exit code is 1 if a case fails."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import real_model_example
from distributed_training import cli

EXPECTED_ERRORS = {
    "no-tokenizer-json": "cannot be read", "gpt2-vocab-txt": "no vocabulary",
    "one-token-more-than-rows": "'<pad>'",
}  # fmt: skip
UNCHECKED_CASES = {"template", "lengths", "folders", "system-in-last-message", "thoughts-stripped"}


def run_data_command(model: Path, data: Path) -> tuple[int, str, str]:
    """Run `data --json`. Return its exit code, stdout and stderr."""
    sys.argv = ["real_model_example.py", "data", "--model", str(model), "--dataset", str(data)]
    sys.argv += ["--json", "--show", "9999", "--pack", "False", "--max_length", "512"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        script = str(real_model_example.__file__)
        code = cli.main(real_model_example.CONFIG, str(real_model_example.__doc__), script)
    return code, out.getvalue(), err.getvalue()


def check(case: str, model: Path, data: Path) -> str:
    """Return the reason why a case fails, or "" if it passes."""
    from transformers import AutoTokenizer

    code, out, err = run_data_command(model, data)
    if case in EXPECTED_ERRORS:
        return "" if code == 2 and EXPECTED_ERRORS[case] in err else f"not rejected: {code} {err}"
    if code:
        return err
    preview: dict[str, Any] = json.loads(out)
    counts = preview["counts"]
    if counts["used"] + sum(counts["left_out"].values()) != counts["records"]:
        return f"counts do not add up: {counts}"
    if case in UNCHECKED_CASES or data.suffix != ".jsonl":
        return ""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    expected = []
    answers = []
    for row in map(json.loads, data.read_text().splitlines()):
        if "text" in row:
            ids = tokenizer(row["text"])["input_ids"]
            expected += [ids, [*ids, tokenizer.eos_token_id]]
            continue
        messages = [{**m, "content": m["content"] or ""} for m in row["messages"]]
        for message in messages:
            message["role"] = {"model": "assistant"}.get(message["role"], message["role"])
        for end, message in enumerate(messages, 1):
            if message["role"] == "assistant":
                options = {"tools": row.get("tools")}
                rendered = tokenizer.apply_chat_template(messages[:end], **options)
                expected.append(rendered["input_ids"])
                if message.get("weight") != 0:
                    answers.append(message["content"])
    learned_answers = []
    for sample in preview["samples"]:
        if sample["ids"] not in expected:
            return f"the token ids differ from transformers' ids: {sample['text']!r}"
        answer = list[int]()
        for token, is_target in zip(sample["ids"], [*sample["loss_mask"][:-1], False], strict=True):
            if is_target:
                answer.append(token)
            elif answer:
                learned_answers.append(tokenizer.decode(answer))
                answer = []
    if not answers:
        return ""
    missing = [
        a for a, b in zip(sorted(answers), sorted(learned_answers), strict=False) if a not in b
    ]
    return (
        f"the loss does not cover {missing[:3]}"
        if missing or len(answers) != len(learned_answers)
        else ""
    )


def main(cases: Path) -> int:
    """Check all cases in a folder and return the exit code."""
    num_failed = 0
    for model in sorted(cases.glob("*/model")):
        for data in sorted(file for file in model.parent.iterdir() if file != model):
            failure = check(model.parent.name, model, data)
            print(f"{model.parent.name}/{data.name}: {failure or 'passed'}", flush=True)
            num_failed += bool(failure)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
