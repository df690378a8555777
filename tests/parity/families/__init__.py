"""Model families with small models for tests, in folders as a user would write them. Importing this
module allows their code to run in this process."""

from pathlib import Path

from distributed_training.settings.own_code import allow_code

GPT2 = Path(__file__).with_name("gpt2")
LLAMA = Path(__file__).with_name("llama")
allow_code(GPT2)
allow_code(LLAMA)
