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
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
warnings.simplefilter("ignore")

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl", "liger-kernel")
BLOCK = 512  # the allocator rounds sizes up to multiples of this number of bytes
# Functions that compute in fp32 under autocast on CUDA but not on the CPU
FP32 = (
    (torch, "pow rsqrt exp log sum softmax log_softmax"),
    (torch.Tensor, "pow __pow__ rsqrt exp log sum norm softmax log_softmax"),
    (F, "softmax log_softmax cross_entropy nll_loss layer_norm"),
)


class Tracker(TorchDispatchMode):
    """Count the bytes of all tensors that are alive, and keep the peak of each part of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.part = "forward"
        self.peaks: dict[str, int] = {}
        self.work = dict.fromkeys(("flops", "fp32_flops", "attention_flops", "bytes", "kernels"), 0)
        self.storages: dict[int, int] = {}

    def begin(self, part: str) -> None:
        self.part = part
        self.peaks[part] = max(self.live, self.peaks.get(part, 0))

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages:
            return
        self.storages[key] = -(-storage.nbytes() // BLOCK) * BLOCK
        self.live += self.storages[key]
        self.peaks[self.part] = max(self.peaks.get(self.part, 0), self.live)
        weakref.finalize(storage, self.remove, key)

    def remove(self, key: int) -> None:
        self.live -= self.storages.pop(key)

    def count(self, name: str, args: Any, result: Any) -> None:
        """Count what an operation's kernel computes, reads and writes. Views have no kernel."""
        inputs = [leaf for leaf in tree_leaves(args) if torch.is_tensor(leaf)]
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        outputs = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        written = [t for t in outputs if t.untyped_storage()._cdata not in known]
        written = written or (inputs if name.endswith("_") else [])
        if not written or name.startswith("empty") or name.startswith("new_empty"):
            return
        self.work["kernels"] += 1
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            first, second = inputs[-2:]
            kind = "fp32_flops" if first.dtype == torch.float32 else "flops"
            self.work[kind] += 2 * first.numel() * second.shape[-1]
            return
        if name == "embedding":
            inputs = []
        self.work["bytes"] += sum(t.numel() * t.element_size() for t in inputs + written)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":  # losses are finite, masks are full, lengths are positive
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 4096
        if name == "equal":
            return True
        if name == "add" and args[0].dim() == 2 and torch._C._current_graph_task_id() >= 0:
            return args[0]  # Autograd sums the gradients of a matrix with two uses in place.
        masks = [i for i in tree_leaves(args[1:2]) if torch.is_tensor(i) and i.dtype == torch.bool]
        if masks and name in ("index", "masked_select"):  # every element is selected
            result = args[0].reshape(-1, *args[0].shape[masks[0].dim() :]).clone()
        elif masks and name.startswith(("index_put", "_index_put")):
            result = args[0] if name.endswith("_") else args[0].clone()
        else:
            result = func(*args, **kwargs or {})
        self.count(name, args, result)
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf):
                self.add(leaf)
        return result


def count_attention(q: Any, k: Any, num_products: int) -> None:
    """Count half of each product of [tokens, keys], because attention is causal."""
    TRACKER.work["attention_flops"] += num_products * q.numel() * k.shape[2]
    TRACKER.work["kernels"] += num_products - 1


class FusedAttention(torch.autograd.Function):
    """Keep what a fused kernel keeps: its inputs, its result and the statistics of the softmax."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        batch, heads, length, _ = q.shape
        result = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        statistics = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, result, statistics)
        count_attention(q, k, 2)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        q, k, v, _, statistics = ctx.saved_tensors
        count_attention(q, k, 5)
        sums = torch.empty_like(statistics), torch.empty_like(q, dtype=torch.float32)
        heads = q.shape[1]
        gradients = [q.new_empty(t.shape[0], heads, *t.shape[2:]) for t in (q, k, v)]
        del sums
        for i, t in ((1, k), (2, v)):
            if t.shape[1] != heads:
                gradients[i] = gradients[i].unflatten(1, (t.shape[1], -1)).sum(2)
        return tuple(gradients)


def attend(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    """Replace torch's attention."""
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (t.to(torch.get_autocast_dtype("cpu")) for t in (q, k, v))
    return FusedAttention.apply(q, k, v)


class FusedDropout(torch.autograd.Function):
    """Keep what a fused kernel keeps: a mask of one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.empty_like(gradient)


def drop(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Replace torch's dropout."""
    return FusedDropout.apply(x) if p and training else x


def in_fp32(function: Any) -> Any:
    """Apply CUDA's autocast to a function, in the recomputation of blocks, too."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        low = (torch.bfloat16, torch.float16)
        args = tuple(a.float() if torch.is_tensor(a) and a.dtype in low else a for a in args)
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return compute


def dequantize(weight: Any, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    result = weight.new_empty(shape, dtype=dtype)
    TRACKER.count("dequantize", weight, result)
    return result


class Nf4Product(torch.autograd.Function):
    """Multiply by a 4-bit weight as bitsandbytes does, which keeps the weight in 4 bits only."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, shape: tuple[int, int]) -> Any:
        ctx.weight, ctx.shape = weight, shape
        return x @ dequantize(weight, shape, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient @ dequantize(ctx.weight, ctx.shape, gradient.dtype), None, None


TRACKER = Tracker()


def pretend_gpu() -> None:
    """Let the packages take the paths that they take on a GPU."""
    import transformers.masking_utils

    # Otherwise fake tensors look like a compiler's, and masks are built that no run has.
    transformers.masking_utils.is_tracing = lambda *_: False
    torch.nn.Module._apply = convert
    F.scaled_dot_product_attention = attend
    F.dropout = drop
    for owner, names in FP32:
        for name in names.split():
            setattr(owner, name, in_fp32(getattr(owner, name)))
    is_autocast_enabled = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda *_: is_autocast_enabled("cpu")  # PEFT asks for CUDA
    try:
        import triton
    except ModuleNotFoundError:
        return

    def skip_kernel(_: Any, *args: Any, **__: Any) -> None:
        TRACKER.count("kernel_", args, None)  # which may write any of its arguments

    triton.runtime.jit.JITFunction.run = skip_kernel
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


def build_model(question: dict[str, Any], num_layers: int) -> Any:
    """Return the model with `num_layers` blocks, on fake tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    document = dict(question["config"])
    config = AutoConfig.for_model(document.pop("model_type"), **document)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    dtype = getattr(torch, question["dtype"])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, module in model.named_modules():
        if any(part in name for part in question.get("fp32", ())):
            module.float()
    model.tie_weights()
    if question["nf4"]:
        quantize(model, **question["nf4"])
    return model


def quantize(model: Any, double: bool) -> None:
    """Replace the matrices of the blocks by 4-bit matrices of bitsandbytes."""
    from bitsandbytes.nn import Linear4bit

    def forward(self: Any, x: Any) -> Any:
        shape = (self.out_features, self.in_features)
        return Nf4Product.apply(x.to(torch.bfloat16), self.weight, shape).to(x.dtype)

    Linear4bit.forward = forward
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and layer is not model.get_output_embeddings():
            layer.__class__ = Linear4bit
            layer.compute_dtype = torch.bfloat16
            # One scale for 64 weights. With double quantization, it has 8 bits, and 256 share one.
            num_weights = layer.weight.numel()
            scale_bytes = num_weights // 64 * (1 + 4 / 256 if double else 4)
            packed = torch.empty(num_weights // 2 + int(scale_bytes), dtype=torch.uint8)
            layer.weight = torch.nn.Parameter(packed, requires_grad=False)
            layer.weight.compress_statistics, layer.weight.quant_type = double, "nf4"
    model.is_loaded_in_4bit = True


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
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        trainer_class = trl.SFTTrainer
        for name, module in list(sys.modules.items()):
            if name.startswith("trl.") and hasattr(module, "_use_triton"):
                module._use_triton = lambda device: True
                module._addmm_fp32 = lambda *_: None  # without the copies that a CPU needs
        words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        return trainer_class(
            model,
            trl.SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True}),
            train_dataset=Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a"),
            peft_config=lora,
        )
    from transformers import Trainer, TrainingArguments

    if lora:
        from peft import get_peft_model, prepare_model_for_kbit_training

        if question["nf4"] and question["prepare"]:
            checkpoints = bool(arguments.get("gradient_checkpointing"))
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpoints)
        model = get_peft_model(model, lora)
        if arguments.get("gradient_checkpointing"):
            model.enable_input_require_grads()
    return Trainer(model, TrainingArguments(**arguments))


def watch_parts(model: Any, num_layers: int) -> None:
    """Let the tracker tell the parts of a step apart. What lives in each is linear in the number of
    blocks, but which part needs most depends on this number."""
    blocks = next(
        m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers
    )
    # The gradient of a block's output comes before the block's backward pass.
    parts = {num_layers - 1: "upper blocks", num_layers // 2 - 1: "lower blocks", 0: "first block"}

    def watch(part: str, output: Any) -> None:
        tensor = tree_leaves(output)[0]
        if tensor.requires_grad:
            tensor.register_hook(lambda _: TRACKER.begin(part))

    for index, part in parts.items():
        blocks[index].register_forward_hook(lambda _, __, output, part=part: watch(part, output))
    model.register_forward_pre_hook(lambda *_: TRACKER.begin("forward"))


def trace(question: dict[str, Any], num_layers: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the bytes of a step with `num_layers` blocks, and the arguments in effect."""
    gc.collect()  # a trainer is in cycles of references
    with (
        tempfile.TemporaryDirectory() as folder,
        FakeTensorMode(allow_non_fake_inputs=True),
        TRACKER,
    ):
        before = TRACKER.live
        model = build_model(question, num_layers)
        watch_parts(model, num_layers)
        trainer = build_trainer(question, model, folder)
        args = trainer.args
        length = question["length"] or args.max_length
        ids = torch.zeros(args.per_device_train_batch_size, length, dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        trainer.get_train_dataloader = lambda: [inputs] * 2 * args.gradient_accumulation_steps
        weights = TRACKER.live - before
        optimizer = trainer.create_optimizer()
        for group in optimizer.param_groups:
            group["foreach"] = not group.get("fused")  # as on a GPU
        optimizer.register_step_pre_hook(lambda *_: TRACKER.begin("optimizer"))
        TRACKER.peaks.clear()
        TRACKER.work = dict.fromkeys(TRACKER.work, 0)
        trainer.train()
        states = [t for state in optimizer.state.values() for t in state.values()]
        sizes = {
            "weights": weights,
            "optimizer": sum(t.numel() * t.element_size() for t in states if torch.is_tensor(t)),
        }
        sizes |= {key: number // args.max_steps for key, number in TRACKER.work.items()}
        sizes |= {f"peak: {part}": peak - before for part, peak in TRACKER.peaks.items()}
    names = ("gradient_checkpointing", "bf16", "optim")
    used = {"batch_size": ids.shape[0], "max_length": length}
    used["grad_accum_steps"] = args.gradient_accumulation_steps
    if question["lora"] and not question["lora"]["target_modules"]:  # PEFT has chosen
        used["lora_targets"] = ",".join(sorted(trainer.model.peft_config["default"].target_modules))
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
        few = -(-4 // period(kinds)) * period(kinds)  # at least 4
        few += getattr(config, "first_k_dense_replace", None) or 0
        if total <= 2 * few:
            sizes, used = trace(question, total)
        else:
            # Every block of a kind needs the same, so two depths determine all.
            less, used = trace(question, few)
            more, _ = trace(question, 2 * few)
            share = (total - few) / few
            sizes = {k: round(less[k] + share * (more[k] - less[k])) for k in more}
        sizes["peak"] = max(size for key, size in sizes.items() if key.startswith("peak"))
    installed = {
        d.metadata["Name"].lower().replace("_", "-") for d in importlib.metadata.distributions()
    }
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    print(json.dumps({"sizes": sizes, "used": used, "versions": versions}))


if __name__ == "__main__":
    main()
