"""What a trained model leaves: a sample of its text, folders in Hugging Face's format, the Hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from distributed_training.data.pieces import MESSAGES, ask
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.engines.base import Engine
from distributed_training.parallel.tensor_files import TensorFiles
from distributed_training.plan.plan import Plan, load_plan
from distributed_training.records.card import write_card
from distributed_training.records.display import Display, short_path
from distributed_training.records.record import LAST, load_record
from distributed_training.run.generate import continuation
from distributed_training.run.saving import resume
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import given_path


def generate_sample(
    engine: Engine, plan: Plan, tokenizer: Tokenizer, chat: bool, display: Display, when: str
) -> str | None:
    """The text after CONFIG's prompt, also shown; None where it has none. Collective.

    With `chat` the model was trained on conversations, and the prompt is what a user says.
    """
    if plan.config.generate is None:
        return None
    tp, eos_id = plan.mesh["tp"], tokenizer.eos_id
    text = ask(plan.config.generate) if chat else plan.config.generate
    prompt = tokenizer.encode_batch([text])[0].tolist() or [eos_id]
    # The split of a window over tp may append tokens, which need positions, too.
    context = plan.size.num_positions // tp * tp
    # Rank 0 chooses: sharded engines gather parameters at each step, so all take one path.
    ids = continuation(
        engine.logits, prompt, num_tokens=60, context=context, eos_id=eos_id,
        seed=plan.config.seed, agree=lambda choice: dist.broadcast(choice, src=0),
    )  # fmt: skip
    sample = tokenizer.decode([*prompt, *ids])
    display.sample(f"sample {when} training:", sample)
    return sample


def export(engine: Engine, plan: Plan, tokenizer: Tokenizer, chat: bool, folder: Path) -> None:
    """Write the model as `folder`, all of it or nothing, over an older one. Collective."""
    state = engine.full_state()
    if state is not None:
        _write(state, plan, tokenizer, chat, folder)
    dist.barrier()


def export_checkpoint(given: str, to: str | None = None) -> int:
    """Write a checkpoint's weights, or those of a run's newest one, to `to` (None: its hf/)."""
    checkpoint = resume.newest_checkpoint(given_path(given).resolve())
    if checkpoint is None:
        what = "holds no checkpoint" if given_path(given).exists() else "does not exist"
        fix = "give a run's folder, such as runs/latest, or a folder of its checkpoints/"
        raise UserError(f"{given} {what}", fix=fix)
    run_dir = checkpoint.parents[1]
    folder = run_dir / LAST if to is None else Path(to).expanduser()
    if folder.exists():
        raise UserError(f"{folder} is there already", fix="name another folder with --to")
    meta = resume.read_meta(checkpoint)
    names = resume.files_to_read(checkpoint, meta, meta.spread, None)
    resume.check_files(checkpoint, meta, names)
    saved = TensorFiles(checkpoint / name for name in names)
    weights = [name for name in saved.stored if name.startswith("weight/")]
    state = {name.removeprefix("weight/"): saved.whole(name) for name in weights}
    plan, record = load_plan(run_dir), load_record(run_dir)
    chat = record.data.get("form") == MESSAGES
    _write(state, plan, Tokenizer(plan.tokenizer_dir), chat, folder)
    write_card(folder, record.model_copy(update={"step": meta.step}))
    print(f"exported {short_path(folder)} (Hugging Face's format, after step {meta.step})")
    return 0


def _write(
    state: dict[str, torch.Tensor], plan: Plan, tokenizer: Tokenizer, chat: bool, folder: Path
) -> None:
    writing = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(writing, ignore_errors=True)
    plan.model.save(state, writing, eos_token_id=tokenizer.eos_id)
    tokenizer.save(writing, chat=chat)
    shutil.rmtree(folder, ignore_errors=True)
    writing.rename(folder)
