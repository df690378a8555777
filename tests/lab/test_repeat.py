"""Test that a sample of the recorded commands is still accepted. `python results/lab/repeat.py`
tests all of the commands."""

from tests.conftest import ROOT, assert_ok, heavy_pool

RECORDS = (  # runs of different programs, with a renamed key, and with the first record schema
    "records/h200-x4/gpt2-medium-dp-bf16-b4-x4.json",
    "records/h200-x4-compression/gpt2-medium-dp-topk-int8-b64-x4.json",
    "records/h200-x4-layouts/gpt2-xl-20-heads-pp-pp4-1f1b-m4-bf16-b32-x4.json",
    "records/h200-x1-large/gpt2-large-zero1-bf16-b2-x1.json",
    "records/cpu-links/1-gbit.json",
    "records/cpu-traffic/traffic.json",
)


def test_recorded_commands_are_accepted():
    paths = [ROOT / "results" / name for name in RECORDS]
    result = heavy_pool().script(paths, script=ROOT / "results/lab/repeat.py")
    assert_ok(result)
    assert result.stdout.endswith(f"{len(paths)} of {len(paths)} commands were accepted.\n")
