"""Run two training steps of a trainer on fake tensors, and print the bytes that its GPU would hold.

This file imports nothing of this package, so that any environment with a trainer can run it. It
reads a question as JSON from standard input and prints the answer as JSON. The trainer's own code
runs: Trainer or SFTTrainer, PEFT, Liger and the optimizer. Only the tensors have no values, and
Triton kernels do nothing. Fake tensors are on the CPU, because autograd refuses fake CUDA tensors
without a driver, so fused attention and CUDA's autocast are imitated."""

import gc
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
import weakref
from collections import Counter
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
warnings.simplefilter("ignore")

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "liger-kernel")
BLOCK = 512  # the allocator rounds sizes up to multiples of this number of bytes
CAUSAL = 0.5  # share of the products that causal attention computes
# Functions that compute in fp32 under autocast on CUDA but not on the CPU
FP32 = {
    torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.rsqrt, torch.Tensor.rsqrt,
    torch.exp, torch.log, torch.sum, torch.Tensor.sum, torch.Tensor.norm, F.softmax,
    torch.softmax, torch.Tensor.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.layer_norm,
}  # fmt: skip
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0}  # index of first factor


class Tracker(TorchDispatchMode):
    """Count the bytes of all tensors that are alive, and the work of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.storages: dict[int, int] = {}
        self.work: Counter[str] = Counter()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages:
            return
        self.storages[key] = -(-storage.nbytes() // BLOCK) * BLOCK
        self.live += self.storages[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.remove, key)

    def remove(self, key: int) -> None:
        self.live -= self.storages.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":  # losses are finite, masks are full, lengths are positive
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 4096
        if name == "equal":
            return True
        masks = [i for i in tree_leaves(args[1:2]) if torch.is_tensor(i) and i.dtype == torch.bool]
        if masks and name in ("index", "masked_select"):  # every element is selected
            result = args[0].reshape(-1, *args[0].shape[masks[0].dim() :]).clone()
        elif masks and name.startswith(("index_put", "_index_put")):
            result = args[0] if name.endswith("_") else args[0].clone()
        else:
            result = func(*args, **kwargs or {})
        outputs = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        for tensor in outputs:
            self.add(tensor)
        if outputs and not (func.is_view or name.startswith(("empty", "new_empty"))):
            self.count(name, [t for t in tree_leaves(args) if torch.is_tensor(t)], outputs)
        return result

    def count(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        self.work["launches"] += 1
        if name in PRODUCTS:
            factor = inputs[PRODUCTS[name]]
            kind = "fp32_flops" if factor.dtype == torch.float32 else "flops"
            self.work[kind] += 2 * factor.numel() * outputs[0].shape[-1]
            return
        if name == "embedding":
            inputs = inputs[1:]
        self.work["bytes"] += sum(t.numel() * t.element_size() for t in (*inputs, *outputs))


class FusedAttention(torch.autograd.Function):
    """Keep what a fused kernel keeps: its inputs, its result and the statistics of the softmax."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        batch, heads, length, _ = q.shape
        result = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        statistics = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, result, statistics)
        TRACKER.work["attention_flops"] += int(4 * CAUSAL * q.numel() * k.shape[2])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        q, k, v, _, statistics = ctx.saved_tensors
        sums = torch.empty_like(statistics), torch.empty_like(q, dtype=torch.float32)
        heads = q.shape[1]
        gradients = [q.new_empty(t.shape[0], heads, *t.shape[2:]) for t in (q, k, v)]
        del sums
        TRACKER.work["attention_flops"] += int(10 * CAUSAL * q.numel() * k.shape[2])
        for i, t in ((1, k), (2, v)):
            if t.shape[1] != heads:
                gradients[i] = gradients[i].unflatten(1, (t.shape[1], -1)).sum(2)
        return tuple(gradients)


def attend(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    """Replace torch's attention, in the recomputation of blocks, too, where no mode is active."""
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (t.to(torch.get_autocast_dtype("cpu")) for t in (q, k, v))
    return FusedAttention.apply(q, k, v)


class CudaFunctions(TorchFunctionMode):
    """Apply CUDA's autocast to functions in FP32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FP32 and torch.is_autocast_enabled("cpu"):
            low = (torch.bfloat16, torch.float16)
            args = [a.float() if torch.is_tensor(a) and a.dtype in low else a for a in args]
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


TRACKER = Tracker()


def pretend_gpu() -> None:
    """Let the packages take the paths that they take on a GPU."""
    import transformers.masking_utils

    # Otherwise fake tensors look like a compiler's, and masks are built that no run has.
    transformers.masking_utils.is_tracing = lambda *_: False
    torch.nn.Module._apply = convert
    F.scaled_dot_product_attention = attend
    try:
        import triton
    except ModuleNotFoundError:
        return
    triton.runtime.jit.JITFunction.run = count_kernel
    with suppress(ModuleNotFoundError):
        import liger_kernel.ops.fused_linear_cross_entropy as liger_loss

        # On a GPU, Liger adds to the gradient of the head in place. On a CPU, it needs a copy.
        torch.cuda.get_device_capability = lambda *_: (8, 0)
        source = Path(liger_loss.__file__).read_text()
        exec(source.replace('grad_weight.device.type == "cuda"', "True"), vars(liger_loss))


@torch.no_grad()
def convert(module: Any, function: Any, recurse: bool = True) -> Any:
    """Convert a module's tensors. torch's own method would swap fake tensors, which fails."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and (new := function(parameter)) is not parameter:
                child._parameters[name] = torch.nn.Parameter(new, parameter.requires_grad)
        for name, buffer in child._buffers.items():
            child._buffers[name] = None if buffer is None else function(buffer)
    return module


def count_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
    """Count a Triton kernel instead of running it."""
    tensors = [a for a in (*args, *kwargs.values()) if torch.is_tensor(a)]
    TRACKER.work["launches"] += 1
    TRACKER.work["bytes"] += sum(t.numel() * t.element_size() for t in tensors)


def build_model(question: dict[str, Any], num_layers: int) -> Any:
    """Return the model with `num_layers` blocks, on fake tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    document = dict(question["config"])
    config = AutoConfig.for_model(document.pop("model_type"), **document)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    dtype = getattr(torch, question["dtype"])
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def build_trainer(question: dict[str, Any], model: Any, folder: str) -> Any:
    """Return the trainer with the arguments of the question."""
    lora = question["lora"]
    if lora:
        from peft import LoraConfig

        lora = LoraConfig(task_type="CAUSAL_LM", **lora)
    arguments = dict(question["arguments"], output_dir=folder, use_cpu=True, max_steps=2)
    arguments |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    if question["class"] == "SFTTrainer":
        import trl
        import trl.kernels.chunked_logprob
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        trl.kernels.chunked_logprob._use_triton = lambda device: True
        trl.trainer.utils._use_triton = lambda device: True
        words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        return trl.SFTTrainer(
            model,
            trl.SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True}),
            train_dataset=Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a"),
            peft_config=lora,
        )
    from transformers import Trainer, TrainingArguments

    if lora:
        from peft import get_peft_model

        model = get_peft_model(model, lora)
        if arguments.get("gradient_checkpointing"):
            model.enable_input_require_grads()
    return Trainer(model, TrainingArguments(**arguments))


def trace(question: dict[str, Any], num_layers: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Return bytes and work of a step with `num_layers` blocks, and the arguments in effect."""
    gc.collect()  # a trainer is in cycles of references
    with (
        tempfile.TemporaryDirectory() as folder,
        FakeTensorMode(allow_non_fake_inputs=True),
        TRACKER,
        CudaFunctions(),
    ):
        before = TRACKER.live
        trainer = build_trainer(question, build_model(question, num_layers), folder)
        args = trainer.args
        length = question["length"] or args.max_length
        ids = torch.zeros(args.per_device_train_batch_size, length, dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        trainer.get_train_dataloader = lambda: [inputs] * 2 * args.gradient_accumulation_steps
        weights = TRACKER.live - before
        parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        optimizer = trainer.create_optimizer()
        for group in optimizer.param_groups:
            group["foreach"] = not group.get("fused")  # as on a GPU
        TRACKER.peak = TRACKER.live

        def finish_step(*_: Any) -> None:
            if trainer.state.global_step == 0:
                TRACKER.work.clear()

        optimizer.register_step_post_hook(finish_step)
        trainer.train()
        states = [t for state in optimizer.state.values() for t in state.values()]
        sizes = {
            "weights": weights,
            "optimizer": sum(t.numel() * t.element_size() for t in states if torch.is_tensor(t)),
            "gradients": sum(p.numel() * p.element_size() for p in parameters),
            "trainable": sum(p.numel() for p in parameters),
            "peak": TRACKER.peak - before,
            **TRACKER.work,
        }
    names = ("gradient_checkpointing", "bf16", "optim")
    used = {"batch_size": ids.shape[0], "max_length": length}
    used["grad_accum_steps"] = args.gradient_accumulation_steps
    return sizes, used | {name: getattr(args, name) for name in names}


def period(kinds: list[str]) -> int:
    """Return the number of blocks after which the kinds of blocks repeat."""
    return next(
        p for p in range(1, len(kinds) + 1) if kinds == (kinds[:p] * len(kinds))[: len(kinds)]
    )


def main() -> None:
    question = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):
        pretend_gpu()
        torch.manual_seed(0)
        from transformers import AutoConfig

        config = AutoConfig.for_model(**question["config"])
        total = config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or [""]
        few = max(2, period(kinds))
        few += getattr(config, "first_k_dense_replace", None) or 0
        if total <= 2 * few:
            sizes, used = trace(question, total)
        else:
            # Every block of a kind needs the same, so two depths determine all.
            less, used = trace(question, few)
            more, _ = trace(question, 2 * few)
            share = (total - few) / few
            sizes = {k: round(less[k] + share * (more[k] - less[k])) for k in more}
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    print(json.dumps({"sizes": sizes, "used": used, "versions": versions}))


if __name__ == "__main__":
    main()
