"""Compare tensor parallelism of transformers' modules with one process: for every type of model
that transformers has. test_hub_layouts.py compares whole runs.

    python -m tests.parity.test_regions    writes the results to results/model-types.json
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distributed_training.models import HUB_PREFIX, ModelSpec, find_model
from distributed_training.models.chunked_loss import ChunkedCrossEntropy
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.parallel.gradients import all_reduce_sum
from distributed_training.parallel.regions import apply_regions
from distributed_training.parallel.tensor import shard_loss, tp_partial_names
from tests.conftest import heavy_pool
from tests.models.hub_folders import random_model
from tests.models.test_all_types import ACCEPTED, RESULTS
from tests.models.theirs import small_config

CPU = torch.device("cpu")
LIMIT = 2e-6
RECORDED = json.loads(RESULTS.read_text())
TYPES = [name for name, result in RECORDED["types"].items() if result == ACCEPTED]
GROUP = 12  # types that one job compares
SPLIT = "split"


def compare_types(model_types: list[str]) -> dict[str, Any]:
    """Return {type: why tp is refused, or the largest differences of a loss and of a gradient
    between the shards of a model and the whole model, relative to the whole}."""
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {model_type: Path(name, model_type) for model_type in model_types}
        for model_type, folder in folders.items():
            random_model(small_config(model_type)).save_pretrained(folder)
        dist.init_process_group("gloo")  # transformers then saves only on rank 0
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for model_type, folder in folders.items():
            spec = find_model(f"{HUB_PREFIX}{folder}")
            results[model_type] = spec.size.unsplit.get("tp")
            if results[model_type] is None:
                layouts = [(2, 1)] if spec.size.needs_whole_samples else [(2, 1), (1, 2)]
                pairs = [_compare(spec, folder, mesh, parts) for parts in layouts]
                results[model_type] = [max(values) for values in zip(*pairs, strict=True)]
    return results


def _compare(
    spec: ModelSpec, folder: Path, mesh: Any, tp_parts: tuple[int, int]
) -> tuple[float, float]:
    length = min(17, spec.size.num_positions + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, spec.size.vocab_size, (2, length), generator=generator)
    losses, gradients = [], []
    for is_split in (False, True):
        model = spec.build_meta_model()
        model.loss = ChunkedCrossEntropy(8, compiled=False)
        names = set()
        if is_split:
            apply_regions(model, mesh, tp_parts)
            names = tp_partial_names(model)
            model.loss = shard_loss(model.loss, mesh, tp_parts)
        InitialWeights(source=spec.weights_source(folder)).fill(model, CPU)
        loss = model(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        losses.append(loss.detach())
        found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        if names:
            all_reduce_sum([found[name] for name in sorted(names)])
        gradients.append(found)
    expected = gradients[0]
    scale = sum(gradient.square().sum() for gradient in expected.values()).sqrt()
    errors = []
    for name, gradient in gradients[1].items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        rows = whole[: len(expected[name])] if expected[name].dim() else whole  # without padding
        errors.append(float((rows - expected[name]).norm() / scale))
    return float((losses[1] - losses[0]).abs() / losses[0]), max(errors)


@functools.cache
def results_of_group(index: int) -> dict[str, Any]:
    types = TYPES[index * GROUP :][:GROUP]
    return heavy_pool().call(f"{__name__}:compare_types", types, num_processes=2)


@pytest.mark.processes
@pytest.mark.parametrize("model_type", TYPES)
def test_shards_compute_the_loss_and_gradients_or_the_type_is_refused(model_type):
    result = results_of_group(TYPES.index(model_type) // GROUP)[model_type]
    if RECORDED["tp"][model_type].startswith(SPLIT):
        assert max(result) < LIMIT
    else:
        assert result == RECORDED["tp"][model_type]


def main() -> None:
    for model_type in TYPES:
        with tempfile.TemporaryDirectory() as folder:
            small_config(model_type).save_pretrained(folder)
            size = find_model(f"{HUB_PREFIX}{folder}").size
        condition = ", if micro-batches have whole samples" if size.needs_whole_samples else ""
        RECORDED.setdefault("tp", {})[model_type] = size.unsplit.get("tp", SPLIT + condition)
    RESULTS.write_text(json.dumps(RECORDED, indent=1) + "\n")


if __name__ == "__main__":
    main()
