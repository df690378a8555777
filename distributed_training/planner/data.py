"""Find the tokenizer, weights and dataset for a run, and resolve the settings that depend on the
dataset.

This module does not import torch."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed_training.data import hub, report
from distributed_training.data.cache import cache_folder, token_cache_dir, tokenize
from distributed_training.data.corpus import (
    EMBEDDED,
    WIKITEXT,
    Corpus,
    count_corpus_bytes,
    find_corpus,
    find_unread,
    is_hub_name,
    split_weights,
)
from distributed_training.data.estimate import MIN_ERROR, sample_corpus
from distributed_training.data.samples import Data, Sampler, cut_samples
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.models import ModelSpec, read_published, weights
from distributed_training.models.adapters import base_folder, is_adapter
from distributed_training.models.gpt2 import HUB_IDS
from distributed_training.plan.layout import Amount
from distributed_training.plan.plan import Draft, Packing
from distributed_training.plan.samples import build_tokenizer
from distributed_training.planner.answer import count_typed_steps
from distributed_training.planner.conflicts import check_settings
from distributed_training.settings.config import AUTO, Config, Request
from distributed_training.settings.errors import UserError, first_line
from distributed_training.settings.files import plural

MAX_DRY_RUN_BYTES = 4_000_000  # largest amount of text, in bytes, that a dry run tokenizes
MAX_HASHED_BYTES = 10**9  # largest amount of text that a dry run looks up in the token cache
MIN_STEPS = 50  # shorter runs get a note
MAX_SPARE_ROWS = 128  # maximum number of embedding rows without a token


def find_sources(
    draft: Draft, notes: list[str], *, needs_weights: bool = True
) -> tuple[Draft, dict[str, Any]]:
    """Find the weights, tokenizer and dataset, and choose the learning rate. Return the draft with
    the values of the keys that depend on them, and the folders of the tokenizer, weights and
    adapters, by the names of the fields of Plan. Raises UserError if a file or Hub
    repository that CONFIG names is not available. Unless `needs_weights` is set, missing weights
    are only a note."""
    config = draft.config
    spec = draft.model
    request = draft.requested
    source, weights_dir = config.weights, None
    try:
        source, weights_dir = _choose_weights(config, request, spec, notes)
    except UserError as error:
        if needs_weights or config.weights not in (AUTO, "pretrained"):
            raise
        notes.append(first_line(error))
    adapters_dir = Path(source).resolve() if is_adapter(Path(source)) else None
    if not spec.has_own_config and (needs_weights or weights_dir is not None):
        spec = read_published(str(spec.hub_id))
        draft = replace(draft, model=spec)
        check_settings(draft, [])  # such as max_length, because the table may be of a sibling
    if weights_dir is not None:
        spec.check_weights(weights_dir)
    tokenizer, tokenizer_dir = choose_tokenizer(config, request, spec, source, notes)
    if tokenizer == EMBEDDED and weights_dir is not None:
        _check_embedded(weights_dir, spec)
    if config.lora_rank and source == "random":
        notes.append(
            "LoRA adapters on frozen random weights learn little; set lora_rank=0 to train all "
            "weights"
        )
    dataset = choose_dataset(config.dataset, notes, strict=request.strict)
    learning_rate = config.learning_rate
    if learning_rate == AUTO:
        learning_rate = 3e-4
        if config.has_pairs:
            learning_rate = 1e-5 if config.lora_rank else 1e-6
        elif config.lora_rank:
            learning_rate = 2e-4
        elif source != "random":
            learning_rate = 5e-5
        elif config.model.startswith("gpt2-tiny"):
            learning_rate = 3e-3
    config_values = {
        "learning_rate": learning_rate,
        "tokenizer": tokenizer,
        "weights": source,
        "dataset": dataset,
    }
    if spec.weights_dir is not None:  # a link such as runs/latest may change
        config_values["model"] = str(spec.weights_dir)
    folders = {
        "tokenizer_dir": tokenizer_dir,
        "weights_dir": weights_dir,
        "adapters_dir": adapters_dir,
    }
    return draft.with_config(**config_values), folders


def peek_data(draft: Draft, tokenizer_dir: Path) -> Data | None:
    """Return a run's samples without writing to the token cache. If the text is larger than
    MAX_DRY_RUN_BYTES and not in the token cache, return samples from a part of it. Return None if a
    dataset is on the Hub, or if a large file cannot be read in parts."""
    config = draft.config
    keys = dict.fromkeys(split_weights(config.dataset), "dataset")
    if config.validation_dataset is not None:
        keys[config.validation_dataset] = "validation_dataset"
    on_hub = list(filter(is_hub_name, keys))
    for name in on_hub:
        hub.fetch_dataset(keys[name], name, download=False)
    if on_hub:
        return None
    corpus = find_corpus(config)
    num_bytes = count_corpus_bytes(corpus)
    tokenizer = build_tokenizer(draft, tokenizer_dir)
    with TemporaryDirectory() as cache_dir:
        if num_bytes <= MAX_DRY_RUN_BYTES:
            return read_data(draft, tokenizer_dir, Path(cache_dir))
        if num_bytes <= MAX_HASHED_BYTES:
            folder = cache_folder(corpus, tokenizer, config, token_cache_dir())
            if folder.is_dir():
                return read_data(draft, tokenizer_dir)
        if (sampled := sample_corpus(corpus, Path(cache_dir))) is None:
            return None
        part, scale, error = sampled
        draft = draft.with_config(num_samples=-1)
        data = read_data(draft, tokenizer_dir, Path(cache_dir), part)
        return replace(data, scale=scale, error=error)


def read_data(
    draft: Draft, tokenizer_dir: Path, cache_dir: Path | None = None, corpus: Corpus | None = None
) -> Data:
    """Return the samples of `corpus` or, by default, of a run's dataset, with their statistics.
    Tokenize the text if its tokens are not in `cache_dir` or, by default, in the token cache."""
    config = draft.config
    is_sample = corpus is not None
    if corpus is None:
        corpus = find_corpus(config)
    tokenizer = build_tokenizer(draft, tokenizer_dir)
    folder = tokenize(
        corpus,
        tokenizer,
        config,
        cache_dir or token_cache_dir(),
        embedding_rows=draft.size.vocab_size,
    )
    data = cut_samples(folder, tokenizer, config, can_pack=draft.size.packs)
    counts = report.summarize(folder, config, can_pack=draft.size.packs)
    unread = [] if is_sample else find_unread(config.dataset, corpus)
    return replace(data, counts={**counts, "unread": unread})


def count_work(draft: Draft, notes: list[str]) -> Amount | str:
    """Return the amount of work that CONFIG requests, or the reason why it is unknown. This needs
    the dataset and the tokenizer, but no weights. Notes about the dataset are added to `notes`."""
    reason = "the dataset is not on this machine"
    config = draft.config
    try:
        dataset = choose_dataset(config.dataset, notes)
        draft = draft.with_config(dataset=dataset)
        _, tokenizer_dir = choose_tokenizer(
            config, draft.requested, draft.model, config.weights, notes
        )
        if data := peek_data(draft, tokenizer_dir):
            return resolve_data_values(draft, data, notes)[1]
        if not any(map(is_hub_name, split_weights(dataset))):
            reason = "the dataset is large and not tokenized yet (the data command does this)"
    except (UserError, OSError) as error:
        reason = first_line(error)
    typed = count_typed_steps(draft, notes)
    return f"the number of steps is unknown, because {reason}" if isinstance(typed, str) else typed


def resolve_data_values(draft: Draft, data: Data, notes: list[str]) -> tuple[Draft, Amount]:
    """Return the draft with the values that depend on the samples, and the amount of work. Shorten
    the warm-up if it is too long for the run."""
    config = draft.config
    train = data.train
    num_samples = round(data.scale * len(train.starts))
    num_sequences = round(data.scale * len(train))  # samples or, with packing, blocks
    error = data.error
    if error and 0 < config.num_samples < num_samples:
        num_sequences = round(num_sequences * config.num_samples / num_samples)
        num_samples = config.num_samples
        error = MIN_ERROR if data.packs else 0.0
    if num_samples < config.num_samples and draft.requested.is_set("num_samples"):
        notes.append(f"the dataset has only {plural(num_samples, 'training sample')}")
    if not (data.packs or config.has_pairs) and config.pack == AUTO:
        notes.append(
            "records are padded instead of packed, because "
            f"{draft.model.label} cannot keep packed records apart"
        )
    if config.system is not None and not data.is_chat:
        notes.append(
            "system has no effect, because the data is not rendered with a chat template; for "
            "prompts and completions, set chat_template to chatml"
        )
    if not data.error:
        notes += report.describe(data.counts, config.max_length)
    batch_size = draft.batch.global_batch_size
    batch_key = "batch_size" if config.grad_accum_steps == 1 else "grad_accum_steps"
    if num_sequences < batch_size:
        unit = "sample" if train.firsts is None else "block"
        notes.append(
            "each step trains on the whole dataset, because the batch of "
            f"{plural(batch_size, unit)} is larger than the dataset "
            f"({plural(num_sequences, unit)}). Consider a smaller {batch_key}"
        )
    steps_per_epoch = math.ceil(num_sequences / batch_size)
    steps_in_epochs = config.epochs * steps_per_epoch
    num_steps = steps_in_epochs
    is_typed = draft.requested.is_set("max_steps")
    if config.max_steps != -1:
        # If choose_model set max_steps, the value is only a limit, because 60 epochs of a small
        # dataset may have fewer steps.
        num_steps = config.max_steps if is_typed else min(steps_in_epochs, config.max_steps)
    if num_steps < MIN_STEPS and not is_typed:
        notes.append(
            f"the run has only {plural(num_steps, 'step')}. If the model learns too little, use "
            f"more data, a smaller {batch_key} or more epochs"
        )
    warmup_steps = config.warmup_steps
    if warmup_steps >= num_steps:
        warmup_steps = num_steps // 2
        notes.append(
            f"the warm-up lasts {plural(warmup_steps, 'step')} instead of {config.warmup_steps}, "
            f"because the run has only {plural(num_steps, 'step')}"
        )
    packing = None
    if train.firsts is not None:
        if draft.mesh["tp"] > 1 and draft.size.needs_whole_samples:
            raise UserError(
                f"packed records cannot be used with tp={draft.mesh['tp']}",
                "blocks of the model mix tokens in layers that tp does not shard",
                "set pack to False",
            )
        sampler = Sampler(
            num_samples=len(train), **draft.batch.model_dump(), replica=0, seed=config.seed
        )
        _, lengths = train.find_documents(slice(None))
        lengths = lengths.astype(float)
        packing = Packing(
            max_documents=sampler.count_max_documents(train, num_steps),
            mean_length=float(lengths @ lengths / lengths.sum()),
        )
    draft = draft.with_config(warmup_steps=warmup_steps, pack=data.packs)
    amount = Amount(
        num_samples=num_samples,
        unit=data.counts["unit"],
        epochs=num_steps / steps_per_epoch,
        num_steps=num_steps,
        error=error,
    )
    return replace(draft, packing=packing), amount


def choose_dataset(dataset: str, notes: list[str], *, strict: bool = False) -> str:
    """Return the dataset's name after resolving "auto", which is always WikiText-2 if `strict` is
    set."""
    if dataset != AUTO:
        return dataset
    if strict:  # if it is not available, an error follows when it is read
        return WIKITEXT
    try:
        hub.fetch_wikitext()
        return WIKITEXT
    except OSError as error:
        notes.append(
            f"WikiText-2 is not available ({error}), so the run uses the embedded corpus: the "
            "source code and help topics of this Python installation"
        )
        return EMBEDDED


def _choose_weights(
    config: Config, request: Request, spec: ModelSpec, notes: list[str]
) -> tuple[str, Path | None]:
    """Return the value of the key `weights`, and the weights' folder (None for random weights).

    Weights are random only in three cases: the key is "random", the model is not published, or the
    published weights cannot be used and the user did not name the model. Raises UserError if
    required weights are not available."""
    weights_key = config.weights
    model = config.model
    hub_id = spec.hub_id
    if weights_key == "random":
        return "random", None
    if weights_key not in (AUTO, "pretrained"):
        folder = base_folder(Path(weights_key).resolve())
        model_folder = spec.weights_dir
        if (
            is_adapter(Path(weights_key))
            and model_folder is not None
            and model_folder.resolve() != folder
        ):
            raise UserError(
                f"weights={weights_key!r} is a folder of adapters for the model in {folder}",
                f"model is set to {model_folder}",
                "set model to auto",
            )
        return weights_key, folder
    if spec.weights_dir is not None:
        weights.require_weights(spec.weights_dir)
        return str(spec.weights_dir), spec.weights_dir
    scratch_advice = "set weights to random to train from scratch"
    if hub_id is None:
        if weights_key == "pretrained":
            raise UserError(
                f"weights='pretrained' cannot be used with {model=}, which is not published",
                fix=scratch_advice,
            )
        notes.append(f"{model} has no published weights, so training starts from random weights")
        return "random", None
    is_required = weights_key == "pretrained" or request.is_set("model") or request.strict
    if config.tokenizer == EMBEDDED:
        why = f"the published weights of {model} need their own tokenizer"
        if is_required:
            raise UserError(
                f"tokenizer={EMBEDDED!r} cannot be used with weights={weights_key!r}",
                why,
                f"set tokenizer to auto, or {scratch_advice}",
            )
        notes.append(f"training starts from random weights, because {why}")
        return "random", None
    try:
        return "pretrained", weights.fetch_weights(hub_id)
    except OSError as error:
        if is_required:
            missing = f"the published weights of {model} are"
            command = f"hf download {hub_id}"
            raise hub.fetch_error(missing, error, command, scratch_advice) from None
        notes.append(
            f"pretrained weights are not available ({error}), so training starts from random "
            "weights"
        )
        return "random", None


def choose_tokenizer(
    config: Config, request: Request, spec: ModelSpec, source: str, notes: list[str]
) -> tuple[str, Path]:
    """Return the value of the key `tokenizer` and the tokenizer's folder. If the key is "auto",
    prefer the tokenizer that comes with the weights `source`. Raises UserError if a required
    tokenizer is not available."""
    tokenizer = config.tokenizer
    folders = [] if source in (AUTO, "pretrained", "random") else [Path(source).resolve()]
    if spec.weights_dir and all(map(is_adapter, folders)):
        folders.append(spec.weights_dir)
    if tokenizer == AUTO:
        for folder in folders:
            if Tokenizer(folder).files:
                return str(folder), folder
        if folders and source != "random" and weights.weight_files(folders[-1]):
            raise UserError(
                f"the folder {folders[-1]} has weights but no tokenizer",
                "with another tokenizer, the weights produce nonsense",
                "copy the tokenizer files there, or set tokenizer to another folder or to a "
                "name on the Hub",
            )
    if tokenizer == EMBEDDED or (tokenizer == AUTO and config.model.startswith("gpt2-tiny")):
        return EMBEDDED, EMBEDDED_DIR
    folder = Path(tokenizer)
    if tokenizer not in (AUTO, "gpt2") and folder.is_dir():
        return str(folder), folder.resolve()
    repo_id = spec.hub_id if tokenizer == AUTO else tokenizer
    if repo_id in (None, "gpt2") or repo_id in HUB_IDS.values():
        repo_id = "gpt2"
        fetch = partial(hub.fetch_folder, hub.TOKENIZER_ID, hub.TOKENIZER_FILES)
        command = f"hf download {hub.TOKENIZER_ID} {' '.join(hub.TOKENIZER_FILES)}"
    elif repo_id.count("/") == 1 and repo_id[0] not in "/.~":
        fetch = partial(hub.fetch_tokenizer, repo_id)
        command = f"hf download {repo_id} --include '*token*'"
    else:
        raise UserError(
            f"tokenizer={tokenizer!r} is not a folder",
            fix='use "auto", "gpt2", "embedded", the name of a model on the Hub, or a folder that '
            "has tokenizer.json or both vocab.json and merges.txt",
        )
    try:
        return repo_id, fetch()
    except OSError as error:
        is_needed = source != "random" and (source != AUTO or request.is_set("model"))
        if tokenizer != AUTO or is_needed or request.strict:
            raise hub.fetch_error(f"tokenizer={repo_id!r} is", error, command) from None
        owner = "GPT-2" if repo_id == "gpt2" else repo_id
        notes.append(
            f"{owner}'s tokenizer is not available ({error}), so the run uses the embedded "
            "tokenizer. Compare its perplexity only with runs that use this tokenizer"
        )
        return EMBEDDED, EMBEDDED_DIR


def _check_embedded(weights_dir: Path, spec: ModelSpec) -> None:
    """Raise UserError if the weights were not trained with the embedded tokenizer."""
    embedded = Tokenizer(EMBEDDED_DIR)
    if Tokenizer(weights_dir).files:
        is_same_tokenizer = Tokenizer(weights_dir).vocabulary == embedded.vocabulary
    else:
        is_same_tokenizer = spec.size.vocab_size <= embedded.num_tokens + MAX_SPARE_ROWS
    if not is_same_tokenizer:
        raise UserError(
            f"tokenizer={EMBEDDED!r} cannot be used with the weights in {weights_dir}",
            "the weights were trained with another tokenizer",
            "set tokenizer to auto, or set weights to random to train from scratch",
        )
