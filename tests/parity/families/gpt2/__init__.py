"""Small shapes of GPT-2. The models are deep enough for stages of unequal length, or for two stages
on each of four processes."""

from distributed_training.models.gpt2 import STORES_TRANSPOSED, build, gpt2_size, to_config, to_hf

__all__ = ["STORES_TRANSPOSED", "build", "sizes", "to_config", "to_hf"]
# Name -> (vocabulary size, number of blocks, width)
SHAPES = {
    "four-wide-layers": (2048, 4, 96),
    "six-layers": (2048, 6, 32),
    "eight-layers": (2048, 8, 32),
    # The vocabulary has two tokens more than the tokenizer, so the embedding is padded.
    "eight-layers-2050": (2050, 8, 32),
    # Some tensors are large enough for infinity to keep them in files.
    "eight-wide-layers-2050": (2050, 8, 120),
}


def sizes(folder=None):
    return {
        name: gpt2_size(
            vocab_size=vocab_size,
            num_positions=128,
            num_layers=num_layers,
            num_heads=4,
            hidden_size=hidden_size,
        )
        for name, (vocab_size, num_layers, hidden_size) in SHAPES.items()
    }
