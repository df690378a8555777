"""What SLURM's variables lead to; test_engineers_path.py runs a job."""

from __future__ import annotations

from tests.conftest import SMALL, script
from tests.e2e.support import assert_refused


def test_srun_without_a_launcher_is_answered_with_what_to_type(tmp_path):
    values = {**SMALL, "output_dir": tmp_path / "runs"}
    task = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    first, second = (script(values, **task, SLURM_PROCID=rank) for rank in "01")
    assert_refused(first, "srun started this command 2 times", "sbatch --nodes=2 configs/train.slu")
    assert (second.returncode, second.stderr) == (2, ""), "said once"
    batch = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}  # of sbatch: one process, no step of srun's
    assert script(values, "--dry-run", **batch).returncode == 0
