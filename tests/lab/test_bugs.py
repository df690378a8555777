"""Test what the page about published bugs claims, and run some of them again."""

import pytest

from results.lab import bugs as program
from results.lab.pages import bugs
from tests.e2e.support import clone
from tests.pool import ROOT

RECORDS = ROOT / "results/records"
BUGS = {bug["name"]: (bug, result) for bug, result in bugs.read_bugs(RECORDS)}
# Each shows only in a reference's comparison with itself: with its merged weights, and with other
# micro-batches. test_parity.py has an error in a layout.
AGAIN = ("LoRA scale after merging", "partial batch dropped")


@pytest.mark.parametrize(
    "bug", [bug for bug, _ in BUGS.values() if "file" in bug], ids=lambda bug: bug["name"]
)
def test_bugs_still_apply(bug):
    assert (ROOT / bug["file"]).read_text().count(bug["old"]) == 1


def test_the_record_has_all_bugs_and_no_correct_layout_is_called_wrong():
    unseen = [name for name, (_, result) in BUGS.items() if not bugs.is_caught(result)]
    assert unseen == ["fp16 overflow counted"]
    rows = bugs.correct_rows(RECORDS)
    assert len(rows) >= 100
    assert {verdict for _, verdict, *_ in rows} == {"ok"}


@pytest.mark.processes
def test_parity_catches_two_published_bugs(tmp_path):
    copy = clone(tmp_path / "copy")
    options = ""
    for name in AGAIN:
        bug, _ = BUGS[name]
        file = copy / bug["file"]
        file.write_text(file.read_text().replace(bug["old"], bug["new"]))
        options += f"{bug['options']} "
    result = program.run_parity(copy, options, program.write_inputs(tmp_path))
    assert result["exit_code"]
    (*_, of_evaluation), (*_, of_micro_batches), _ = result["rows"]
    assert "merged adapters" in of_evaluation
    assert "Loss of step" in of_micro_batches
