"""Read adapters with PEFT and transformers as they are, in a process that never imports the suite:

    python -m tests.models.adapters_in_peft FOLDER

FOLDER/CASE/model is a model, and FOLDER/CASE/NAME its adapters, with logits.pt, the suite's logits.
The results are written to FOLDER/results.json."""

import json
import sys
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, logging

IDS = torch.randint(2, 64, (2, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def read(folder: Path) -> dict[str, object]:
    """Return {name of adapters: [difference of logits, tensors without a place, places without a
    tensor]} for a model."""
    results = {}
    for file in sorted(folder.glob("*/logits.pt")):
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        model = PeftModel(base, PeftConfig.from_pretrained(file.parent)).eval()
        keys = model.load_adapter(file.parent, "default")
        expected = torch.load(file)
        logits = model(IDS[:, : expected.shape[1]], use_cache=False).logits
        # Transformers sets the padding row of Youtu's embedding, which has id 1, to 0.
        error = ((logits - expected)[..., 2:].norm() / expected.norm()).item()
        results[file.parent.name] = [error, keys.unexpected_keys, keys.missing_keys]
    return results


def main(folder: Path) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    results = {case.name: read(case) for case in sorted(folder.iterdir())}
    (folder / "results.json").write_text(json.dumps(results))
    assert "distributed_training" not in sys.modules


if __name__ == "__main__":
    main(Path(sys.argv[1]))
