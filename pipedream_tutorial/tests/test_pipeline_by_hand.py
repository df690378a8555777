"""Test that pipeline_by_hand.py trains equally with any number of stages and under both orders."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pipedream.config import FOLDER

FUNCTION = re.compile(r"^def order\(.*?(?=\n\n\n|\Z)", re.DOTALL | re.MULTILINE)


def run_pipeline(script: Path, num_stages: int) -> tuple[list[float], dict[int, int]]:
    """Return the losses, and the number of held microbatches by rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    output = subprocess.run(
        [*command, str(num_stages), script], env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True, stdout=subprocess.PIPE, text=True, timeout=200,
    ).stdout  # fmt: skip
    held = re.findall(r"rank (\d+) held\D*(\d+)", output)
    return (
        [float(loss) for loss in re.findall(r"loss (\S+)", output)],
        {int(stage): int(count) for stage, count in held},
    )


@pytest.mark.timeout(300)
def test_losses_do_not_depend_on_the_stages_and_only_1f1b_holds_fewer_microbatches(
    tmp_path: Path,
) -> None:
    text = (FOLDER / "pipeline_by_hand.py").read_text()
    assert len(text.splitlines()) <= 120
    solved = tmp_path / "solved.py"
    solution = FUNCTION.search((FOLDER / "solutions/9_order.py").read_text())
    assert solution is not None
    solved.write_text(FUNCTION.sub(lambda _: solution[0].rstrip(), text))
    losses, held = run_pipeline(FOLDER / "pipeline_by_hand.py", 1)
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 10
    assert held == {0: 8}
    for script, expected in (
        (FOLDER / "pipeline_by_hand.py", {0: 8, 1: 8, 2: 8}),
        (solved, {0: 3, 1: 2, 2: 1}),
    ):
        found, held = run_pipeline(script, 3)
        assert found == pytest.approx(losses, abs=1e-6)
        assert held == expected
