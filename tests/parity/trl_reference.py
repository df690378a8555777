"""Train on pairs of answers with TRL, in a process of its own.

    python tests/parity/trl_reference.py '{"kind": "dpo", "model": ..., "rows": [...], ...}'

The output is JSON: the values that TRL logs for each step, and the final weights' sums of squares.
"""

import importlib
import json
import sys

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

OPTIONS = {
    "per_device_train_batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    "warmup_steps": 0, "weight_decay": 0.01, "max_grad_norm": 1.0, "use_cpu": True,
    "report_to": "none", "logging_steps": 1, "save_strategy": "no", "bf16": False,
    "gradient_checkpointing": False, "disable_tqdm": True, "optim": "adamw_torch",
}  # fmt: skip
MODULES = {"orpo": "trl.experimental.orpo", "cpo": "trl.experimental.cpo"}


def main(kind, model, rows, output_dir, **options):
    module = importlib.import_module(MODULES.get(kind, "trl"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.bos_token = None  # which CPO and ORPO would add

    class Trainer(getattr(module, f"{kind.upper()}Trainer")):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=getattr(module, f"{kind.upper()}Config")(output_dir, **OPTIONS, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    weights = {name: float(p.double().norm()) for name, p in trainer.model.named_parameters()}
    logs = [row for row in trainer.state.log_history if "loss" in row]
    print(json.dumps({"logs": logs, "weights": weights}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
