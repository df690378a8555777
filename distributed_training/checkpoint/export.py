"""What a trained model leaves: its text, folders in Hugging Face's format, their cards, the Hub."""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.nn.attention import SDPBackend, sdpa_kernel

from distributed_training.checkpoint.trained import Trained, trained_by
from distributed_training.data.corpus import WIKITEXT
from distributed_training.data.hub import WIKITEXT_ID
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.models import find_model
from distributed_training.models.decoder import Past
from distributed_training.plan.plan import Plan
from distributed_training.records.display import fill, in_markdown, last_part, short_path
from distributed_training.records.record import BEST, RECORD_FILE, Record, load_record
from distributed_training.settings.errors import RunError, UserError
from distributed_training.settings.files import load_json, plural, publish

LENGTHS = 64  # of texts that a model sees are multiples of this
# Without cuDNN's, which plans anew for every length: each token of a growing text has another.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CARD = "README.md"
GENERATION_CONFIG = "generation_config.json"
DTYPES = {
    "auto": torch.float32,  # in plans of earlier releases
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
_PUBLISHED_DATA: dict[str, Any] = {WIKITEXT: {"datasets": [WIKITEXT_ID], "language": "en"}}


def continuation(
    logits: Callable[[torch.Tensor, Past | None], torch.Tensor],
    prompt_ids: list[int],
    *,
    num_tokens: int,
    context: int,
    eos_ids: Sequence[int],
    seed: int,
    top_k: int = 40,
    temperature: float = 0.7,
    past: Past | None = None,
    agree: Callable[[torch.Tensor], None] = lambda choice: None,
) -> Iterator[int]:
    """Ids after `prompt_ids`, up to `num_tokens` or one of `eos_ids`, of the `top_k` likeliest.
    `logits` takes ids [1, T], T at most `context`, and gives [1, T, V]; where it can go on from a
    `past`, each token passes through it once, as long as all fit. `agree` makes a choice, int64
    [1], the same on every rank. A temperature of 0 takes the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    ids = prompt_ids or [eos_ids[0]]
    for _ in range(num_tokens):
        if len(ids) > context:
            past = None
        seen = ids[past.length :] if past else ids[-context:]
        # Few lengths, for which kernels are chosen once.
        padding = 0 if past else min(-len(seen) % LENGTHS, context - len(seen))
        with sdpa_kernel(ATTENTION):
            padded = torch.tensor([seen + [eos_ids[0]] * padding])
            last = logits(padded, past)[0, len(seen) - 1].float().cpu()
        values, candidates = torch.topk(last, min(top_k, len(last)))
        if not values[0].isfinite():
            why = "its weights are damaged, or its adapters too large"
            raise UserError("the model's logits are not finite", why, "eval shows its loss")
        if temperature:
            weights = ((values - values[0]) / max(temperature, 1e-6)).softmax(0)
        else:
            weights = (values == values[0]).float()
        choice = candidates[torch.multinomial(weights, 1, generator=generator)]
        agree(choice)
        if int(choice) in eos_ids:
            return
        ids = [*ids, int(choice)]
        yield ids[-1]


def in_thread(write: Callable[..., None], *arguments: Any) -> Future[None]:
    """What is written while training or its end goes on."""
    pool = ThreadPoolExecutor(1)
    written = pool.submit(write, *arguments)
    pool.shutdown(wait=False)
    return written


def copy_folder(made: Path, folder: Path) -> None:
    """Write `made` once more, as `folder`, all of it or nothing."""
    with writing(folder) as unfinished:
        shutil.copytree(made, unfinished)


def write_folder(
    state: Mapping[str, torch.Tensor],
    base_fingerprint: int,
    plan: Plan,
    tokenizer: Tokenizer,
    chat: bool,
    folder: Path,
    *,
    merge: bool = False,
) -> None:
    """Write what a run has learnt, under the model's names, as `folder`, all of it or nothing.
    Adapters alone, unless they are to `merge` or nobody else has the weights beside them. Raises
    RunError, and leaves an older one, where a number is not finite."""
    config = plan.config
    if config.lora_rank:
        for name, values in state.items():
            if not values.isfinite().all():
                what = f"{folder.name}/ is not written: {name} has numbers that are not finite"
                raise RunError(what, fix="lower learning_rate")
    trained = trained_by(plan, state, base_fingerprint)
    if not config.lora_rank or plan.weights_dir is None or merge:
        dtype = DTYPES[config.export_dtype]
        save_whole(trained, tokenizer, chat, plan.weights_dir, folder, dtype)
        return
    from distributed_training.models.peft import save_adapters

    with writing(folder) as unfinished:
        on_hub = config.weights == "pretrained" or plan.adapters_dir is not None
        base = str(plan.model.hub_id if on_hub and not plan.model.weights_dir else plan.weights_dir)
        save_adapters(
            state, plan.model, config, unfinished, base=base, fingerprint=base_fingerprint
        )
        tokenizer.save(unfinished, chat=chat)


def save_whole(
    trained: Trained,
    tokenizer: Tokenizer,
    chat: bool,
    base: Path | None,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write a whole model with its tokenizer as `folder`, all of it or nothing. One of its tensors
    is in memory at a time."""
    with writing(folder) as unfinished:
        trained.save(unfinished, eos_token_id=tokenizer.eos_id, dtype=dtype)
        write_generation_config(unfinished, tokenizer, chat, base)
        tokenizer.save(unfinished, chat=chat)


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes `folder` at the end."""
    unfinished = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
    except RunError as error:
        raise RunError(f"{folder.name}/ is not written: {error}") from None
    publish(unfinished, folder)


def write_generation_config(
    folder: Path, tokenizer: Tokenizer, chat: bool, base: Path | None
) -> None:
    """Write generation_config.json, by which others stop generating where we do. What the `base`
    model's says about sampling stays."""
    document: dict[str, Any] = {}
    if base is not None and (base / GENERATION_CONFIG).is_file():
        document = load_json(base / GENERATION_CONFIG, "model")
    # Made from config.json, transformers may make it again from there, without what is added below.
    document.pop("_from_model_config", None)
    ends = document.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    document |= tokenizer.generation_tokens
    document["eos_token_id"] = list(dict.fromkeys([*tokenizer.ends_of(chat=chat), *ends]))
    (folder / GENERATION_CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def write_card(folder: Path, r: Record, repo_id: str | None = None) -> None:
    """Write README.md of `folder`, a run's hf/ or best/; `repo_id`: where on the Hub it will be."""
    from huggingface_hub import ModelCardData  # slow to import

    published = r.config["weights"] == "pretrained"
    front = ModelCardData(  # without license and language where they are not known
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=find_model(r.config["model"]).hub_id if published else None,
        **_PUBLISHED_DATA.get(r.config["dataset"], {}),
    )
    steps = r.step
    best = ""
    if folder.name == BEST and r.best is not None:
        steps = r.best["step"]
        best = ", of the lowest validation loss"
    losses = [
        (entry["step"], entry["loss"], entry["perplexity"], entry.get("bits_per_byte"))
        for entry in r.evaluations
        if entry["step"] in (0, steps)
    ]
    # Paths are nobody's business.
    settings = [(key, in_markdown(last_part(str(value)))) for key, value in r.work.items()]
    text = fill(
        "card.md.jinja", r=r, repo_id=repo_id,
        folder=str(Path("runs", folder.parent.name, folder.name)),
        front=front.to_yaml(), steps=steps, best=best, strategy=r.layout_name,
        processes=plural(r.world_size, "process"), last_part=last_part, quote=shlex.quote,
        in_markdown=in_markdown,
        losses=tabulate(
            losses, ["step", "validation loss", "perplexity", "bits per byte"], "github",
            floatfmt=("g", ".4f", ".2f", ".4f"),
        ),
        settings=tabulate(settings, ["key", "value"], "github", disable_numparse=True),
    )  # fmt: skip
    (folder / CARD).write_text(text, encoding="utf-8")


def push_folder(folder: Path, repo_id: str) -> str:
    """Upload `folder` as the model `repo_id`; its address. UserError where that is refused."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if (folder.parent / RECORD_FILE).is_file():
        write_card(folder, load_record(folder.parent), repo_id)
    disable_progress_bars()
    api = HfApi()
    try:
        address = str(api.create_repo(repo_id, exist_ok=True))
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Trained model")
    except Exception as error:  # those of whichever HTTP client the library uses
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        fix = f"type: python real_model_example.py push {short_path(folder)} {repo_id}"
        if status in (401, 403):
            fix = f"log in with a token that may write there, hf auth login, then {fix}"
        raise UserError(f"{short_path(folder)} was not pushed", why, fix) from None
    return address
