"""Try every type of decoder in transformers with a tiny config: it is refused in one line, or its
loss, gradients and files equal those of transformers, and its loss in bf16 is close to them.

    python -m tests.models.test_all_types    writes the results to results/model-types.json
"""

import json
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.settings.errors import UserError
from tests.models.theirs import save_type, small_config, train_step  # noqa: F401
from tests.reference import call_reference
from tests.support import read_model, save_model

RESULTS = Path(__file__).parents[2] / "results" / "model-types.json"
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
pytestmark = pytest.mark.usefixtures("run_if_changed")
ACCEPTED = "accepted"
UNTRIED = "not tried"


def try_type(model_type: str, folder: Path) -> str:
    """Return ACCEPTED, the reason for which a type is refused, or why transformers itself does not
    run it with tiny values. Raises AssertionError if an accepted type is not exact."""
    ids = torch.randint(2, 64, (2, 21), generator=torch.Generator().manual_seed(0))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    reason = call_reference(save_type, model_type, folder, inputs)
    if reason:
        return f"{UNTRIED}: {reason}"
    try:
        spec = find_model(f"{HUB_PREFIX}{folder}")
    except UserError as error:
        return str(error).partition("config.json")[2].lstrip(":. ").partition(". ")[0]
    length = min(20, spec.size.num_positions)
    inputs, targets = inputs[:, :length], targets[:, :length]
    expected = call_reference(train_step, folder, inputs, targets)
    ours = read_model(spec, folder).eval()
    loss = ours(inputs, targets)
    loss.backward()
    assert abs(loss - expected.loss) <= 1e-6 * loss, model_type
    for name, parameter in ours.named_parameters():
        (their_name,) = spec.code.to_hf(name, parameter, spec.size)
        gradient = expected.gradients.pop(their_name)
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert (parameter.grad - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    save_model(spec, ours.state_dict(), folder / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, folder / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(values, after[name]) for name, values in before.items())
    ours.zero_grad()
    ours.compute_dtype = torch.bfloat16
    rounded = ours(inputs, targets)
    rounded.backward()
    assert abs(rounded - loss) <= 0.02 * loss
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())
    return ACCEPTED


@pytest.mark.processes  # of references
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_type_is_exact_or_refused(model_type, tmp_path):
    result = try_type(model_type, tmp_path)
    recorded = json.loads(RESULTS.read_text())
    assert len(result.splitlines()) == 1
    if recorded["transformers"] == transformers.__version__:
        assert result == recorded["types"][model_type]


def main() -> None:
    results = {}
    warnings.simplefilter("ignore")
    for model_type in TYPES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[model_type] = try_type(model_type, Path(folder))
            except Exception as error:
                results[model_type] = f"WRONG {type(error).__name__} {error}"
        print(model_type, results[model_type], flush=True)
    document = {"transformers": transformers.__version__, "types": results}
    document = json.loads(RESULTS.read_text()) | document
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
