"""Split every type of decoder in transformers in one process, by blocks as pipelines do, and by
tokens as context parallelism does. The results equal those of the whole model, or the type is
refused by a property."""

import json

import pytest
import torch

from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.models.attention import Documents
from distributed_training.models.hub.attention import attend_to_own_tokens
from distributed_training.models.initial_weights import allocate
from tests.models.test_all_types import ACCEPTED, RESULTS, small_config

TYPES = [name for name, result in json.loads(RESULTS.read_text())["types"].items()
         if result == ACCEPTED]  # fmt: skip
# Type -> word in the property by which pipelines refuse it
REFUSED = {"gemma3n_text": "hidden states", "gemma4_text": "share", "gemma4_unified_text": "share"}


@torch.no_grad()
def build(folder):
    """Return the specification of the model in a folder, and the model with random values."""
    spec = find_model(f"{HUB_PREFIX}{folder}")
    model = spec.build_meta_model()
    allocate(model, torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return spec, model.eval()


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_stages_equal_the_whole_model_or_the_type_is_refused(model_type, tmp_path):
    small_config(model_type).save_pretrained(tmp_path)
    spec, model = build(tmp_path)
    if model_type in REFUSED:
        assert REFUSED[model_type] in spec.size.unsplit["pp"]
        return
    length = min(20, spec.size.num_positions)
    ids = torch.randint(2, 64, (2, length + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    loss = model(inputs, targets)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    cut = spec.size.num_layers // 2
    stages = [model.stage(range(cut)), model.stage(range(cut, spec.size.num_layers))]
    hidden = stages[0](inputs)
    assert hidden.shape == (*inputs.shape, spec.size.hidden_size)
    staged_loss = stages[1](hidden, targets)
    staged_loss.backward()
    assert torch.equal(staged_loss, loss)
    grads = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            grads.setdefault(name, []).append(parameter.grad)
    assert grads.keys() == expected.keys()
    assert sum(len(parts) - 1 for parts in grads.values()) == int(spec.size.tied)
    for name, grad in expected.items():
        parts = [part for part in grads[name] if part is not None]
        if grad is None or not parts:
            assert not parts, name
            assert grad is None or not grad.any(), name
        else:
            torch.testing.assert_close(sum(parts), grad, msg=name)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_only_attention_combines_tokens_or_the_type_is_refused(model_type, tmp_path):
    """If each token attends only to itself, the second half of a sample is as in the whole
    sample. In types that are refused, it is not, or their attention is not replaced."""
    small_config(model_type).save_pretrained(tmp_path)
    spec, model = build(tmp_path)
    length = min(20, spec.size.num_positions) // 2
    ids = torch.randint(2, 64, (2, 2 * length))
    reasons = []
    with torch.no_grad(), attend_to_own_tokens(spec.size.num_heads, reasons):
        whole = model(ids)[:, length:]
        try:
            half = model.apply_head(model.run(ids[:, length:], length, Documents(length), None))
        except TypeError:  # does not accept positions
            half = whole + 1
    is_equal = torch.allclose(half, whole, rtol=1e-4, atol=1e-4)
    assert ("cp" in spec.size.unsplit) == (not is_equal or bool(reasons)), spec.size.unsplit
