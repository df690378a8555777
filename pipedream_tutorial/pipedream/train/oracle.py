"""What is trained, and training it in one process: the result that the runtime has to reproduce."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipedream.errors import UserError
from pipedream.schedules.ops import Op, Schedule
from pipedream.schedules.orders import layers_of_a_stage, schedule_for_training
from pipedream.schedules.policies import Policy
from pipedream.simulate.simulator import build_costs, simulate
from pipedream.simulate.trace import handed_on
from pipedream.train import models
from pipedream.train.trainer import Loss, StageTrainer, Weights

Config = Mapping[str, Any]
Trainers = Mapping[int, StageTrainer]
"""By stage."""
Watcher = Callable[[Op, Trainers], None]


class Workload:
    """A model to cut into stages, its loss and its microbatches: the same in every process."""

    def __init__(self, config: Config, device: torch.device | None = None) -> None:
        """Of `config`: num_stages, layers_per_stage, learning_rate, seed; and model,
        microbatch_size, dtype, where None is what suits the model.

        Raises UserError when the model's blocks cannot be cut evenly into the stages.
        """
        name = config.get("model", "mlp")
        layers = config["layers_per_stage"]
        self.config = config
        self.device = device or torch.device("cpu")
        self.blocks = models.BLOCKS.get(name)
        batch = config.get("microbatch_size") or (8 if self.blocks is None else 4)
        dtype = config.get("dtype")
        if self.blocks is None:
            layers = layers or 2
            dtype = dtype or "float64"
            task = models.build_task(seed=config["seed"], microbatch_size=batch)
            self.loss: Loss = functional.cross_entropy
            text = f"{count(layers, 'layer')} a stage, {batch} samples"
        else:
            total, hidden, tokens = self.blocks.num_layers, self.blocks.hidden, self.blocks.seq_len
            p = config["num_stages"]
            if not layers and total % p:
                able = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
                raise UserError(
                    f"the {total} blocks of {name} cannot be cut evenly into {p} stages",
                    f"set num_stages to one of {able}, or set layers_per_stage",
                )
            layers = layers or total // p
            dtype = dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
            # Four microbatches of normal numbers, in place of embedded text, and as the target.
            generator = torch.Generator().manual_seed(config["seed"])
            shape = 4 * batch, tokens, hidden
            x, y = (torch.randn(shape, generator=generator) for _ in range(2))
            task = models.Task(x, y.to(getattr(torch, dtype)), batch)
            self.loss = functional.mse_loss
            text = (
                f"{count(layers, 'block')} of hidden size {hidden} a stage (no embedding, no "
                f"head), {batch} sequences of {tokens}"
            )
        self.layers = layers
        """Of a rank."""
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.text = f"{name}, {text} a microbatch, {dtype}"
        inputs = task.inputs.to(self.device, self.dtype)
        self.task = task._replace(inputs=inputs, targets=task.targets.to(self.device))

    def build_modules(self, stages_per_rank: int) -> list[nn.Module]:
        """By stage; each but the last gives a tensor of the form that it takes.

        Raises UserError when a rank's layers cannot be cut evenly.
        """
        layers = layers_of_a_stage(self.layers, stages_per_rank)
        num_stages = self.config["num_stages"] * stages_per_rank
        seed = self.config["seed"]
        if self.blocks is None:
            return models.build_stages(num_stages, layers, seed=seed, dtype=self.dtype)
        size = replace(self.blocks, num_layers=num_stages * layers)
        torch.manual_seed(seed)
        with self.device:
            blocks = list(models.gpt2_layers(size).values())[1:-1]
        cuts = range(0, len(blocks), layers)
        return [nn.Sequential(*blocks[cut : cut + layers]).to(self.dtype) for cut in cuts]

    def build_trainers(
        self,
        schedule: Schedule,
        policy: Policy,
        batch_size: int,
        stages: Iterable[int] | None = None,
        trainer_class: type[StageTrainer] = StageTrainer,
    ) -> dict[int, StageTrainer]:
        """By stage, with the initial weights: for these stages, or for all."""
        modules = self.build_modules(schedule.stages_per_rank)
        return {
            stage: trainer_class(
                modules[stage].to(self.device),
                schedule,
                policy,
                stage=stage,
                batch_size=batch_size,
                learning_rate=self.config["learning_rate"],
                loss=self.loss,
            )
            for stage in (range(len(modules)) if stages is None else stages)
        }


def count(number: int, noun: str) -> str:
    """'1 stage', '2 stages'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def run_schedule(
    schedule: Schedule, trainers: Trainers, task: models.Task, watch: Watcher | None = None
) -> None:
    """Run every operation once, by the simulator's clock, all operations equally long.

    `watch` is called after each. Which of the orders that ranks' orders and data allow it is cannot
    matter: a stage sees its own operations in its rank's order, whatever the others do meanwhile.
    """
    source: dict[Op, Op] = {taker: giver for giver, taker in handed_on(schedule)}
    given: dict[Op | None, torch.Tensor | None] = {}  # operation -> its result, until it is taken
    timeline = simulate(schedule, build_costs(schedule))
    for op in (op for event in timeline.all_events() for op in event.item.parts):
        given[op] = trainers[op.stage].run(op, given.pop(source.get(op), None), task)
        if watch is not None:
            watch(op, trainers)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What training under one schedule came to."""

    losses: list[float]  # mean of each batch, nats
    weights: list[Weights]  # the last version of every stage
    peak_versions: list[int]  # most versions that each stage kept at a time

    @property
    def diverged(self) -> bool:
        """Whether a loss is no number, or the last one is above the first."""
        return not all(map(math.isfinite, self.losses)) or self.losses[-1] > self.losses[0]


def train(
    name: str,
    *,
    num_microbatches: int,
    num_batches: int,
    watch: Watcher | None = None,
    trainer_class: type[StageTrainer] = StageTrainer,
    **config: Any,
) -> TrainResult:
    """Train under a schedule of SCHEDULES for `num_batches` batches. `config` is a Workload's."""
    m = num_microbatches
    schedule, policy = schedule_for_training(name, config["num_stages"], m, num_batches)
    workload = Workload(config)
    trainers = workload.build_trainers(schedule, policy, m, trainer_class=trainer_class)
    run_schedule(schedule, trainers, workload.task, watch)
    losses = [float(trainers[max(trainers)].losses[i]) for i in range(m * num_batches)]
    return TrainResult(
        losses=[sum(losses[first : first + m]) / m for first in range(0, len(losses), m)],
        weights=[trainer.weights for trainer in trainers.values()],
        peak_versions=[trainer.peak_versions for trainer in trainers.values()],
    )


def final_loss(result: TrainResult, num_microbatches: int) -> float:
    """Mean loss of the last batches that hold every sample about once (all batches, if fewer).

    Of the whole data and of many weights: one step's noise would hide what the schedules differ by.
    """
    batches = math.ceil(models.TASK_MICROBATCHES / num_microbatches)
    return statistics.fmean(result.losses[-batches:])
