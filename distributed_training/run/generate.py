"""Text from a trained model: the sample at a run's end, and the command `generate`.

python real_model_example.py generate runs/latest --prompt "Once upon a time"
python real_model_example.py generate runs/latest                  line by line, until Ctrl-D
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from distributed_training.data.pieces import ASSISTANT, ask
from distributed_training.data.tokenizer import Tokenizer, is_chat
from distributed_training.models import ModelSpec, find_model
from distributed_training.plan.plan import PLAN_FILE, load_plan
from distributed_training.records.record import BEST, LAST
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import given_path

REPLACEMENT = "\ufffd"  # what decoding gives for a character whose bytes are not all there yet


def continuation(
    logits: Callable[[torch.Tensor], torch.Tensor],
    prompt_ids: list[int],
    *,
    num_tokens: int,
    context: int,
    eos_id: int,
    seed: int,
    top_k: int = 40,
    temperature: float = 0.7,
    agree: Callable[[torch.Tensor], None] = lambda choice: None,
) -> Iterator[int]:
    """Ids after `prompt_ids`, up to `num_tokens` or end-of-text, drawn from the `top_k` likeliest.

    `logits` takes ids [1, T], T at most `context`, and gives [1, T, V]. `agree` makes a choice,
    int64 [1], the same on every rank. A temperature of 0 takes the likeliest.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = prompt_ids or [eos_id]
    for _ in range(num_tokens):
        # A text that grows would be compiled again and again.
        with torch.compiler.set_stance("force_eager"):
            last = logits(torch.tensor([ids[-context:]]))[0, -1].float().cpu()
        values, candidates = torch.topk(last, min(top_k, len(last)))
        weights = (
            (values / temperature).softmax(0) if temperature else (values == values[0]).float()
        )
        choice = candidates[torch.multinomial(weights, 1, generator=generator)]
        agree(choice)
        if int(choice) == eos_id:
            return
        ids = [*ids, int(choice)]
        yield ids[-1]


def find_weights(given: str, kind: str = LAST) -> tuple[ModelSpec, Path]:
    """(the model, the folder with its weights and tokenizer) of a run, its last or its best ones,
    or of such a folder itself."""
    folder = given_path(given).resolve()
    run, kind = (folder.parent, folder.name) if folder.name in (LAST, BEST) else (folder, kind)
    if not (run / PLAN_FILE).is_file():
        if (folder / "config.json").is_file():
            return find_model(str(folder)), folder
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


def generate(
    given: str,
    prompt: str | None,
    *,
    num_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    kind: str,
) -> int:
    """Print what the model of a run makes of `prompt`, or of each line of standard input."""
    spec, folder = find_weights(given, kind)
    tokenizer = Tokenizer(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = spec.build(dropout=0.0, seed=0)
    spec.load(model, folder)
    model = model.eval().to(device)

    @torch.inference_mode()
    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model(ids.to(device))

    chat, before = is_chat(folder), list[int]()
    for text in _lines(chat) if prompt is None else [prompt]:
        asked = tokenizer.encode_batch([ask(text) if chat else text])[0].tolist()
        ids = continuation(
            logits, [*before, *asked], num_tokens=num_tokens,
            context=spec.size.num_positions, eos_id=tokenizer.eos_id, seed=seed, top_k=top_k,
            temperature=temperature,
        )  # fmt: skip
        answer = list[int]()
        sys.stdout.write(f"{ASSISTANT}:" if chat else text)
        for part in _decoded(tokenizer, ids, answer):
            sys.stdout.write(part)
            sys.stdout.flush()
        print()
        if chat:  # a dialogue goes on
            before += [*asked, *answer, tokenizer.eos_id]
    return 0


def _lines(chat: bool) -> Iterator[str]:
    asks = sys.stdin.isatty()
    if asks:
        print(f"Type {'a question' if chat else 'the beginning of a text'}; Ctrl-D ends.")
    while True:
        try:
            yield input("> " if asks else "")
        except EOFError:
            return


def _decoded(tokenizer: Tokenizer, ids: Iterable[int], known: list[int]) -> Iterator[str]:
    """The text of the ids, piece by piece, each as soon as its characters are whole; the ids are
    added to `known`, which is empty."""
    said = ""
    for token in ids:
        known.append(token)
        text = tokenizer.decode(known)
        if not text.endswith(REPLACEMENT):
            yield text[len(said) :]
            said = text
    yield tokenizer.decode(known)[len(said) :]
