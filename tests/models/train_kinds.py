"""Train tiny models from transformers with two processes, and compare their exports after 20 steps
with transformers, PEFT and torch's AdamW.

    python -m tests.models.train_kinds qwen3_5_text gpt_oss

Each kind (hub_folders.py) trains all parameters and LoRA adapters in fp32, with accumulation, under
dp, fsdp, zero2 and zero3. Each run is also resumed from its middle under each of the four layouts.
The learning rate is 1e-4. At a higher rate, Adam amplifies rounding errors: two runs of PEFT, one
in fp32 and one in fp64, differ by 6e-4 after five steps at 1e-2 (qwen3_5_text)."""

import itertools
import shutil
import sys
import tempfile
from pathlib import Path

from distributed_training.checkpoint.saver import load_checkpoint
from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.models.peft import to_peft
from tests.conftest import assert_ok, train
from tests.models.hub_folders import make_folder
from tests.models.theirs import read_tensors, trained_values
from tests.parity.cases import all_cases
from tests.parity.support import BASE, micro_batches, run_cases
from tests.parity.test_lora import made_by_peft, train_in_peft
from tests.reference import call_reference

LAYOUTS = ("dp", "fsdp", "zero2", "zero3")
LIMIT = 1e-4
RATE = 1e-4
NUM_STEPS = 20
VALUES = {
    **BASE, "max_length": 48, "pack": False, "learning_rate": RATE, "lr_schedule": "constant",
    "warmup_steps": 0, "max_steps": NUM_STEPS, "checkpoint_every": NUM_STEPS // 2,
    "keep_checkpoints": 2, "eval_samples": 8, "generate": None,
}  # fmt: skip
# In mixtures, PEFT takes these names for those of the fused experts.
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


def finish(arguments):
    """Train each case from its checkpoint to the last step. Return the trained values by their
    names in transformers or PEFT."""
    return all_cases(arguments, _finish)


def _finish(run):
    plan = run.plan
    first = load_checkpoint(plan.checkpoint, run.engine, plan, run.topology, run.data)
    for step in range(first, NUM_STEPS):
        run.engine.train_step(run.batch(step))
    state = run.engine.full_state()
    if state is None:  # on all ranks but one
        return None
    if plan.config.lora_rank:
        return to_peft(state, plan.model, plan.config)
    parts = (plan.model.code.to_hf(name, state[name], plan.size) for name in state)
    return {name: tensor for part in parts for name, tensor in part.items()}


def make_case(kind, folder, *, lora):
    """Save a model and, for `lora`, adapters on its matrices. Return (CONFIG values, folder of the
    adapters)."""
    base = make_folder(kind, folder / "base")
    if not lora:
        return {**VALUES, "model": f"{HUB_PREFIX}{base}"}, None
    size = find_model(f"{HUB_PREFIX}{base}").size
    targets = size.part_names(None)
    if any(block.expert_products for block in size.kinds):
        targets = [name for name in targets if not name.endswith(EXPERT_NAMES)]
    base, adapters = made_by_peft(folder, kind, target_modules=targets)
    values = {**VALUES, "model": "auto", "weights": str(adapters)}
    return values, adapters


def read_export(export, base, *, lora):
    """Return the tensors that transformers or PEFT reads from an export."""
    if lora:
        return call_reference(trained_values, base, export)
    call_reference(read_tensors, export)
    return call_reference(trained_values, export)


def largest_difference(found, expected):
    """Return the largest difference of a tensor relative to its 2-norm, with the tensor's name."""
    assert found.keys() == expected.keys()
    return max(
        (float((found[name] - tensor).norm() / tensor.norm()), name)
        for name, tensor in expected.items()
    )


def try_kind(kind, folder, *, lora):
    """Train a kind under all layouts, resume all pairs of layouts, and compare the results with
    those of transformers or PEFT."""
    values, adapters = make_case(kind, folder, lora=lora)
    one = {"one": {**values, "strategy": "dp", **micro_batches(1)}}
    steps = run_cases(one, 1, steps=NUM_STEPS, function="batches")["one"]
    before, expected = train_in_peft(folder / "base", adapters, steps, RATE)
    print(f"  changed by up to {largest_difference(before, expected)}", flush=True)
    found, pairs = {}, {}
    for layout in LAYOUTS:
        keys = {**values, "batch_size": 2, "grad_accum_steps": 2, "strategy": layout}
        assert_ok(train({**keys, "output_dir": folder / layout}, num_processes=2))
        (export,) = (folder / layout).glob("*-*/hf")
        found[layout] = read_export(export, folder / "base", lora=lora)
        for other in LAYOUTS:
            copied = folder / f"{layout}-{other}" / export.parent.name
            shutil.copytree(export.parent, copied)
            middle = f"{copied}/checkpoints/step-{NUM_STEPS // 2:08d}"
            pairs[f"{layout} -> {other}"] = {**keys, "strategy": other, "resume": middle}
    found |= run_cases(pairs, 2, module="tests.models.train_kinds", function="finish")
    for name, tensors in found.items():
        difference, tensor = largest_difference(tensors, expected)
        print(f"  {name:15} {difference:.1e}  {tensor}", flush=True)
        assert difference <= LIMIT


def main():
    for kind, lora in itertools.product(sys.argv[1:], (False, True)):
        print(f"{kind}, adapters" if lora else kind, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try_kind(kind, Path(folder), lora=lora)


if __name__ == "__main__":
    main()
