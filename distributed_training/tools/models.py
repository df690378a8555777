"""Use the model from a finished run: generate, evaluate and export."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from distributed_training.checkpoint import export, resume
from distributed_training.checkpoint.trained import (
    TrainedModel,
    open_trained_folder,
    trained_model_of_run,
)
from distributed_training.data import hub, report
from distributed_training.data.cache import load_bytes, token_cache_dir, tokenize
from distributed_training.data.corpus import find_corpus
from distributed_training.data.pieces import ASSISTANT, RUNNING, Message
from distributed_training.data.samples import Samples, read_samples
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.engines.graphs import to_device
from distributed_training.models import ModelSpec, find_model, read_published, weights
from distributed_training.models.adapters import base_folder, base_name, is_adapter
from distributed_training.models.decoder import Decoder, KVCache
from distributed_training.models.size import ModelSize
from distributed_training.parallel.tensor_files import TensorFiles
from distributed_training.plan.plan import PLAN_FILE, Plan, load_plan
from distributed_training.plan.samples import build_tokenizer, load_data
from distributed_training.planner.data import choose_dataset, choose_tokenizer
from distributed_training.records import metrics
from distributed_training.records.display import Display, format_perplexity, short_path
from distributed_training.records.folder import newest_checkpoint
from distributed_training.records.record import BEST, LAST, find_record
from distributed_training.settings.config import Config, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import did_you_mean, resolve_user_path
from distributed_training.settings.request import build_config
from distributed_training.tools.data import escape_controls

EXPORT = shlex.join(["python", sys.argv[0], "export"])  # as this command was typed
MERGED = "merged"  # folder in a LoRA run that contains the merged model
TOKENS_AT_ONCE = 2048  # tokens evaluated together; memory must hold all their logits
MAX_LENGTH = 1024  # sequence length in tokens if the model belongs to no run


def choose_weights(arguments: argparse.Namespace) -> str:
    """Return the name of the folder in a run that has the weights to use: the best ones, if the run
    kept them and --last is not set."""
    has_best = (resolve_user_path(arguments.run) / BEST).is_dir()
    return BEST if has_best and not arguments.last else LAST


def find_weights(name: str, weights_name: str) -> tuple[ModelSpec, Path]:
    """Return the model and the folder with its weights and tokenizer.

    `name` is a run, a folder of weights, or the name of a published model. In a run, the folder
    `weights_name` ("hf" or "best") is used. Raises UserError for any other name, and for a run
    without this folder."""
    folder = resolve_user_path(name).resolve()
    if not (folder / PLAN_FILE).is_file():
        if is_adapter(folder):
            return find_model(base_name(folder)), folder
        if (folder / "config.json").is_file():
            return find_model(str(folder)), folder
        if folder.exists():
            fix = "name the folder of a run or of a model in Hugging Face format"
            raise UserError(f"{name} is neither a run nor a model", fix=fix)
        if folder.parent.is_dir() and "/" in name:  # not a name on the Hub
            advice = did_you_mean(folder.name, os.listdir(folder.parent))
            raise UserError(f"{name} does not exist", advice)
        spec = find_model(name)
        if not spec.has_own_config:
            spec = read_published(str(spec.hub_id))
        if spec.hub_id is None:
            raise UserError(f"{name} has no weights", fix="name a run or a published model")
        try:
            return spec, weights.fetch_weights(spec.hub_id)
        except OSError as error:
            command = f"hf download {spec.hub_id}"
            raise hub.fetch_error(f"model={name!r} is", error, command) from None
    if not (folder / weights_name).is_dir():
        fix = "train with --keep_best True"
        if weights_name == LAST:
            fix = f"run: {EXPORT} {shlex.quote(name)}"
        raise UserError(f"{name} has no {weights_name}/", fix=fix)
    return load_plan(folder).model, folder / weights_name


def find_trained(name: str, weights_name: str) -> tuple[TrainedModel, Tokenizer, bool]:
    """Return the weights and the tokenizer of a run, and whether the run trained on
    conversations."""
    spec, folder = find_weights(name, weights_name)
    trained = open_trained_folder(spec, folder, base_folder(folder))
    # The tokenizer is in `folder`, or in the adapters' base model or the published model.
    config = build_config({"model": spec.hub_id or str(folder)})
    source = str(folder)
    if spec.hub_id and not Tokenizer(folder).files:
        source = "pretrained"
    _, tokenizer_dir = choose_tokenizer(config, config, spec, source, [])
    tokenizer = Tokenizer(tokenizer_dir, spec.class_keys)
    chat = tokenizer.facts.has_template
    if (folder.parent / PLAN_FILE).is_file():
        chat = _trained_on_chats(folder.parent, tokenizer)
    return trained, tokenizer, chat


def _trained_on_chats(run_dir: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a run, whose record may be lost, trained on conversations."""
    record = find_record(run_dir)
    form = record.data.get("form") if record else load_plan(run_dir).form
    return tokenizer.is_chat_form(form)


def load(trained: TrainedModel) -> tuple[Decoder, torch.device]:
    """Load a model onto the first GPU, in bf16 if the GPU supports bf16. Without a GPU, load the
    model onto the CPU. Return the model and its device."""
    if not torch.cuda.is_available():
        device = torch.device("cpu")
        return trained.load(device), device
    device = torch.device("cuda")
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return trained.load(device, dtype), device


def generate(arguments: argparse.Namespace) -> int:
    """Print text that a run's model generates from the prompt, or from each line of standard input.
    Return the exit code."""
    trained, tokenizer, chat = find_trained(arguments.run, choose_weights(arguments))
    model, device = load(trained)
    temperature = arguments.temperature
    if temperature is None:
        temperature = export.default_temperature(chat)
    opening = list[Message]()
    if arguments.system:
        opening = [{"role": "system", "content": arguments.system}]
    dialog = [*opening]
    if arguments.prompt is None and sys.stdin.isatty():
        print(f"Type {'a question' if chat else 'text to continue'}. Press Ctrl-D to end.")

    @torch.inference_mode()
    def logits(ids: torch.Tensor, past: KVCache | None) -> torch.Tensor:
        return model(ids.to(device), past=past)

    eos_ids = export.find_stop_ids(tokenizer, chat, trained.base)
    for text in _read_prompts(arguments.prompt):
        if not sys.stdin.isatty():  # Each line of a file is a question of its own.
            dialog = [*opening]
        if chat:
            dialog.append({"role": "user", "content": text})
            prompt_ids = tokenizer.encode_chat_prompt(dialog)
            print(f"{ASSISTANT}: ", end="")
        else:
            prompt_ids = tokenizer.encode_prompt(text)
            print(text, end="")
        ids = export.generate_ids(
            logits,
            prompt_ids,
            num_tokens=arguments.num_tokens,
            context=model.size.context_length,
            seed=arguments.seed,
            temperature=temperature,
            eos_ids=eos_ids,
        )
        answer = ""
        for piece in _decode_pieces(tokenizer, ids):
            if chat and not answer:
                piece = piece.lstrip()
            answer += piece
            if sys.stdout.isatty():  # Generated text can contain terminal control sequences.
                piece = escape_controls(piece)
            print(piece, end="", flush=True)
        print()
        dialog.append({"role": ASSISTANT, "content": answer})
    return 0


def _read_prompts(prompt: str | None) -> Iterator[str]:
    """Yield the prompt or, if there is none, each line of standard input."""
    if prompt is not None:
        yield prompt
        return
    mark = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            yield input(mark)


def _decode_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Decode token ids and yield the text in pieces, each as soon as its characters are
    complete."""
    tokens = list[int]()
    printed = ""
    for token in ids:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # U+FFFD stands for a character with missing bytes
            yield text[len(printed) :]
            printed = text
    yield tokenizer.decode(tokens)[len(printed) :]


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the loss, perplexity and bits per byte of a model on a dataset, or on the validation
    samples of the model's run. Return the exit code."""
    run = resolve_user_path(arguments.run).resolve()
    if run.name in (LAST, BEST, MERGED):  # an export of a run
        run = run.parent
    plan = load_plan(run) if (run / PLAN_FILE).is_file() else None
    if arguments.dataset is None and (plan is None or plan.config.has_pairs):
        what = f"{arguments.run} is not a run, so it has no validation samples"
        if plan is not None:
            what = f"the validation samples of {arguments.run} are pairs of answers, not texts"
        raise UserError(what, fix="name a dataset with --dataset")
    trained, tokenizer, _ = find_trained(arguments.run, choose_weights(arguments))
    size = trained.spec.size
    config: Any = plan.config if plan else build_config({"model": arguments.run})
    length = config.max_length
    if arguments.dataset is not None:  # the same for a model before and after its training
        length = min(MAX_LENGTH, size.num_positions)
    config = with_values(config, preference="none", max_length=arguments.max_length or length)
    if config.max_length > size.num_positions:
        what = f"--max_length {config.max_length} is more than the model's context length of "
        what += f"{size.num_positions} tokens"
        raise UserError(what, fix=f"set it to {size.num_positions} or less")
    display = Display(enabled=True)
    if arguments.dataset is None:
        assert plan is not None
        data = load_data(replace(plan, config=config))
        samples, bytes_per_token = data.validation, data.bytes_per_token
        text = f"the validation samples of {config.validation_dataset or config.dataset}"
    else:
        notes = list[str]()
        dataset = choose_dataset(arguments.dataset, notes)
        config = with_values(
            config,
            dataset=dataset,
            validation_dataset=None,
            columns=arguments.columns or config.columns,
        )
        samples, bytes_per_token, split = _load_samples(config, tokenizer, size, notes)
        text = f"{config.dataset}{split}"
        for note in notes:
            display.note(note)
    model, device = load(trained)
    row = measure(model, samples, bytes_per_token, device)
    precision = "bf16" if model.compute_dtype == torch.bfloat16 else "fp32"
    display.say(f"Evaluated {arguments.run} on {text} in {precision}.")
    bits = row["bits_per_byte"]
    rows = {
        "loss": f"{row['loss']:.4f} nats per token",
        "perplexity": format_perplexity(row["perplexity"]),
        "bits per byte": "-" if bits is None else f"{bits:.4f}",
        "tokens": f"{row['num_targets']:,} in the loss, {row['num_bytes']:,} bytes of text",
        "samples": f"{len(samples):,} of up to {config.max_length} tokens",
    }
    display.table(rows)
    return 0


def _load_samples(
    config: Config, tokenizer: Tokenizer, size: ModelSize, notes: list[str]
) -> tuple[Samples, np.ndarray, str]:
    """Return (samples, number of bytes for each token id, note about the split). The samples come
    from the dataset's validation split if there is one. Notes about records that are omitted or
    truncated are added to `notes`."""
    corpus = find_corpus(config)
    split = "validation" if "validation" in corpus else "train"
    split_corpus = {"train": corpus[split]}
    folder = tokenize(
        split_corpus, tokenizer, config, token_cache_dir(), embedding_rows=size.vocab_size
    )
    special_ids = tokenizer.special_ids[tokenizer.special_ids != tokenizer.unknown_id]
    form, packs, (samples,) = read_samples(
        folder, config, can_pack=size.packs, padding_id=tokenizer.eos_id, special_ids=special_ids
    )
    if len(samples) == 0:
        what = f"dataset={config.dataset!r} has nothing to evaluate"
        raise UserError(what, "it has no tokens to predict", "use more text or more records")
    counts = report.summarize(folder, config, can_pack=size.packs)
    notes.append(f"{counts['records']:,} records read, {counts['used']:,} used")
    notes += report.describe(counts, config.max_length)
    split_note = " (validation split)" if split == "validation" else ""
    samples = samples.packed() if packs and form != RUNNING else samples
    return samples, load_bytes(folder), split_note


@torch.inference_mode()
def measure(
    model: Decoder, samples: Samples, bytes_per_token: np.ndarray, device: torch.device
) -> dict[str, float]:
    """Evaluate an unsharded model, which must be on `device`. Return an entry for the record's
    `evaluations`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    batch_size = max(1, TOKENS_AT_ONCE // samples.seq_len)
    batches = range(0, len(samples), batch_size)
    for first in tqdm(batches, desc="evaluating", disable=None, leave=False):
        indices = np.arange(len(samples))[first : first + batch_size]
        total += model(*to_device(device, *samples.batch(indices)))
    num_targets = int(samples.num_targets.sum())
    return metrics.evaluation(float(total), num_targets, samples.count_bytes(bytes_per_token))


def export_checkpoint(arguments: argparse.Namespace) -> int:
    """Write weights from a checkpoint to the folder --to, by default to the run's hf/. If a run is
    named, the run's newest checkpoint is used. With --merge, merge exported adapters instead.
    Return the exit code."""
    run = resolve_user_path(arguments.run).resolve()
    if arguments.merge:
        exported = run
        if not is_adapter(run):
            exported = run / BEST if (run / BEST).is_dir() else run / LAST
        return merge_adapters(exported, arguments.to, text=arguments.text)
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        fix = "name a run's folder, such as runs/latest, or a folder in its checkpoints/"
        raise UserError(f"{arguments.run} is not a folder with a checkpoint", fix=fix)
    run_dir = checkpoint.parents[1]
    folder = _new_folder(arguments.to, run_dir / LAST)
    plan, trained, step = open_checkpoint(checkpoint)
    if arguments.text:
        plan = replace(plan, config=plan.config.model_copy(update={"export_text": True}))
    tokenizer = build_tokenizer(plan, plan.tokenizer_dir)
    chat = _trained_on_chats(run_dir, tokenizer)
    export.write_folder(trained, plan, tokenizer, chat, folder)
    where = f"{short_path(folder)} in Hugging Face format"
    print(f"Exported the weights after step {step} to {where}.")
    return 0


def open_checkpoint(checkpoint: Path) -> tuple[Plan, TrainedModel, int]:
    """Return the plan of a checkpoint's run, the weights in the checkpoint, and its step."""
    meta = resume.read_meta(checkpoint)
    files = TensorFiles(checkpoint / name for name in resume.check_files(checkpoint, meta))
    plan = load_plan(checkpoint.parents[1])
    prefix = "weight/"
    weight_names = [name for name in files.stored_parts if name.startswith(prefix)]
    trained = trained_model_of_run(
        plan,
        [name.removeprefix(prefix) for name in weight_names],
        lambda name: files.read_whole(f"{prefix}{name}").float(),
        meta.base_fingerprint,
    )
    return plan, trained, meta.step


def merge_adapters(exported: Path, to: str | None, *, text: bool) -> int:
    """Merge exported adapters into their base model, and write the whole model to the folder `to`,
    by default to merged/ beside the adapters. With `text`, write only the text decoder of a
    multimodal model. Return the exit code."""
    if not is_adapter(exported):
        fix = f"to export an interrupted run's adapters, run: {EXPORT} {exported.parent}"
        raise UserError(f"{exported} has no adapters to merge", fix=fix)
    folder = _new_folder(to, exported.with_name(MERGED))
    trained, tokenizer, chat = find_trained(str(exported), LAST)
    export.save_full_model(trained, tokenizer, chat, trained.base, folder, text=text)
    if trained.adapters and trained.adapters.config.has_quantized_base:
        base_dtype = trained.adapters.config.base_dtype
        note = f"the base model was in {base_dtype}. The export contains its dequantized weights "
        print(f"note: {note}plus the adapters.")
    print(f"Exported the merged model to {short_path(folder)} in Hugging Face format.")
    return 0


def _new_folder(to: str | None, default: Path) -> Path:
    """Return the folder `to` or, by default, `default`. Raises UserError if the folder exists."""
    folder = default if to is None else Path(to).expanduser()
    if folder.exists():
        raise UserError(f"{folder} already exists", fix="name another folder with --to")
    return folder
