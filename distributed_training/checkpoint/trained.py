"""Read a run's trained weights one tensor at a time, to load or export them."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from distributed_training.models import ModelSpec, peft
from distributed_training.models.decoder import Decoder
from distributed_training.models.initial_weights import (
    InitialWeights,
    Slices,
    WeightSource,
    weights_checksum,
)
from distributed_training.models.quantized import quantize_matrices
from distributed_training.parallel.lora import apply_lora
from distributed_training.plan.plan import Plan
from distributed_training.settings.detect import available_ram_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """Weights of a trained model. Adapters are kept in memory; other tensors are read when
    needed."""

    spec: ModelSpec
    weights: WeightSource  # weights of the whole model or, with `adapters`, of the base model
    adapters: peft.Adapters | None = None
    base: Path | None = None  # folder of the base weights, if the model was read from a folder

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> Decoder:
        """Build the model on `device` without merging adapters. If `dtype` is set, weights and
        computation use this dtype. The exception is a base model in NF4, which stays quantized and
        keeps its compute dtype. A base model in fp8 is dequantized, and computation is not in fp8.

        If `dtype` is None, weights and computation use fp32. If fp32 weights would take more than a
        quarter of the available RAM, each weight keeps its stored dtype instead. Computation still
        uses fp32."""
        model = self.spec.build_meta_model()
        weights = self._checked_weights(model)
        adapters = self.adapters
        model.compute_dtype = dtype or torch.float32
        stays_nf4 = False
        if dtype and adapters and adapters.config.base_dtype == "nf4":
            stays_nf4 = True
            model.compute_dtype = adapters.compute_dtype
        fp32_bytes = 4 * self.spec.size.num_parameters
        keeps_dtypes = dtype is None and fp32_bytes > available_ram_bytes() / 4
        for name, parameter in model.named_parameters():
            parameter_dtype = model.compute_dtype
            if keeps_dtypes:
                parameter_dtype = self.weights(name, (slice(0, 1),)).dtype
            parameter.data = parameter.data.to(parameter_dtype)
        if stays_nf4:
            weights = quantize_matrices(model, weights, device, "nf4")
        elif adapters:
            weights = adapters.trained_base(weights)
        InitialWeights(source=weights).fill(model, device)
        if adapters:
            apply_lora(model, self.spec, adapters.config, device, adapters.tensors)
        return model.eval().requires_grad_(False)

    def merged_weights(self) -> WeightSource:
        """Return the weights of the whole model, with the adapters merged."""
        weights = self._checked_weights(self.spec.build_meta_model())
        return self.adapters.merged(weights) if self.adapters else weights

    def _checked_weights(self, model: Decoder) -> WeightSource:
        """Return `weights`. Raises UserError if the adapters were trained on other weights."""
        if self.adapters:
            self.adapters.check_base(weights_checksum(model, self.weights))
        return self.weights


def trained_model_of_run(
    plan: Plan, names: Iterable[str], read: Callable[[str], torch.Tensor], base_fingerprint: int
) -> TrainedModel:
    """Return the trained weights of a run. `names` are the names of the trained parameters, and
    `read` returns the tensor of a name."""
    config = plan.config
    spec = plan.model
    base = functools.cache(lambda: base_source(plan, torch.device("cpu")))
    if not config.lora_rank:
        trained_names = set(names)

        def read_any(name: str, slices: Slices) -> torch.Tensor:
            if name in trained_names:
                return read(name)[slices]
            return base()(name, slices)  # buffers that are not trained

        return TrainedModel(spec=spec, weights=read_any)
    adapters = peft.Adapters(
        spec=spec,
        tensors={name: read(name).float() for name in names if "adapter." in name},
        config=config,
        base_fingerprint=str(base_fingerprint),
        origin=plan.run_dir,
    )
    return TrainedModel(spec=spec, weights=base(), adapters=adapters)


def base_source(plan: Plan, device: torch.device) -> WeightSource:
    """Return the weights with which a run begins. Random weights are drawn on `device`."""
    if plan.weights_dir is not None:
        return plan.model.weights_source(plan.weights_dir)
    model = plan.model.build_meta_model()
    return model.random_source(plan.config.seed, device, hashed=plan.machine.num_gpus > 0)


def open_trained_folder(spec: ModelSpec, folder: Path, base: Path) -> TrainedModel:
    """Return the weights in `folder`. If `base` is another folder, `folder` contains adapters for
    the model in `base`."""
    adapters = peft.read_folder(spec, folder) if base != folder else None
    return TrainedModel(spec=spec, weights=spec.weights_source(base), adapters=adapters, base=base)
