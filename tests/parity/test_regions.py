"""Compare tensor parallelism of transformers' modules with one process: for every type of model
that transformers has. test_hub_layouts.py compares whole runs."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distributed_training.models import ModelSpec, find_model
from distributed_training.models.chunked_loss import ChunkedCrossEntropy
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.parallel.gradients import all_reduce_sum
from distributed_training.parallel.tensor import apply_tp, shard_loss, tp_partial_names
from tests.conftest import heavy_pool
from tests.models.hub_folders import random_model
from tests.models.test_all_types import ACCEPTED_TYPES, RECORDED, SPLIT
from tests.models.theirs import small_config

pytestmark = pytest.mark.usefixtures("run_if_changed")
CPU = torch.device("cpu")
LIMIT = 2e-6


def compare_types(model_types: list[str]) -> dict[str, Any]:
    """Return {type: why tp is refused, or the differences of losses and gradients between the
    shards of a model and the whole model, relative to the whole}."""
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {model_type: Path(name, model_type) for model_type in model_types}
        for model_type, folder in folders.items():
            random_model(small_config(model_type)).save_pretrained(folder)
        dist.init_process_group("gloo")  # transformers then saves only on rank 0
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for model_type, folder in folders.items():
            if dist.get_rank():  # Rank 0 measures a size, and the others read it from the cache.
                dist.barrier()
            spec = find_model(str(folder))
            if not dist.get_rank():
                dist.barrier()
            reason = spec.size.unsplit.get("tp")
            results[model_type] = _compare(spec, folder, mesh) if reason is None else reason
    return results


def _compare(spec: ModelSpec, folder: Path, mesh: Any) -> list[float]:
    length = min(17, spec.size.num_positions + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, spec.size.vocab_size, (2, length), generator=generator)
    losses, gradients = [], []
    weights = InitialWeights(source=spec.weights_source(folder))
    layouts = [None, (2, 1)] if spec.size.needs_whole_samples else [None, (2, 1), (1, 2)]
    for tp_parts in layouts:
        model = spec.build_meta_model()
        model.loss = ChunkedCrossEntropy(8, compiled=False)
        names = set()
        if tp_parts:
            apply_tp(model, mesh, tp_parts)
            names = tp_partial_names(model)
            model.loss = shard_loss(model.loss, mesh, tp_parts)
        weights.fill(model, CPU)
        loss = model(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        losses.append(loss.detach())
        found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        if names:
            all_reduce_sum([found[name] for name in sorted(names)])
        gradients.append(found)
    loss, expected = losses[0], gradients[0]
    scale = sum(gradient.square().sum() for gradient in expected.values()).sqrt()
    errors = [float((other - loss).abs() / loss) for other in losses[1:]]
    for found in gradients[1:]:
        for name, gradient in found.items():
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            rows = whole[: len(expected[name])] if expected[name].dim() else whole  # no padding
            errors.append(float((rows - expected[name]).norm() / scale))
    return errors


@pytest.fixture(scope="module")
def results(request):
    """Return a function that compares all selected types in one job when it is first called."""
    items = [item for item in request.session.items if item.path == request.path]
    types = [item.callspec.params["model_type"] for item in items]
    job = f"{__name__}:compare_types"
    return functools.cache(lambda: heavy_pool().call(job, types, num_processes=2))


@pytest.mark.processes
@pytest.mark.parametrize("model_type", ACCEPTED_TYPES)
def test_shards_compute_the_loss_and_gradients_or_the_type_is_refused(model_type, results):
    result = results()[model_type]
    if RECORDED["tp"][model_type].startswith(SPLIT):
        assert max(result) < LIMIT
    else:
        assert result == RECORDED["tp"][model_type]
