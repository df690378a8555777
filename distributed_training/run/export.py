"""What a trained model leaves: a sample of its text, folders in Hugging Face's format, the Hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from distributed_training.data.pieces import ask
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.engines.base import Engine
from distributed_training.plan.plan import Plan
from distributed_training.records.display import Display
from distributed_training.run.generate import continuation


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
        writing = folder.with_name(f".writing-{folder.name}")
        shutil.rmtree(writing, ignore_errors=True)
        plan.model.save(state, writing, eos_token_id=tokenizer.eos_id)
        tokenizer.save(writing, chat=chat)
        shutil.rmtree(folder, ignore_errors=True)
        writing.rename(folder)
    dist.barrier()
