"""What the runtime trains: a model cut into stages, its loss, its microbatches, and the device."""

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipedream.errors import UserError
from pipedream.plan.profile import device_name
from pipedream.runtime.record import Case
from pipedream.schedules.catalogue import layers_of_a_stage
from pipedream.train.models import GPT2_SIZES, GPT2Size, Task, build_stages, build_task, gpt2_layers
from pipedream.train.oracle import run_schedule
from pipedream.train.trainer import Loss, StageTrainer, Weights

Config = Mapping[str, Any]

# One token of vocabulary: embedding and head are not used.
BLOCKS: dict[str, GPT2Size] = {
    "gpt2-medium": replace(GPT2_SIZES["gpt2-medium"], vocabulary=1),
    "gpt2-tiny": GPT2Size(num_layers=8, hidden=64, heads=4, vocabulary=1, seq_len=32),
}


class Workload:
    """CONFIG, with what it leaves open decided: the same in every process, from the seed."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Raises UserError when the model's blocks cannot be cut evenly into the stages."""
        name = config["model"]
        size = BLOCKS.get(name)
        layers = config["layers_per_stage"]
        batch = config["microbatch_size"]
        on_gpu = device.type == "cuda"
        self.config = config
        self.device = device
        self.slept_ms = (0.0, 0.0) if on_gpu else (config["forward_ms"], config["backward_ms"])
        """In a forward and in a whole backward pass of a rank's layers."""
        if size is None:
            layers = layers or 2
            dtype = config["dtype"] or "float64"
            task = build_task(seed=config["seed"], microbatch_size=batch or 8)
            self.loss: Loss = nn.functional.cross_entropy
            text = f"{_count(layers, 'layer')} a stage, {task.microbatch_size} samples"
        else:
            p = config["num_stages"]
            if not layers and size.num_layers % p:
                able = [str(n) for n in range(1, size.num_layers + 1) if size.num_layers % n == 0]
                raise UserError(
                    f"the {size.num_layers} blocks of {name} cannot be cut evenly into {p} stages",
                    f"set num_stages to one of {', '.join(able)}, or set layers_per_stage",
                )
            layers = layers or size.num_layers // p
            dtype = config["dtype"] or ("bfloat16" if on_gpu else "float32")
            task = _noise(size, batch or 4, getattr(torch, dtype), config["seed"])
            self.loss = nn.functional.mse_loss
            text = (
                f"{_count(layers, 'block')} of hidden size {size.hidden} a stage (no "
                f"embedding, no head), {task.microbatch_size} sequences of {size.seq_len}"
            )
        self.layers = layers
        """Of a rank."""
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.text = f"{name}, {text} a microbatch, {dtype}"
        inputs = task.inputs.to(device, self.dtype)
        self.task = replace(task, inputs=inputs, targets=task.targets.to(device))

    def build_modules(self, stages_per_rank: int) -> list[nn.Module]:
        """By stage; each but the last gives a tensor of the form that it takes.

        Raises UserError when a rank's layers cannot be cut evenly.
        """
        layers = layers_of_a_stage(self.layers, stages_per_rank)
        num_stages = self.config["num_stages"] * stages_per_rank
        seed = self.config["seed"]
        if self.config["model"] == "mlp":
            return build_stages(num_stages, layers, seed=seed, dtype=self.dtype)
        size = replace(BLOCKS[self.config["model"]], num_layers=layers * num_stages)
        torch.manual_seed(seed)
        with self.device:
            blocks = gpt2_layers(size)[1:-1]
        return [
            nn.Sequential(*blocks[stage * layers :][:layers]).to(self.dtype)
            for stage in range(num_stages)
        ]

    def build_trainers(self, case: Case, rank: int | None = None) -> dict[int, StageTrainer]:
        """By stage, with the initial weights: for the stages of one rank, or for all."""
        own = case.schedule.position() if rank is None else case.schedule.stages()[rank]
        return {
            stage: StageTrainer(
                module.to(self.device),
                case.schedule,
                case.policy,
                stage=stage,
                batch_size=case.num_microbatches,
                learning_rate=self.config["learning_rate"],
                loss=self.loss,
            )
            for stage, module in enumerate(self.build_modules(case.schedule.stages_per_rank))
            if stage in own
        }

    def train_alone(self, case: Case) -> list[Weights]:
        """The final weights of every stage, from one process."""
        trainers = list(self.build_trainers(case).values())
        run_schedule(case.schedule, trainers, self.task)
        return [trainer.weights for trainer in trainers]

    def describe(self) -> str:
        """What is about to run, in words."""
        p = self.config["num_stages"]
        gpus = torch.cuda.device_count()
        where = "NCCL, a GPU each"
        if self.device.type == "cpu":
            where = "gloo, on the CPU"
            if gpus and self.config["device"] == "auto":
                where += f", as there are {gpus} GPUs for {p} stages"
        text = f"{_count(p, 'stage')}, a process each ({where}): {self.text}"
        if any(self.slept_ms):
            forward, backward = self.slept_ms
            text += (
                f"\nemulated device: each forward sleeps {forward:g} ms and each backward "
                f"{backward:g} ms on top of its small real computation"
            )
        return text

    def about(self, command: str) -> dict[str, Any]:
        """What a record says of how it came about: command, versions, machine, emulation, workload,
        CONFIG."""
        on_gpu = self.device.type == "cuda"
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        if on_gpu:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            versions |= {"cuda": str(torch.version.cuda), "nccl": nccl}
        return {
            "command": command,
            "versions": versions,
            "machine": {
                "device": device_name(self.device),
                "gpus": torch.cuda.device_count() if on_gpu else 0,
                "cores": os.cpu_count(),
                "system": f"{platform.system()} {platform.machine()}",
            },
            "emulated_ms": dict(zip(("forward", "backward"), self.slept_ms, strict=True)),
            "workload": self.text,
            "config": {key: self.config[key] for key in sorted(self.config)},
        }


def _noise(size: GPT2Size, microbatch_size: int, dtype: torch.dtype, seed: int) -> Task:
    """Four microbatches of normal numbers, in place of embedded text, and others as the target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4 * microbatch_size, size.seq_len, size.hidden)
    inputs, targets = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return Task(inputs=inputs, targets=targets, microbatch_size=microbatch_size)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def on_gpus(config: Config) -> bool:
    """Whether the stages run on GPUs: where device=auto finds one for each of them, they do.

    Raises UserError where device=cuda finds fewer.
    """
    stages = config["num_stages"]
    gpus = torch.cuda.device_count()
    if config["device"] == "cuda" and gpus < stages:
        fewer = "set num_stages to that, " if gpus else ""
        raise UserError(
            f"device=cuda needs a GPU for each of {stages} stages, and this machine has "
            f"{gpus or 'none'}",
            f"{fewer}run it where there are {stages}, or add --set device=cpu",
        )
    return config["device"] != "cpu" and gpus >= stages


def take_device(config: Config, rank: int) -> torch.device:
    """A stage's device, set up for what follows."""
    torch.set_num_threads(1)  # a stage stands for one device, and so does the one-process run
    if not on_gpus(config):
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if config["check_weights"]:  # sums in any order give other bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device
