"""Strategies are folders: strategies/<n>_<name>/config.json says what is sharded or offloaded.

A DeepSpeed JSON goes to the DeepSpeed engine, a file with a "mesh" to the native one. This module
finds the folders, checks the form of their JSON and estimates the memory that follows from it.
No torch import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed_training.config import RunConfig
from distributed_training.errors import UserError
from distributed_training.files import load_json, nearest, shown, user_path

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES_DIR = ROOT / "strategies"
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # the slowest with the rank first


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way of spreading the state of training over processes."""

    name: str
    """Short name, the value of CONFIG["strategy"]."""
    source: Path
    """The JSON it was read from."""
    document: Mapping[str, Any]
    """The JSON as written, "auto" values included."""

    @property
    def engine(self) -> str:
        """ "deepspeed" or "native", by the form of the document."""
        return "native" if "mesh" in self.document else "deepspeed"

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage; 0 for native strategies."""
        return int(self.document.get("zero_optimization", {}).get("stage", 0))

    def offload_device(self, what: str) -> str:
        """ "none", "cpu" or "nvme" for `what` = "optimizer" or "param"."""
        section = self.document.get("zero_optimization", {}).get(f"offload_{what}") or {}
        return str(section.get("device", "none"))

    @property
    def divides_parameters(self) -> bool:
        """Whether no process holds all parameters at once."""
        if self.engine == "native":
            return any(self.mesh[axis] != 1 for axis in ("dp_shard", "tp", "pp"))
        return self.zero_stage == 3 or self.pipelined

    @property
    def needs_cpu_adam(self) -> bool:
        """Whether the optimizer step runs on the host, in DeepSpeed's compiled CPU Adam."""
        return self.offload_device("optimizer") != "none"

    @property
    def needs_async_io(self) -> bool:
        """Whether state moves to files through DeepSpeed's libaio extension."""
        return "nvme" in (self.offload_device("optimizer"), self.offload_device("param"))

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes; -1 means "what is left of the world size".

        Raises UserError for an axis that is not known or a size that is no whole number.
        """
        if self.engine == "deepspeed":
            stages = self.document.get("pipeline", {}).get("stages", 1)
            return {"pp": stages, "dp_replicate": 1, "dp_shard": -1, "tp": 1}
        sizes = {axis: self.document["mesh"].get(axis, 1) for axis in MESH_AXES}
        for axis, size in {**self.document["mesh"], **sizes}.items():
            if axis not in MESH_AXES or type(size) is not int:
                raise UserError(
                    f"{self.source}: mesh axis {axis!r} of size {shown(size)} is not understood",
                    f"the axes are {', '.join(MESH_AXES)}",
                    "give each a whole number, or -1 for what is left of the processes",
                )
        return sizes

    @property
    def pipelined(self) -> bool:
        """Whether the layers are dealt out to stages."""
        return self.mesh["pp"] != 1

    def describe_sharding(self) -> str:
        """One phrase for the header: what is divided over processes."""
        mesh = self.mesh
        parts = ["layers over pp"] * self.pipelined + ["each layer over tp"] * (mesh["tp"] != 1)
        if self.engine == "native":
            if mesh["dp_shard"] != 1:
                parts += ["parameters, gradients, optimizer state over dp_shard"]
            return "; ".join(parts) or "nothing (replicas)"
        zero = ["optimizer state", "gradients", "parameters"][: self.zero_stage]
        text = "; ".join(parts + [", ".join(zero)] * bool(zero)) or "nothing (replicas)"
        for what, label in (("optimizer", "optimizer state"), ("param", "parameters")):
            device = self.offload_device(what)
            if device != "none":
                text += f"; {label} kept on {device}"
        return text


def list_strategies() -> dict[str, Path]:
    """Short name -> config.json of every folder under strategies/, in the folders' order."""
    found = {}
    for path in sorted(STRATEGIES_DIR.glob("*/config.json"), key=_folder_number):
        # A DeepSpeed strategy's file is a link to configs/ds_config_<name>.json; a native one
        # carries its name, because its JSON is ours. Any other is named by its folder.
        target = path.resolve().stem
        name = target.removeprefix("ds_config_")
        if name == target:
            document = load_json(path, "strategy")
            named = document.get("name") if isinstance(document, dict) else None
            name = named if isinstance(named, str) else path.parent.name
        found[name] = path
    return found


def _folder_number(path: Path) -> tuple[int, str]:
    number, _, rest = path.parent.name.partition("_")
    return (int(number), rest) if number.isdecimal() else (10**6, path.parent.name)


def load_strategy(config: RunConfig) -> Strategy:
    """Find and read the strategy that `config` names.

    Raises UserError for an unknown name, a JSON that does not parse, and a `deepspeed_config`
    that is given to a native strategy or has another ZeRO stage than the strategy.
    """
    known = list_strategies()
    if config.strategy not in known:
        hint = nearest(config.strategy, known)
        raise UserError(
            f"strategy={shown(config.strategy)} is not known",
            f"the strategies are {', '.join(known)}",
            f"did you mean {hint!r}?" if hint else "",
        )
    own = _read(config.strategy, known[config.strategy])
    if config.deepspeed_config is None:
        return _with_axes(own, config)
    if own.engine != "deepspeed":
        users = ", ".join(name for name in known if _read(name, known[name]).engine == "deepspeed")
        raise UserError(
            f"strategy={own.name!r} does not run on DeepSpeed",
            f"deepspeed_config={config.deepspeed_config!r} would be ignored",
            f"set deepspeed_config to None or strategy to one of {users}",
        )
    given = _read(config.strategy, user_path("deepspeed_config", config.deepspeed_config))
    if given.engine != own.engine:
        raise UserError(
            f"{given.source} has a mesh but strategy={own.name!r} runs on DeepSpeed",
            "a mesh is for strategies that do not",
            "remove the section",
        )
    for what, theirs, ours in [
        ("zero_optimization.stage", given.zero_stage, own.zero_stage),
        *(
            (f"zero_optimization.offload_{part}.device", *pair)
            for part in ("optimizer", "param")
            for pair in [(given.offload_device(part), own.offload_device(part))]
        ),
    ]:
        if theirs != ours:
            raise UserError(
                f"{given.source}: {what}={theirs!r} but strategy={own.name!r} means {ours!r}",
                fix="change one of them",
            )
    if given.pipelined != own.pipelined:
        raise UserError(
            f"{given.source}: pipeline.stages={given.mesh['pp']} but strategy={own.name!r} "
            f"{'needs' if own.pipelined else 'has no'} stages",
            fix="change one of them",
        )
    return _with_axes(given, config)


def _with_axes(strategy: Strategy, config: RunConfig) -> Strategy:
    """The strategy with CONFIG's sizes of axes in place of its JSON's."""
    given = {axis: size for axis in MESH_AXES if (size := getattr(config, axis)) is not None}
    if not given:
        return strategy
    document = dict(strategy.document)
    if strategy.engine == "native":
        document["mesh"] = {**document["mesh"], **given}
        return replace(strategy, document=document)
    can = ("pp",) if strategy.pipelined else ()
    for axis, size in given.items():
        if axis not in can:
            raise UserError(
                f"{axis}={size} cannot be set with strategy={strategy.name!r}",
                "DeepSpeed divides over all processes",
                "set it to None, or strategy to 3d, whose mesh has all axes"
                + (", or to hybrid" if axis == "pp" else ""),
            )
    document["pipeline"] = {**document["pipeline"], "stages": given["pp"]}
    return replace(strategy, document=document)


def _read(name: str, path: Path) -> Strategy:
    document = load_json(path, "strategy file" if path.is_relative_to(ROOT) else "DeepSpeed JSON")
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a JSON object", fix="see configs/ds_config_zero2.json")
    for section in ("zero_optimization", "bf16", "fp16", "mesh", "optimizer", "pipeline"):
        _check_object(path, document, section)
    zero = document.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise UserError(f"{path}: zero_optimization.stage={shown(stage)}", "it is 0, 1, 2 or 3")
    stages = document.get("pipeline", {}).get("stages", 1)
    if type(stages) is not int or (stages < 1 and stages != -1):
        raise UserError(
            f"{path}: pipeline.stages={shown(stages)}",
            fix="give a whole number, or -1 for what is left of the processes",
        )
    if stages != 1 and stage > 1:
        raise UserError(
            f"{path}: pipeline.stages={stages} with zero_optimization.stage={stage}",
            "a stage of the pipeline needs its gradients whole until its last micro-batch",
            "set zero_optimization.stage to 1 or 0, or pipeline.stages to 1",
        )
    for part in ("offload_optimizer", "offload_param"):
        if zero.get(part) is not None:  # DeepSpeed reads null as "no offload"
            _check_object(path, zero, part)
            device = zero[part].get("device", "none")
            if device not in ("none", "cpu", "nvme"):
                raise UserError(
                    f"{path}: zero_optimization.{part}.device={shown(device)}",
                    "it is none, cpu or nvme",
                )
    source = path.resolve()
    return Strategy(name=name, source=source, document=document)


def _check_object(path: Path, parent: Mapping[str, Any], section: str) -> None:
    if section in parent and not isinstance(parent[section], dict):
        raise UserError(f"{path}: {section} is not a JSON object", fix="see configs/")


def estimate_state_bytes(
    strategy: Strategy, *, num_parameters: int, precision: str, dp_size: int
) -> dict[str, int]:
    """Bytes of model state per process, by part, without activations. Pure arithmetic.

    `num_parameters` are those of one process's part of the model where tp or pp divide it
    (layout.py), all of them otherwise; `dp_size` processes hold the same part.
    Mixed precision under DeepSpeed (ZeRO paper, section 3.1): parameters 2, gradients 2, fp32
    master copy and both Adam moments 12 bytes a parameter. The native engines keep fp32
    parameters (4), gradients (4) and moments (8); a pipeline's stages also what they gather while
    a step runs, or round. "host" is what offload moves to RAM, "disk" what it moves to files; the
    other entries are on the training device.
    """
    shards = dp_size
    width = 4 if precision == "fp32" else 2
    if strategy.engine == "native":
        mesh = strategy.mesh
        shards = mesh["dp_shard"] if mesh["dp_shard"] != -1 else dp_size // mesh["dp_replicate"]
        if not strategy.pipelined:
            return _bytes(4 / shards, 4 / shards, 8 / shards, num_parameters)
        # A stage stays gathered, or at least rounded, for all micro-batches of a step, and adds its
        # gradients up whole.
        gathered = width if dp_size > 1 or precision != "fp32" else 0
        return _bytes(4 / shards + gathered, 4, 8 / shards, num_parameters)
    stage = strategy.zero_stage
    parameters = width / (shards if stage >= 3 else 1)
    gradients = width / (shards if stage >= 2 else 1)
    optimizer = 12 / (shards if stage >= 1 else 1)
    state = _bytes(parameters, gradients, optimizer, num_parameters)
    for what, part in (("optimizer", "optimizer"), ("param", "parameters")):
        device = strategy.offload_device(what)
        if device != "none":
            state["disk" if device == "nvme" else "host"] += state[part]
            state[part] = 0
    if strategy.needs_cpu_adam:  # gradients wait on the host, in fp32, for the optimizer step
        state["host"] += round(4 * num_parameters / shards)
        state["gradients"] = 0
    return state


def _bytes(parameters: float, gradients: float, optimizer: float, count: int) -> dict[str, int]:
    return {
        "parameters": round(parameters * count),
        "gradients": round(gradients * count),
        "optimizer": round(optimizer * count),
        "host": 0,
        "disk": 0,
    }
