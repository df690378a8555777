"""Generate text, and export models in the Hugging Face format."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from distributed_training.checkpoint.trained import TrainedModel
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.models.config_file import GENERATION_CONFIG, read_generation_config
from distributed_training.models.decoder import KVCache
from distributed_training.models.weights import stored_dtype
from distributed_training.plan.plan import Plan
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import atomic_folder, is_outside

# cuDNN is left out because it compiles a new plan for each sequence length, and the length changes
# with every generated token.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
TOP_K = 40


def generate_ids(
    compute_logits: Callable[[torch.Tensor, KVCache | None], torch.Tensor],
    prompt_ids: list[int],
    *,
    num_tokens: int,
    context: int,
    eos_ids: Sequence[int],
    seed: int,
    temperature: float = 0.7,
    broadcast_choice: Callable[[torch.Tensor], object] = lambda choice: None,
) -> Iterator[int]:
    """Yield up to `num_tokens` token ids that continue `prompt_ids`. Stop early if an id in
    `eos_ids` is chosen; this id is not yielded. Each id is sampled from the TOP_K most likely
    tokens. If `temperature` is 0, the most likely token is always chosen.

    `compute_logits` maps ids [1, T], with T at most `context`, to logits [1, T, V], where V is the
    vocabulary size. It receives each token only once, with a cache of the earlier ones, as long as
    all tokens fit in the context. `broadcast_choice` modifies the chosen id, int64 [1], in
    place so that all ranks use the same id. Raises UserError if the logits are not finite."""
    generator = torch.Generator().manual_seed(seed)
    ids = prompt_ids or [eos_ids[0]]
    past = KVCache()
    for _ in range(num_tokens):
        fits = len(ids) <= context
        model_ids = ids[past.length :] if fits else ids[-context:]
        with sdpa_kernel(ATTENTION_BACKENDS):
            logits = compute_logits(torch.tensor([model_ids]), past if fits else None)
        last_logits = logits[0, -1].float().cpu()
        num_candidates = min(TOP_K, len(last_logits)) if temperature else 1
        top_logits, candidates = torch.topk(last_logits, num_candidates)
        if not top_logits[0].isfinite():
            why = "its weights are damaged, or the values of its adapters are too large"
            fix = "check the model's loss with the eval command"
            raise UserError("The model's logits are not finite", why, fix)
        scaled = (top_logits - top_logits[0]) / max(temperature, 1e-6)
        choice = candidates[torch.multinomial(scaled.softmax(0), 1, generator=generator)]
        broadcast_choice(choice)
        if int(choice) in eos_ids:
            return
        ids = [*ids, int(choice)]
        yield ids[-1]


def default_temperature(chat: bool) -> float:
    """Return the temperature of answers, which should be the likeliest, or of other text, which
    would repeat itself."""
    return 0.0 if chat else 0.7


def write_folder(
    trained: TrainedModel, plan: Plan, tokenizer: Tokenizer, chat: bool, folder: Path
) -> None:
    """Write a run's trained weights and tokenizer to `folder`, which appears only when it is
    complete. For a LoRA run, only the adapters are written unless the base model has random
    weights.

    Raises RunError if a value is not finite. An existing folder then remains unchanged."""
    config = plan.config
    if trained.adapters is None or plan.weights_dir is None:
        save_full_model(trained, tokenizer, chat, plan.weights_dir, folder, text=config.export_text)
        return
    from distributed_training.models.peft import save_adapters

    with atomic_folder(folder) as unfinished:
        base = str(plan.weights_dir)
        on_hub = config.weights == "pretrained" or plan.adapters_dir is not None
        if on_hub and plan.model.weights_dir is None:
            base = str(plan.model.hub_id)
        save_adapters(trained.adapters, unfinished, base, text=config.export_text)
        tokenizer.save(unfinished, chat=chat)


def save_full_model(
    trained: TrainedModel,
    tokenizer: Tokenizer,
    chat: bool,
    base: Path | None,
    folder: Path,
    *,
    text: bool,
) -> None:
    """Write a whole model and its tokenizer to `folder`, one tensor at a time to save memory.
    `folder` appears only when it is complete. Each weight has its dtype in `base`, or fp32. With
    `text`, write only the text decoder of a multimodal model. Otherwise, its other parts, and the
    files of its processor, are those of the model in `base`."""
    original = None if text else base
    dtype = torch.float32 if base is None else getattr(torch, stored_dtype(base))
    weights = trained.merged_weights()
    with atomic_folder(folder) as unfinished:
        trained.spec.save(
            weights,
            unfinished,
            eos_token_id=tokenizer.eos_id,
            dtype=dtype,
            original=base,
            text=text,
        )
        write_generation_config(unfinished, tokenizer, chat, base)
        tokenizer.save(unfinished, chat=chat)
        if original is not None:
            for file in original.glob("*processor_config.json"):
                if not is_outside(file, original):  # A link may lead to a private file.
                    shutil.copy(file, unfinished)


def write_generation_config(
    folder: Path, tokenizer: Tokenizer, chat: bool, base: Path | None
) -> None:
    """Write generation_config.json with the end tokens from `find_stop_ids`, so that other programs
    stop generation at these tokens. The sampling settings of the model in `base` are kept."""
    document = {} if base is None else read_generation_config(base)
    document["eos_token_id"] = find_stop_ids(tokenizer, chat, base)
    # If this key were kept, transformers could regenerate the file from config.json, without our
    # end tokens.
    document.pop("_from_model_config", None)
    document |= tokenizer.generation_tokens
    (folder / GENERATION_CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def find_stop_ids(tokenizer: Tokenizer, chat: bool, base: Path | None) -> list[int]:
    """Return the ids of the tokens that stop generation: the tokenizer's end tokens, then the end
    tokens in the generation config of the model in `base`."""
    ids = [tokenizer.eos_id]
    if chat:
        ids += tokenizer.answer_end_ids
    base_ids = None if base is None else read_generation_config(base).get("eos_token_id")
    if isinstance(base_ids, list):
        ids += base_ids
    elif base_ids is not None:
        ids.append(base_ids)
    return list(dict.fromkeys(ids))
