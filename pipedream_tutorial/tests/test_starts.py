"""The runtime again and again: no start and no run hangs. A file of its own, so that another worker
of pytest than test_runtime.py's can take it."""

import json

import pytest
from starting import no_process_is_left, run, warm  # noqa: F401


@pytest.mark.timeout(600)
def test_starts_without_a_hang(tmp_path):
    """New processes each time, mostly two of them; a hang ends at its limit. The first
    start is a user's; the others leave out its launcher and the imports."""
    record = tmp_path / "record.json"
    for number in range(6):
        p = 3 if number % 5 == 0 else 2
        schedule = ("pipedream", "1f1b", "gpipe")[number % 3]
        arguments = [
            "--num_stages", str(p), "--schedule", schedule, "--num_microbatches=4",
            "--warmups=0", "--forward_ms=0", "--backward_ms=0", "--record", str(record),
        ]  # fmt: skip
        record.unlink(missing_ok=True)
        if number == 0:
            done = run(arguments, limit_s=120)
        else:
            done = warm(arguments, p, limit_s=120)
        assert done.returncode == 0, f"start {number}: {done.returncode} {done.stderr}"
        (case,) = json.loads(record.read_text())["cases"]
        assert case["measured"]["weights_equal"] is True, f"start {number}"
