"""A run whose processes torchrun starts again, perhaps fewer or more than before. No torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from distributed_training.plan.plan import PLAN_FILE, load_plan
from distributed_training.run.saving.resume import list_checkpoints
from distributed_training.settings.config import AUTO, RunConfig, replace
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import user_path


def go_on(
    config: RunConfig, launchers: Iterable[str], num_processes: int
) -> tuple[RunConfig, list[str]]:
    """CONFIG for so many processes to go on with the run that one of these launchers
    (`Plan.launchers`) has begun, with its global batch and from its last checkpoint; and a note.
    Unchanged where there is none. Raises UserError where they cannot share the batch evenly.
    """
    run_dir = _find_begun(user_path("output_dir", config.output_dir), set(launchers))
    if run_dir is None:
        return config, []
    before, saved = load_plan(run_dir), list_checkpoints(run_dir)
    if saved:
        config = replace(config, resume=str(run_dir))
    note = f"started again, from {saved[-1].name if saved else 'the beginning'}"
    size, was = before.batch.global_batch_size, before.num_processes
    each, odd = divmod(size, num_processes)
    if odd:
        what = f"{num_processes} processes cannot share the global batch of {size} evenly"
        raise UserError(what, f"{run_dir} has it, of {was} processes", "start a divisor of it")
    asked = before.config.batch_size if config.batch_size == AUTO else config.batch_size
    if int(asked) * config.grad_accum_steps != each:
        most = max(n for n in range(1, int(asked) + 1) if each % n == 0)
        batch = {"batch_size": most, "grad_accum_steps": each // most}
        config = replace(config, **batch, micro_batch_size=AUTO, num_microbatches=AUTO)
        cut = " x ".join(f"{key} {value}" for key, value in batch.items())
        note += f"; the global batch stays {size}: {cut} x {num_processes}"
    return config, [note]


def _find_begun(output_dir: Path, launchers: set[str]) -> Path | None:
    """The newest run whose processes one of these has started."""
    for file in sorted(output_dir.glob(f"*/{PLAN_FILE}") if launchers else (), reverse=True):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if launchers.intersection(json.loads(file.read_bytes()).get("launchers", ())):
                return file.parent.resolve()
    return None
