"""What each engine can do. The rest of the package asks these traits and never an engine's name.

An algorithm of one's own is a file in its strategy's folder: config.json names it ("engine":
"engine.py"), and it holds `TRAITS`, `OPTIONS` where it has some, and the class that `TRAITS.build`
names, which may be in another file there ("local_sgd.py:LocalSGD"). No torch import.
"""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed_training.settings.config import PIPELINE_SCHEDULES
from distributed_training.settings.files import load_code

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # the slowest with the rank first


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    build: str  # its class, "package.module:Class"; an engine's own file says "Class"
    axes: tuple[str, ...] = MESH_AXES  # axes of the mesh that may be larger than 1
    schedules: tuple[str, ...] = ()  # pipeline schedules that it runs; the first is the default
    package: str | None = None  # what it needs besides torch
    leaves_out_updates: bool = False  # whether on_nonfinite=skip is possible
    replays_steps: bool = False  # whether it can launch a step as one CUDA graph
    # Whether PyTorch's DDP averages gradients of copies, and its FSDP divides state.
    uses_ddp_and_fsdp: bool = False
    takes_deepspeed_json: bool = False  # whether a DeepSpeed JSON configures it rather than a mesh
    # Whether it keeps weights and gradients in the precision of the arithmetic beside an fp32
    # master copy (2 + 2 + 12 bytes a parameter), or fp32 alone (4 + 4 + 8)
    rounded_weights: bool = False

    def load(self) -> Any:
        """The engine's class. Imports torch."""
        place, _, name = self.build.rpartition(":")
        if place.endswith(".py"):
            return getattr(load_code(Path(place), f"the engine {place}"), name)
        return getattr(importlib.import_module(place), name)


_DEEPSPEED = Traits(
    build="distributed_training.engines.deepspeed:DeepSpeedEngine",
    axes=("dp_shard",),
    package="deepspeed",
    takes_deepspeed_json=True,
    rounded_weights=True,
)
ENGINES: dict[str, Traits] = {
    "native": Traits(
        build="distributed_training.engines.native:NativeEngine",
        schedules=PIPELINE_SCHEDULES,
        leaves_out_updates=True,
        replays_steps=True,
        uses_ddp_and_fsdp=True,
    ),
    "deepspeed": _DEEPSPEED,
    "deepspeed_pipeline": replace(
        _DEEPSPEED,
        build="distributed_training.engines.deepspeed:DeepSpeedPipelineEngine",
        axes=("pp", "dp_shard"),
        schedules=("1f1b",),
    ),
}
