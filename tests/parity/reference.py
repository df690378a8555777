"""Train GPT-2 with only PyTorch and Hugging Face, as a reference for the suite's runs. Other parity
tests compare the suite only with itself. This module therefore does not import the suite, and
runs in the process of references (tests/reference.py). Tokens, targets, sample order, AdamW's
parameter groups, learning rate, clipping and evaluation are implemented independently."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GPT2LMHeadModel, GPT2TokenizerFast, PreTrainedTokenizerBase

Settings = SimpleNamespace  # attributes have the names of CONFIG keys


@dataclass(frozen=True)
class Records:
    """Prompts with completions. Each row is one record, truncated or padded at the end."""

    ids: torch.Tensor  # [num_records, max_length + 1]
    is_target: torch.Tensor  # whether a token belongs to a completion or ends its text

    def sum_loss(self, model: GPT2LMHeadModel, rows: np.ndarray) -> torch.Tensor:
        """Return the summed loss of the target tokens in `rows`. Each token is predicted from the
        tokens before it."""
        ids, is_target = self.ids[rows], self.is_target[rows]
        logits = model(ids[:, :-1]).logits
        return F.cross_entropy(
            logits[is_target[:, 1:]], ids[:, 1:][is_target[:, 1:]], reduction="sum"
        )

    def count(self, rows: np.ndarray) -> int:
        """Return the number of target tokens in `rows`."""
        return int(self.is_target[rows, 1:].sum())


def read_records(file: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Records:
    """Read records from JSON lines."""
    rows, targets = [], []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        prompt = tokenizer(record["prompt"])["input_ids"]
        answer = [*tokenizer(record["completion"])["input_ids"], tokenizer.eos_token_id]
        padding = [tokenizer.eos_token_id] * (max_length + 1)
        rows.append((prompt + answer + padding)[: max_length + 1])
        mask = [False] * len(prompt) + [True] * len(answer) + [False] * len(padding)
        targets.append(mask[: max_length + 1])
    return Records(torch.tensor(rows), torch.tensor(targets))


def follow(
    algorithm: Callable[..., dict[str, Any]],
    folder: Path,
    tokenizer: Path,
    settings: Settings,
    **options: Any,
) -> dict[str, Any]:
    """Train the model in a folder on the records beside it. Return the results of the algorithm,
    and the final weights as `state`."""
    model = GPT2LMHeadModel.from_pretrained(folder / "model").eval()
    tokens = GPT2TokenizerFast.from_pretrained(tokenizer)
    files = [folder / f"{name}.jsonl" for name in ("train", "held-out")]
    records = [read_records(file, tokens, settings.max_length) for file in files]
    return algorithm(model, *records, settings, **options) | {"state": model.state_dict()}


def sum_in_bf16(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    total: Any = sum(gradient.bfloat16() for gradient in gradients)
    return total.float()  # type: ignore[no-any-return]


def draw_batches(num_records: int, settings: Settings) -> Iterator[np.ndarray]:
    """Yield the rows of each step. Every record is used once per epoch, in an order that depends on
    the seed and the epoch."""
    epoch = 0
    while True:
        order = np.random.default_rng([settings.seed, epoch]).permutation(num_records)
        for first in range(0, num_records, settings.global_batch_size):
            yield order[first : first + settings.global_batch_size]
        epoch += 1


def learning_rate(step: int, settings: Settings) -> float:
    """Return the learning rate of a step. During warm-up, the rate increases linearly from above 0.
    It then decays to 0 along a cosine."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / (settings.max_steps - settings.warmup_steps)
    return settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2


def new_adamw(model: GPT2LMHeadModel, settings: Settings) -> torch.optim.AdamW:
    """Return an AdamW optimizer that applies weight decay to matrices and embeddings, but not to
    biases and norms."""
    with_decay, without_decay = [], []
    for name, parameter in model.named_parameters():
        (without_decay if name.endswith("bias") or ".ln_" in name else with_decay).append(parameter)
    groups = [
        {"params": with_decay, "weight_decay": settings.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)


def clip_and_step(optimizer: torch.optim.AdamW, rate: float, max_norm: float) -> float:
    """Clip the gradient, update the weights once, and return the gradient norm before clipping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))
    for parameter in parameters:
        parameter.grad *= min(1.0, max_norm / norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm


def evaluate(model: GPT2LMHeadModel, records: Records) -> float:
    """Return the mean loss over the target tokens."""
    rows = np.arange(len(records.ids))
    with torch.no_grad():
        return float(records.sum_loss(model, rows)) / records.count(rows)


def train(
    model: GPT2LMHeadModel,
    records: Records,
    validation: Records,
    settings: Settings,
    *,
    num_replicas: int = 1,
    exchange: Callable[[Sequence[torch.Tensor]], Any] = sum,
) -> dict[str, Any]:
    """Return the losses and gradient norms of all steps, and evaluations keyed by the number of
    completed steps. `exchange` combines the gradients that the replicas compute on their shares of
    the batch."""
    results: dict[str, Any] = {"losses": [], "grad_norms": [], "evaluations": {}}
    optimizer, parameters = new_adamw(model, settings), list(model.parameters())
    batches = draw_batches(len(records.ids), settings)
    for step, batch in zip(range(settings.max_steps), batches, strict=False):
        if step % settings.eval_every == 0:
            results["evaluations"][step] = evaluate(model, records=validation)
        loss, num_targets = 0.0, records.count(batch)
        replica_gradients = []
        for rows in split(batch, num_replicas, settings):
            loss_share = records.sum_loss(model, rows) / num_targets
            loss += loss_share.item()
            replica_gradients.append(torch.autograd.grad(loss_share, parameters))
        for parameter, gradients in zip(
            parameters, zip(*replica_gradients, strict=True), strict=True
        ):
            parameter.grad = exchange(gradients)
        rate = learning_rate(step, settings)
        results["grad_norms"].append(clip_and_step(optimizer, rate, settings.max_grad_norm))
        results["losses"].append(loss)
    results["evaluations"][settings.max_steps] = evaluate(model, validation)
    return results


def train_with_local_steps(
    model: GPT2LMHeadModel,
    records: Records,
    validation: Records,
    settings: Settings,
    *,
    num_replicas: int,
    local_steps: int,
    outer_lr: float,
    outer_momentum: float,
) -> dict[str, Any]:
    """Train `model` with DiLoCo (arXiv 2311.08105, algorithm 1), and return losses and evaluations.
    With outer_lr 1 and outer_momentum 0, the algorithm is local SGD (arXiv 1805.09767). Between
    synchronizations, `model` holds the weights of the last synchronization."""
    results: dict[str, Any] = {"losses": [], "evaluations": {}}
    replicas = [copy.deepcopy(model) for _ in range(num_replicas)]
    optimizers = [new_adamw(replica, settings) for replica in replicas]
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    batches = draw_batches(len(records.ids), settings)
    for step, batch in zip(range(settings.max_steps), batches, strict=False):
        loss, num_targets = 0.0, records.count(batch)
        replica_rows = split(batch, num_replicas, settings)
        for replica, optimizer, rows in zip(replicas, optimizers, replica_rows, strict=True):
            loss_share = records.sum_loss(replica, rows) / num_targets
            loss += loss_share.item()
            optimizer.zero_grad()
            # With this factor, the mean over replicas is the gradient of the whole batch's mean
            # loss.
            (loss_share * num_replicas).backward()
            clip_and_step(optimizer, learning_rate(step, settings), settings.max_grad_norm)
        results["losses"].append(loss)
        if (step + 1) % local_steps == 0:
            # Take one Nesterov step from the last synchronized weights toward the replicas' mean.
            replica_parameters = zip(*(replica.parameters() for replica in replicas), strict=True)
            with torch.no_grad():
                for synchronized, momentum, values in zip(
                    model.parameters(), momenta, replica_parameters, strict=True
                ):
                    outer_gradient = synchronized - torch.stack(values).mean(dim=0)
                    momentum.mul_(outer_momentum).add_(outer_gradient)
                    synchronized -= outer_lr * (outer_gradient + outer_momentum * momentum)
            for replica in replicas:
                replica.load_state_dict(model.state_dict())
            results["evaluations"][step + 1] = evaluate(model, validation)
    return results


def split(batch: np.ndarray, num_replicas: int, settings: Settings) -> list[np.ndarray]:
    """Split the batch into one range of consecutive rows per replica. At the end of an epoch, the
    last replica gets fewer rows."""
    rows_per_replica = settings.global_batch_size // num_replicas
    return [
        batch[replica * rows_per_replica : (replica + 1) * rows_per_replica]
        for replica in range(num_replicas)
    ]
