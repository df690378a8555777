"""What is done with a run's model afterwards: generate, export, push."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from distributed_training.data import hub
from distributed_training.data.hub import check_push
from distributed_training.data.pieces import ASSISTANT, Message
from distributed_training.data.tokenizer import Tokenizer, is_chat
from distributed_training.models import ModelSpec, find_model, peft
from distributed_training.models.adapters import base_folder, is_adapter, read_adapters
from distributed_training.models.decoder import Decoder, Past
from distributed_training.parallel.tensor_files import TensorFiles
from distributed_training.plan.plan import PLAN_FILE, Plan, load_plan
from distributed_training.records.display import short_path
from distributed_training.records.record import BEST, LAST, RECORD_FILE, Record, load_record
from distributed_training.run.saving import export, resume
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import given_path

MERGED = "merged"  # in a run's folder, the whole model of a LoRA run


def find_weights(given: str, kind: str) -> tuple[ModelSpec, Path]:
    """(model, folder of weights and tokenizer) of a run, its last or best, or of such a folder."""
    folder = given_path(given).resolve()
    run, kind = (folder.parent, folder.name) if folder.name in (LAST, BEST) else (folder, kind)
    if not (run / PLAN_FILE).is_file():
        if (folder / "config.json").is_file() or is_adapter(folder):
            return find_model(str(base_folder(folder))), folder
        what = "is neither a run nor a model" if folder.exists() else "does not exist"
        fix = "give a run's folder, such as runs/latest, or its hf/"
        raise UserError(f"{given} {what}", fix=fix)
    if not (run / kind).is_dir():
        why, fix = {
            LAST: ("a run exports its model at its end", "--resume auto, with export=True"),
            BEST: ("a run keeps its best weights with keep_best=True only", "--keep_best true"),
        }[kind]
        raise UserError(f"{given} has no {kind}/", why, f"train with {fix}")
    return load_plan(run).model, run / kind


def find_tokenizer(folder: Path) -> Path:
    """Return `folder`, or if it holds adapters without a tokenizer the folder of their base's."""
    if hub.has_tokenizer(folder) or not is_adapter(folder):
        return folder
    base = base_folder(folder)
    name = read_adapters(folder).base_model_name_or_path
    return base if hub.has_tokenizer(base) or Path(name).is_dir() else hub.fetch_tokenizer(name)


def load_model(given: str, kind: str) -> tuple[Decoder, Tokenizer, bool]:
    """(the model on the CPU, its tokenizer, whether it was trained on conversations) of a run; its
    newest checkpoint's where it has no hf/ yet."""
    checkpoint = resume.newest_checkpoint(given_path(given).resolve())
    if checkpoint is None or kind == BEST or (checkpoint.parents[1] / LAST).is_dir():
        spec, folder = find_weights(given, kind)
        model = spec.build(dropout=0.0, seed=0)
        base = base_folder(folder)
        spec.load(model, base)
        if base != folder:
            peft.load_adapters(model, spec, folder)
        tokenizer = Tokenizer(find_tokenizer(folder))
        chat = is_chat(tokenizer.folder) or tokenizer.is_templated
        if (folder.parent / RECORD_FILE).is_file():
            chat = tokenizer.talks(load_record(folder.parent).data.get("form"))
        return model, tokenizer, chat
    print(f"no {LAST}/ yet: reading {short_path(checkpoint)}", file=sys.stderr)
    plan, record, meta, state = read_checkpoint(checkpoint)
    model = export.whole_model(state, meta.base_fingerprint, plan)
    tokenizer = Tokenizer(plan.tokenizer_dir)
    return model, tokenizer, tokenizer.talks(record.data.get("form"))


def generate(asked: argparse.Namespace) -> int:
    """Print what the model of a run makes of the prompt, or of each line of standard input."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer, chat = load_model(asked.run, BEST if asked.best else LAST)
    model = model.eval().to(device)
    said = list[Message]()
    mark = "> " if sys.stdin.isatty() else ""
    if asked.prompt is None and mark:
        print(f"Type {'a question' if chat else 'the beginning of a text'}; Ctrl-D ends.")

    @torch.inference_mode()
    def logits(ids: torch.Tensor, past: Past | None) -> torch.Tensor:
        return model(ids.to(device), past=past)

    while asked.prompt is None or not said:
        try:
            text = input(mark) if asked.prompt is None else asked.prompt
        except EOFError:
            break
        said.append({"role": "user", "content": text})
        ids = export.continuation(
            logits, tokenizer.ask(said) if chat else tokenizer.begin(text),
            num_tokens=asked.num_tokens, context=model.size.num_positions, seed=asked.seed,
            past=Past(), top_k=asked.top_k, temperature=asked.temperature,
            eos_ids=tokenizer.ends_of(chat=chat),
        )  # fmt: skip
        answer = ""
        print(f"{ASSISTANT}:" if chat else text, end="")
        for part in _decoded(tokenizer, ids):
            print(part, end="", flush=True)
            answer += part
        print()
        said.append({"role": ASSISTANT, "content": answer.strip()})  # a dialogue goes on
    return 0


def _decoded(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of the ids, piece by piece, each as soon as its characters are whole."""
    known = list[int]()
    said = ""
    for token in ids:
        known.append(token)
        text = tokenizer.decode(known)
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
            yield text[len(said) :]
            said = text
    yield tokenizer.decode(known)[len(said) :]


def export_checkpoint(given: str, to: str | None = None, *, merge: bool = False) -> int:
    """Write a checkpoint's weights, or those of a run's newest one, to `to` (None: its hf/, or
    merged/ if that exists); with `merge`, write the whole model instead of adapters, which may also
    come from hf/."""
    run = given_path(given).resolve()
    checkpoint = resume.newest_checkpoint(run)
    exported = run if run.name == LAST else run / LAST
    if checkpoint is None and merge and is_adapter(exported):
        return merge_exported(exported, to)
    if checkpoint is None:
        what = "holds no checkpoint" if given_path(given).exists() else "does not exist"
        fix = "give a run's folder, such as runs/latest, or a folder of its checkpoints/"
        raise UserError(f"{given} {what}", fix=fix)
    folder = checkpoint.parents[1] / LAST
    if merge and folder.exists():
        folder = folder.with_name(MERGED)
    folder = folder if to is None else Path(to).expanduser()
    if folder.exists():
        raise UserError(f"{folder} is there already", fix="name another folder with --to")
    plan, record, meta, state = read_checkpoint(checkpoint)
    tokenizer = Tokenizer(plan.tokenizer_dir)
    chat = tokenizer.talks(record.data.get("form"))
    export.write_folder(state, meta.base_fingerprint, plan, tokenizer, chat, folder, merge=merge)
    export.write_card(folder, record.model_copy(update={"step": meta.step}))
    print(f"exported {short_path(folder)} (Hugging Face's format, after step {meta.step})")
    return 0


def merge_exported(exported: Path, to: str | None) -> int:
    """Write the whole model of a run's exported adapters to `to`, or merged/ of the run."""
    folder = exported.with_name(MERGED) if to is None else Path(to).expanduser()
    if folder.exists():
        raise UserError(f"{folder} is there already", fix="name another folder with --to")
    model, tokenizer, chat = load_model(str(exported), LAST)
    spec, _ = find_weights(str(exported), LAST)
    export.save_whole(model, spec, tokenizer, chat, base_folder(exported), folder)
    if (exported.parent / RECORD_FILE).is_file():
        export.write_card(folder, load_record(exported.parent))
    print(f"exported {short_path(folder)} (Hugging Face's format, adapters merged)")
    return 0


def read_checkpoint(checkpoint: Path) -> tuple[Plan, Record, resume.Meta, dict[str, torch.Tensor]]:
    """Plan and record of its run, its meta.json, and its weights, under the model's names."""
    meta = resume.read_meta(checkpoint)
    saved = TensorFiles(checkpoint / name for name in resume.check_files(checkpoint, meta))
    weights = [name for name in saved.stored if name.startswith("weight/")]
    state = {name.removeprefix("weight/"): saved.whole(name) for name in weights}
    run_dir = checkpoint.parents[1]
    return load_plan(run_dir), load_record(run_dir), meta, state


def push(given: str, repo_id: str, *, best: bool) -> int:
    """Upload the last or the best weights of a run, or a folder of them; the exit code."""
    check_push(repo_id)
    _, folder = find_weights(given, BEST if best else LAST)
    print(f"pushed {export.push_folder(folder, repo_id)}")
    return 0
