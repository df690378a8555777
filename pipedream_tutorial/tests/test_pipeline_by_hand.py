"""Test that pipeline_by_hand.py trains equally with any number of stages and under both orders."""

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest
from pipedream.config import FOLDER

from tests.pool import Pool

FUNCTION = re.compile(r"^def order\(.*?(?=\n\n\n|\Z)", re.DOTALL | re.MULTILINE)
BUILDER = re.compile(r"^def build_layers\(.*?(?=\n\n\n)", re.DOTALL | re.MULTILINE)
OWN_LAYERS = """def build_layers() -> list[nn.Module]:
    width, last = 64, nn.Linear(64 * CONTEXT, 256)
    blocks = [nn.TransformerEncoderLayer(width, 4, 128, 0.0, batch_first=True) for _ in range(4)]
    return [nn.Embedding(256, width), *blocks, nn.Sequential(nn.Flatten(), last)]"""


@functools.cache
def pool() -> Pool:
    """Return warm processes, because importing torch takes longer than most of these runs.
    test_commands.py starts the script with torchrun."""
    return Pool(("torch.distributed", "torch._dynamo"), os.environ | {"OMP_NUM_THREADS": "1"})


def start(script: Path, num_stages: int) -> subprocess.CompletedProcess[str]:
    return pool().script([], script=script, num_processes=num_stages, launched=True)


def read_losses(output: str) -> tuple[list[float], dict[int, int]]:
    """Return the losses, and the number of held microbatches by rank."""
    held = re.findall(r"rank (\d+) held\D*(\d+)", output)
    return (
        [float(loss) for loss in re.findall(r"loss (\S+)", output)],
        {int(stage): int(count) for stage, count in held},
    )


@pytest.mark.timeout(300)
def test_losses_do_not_depend_on_the_stages_and_only_1f1b_holds_fewer_microbatches(
    tmp_path: Path,
) -> None:
    script = FOLDER / "pipeline_by_hand.py"
    text = script.read_text()
    assert len(text.splitlines()) <= 140
    solution = FUNCTION.search((FOLDER / "solutions/9_order.py").read_text())
    assert solution is not None
    losses, held = read_losses(start(script, 1).stdout)
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 10
    assert held == {0: 8}
    gpipe, solved = tmp_path / "gpipe.py", tmp_path / "solved.py"
    gpipe.write_text(text.replace("NUM_STEPS = 40", "NUM_STEPS = 10"))
    solved.write_text(FUNCTION.sub(lambda _: solution[0].rstrip(), gpipe.read_text()))
    for done, expected in (
        (start(gpipe, 3), {0: 8, 1: 8, 2: 8}),
        (start(solved, 3), {0: 3, 1: 2, 2: 1}),
    ):
        found, held = read_losses(done.stdout)
        assert found == pytest.approx(losses[:1], abs=1e-6)
        assert held == expected


@pytest.mark.timeout(300)
def test_own_layers_need_one_constant_which_is_checked_before_the_first_message(
    tmp_path: Path,
) -> None:
    text = (FOLDER / "pipeline_by_hand.py").read_text().replace("NUM_STEPS = 40", "NUM_STEPS = 10")
    own, wrong = tmp_path / "own.py", tmp_path / "wrong.py"
    wrong.write_text(BUILDER.sub(lambda _: OWN_LAYERS, text))
    own.write_text(wrong.read_text().replace("(SIZE, WIDTH)  #", "(SIZE, CONTEXT, 64)  #"))
    (losses, _), (found, _) = (read_losses(start(own, count).stdout) for count in (1, 2))
    assert found == pytest.approx(losses, abs=1e-6)
    assert len(found) == 1
    done = start(wrong, 2)
    assert done.returncode == 1
    assert done.stderr.count("(32, 16, 64) from 3 layers, but MESSAGE is float32 (32, 256)") == 1
    wrong.write_text(wrong.read_text().replace("*blocks,", "nn.GRU(64, 64), *blocks,"))
    done = start(wrong, 2)
    assert done.stderr.count("error: Stage 0 returns a tuple from 3 layers") == 1
