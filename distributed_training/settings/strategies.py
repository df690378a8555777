"""Read strategies and find the engines that run them. Each strategy is a folder,
strategies/<n>_<name>/, whose config.json defines how state is sharded or offloaded. This module
does not import torch.

Keys of config.json:
- `deepspeed`: the path of a DeepSpeed configuration, relative to the checkout
- `mesh`: the sizes of the axes
- `engine`: an engine's name or file. The default is "native" if `mesh` is set. Otherwise, it is
  "deepspeed".

To add an algorithm, put a file such as "engine.py" into the folder. The file defines `TRAITS`,
optionally `OPTIONS`, and the class that `TRAITS.build` names. The class may also be in another file
in the folder ("local_sgd.py:LocalSGD")."""

import functools
import importlib
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from distributed_training.settings import files
from distributed_training.settings.config import AUTO, PIPELINE_SCHEDULES, Config
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import Options, read_keys

STRATEGIES_DIR = files.ROOT / "strategies"
# Order of the axes, from the slowest-varying to the fastest-varying
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_FORM_ADVICE = 'write {"name": ..., "mesh": {...} or "deepspeed": path}'


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Capabilities of an engine. Other code checks these capabilities, never the engine's name."""

    build: str  # engine class as "package.module:Class", or "Class" in the engine's file
    axes: tuple[str, ...] = MESH_AXES  # mesh axes that may be larger than 1
    schedules: tuple[str, ...] = ("1f1b",)  # pipeline schedules; the first is the default
    package: str | None = None  # package that the engine requires in addition to torch
    # Whether PyTorch's DDP and FSDP settings apply, a step can be launched as one CUDA graph, and
    # on_nonfinite=skip is possible
    averages_with_torch: bool = False
    # Whether the model's parameters may already be on the device, and Adam moments may have fewer
    # bits
    builds_on_device: bool = False
    # Whether ZeRO shards the state and averages the gradients, as a DeepSpeed configuration says
    uses_zero: bool = False
    # Whether weights and gradients are in the compute dtype, and master weights and Adam moments in
    # fp32 (2 + 2 + 12 bytes per parameter). Otherwise, everything is in fp32 (4 + 4 + 8).
    has_master_weights: bool = False
    # Whether each parameter of a block runs Python hooks and must be on the device
    has_parameter_hooks: bool = False


ENGINES = {
    "native": Traits(
        build="distributed_training.engines.native:NativeEngine",
        schedules=PIPELINE_SCHEDULES,
        averages_with_torch=True,
        builds_on_device=True,
    ),
    "deepspeed": Traits(
        build="distributed_training.engines.deepspeed:DeepSpeedEngine",
        axes=("dp_shard",),
        package="deepspeed",
        uses_zero=True,
        has_master_weights=True,
        has_parameter_hooks=True,
    ),
}


class _StrategyFile(BaseModel, strict=True, extra="forbid"):
    """Contents of a strategy's config.json."""

    name: str
    mesh: dict[str, int] | None = None
    deepspeed: str | None = None
    engine: str = Field(
        default_factory=lambda values: "deepspeed" if values.get("mesh") is None else "native"
    )
    _path: Path = PrivateAttr()


class _Offload(BaseModel, strict=True):
    device: Literal["none", "cpu", "nvme"] = "none"
    buffer_count: int = 5  # DeepSpeed's default
    buffer_size: float = 1e8  # DeepSpeed's default, in values


class _Zero(BaseModel, strict=True):
    """ZeRO section of a DeepSpeed configuration. Values set to "auto" or null have DeepSpeed's
    defaults."""

    stage: Annotated[int, Field(ge=0, le=3)] = 0
    reduce_bucket_size: float = 5e8  # DeepSpeed's default
    stage3_max_live_parameters: float = 1e9
    stage3_max_reuse_distance: float = 1e9
    offload_optimizer: _Offload = _Offload()
    offload_param: _Offload = _Offload()

    @model_validator(mode="before")
    @classmethod
    def _drop_defaults(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        return {
            key: value
            for key, value in section.items()
            if value not in (AUTO, None) or key == "stage"
        }


class _Pipeline(BaseModel, strict=True):
    stages: int = 1


class _Optimizer(BaseModel, strict=True):
    type: Literal["AdamW"] = "AdamW"
    params: dict[str, Any] = {}


class _DeepSpeed(BaseModel, strict=True):
    """The part of a DeepSpeed configuration that this package reads."""

    zero_optimization: _Zero = _Zero()
    pipeline: _Pipeline = _Pipeline()
    bf16: dict[str, Any] = {}
    fp16: dict[str, Any] = {}
    optimizer: _Optimizer = _Optimizer()


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Definition of how the training state is distributed over ranks."""

    name: str  # short name: the value of CONFIG["strategy"]
    source: Path  # the JSON file that defines the strategy
    document: Mapping[str, Any]  # DeepSpeed config with unresolved "auto" values; {} with a mesh
    zero: _Zero  # ZeRO section of `document`; stage 0 if there is none
    mesh: Mapping[str, int]  # axis sizes; -1 means all remaining ranks
    # Axes that the strategy sets; a suggested layout changes only these
    named_axes: tuple[str, ...]
    engine: str  # a built-in engine or a .py file in the strategy's folder
    traits: Traits
    work_options: tuple[str, ...]  # keys of the strategy's engine that change the computation

    def load_engine(self) -> Any:
        """Import and return the engine's class. The class is looked up by the strategy's name,
        because `traits.build` in a plan.json could name any code."""
        traits, _ = _find_engine(_find_strategy(self.name))
        module, _, name = traits.build.rpartition(":")
        if module.endswith(".py"):
            return getattr(_import_file(Path(module)), name)
        return getattr(importlib.import_module(module), name)

    def options(self, values: Mapping[str, Any]) -> Any:
        """Return an instance of the engine's options with these values."""
        return strategy_options(self.name)(**values)

    @functools.cached_property
    def offload(self) -> dict[str, str]:
        """Map "optimizer" and "param" to their offload devices: "none", "cpu" or "nvme"."""
        return {
            "optimizer": self.zero.offload_optimizer.device,
            "param": self.zero.offload_param.device,
        }

    @property
    def steps_on_host(self) -> bool:
        """Return whether the optimizer step runs on the CPU, with DeepSpeed's compiled CPU Adam."""
        return self.offload["optimizer"] != "none"

    @property
    def fetches_parameters(self) -> bool:
        """Return whether parameters are offloaded and are fetched when a block runs."""
        return self.offload["param"] != "none"

    @property
    def offloads(self) -> bool:
        """Return whether state is kept in host memory or on disk."""
        return self.steps_on_host or self.fetches_parameters

    @property
    def swaps_to_disk(self) -> bool:
        """Return whether DeepSpeed's libaio extension swaps state to disk."""
        return "nvme" in self.offload.values()

    @property
    def extensions(self) -> list[str]:
        """Return the names of the DeepSpeed extensions that a run needs. Each name is also the name
        of the extension's folder in torch's cache."""
        names = ["cpu_adam"] if self.steps_on_host else []
        if self.swaps_to_disk:
            names += ["async_io", "pin_memory"]
        return names

    @property
    def swap_buffer_values(self) -> int:
        """Return the number of values in the buffers through which parameters are swapped to disk.
        Return 0 if parameters are not swapped to disk."""
        section = self.zero.offload_param
        if section.device != "nvme":
            return 0
        return int(section.buffer_count * section.buffer_size)


def list_strategies() -> dict[str, _StrategyFile]:
    """Map the name of each strategy in strategies/ to its parsed config.json, in the order of the
    folder numbers."""
    return _read_strategies(STRATEGIES_DIR)


@functools.cache
def _read_strategies(folder: Path) -> dict[str, _StrategyFile]:
    paths = folder.glob("*/config.json")
    by_number = sorted(paths, key=lambda path: path.parent.name.partition("_")[0].zfill(20))
    return {strategy.name: strategy for strategy in map(_read_strategy_file, by_number)}


def strategy_options(name: str) -> type[Options]:
    """Return the class whose fields are the keys that a strategy's engine adds to CONFIG."""
    return Options if name == AUTO else _find_engine(_find_strategy(name))[1]


def load_strategy(config: Config) -> Strategy:
    """Return the strategy that `config` names. Axis sizes in `config` override the strategy's
    sizes. Raises UserError for an unknown name or an axis that cannot be set. Also raises UserError
    if a DeepSpeed configuration is invalid or does not fit the strategy."""
    strategy_file = _find_strategy(config.strategy)
    setting = f"strategy={strategy_file.name!r}"
    source = strategy_file._path
    mesh = strategy_file.mesh or {}
    document: Mapping[str, Any] = {}
    parsed = _DeepSpeed()
    user_json = config.deepspeed_config
    if strategy_file.deepspeed is not None:
        source, document, parsed = _read_json(strategy_file.deepspeed)
        if user_json:
            own_form = _describe_form(parsed)
            source, document, parsed = _read_json(user_json)
            form = _describe_form(parsed)
            if form != own_form:
                what = f"{source} describes {form}, but {setting} needs {own_form}"
                raise UserError(what, fix="change the JSON, or set strategy to auto")
        stages = {"pp": parsed.pipeline.stages} if "pipeline" in document else {}
        mesh = {"dp_shard": -1, **stages}
    elif user_json is not None:
        what = f"{setting} would ignore deepspeed_config={user_json!r}"
        raise UserError(what, fix="set deepspeed_config to None or strategy to zero2")
    traits, options = _find_engine(strategy_file)
    for axis in MESH_AXES:
        if (size := getattr(config, axis)) is not None:
            mesh = {**mesh, axis: size}
    for axis, size in mesh.items():
        if axis not in traits.axes and (size != 1 or axis not in MESH_AXES):
            why = f"the axes of engine={strategy_file.engine!r} are {', '.join(traits.axes)}"
            fix = f"leave out {axis}, or set strategy to 3d, whose mesh has all axes"
            raise UserError(f"{axis}={size} cannot be set with {setting}", why, fix)
    return Strategy(
        name=strategy_file.name,
        source=source.resolve(),
        document=document,
        zero=parsed.zero_optimization,
        mesh={**dict.fromkeys(MESH_AXES, 1), **mesh},
        named_axes=tuple(mesh),
        engine=strategy_file.engine,
        traits=traits,
        work_options=tuple(key.name for key in read_keys(options).values() if key.work),
    )


def _read_json(path: str) -> tuple[Path, Mapping[str, Any], _DeepSpeed]:
    """Return (file, DeepSpeed configuration, the part of the configuration that this package reads)
    for the path of a DeepSpeed configuration."""
    file = files.resolve_user_path(path)
    document = files.load_json(file, "DeepSpeed configuration")
    fix = "see configs/ds_config_zero2.json"
    parsed = files.parse_as(_DeepSpeed, document, str(file), fix)
    return file, document, parsed


def _describe_form(parsed: _DeepSpeed) -> str:
    """Return the form of a DeepSpeed configuration: a pipeline, offloaded state or a ZeRO stage. A
    user's configuration must have the same form as the strategy's configuration."""
    if parsed.pipeline.stages != 1:
        return "a pipeline"
    zero = parsed.zero_optimization
    devices = (zero.offload_optimizer.device, zero.offload_param.device)
    for device in ("nvme", "cpu"):
        if device in devices:
            return f"state offloaded to {device}"
    return f"ZeRO stage {zero.stage}"


def _find_strategy(name: str) -> _StrategyFile:
    names = list_strategies()
    if name in names:
        return names[name]
    advice = files.did_you_mean(name, names) or f"the strategies are {', '.join(names)}"
    raise UserError(f"strategy={name!r} is not known", advice)


def _find_engine(strategy_file: _StrategyFile) -> tuple[Traits, type[Options]]:
    """Return the traits and the OPTIONS of the engine that a strategy's config.json names."""
    engine = strategy_file.engine
    if engine in ENGINES:
        return ENGINES[engine], Options
    file = strategy_file._path.parent / engine
    if not (engine.endswith(".py") and file.is_file()):
        what = f"{file.parent}: engine={engine!r} is not known"
        why = f"engines are {', '.join(ENGINES)} or a .py file in the strategy's folder"
        raise UserError(what, why)
    module = _import_file(file)
    traits: Traits = module.TRAITS
    build = traits.build if ":" in traits.build else f"{file.name}:{traits.build}"
    return replace(traits, build=f"{file.parent}/{build}"), getattr(module, "OPTIONS", Options)


@functools.cache
def _import_file(file: Path) -> ModuleType:
    """Import a Python file of strategies/ under a unique module name. Later calls return the same
    module. Data files, such as a run's plan or a preset, never cause other code to run."""
    name = f"{file.parent.name}_{file.stem}_{zlib.crc32(str(file.parent).encode()):08x}"
    spec: Any = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _read_strategy_file(path: Path) -> _StrategyFile:
    what = f"{path} is not a strategy"
    strategy_file = files.parse_as(
        _StrategyFile, files.load_json(path, "strategy"), what, _FORM_ADVICE
    )
    if (strategy_file.mesh is None) == (strategy_file.deepspeed is None):
        raise UserError(what, "it must have either mesh or deepspeed, but not both", _FORM_ADVICE)
    strategy_file._path = path
    return strategy_file
