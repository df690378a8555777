"""Test where torch stores compiled code for a model's blocks."""

import sys

from distributed_training.settings.cache import CACHE_VARIABLE
from tests.conftest import run_command

COMPILE = """
import os
from types import SimpleNamespace
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # an earlier test of this process may have set it
from distributed_training.settings.cache import use_private_caches

use_private_caches()  # before torch, which sets the variable itself
import torch
from distributed_training.parallel.blocks import apply_compile

block = torch.nn.Linear(2, 2)
model = SimpleNamespace(blocks={0: block}, is_last=False, loss=None)
config = SimpleNamespace(compile=True, loss_chunk_tokens=1, lora_rank=0)
apply_compile(model, config, compile_outer_layers=False)
block.forward(torch.ones(1, 2))
"""
# A compiler that only creates its output files. The real one would take 15 s.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo g++ 13
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


def test_compiled_code_is_never_stored_in_a_folder_that_another_user_could_create(tmp_path):
    """No compiled code, not even precompiled C++ headers, is stored in torchinductor_<user> in the
    shared temporary folder. Another user could create that folder first and replace its
    contents."""
    shared = tmp_path / "shared"
    shared.mkdir()
    cache, compiler = tmp_path / "own", tmp_path / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = {"TMPDIR": str(shared), CACHE_VARIABLE: str(cache), "CXX": str(compiler)}
    environment["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # four processes would test the CPU
    result = run_command([sys.executable, "-c", COMPILE], **environment)
    assert "main.so: file too short" in result.stderr, result.stderr
    assert list(shared.glob("torchinductor_*")) == []
    assert list(cache.glob("inductor/precompiled_headers/*.h"))
