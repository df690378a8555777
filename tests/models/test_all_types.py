"""Try every type of decoder in transformers with a tiny config. It is refused in one line, or its
loss, gradients, generated tokens and files equal those of transformers, it learns in fp32 and bf16,
its plans cost more for longer samples, and it is split as its size says: by blocks as pipelines do,
and by tokens as context parallelism does. test_regions.py splits its matrices, and
test_adapters_in_peft.py reads its adapters.

    python -m tests.models.test_all_types    writes the results to results/model-types.json
"""

import functools
import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distributed_training.checkpoint.export import generate_ids
from distributed_training.models import ModelSpec, find_model
from distributed_training.models.attention import Documents
from distributed_training.models.decoder import Decoder
from distributed_training.models.hub.attention import attend_to_own_tokens
from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.predict import Prediction, parse_cluster
from distributed_training.settings.errors import UserError
from tests.models.theirs import NUM_POSITIONS, generate, save_type, train_step
from tests.planner.helpers import merged
from tests.reference import call_reference
from tests.support import edit_json, read_model

RESULTS = Path(__file__).parents[2] / "results" / "model-types.json"
RECORDED = json.loads(RESULTS.read_text())
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
ACCEPTED = "accepted"
ACCEPTED_TYPES = [name for name, result in RECORDED["types"].items() if result == ACCEPTED]
UNTRIED = "not tried"
SPLIT = "split"
LENGTH = 20
_FOLDERS = tempfile.TemporaryDirectory(prefix="types-")  # until this process ends
pytestmark = [
    pytest.mark.usefixtures("run_if_changed"), pytest.mark.filterwarnings("ignore"),
]  # fmt: skip


class Trained(NamedTuple):
    """A model, and a step of it."""

    spec: ModelSpec
    folder: Path
    model: Decoder
    inputs: torch.Tensor
    targets: torch.Tensor
    loss: torch.Tensor  # summed over the targets
    gradients: dict[str, torch.Tensor | None]


@functools.cache
def find_type(model_type: str) -> ModelSpec | str:
    """Save and measure a tiny model of a type. Return a reason if it is refused, or if transformers
    itself does not run it with tiny values."""
    folder = Path(_FOLDERS.name, model_type)
    reason = call_reference(save_type, model_type, folder, _ids()[:, :-1])
    if reason:
        return f"{UNTRIED}: {reason}"
    try:
        return find_model(str(folder))
    except UserError as error:
        _, _, reason = str(error).partition(str(folder))
        return reason.removeprefix("/config.json").lstrip(":. ").partition(". ")[0]


def _ids() -> torch.Tensor:
    return torch.randint(2, 64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))


@functools.cache
def train_type(model_type: str) -> Trained:
    """Return an accepted type after the forward and the backward pass of a step in fp32."""
    spec = find_type(model_type)
    assert isinstance(spec, ModelSpec), spec
    folder = Path(_FOLDERS.name, model_type)
    model = read_model(spec, folder).eval()
    ids = _ids()[:, : min(LENGTH, spec.size.num_positions) + 1]
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    loss = model(inputs, targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return Trained(spec, folder, model, inputs, targets, loss.detach(), gradients)


@pytest.mark.processes  # of references
@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_is_exact_or_refused(model_type, tmp_path):
    found = find_type(model_type)
    result = found if isinstance(found, str) else ACCEPTED
    assert len(result.splitlines()) == 1
    if RECORDED["transformers"] == transformers.__version__:
        assert result == RECORDED["types"][model_type]
    if result == ACCEPTED:
        assert_exact(train_type(model_type), tmp_path)


def assert_exact(ours: Trained, tmp_path: Path) -> None:
    """Compare a step and the files of a model with transformers, and a step in bf16 with fp32."""
    spec = ours.spec
    expected = call_reference(train_step, ours.folder, ours.inputs, ours.targets)
    assert abs(ours.loss - expected.loss) <= 1e-6 * expected.loss
    for name, found in ours.gradients.items():
        their_name, _ = spec.code.to_hf(name, found, spec.size)
        gradient = expected.gradients.pop(their_name)
        if gradient is None:
            assert found is None or not found.any(), name
        else:
            assert (found - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name

    state = ours.model.state_dict()
    options = {"eos_token_id": 0, "dtype": torch.bfloat16, "original": ours.folder}
    spec.save(lambda name, _: state[name], tmp_path, **options)
    before, after = (load_file(path / "model.safetensors") for path in (ours.folder, tmp_path))
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert values.dtype == after[name].dtype, name
        assert torch.equal(values, after[name]), name

    losses = {}
    model = read_model(spec, ours.folder).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for dtype in (torch.float32, torch.bfloat16):
        model.load_state_dict(state)
        model.compute_dtype = dtype
        loss = model(ours.inputs, ours.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        with torch.no_grad():
            losses[dtype] = [loss.item(), model(ours.inputs, ours.targets).item()]
        optimizer.zero_grad()
    assert losses[torch.float32][1] < losses[torch.float32][0]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.02)


@pytest.mark.processes
@pytest.mark.parametrize("model_type", ACCEPTED_TYPES)
def test_text_continues_as_in_transformers(model_type):
    ours = train_type(model_type)
    context = ours.spec.size.context_length
    prompt = ours.inputs[:1, :12]
    num_tokens = min(12, context - prompt.shape[1])
    # The cache of transformers forgets MiniMax's window.
    options = {"max_new_tokens": num_tokens, "use_cache": False}
    theirs = call_reference(generate, ours.folder, prompt, **options)
    with torch.no_grad():
        tokens = generate_ids(
            lambda ids, past: ours.model(ids, past=past),
            prompt[0].tolist(),
            num_tokens=num_tokens,
            context=context,
            eos_ids=[-1],
            seed=0,
            temperature=0.0,
        )
        assert [*tokens] == theirs


@pytest.mark.processes
@pytest.mark.parametrize("model_type", ACCEPTED_TYPES)
def test_time_and_memory_grow_with_the_length(model_type):
    spec, folder = find_type(model_type), Path(_FOLDERS.name, model_type)
    if spec.size.num_positions < NUM_POSITIONS - 1:  # the window of all blocks
        edit_json(folder / "config.json", sliding_window=NUM_POSITIONS)
    data = {"dataset": "embedded", "tokenizer": "embedded", "strategy": "dp"}
    values = {"model": str(folder), "weights": "random", **data}
    cluster = parse_cluster("H200")
    for lora_rank in (0, 4):
        seconds, num_bytes = [], []
        for length in (512, 2048, NUM_POSITIONS):
            request = merged({**values, "lora_rank": lora_rank, "max_length": length})
            prediction = Prediction(draft_plan(request, cluster), cluster.rates)
            seconds.append(prediction.step.seconds)
            num_bytes.append(prediction.memory.needed_bytes)
        assert 0 < seconds[0] <= seconds[1] < seconds[2] < math.inf
        assert num_bytes[0] < num_bytes[1] < num_bytes[2]


@pytest.mark.processes
@pytest.mark.parametrize("model_type", ACCEPTED_TYPES)
def test_stages_equal_the_whole_model_or_the_type_is_refused(model_type):
    spec, _, model, inputs, targets, loss, expected = train_type(model_type)
    result = spec.size.unsplit.get("pp", SPLIT)
    assert result == RECORDED["pp"][model_type]
    if result != SPLIT:
        return
    cut = spec.size.num_layers // 2
    stages = [model.stage(range(cut)), model.stage(range(cut, spec.size.num_layers))]
    hidden = stages[0](inputs)
    assert hidden.shape == (*inputs.shape, spec.size.hidden_size)
    staged_loss = stages[1](hidden, targets)
    staged_loss.backward()
    assert torch.equal(staged_loss, loss)
    found: dict[str, list[torch.Tensor]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            found.setdefault(name, []).append(parameter.grad)
    assert found.keys() == expected.keys()
    assert sum(len(parts) - 1 for parts in found.values()) == int(spec.size.tied)
    for name, grad in expected.items():
        parts = [part for part in found[name] if part is not None]
        if grad is None or not parts:
            assert not parts, name
            assert grad is None or not grad.any(), name
        else:
            torch.testing.assert_close(sum(parts), grad, msg=name)
    model.zero_grad()


@pytest.mark.processes
@pytest.mark.parametrize("model_type", ACCEPTED_TYPES)
def test_only_attention_combines_tokens_or_the_type_is_refused(model_type):
    """If each token attends only to itself, the second half of a sample is as in the whole sample.
    In types that are refused, it is not, or their attention is not replaced."""
    spec, _, model, ids, *_ = train_type(model_type)
    length = ids.shape[1] // 2
    reasons: list[str] = []
    with torch.no_grad(), attend_to_own_tokens(spec.size.num_heads, reasons):
        whole = model(ids)[:, length:]
        try:
            half = model.apply_head(model.run(ids[:, length:], length, Documents(length), None))
        except TypeError:  # does not accept positions
            half = whole + 1
    is_equal = torch.allclose(half, whole, rtol=1e-4, atol=1e-4)
    assert ("cp" in spec.size.unsplit) == (not is_equal or bool(reasons)), spec.size.unsplit


def main() -> None:
    warnings.simplefilter("ignore")
    types, splits = {}, {axis: {} for axis in ("pp", "tp", "cp")}
    for model_type in TYPES:
        found = find_type(model_type)
        types[model_type] = found if isinstance(found, str) else ACCEPTED
        print(model_type, types[model_type], flush=True)
        if isinstance(found, str):
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                assert_exact(train_type(model_type), Path(folder))
        except Exception as error:
            types[model_type] = f"WRONG {type(error).__name__} {error}"
        for axis, results in splits.items():
            results[model_type] = found.size.unsplit.get(axis, SPLIT)
        if splits["tp"][model_type] == SPLIT and found.size.needs_whole_samples:
            splits["tp"][model_type] += ", if micro-batches have whole samples"
    document = {"transformers": transformers.__version__, "types": types, **splits}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
