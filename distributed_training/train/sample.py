"""Generate text with a run's model, before and after training."""

import torch.distributed as dist

from distributed_training.checkpoint.export import find_stop_ids, generate_ids
from distributed_training.data.samples import Data
from distributed_training.engines.base import Engine
from distributed_training.parallel.agree import broadcast_from_rank_0
from distributed_training.plan.plan import Plan
from distributed_training.records.display import Display
from distributed_training.settings.errors import UserError


def generate_sample(
    engine: Engine, plan: Plan, data: Data, display: Display, when: str
) -> str | None:
    """Generate, print and return text that continues the prompt in CONFIG's key `generate`. Return
    None if there is no prompt or if the chat template rejects the prompt. If the model is trained
    on conversations, the prompt is a user message. All ranks must call this function."""
    config = plan.config
    if config.generate is None:
        return None
    tokenizer = data.tokenizer
    topology = engine.topology
    # Only rank 0 tokenizes, because many tokenizers import transformers.
    encoded: tuple[list[int], list[int]] | None = None
    if topology.rank == 0:
        try:
            if data.is_chat:
                prompt_ids = tokenizer.encode_chat_prompt(
                    [{"role": "user", "content": config.generate}]
                )
            else:
                prompt_ids = tokenizer.encode_prompt(config.generate)
            encoded = prompt_ids, find_stop_ids(tokenizer, data.is_chat, plan.weights_dir)
        except UserError as error:  # Some chat templates require a system message.
            display.note(f"no sample is generated: {error}")
    encoded = broadcast_from_rank_0(encoded)
    if encoded is None:
        return None
    prompt, eos_ids = encoded
    # Sequence parallelism pads the context to a multiple of tp, and padding needs positions.
    context = plan.size.num_positions // topology.tp * topology.tp
    # Rank 0 chooses each token. All ranks must continue to the end of the text, because engines
    # with sharded parameters gather them from all ranks.
    ids = list(generate_ids(
        engine.logits, prompt, num_tokens=60, context=context, seed=config.seed, eos_ids=eos_ids,
        past=engine.new_kv_cache(), broadcast_choice=lambda choice: dist.broadcast(choice, src=0),
    ))  # fmt: skip
    text = tokenizer.decode([*prompt, *ids]) if topology.rank == 0 else ""
    sample = str(broadcast_from_rank_0(text))
    display.sample(f"sample {when} training:", sample)
    return sample
