"""Ask the planner as the command `plan --json` does. The planner's page runs this file in the
browser, where no trainer can be traced, so `plan --for` is answered from traced.json."""

import contextlib
import hashlib
import io
import json
from pathlib import Path

import real_model_example
from distributed_training.cli import Program, run_command
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, JsonObject, load_json

TRACED = ROOT / "results" / "lab" / "planner_page" / "traced.json"
BATCH_SIZES = ("8", "4", "2", "1")


def ask(*options: str) -> str:
    """Return the answer to a request as JSON, or an error. `options` are those of `plan`. For
    another trainer, the batch size "auto" is the largest one that was traced and fits."""
    if "--for" not in options:
        return ask_planner(*options)
    from distributed_training.tools import plan_for

    plan_for.trace = look_up
    if "auto" not in options:
        return ask_planner(*options)
    text = ""
    for batch_size in BATCH_SIZES:
        answer = ask_planner(*(batch_size if word == "auto" else word for word in options))
        if answer.startswith("{") or not text:
            text = answer
        if answer.startswith("{") and json.loads(answer)["fits"] != "no":
            break
    return text


def ask_planner(*options: str) -> str:
    """Return the planner's answer as JSON, or an error."""
    program = Program(
        config=real_model_example.CONFIG,
        script=Path(real_model_example.__file__),
        description="",
        output_dir=Path("runs"),
        argv=("--json", *options),
    )
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            run_command("plan", program)
    except UserError as error:
        return error.terminal_text
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return (
            "error: A model of this type must be measured with torch, which this page does "
            "not have. Choose a similar model above, or ask in a terminal."
        )
    return output.getvalue()


def look_up(question: JsonObject, python: str) -> JsonObject:
    """Return what others/trace_step.py has answered to this question."""
    document: JsonObject = load_json(TRACED, "the table of traced steps")
    row = document["rows"].get(name_question(question))
    if row is None:
        what = f"This step was not traced for this page, which knows {document['scope']}"
        raise UserError(what, fix="ask in a terminal")
    return {"sizes": row["sizes"], "used": row["used"], "versions": document["versions"]}


def name_question(question: JsonObject) -> str:
    """Return the key of a question in traced.json. No tensor depends on alpha. What a trainer does
    by default needs as much if it is typed, and a base without 4 bits is never prepared."""
    lora = question["lora"] and {**question["lora"], "lora_alpha": None}
    checkpoints = {"gradient_checkpointing": question["class"] == "SFTTrainer"}
    question = {**question, "lora": lora, "arguments": checkpoints | question["arguments"]}
    if question["prepare"] or not question["nf4"]:
        del question["prepare"]
    if not question["fp32"]:
        del question["fp32"]
    text = json.dumps(question, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
