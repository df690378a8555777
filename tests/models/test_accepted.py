"""Test that every accepted type of decoder can be planned, trained, sampled from and exported."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from distributed_training.checkpoint.export import generate_ids
from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.predict import Prediction, parse_cluster
from tests.models.test_all_types import ACCEPTED, RESULTS, small_config
from tests.planner.helpers import merged
from tests.support import read_model

TYPES = [
    name for name, result in json.loads(RESULTS.read_text())["types"].items() if result == ACCEPTED
]
NUM_POSITIONS = 8192
WINDOW = 16
# transformers cannot continue text with a cache if no block has attention.
WITH_ATTENTION = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
# transformers has windows in all blocks of these types only if it builds masks.
WITHOUT_WINDOW = {"laguna", "mellum", "minimax", "nemotron_h", "phimoe", "smollm3"}


@pytest.fixture(scope="module", params=TYPES)
def model(request, tmp_path_factory):
    """Return (a folder with matrices in bf16 and other tensors in fp32, the same model in
    transformers)."""
    document = small_config(request.param).to_dict()
    if changes := WITH_ATTENTION.get(request.param):
        for key in ("layer_types", "layers_block_type"):  # which follow from others
            document.pop(key, None)
        document |= changes
    if request.param in WITHOUT_WINDOW:
        document["sliding_window"] = NUM_POSITIONS
    config = type(small_config(request.param)).from_dict(document)
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if hasattr(config, key):
            setattr(config, key, NUM_POSITIONS)
    if hasattr(config, "floor_scale"):  # Llama 4's samples are shorter
        config.floor_scale = 2 * NUM_POSITIONS
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in reference.parameters():
        noisy = parameter.data + 0.1 * torch.randn_like(parameter)
        parameter.data = noisy.bfloat16().float() if parameter.dim() > 1 else noisy
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    is_matrix = {name: values.dim() > 1 for name, values in stored.items()}
    halves = {name: values.bfloat16() for name, values in stored.items() if is_matrix[name]}
    save_file(stored | halves, file, {"format": "pt"})
    return folder, reference


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_time_and_memory_grow_with_the_length(model, lora_rank):
    values = {"model": f"{HUB_PREFIX}{model[0]}", "weights": "random", "lora_rank": lora_rank}
    data = {"dataset": "embedded", "tokenizer": "embedded", "strategy": "dp"}
    cluster = parse_cluster("H200")
    seconds, num_bytes = [], []
    for length in (512, 1024, 2048, NUM_POSITIONS):
        draft = draft_plan(merged({**values, **data, "max_length": length}), cluster)
        prediction = Prediction(draft, cluster.rates)
        seconds.append(prediction.step.seconds)
        num_bytes.append(prediction.memory.needed_bytes)
    assert 0 < seconds[0] <= seconds[1] <= seconds[2] < seconds[3] < math.inf
    assert num_bytes[0] < num_bytes[1] < num_bytes[2] < num_bytes[3]


def test_training_generation_and_export(model, tmp_path):
    folder, reference = model
    spec = find_model(f"{HUB_PREFIX}{folder}")
    ours = read_model(spec, folder).eval()
    prompt = torch.randint(2, 60, (1, WINDOW - 4))
    theirs = reference.generate(
        prompt, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
    )
    with torch.no_grad():
        tokens = generate_ids(
            lambda ids, past: ours(ids, past=past),
            prompt[0].tolist(),
            num_tokens=12,
            context=spec.size.context_length,
            eos_ids=[-1],
            seed=0,
            temperature=0.0,
        )
        assert [*tokens] == theirs[0, prompt.shape[1] :].tolist()

    again = tmp_path / "again"
    spec.save(
        spec.weights_source(folder), again, eos_token_id=0, dtype=torch.bfloat16, original=folder
    )
    stored, exported = (load_file(path / "model.safetensors") for path in (folder, again))
    assert stored.keys() == exported.keys()
    for name, values in stored.items():
        assert values.dtype == exported[name].dtype, name
        assert torch.equal(values, exported[name]), name

    ids = torch.randint(2, 60, (2, 2 * WINDOW + 1))
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        trained = read_model(spec, folder)
        trained.compute_dtype = dtype
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        losses[dtype] = []
        for _ in range(2):
            loss = trained(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            losses[dtype].append(loss.item())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert losses[torch.float32][1] < losses[torch.float32][0]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.05)
