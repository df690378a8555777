"""Define the functions that the processes of a parity test call.

tests.pool calls these functions on every rank. Each public function except `exchange` takes
{"cases": {name: CONFIG values}, ...} and returns {name: results}. Each case is one training run,
which results/lab/harness.py builds."""

import contextlib
import hashlib
import itertools
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distributed_training.checkpoint.saver import (
    load_checkpoint,
    load_rank_local_parts,
    rank_local_parts,
)
from distributed_training.data.samples import IGNORE_INDEX, StepBatch
from distributed_training.engines import native
from distributed_training.engines.base import Engine
from distributed_training.models import ModelSpec, attention, decoder
from distributed_training.models.decoder import KVCache
from distributed_training.models.gpt2 import model as gpt2
from distributed_training.parallel import lora, private
from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import process_group
from distributed_training.parallel.tensor_files import TensorFiles, write_parts
from distributed_training.plan.plan import Draft
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import load_strategy, strategy_options
from distributed_training.start import worker
from distributed_training.start.ranks import current_process
from distributed_training.train.loop import learning_rate
from distributed_training.train.run import build_engine
from results.lab.harness import Run, each_accepted_run, open_group
from tests.support import save_now, start_test_record

# The length of the prompt is not a multiple of any number of processes in these tests.
PROMPT = torch.tensor([[5, 700, 2047, 9, 9]])


def all_cases(arguments: dict[str, Any], use: Any) -> dict[str, Any]:
    """Return the result of `use` for each case on this rank."""
    # Use deterministic kernels if the environment requests them.
    torch.use_deterministic_algorithms("CUBLAS_WORKSPACE_CONFIG" in os.environ, warn_only=True)
    results, results_of_rank = {}, list[Any]()
    with open_group() as group:
        for name, _ in each_accepted_run(
            group, arguments["cases"], lambda run: results_of_rank.append(use(run))
        ):
            results[name] = results_of_rank.pop()
    return results


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train for `steps` steps. Return losses (means over the targets of the global batch), gradient
    norms and the final full fp32 weights. Also return the evaluation loss on one global batch and
    the logits for PROMPT, both computed halfway through training."""
    return all_cases(arguments, lambda run: _train(run, arguments["steps"]))


def batches(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's micro-batches for each of the first `steps` steps."""
    steps = range(arguments["steps"])
    return all_cases(arguments, lambda run: [run.batch(step).micro_batches for step in steps])


def train_without_inductor(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train like `train`, but without Inductor's generated code, because compiling C++ takes
    seconds per kernel. Compiled functions are still traced, decomposed and partitioned as they
    would be for Inductor."""
    compile_with = torch.compile
    traced = {"backend": "aot_eager_decomp_partition"}
    torch.compile = lambda function, **options: compile_with(function, **options | traced)
    return train(arguments)


def _leave_rows_unwritten() -> list[list[bool]]:
    """Let grouped products leave NaN in the rows behind the last group, as memory may contain.
    Return a list that will contain, for each engine and try of a step, whether it is repeated."""
    multiply = torch.nn.functional.grouped_mm

    def grouped_mm(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        y = multiply(left, right, offs=offs)
        if right.dim() == 3:
            y[torch.arange(len(y)) >= offs[-1]] = torch.nan
        return y

    torch.nn.functional.grouped_mm = grouped_mm
    tries: list[list[bool]] = []
    seen = []
    enlarge = native.enlarge_buffers

    def record(exchanges: Any) -> bool:
        if not seen or seen[-1] is not exchanges:
            seen.append(exchanges)
            tries.append([])
        tries[-1].append(enlarge(exchanges))
        return tries[-1][-1]

    native.enlarge_buffers = record
    return tries


def train_with_unwritten_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train like `train`, but rows that no expert has multiplied contain NaN. The results
    contain `num_repeated`, the number of steps that were repeated with larger buffers."""
    tries = _leave_rows_unwritten()
    results = train(arguments)
    for result, tries_of_case in zip(results.values(), tries, strict=True):
        result["num_repeated"] = sum(tries_of_case)
    return results


def trace_with_unwritten_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train like `train_without_inductor`, but rows that no expert has multiplied contain NaN."""
    _leave_rows_unwritten()
    return train_without_inductor(arguments)


def train_with_a_block_twice(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train like `train`, but the first block runs twice, in place of the second."""
    build_meta_model = ModelSpec.build_meta_model

    def build_twice(spec: ModelSpec, **options: Any) -> Any:
        model = build_meta_model(spec, **options)
        model.blocks["1"] = model.blocks["0"]
        return model

    ModelSpec.build_meta_model = build_twice
    return train(arguments)


def train_with_shared_shards(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train like `train`, but FSDP copies frozen weights from the other ranks, as between GPUs of
    one machine. Here, each rank keeps copies of all shards."""

    handles = []

    class Handle:
        def __init__(self, shared: torch.Tensor, group_name: str) -> None:
            self.shared, self.group = shared, private.group_of_name(group_name)
            handles.append(self)

        def get_buffer(self, rank: int, size: tuple[int], dtype: torch.dtype) -> torch.Tensor:
            values = self.shared.clone().view(dtype).view(size)
            dist.broadcast(values, group=self.group, group_src=rank)
            return values

    private.symmetric_memory = SimpleNamespace(get_mem_pool=str, rendezvous=Handle)
    private._LARGE_BYTES = 1024
    torch.cuda.use_mem_pool = contextlib.nullcontext
    torch.cuda.synchronize = lambda: None
    Draft.shares_frozen_shards = property(lambda plan: plan.uses_fsdp)
    results = train(arguments)
    assert handles
    return results


def train_unpacked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train like `train`, but with each record of a packed block as a separate padded sample."""
    return all_cases(
        arguments, lambda run: _train(run, arguments["steps"], transform=_separate_records)
    )


def unpack_rows(micro_batch: tuple[np.ndarray, ...], padding_id: int) -> np.ndarray:
    """Return the inputs and targets of the documents in packed blocks as an int64 array of shape
    [2, documents, seq_len]. Each document is padded to the length of a block. `micro_batch` comes
    from `Samples.batch`."""
    inputs, targets, _, ends = micro_batch
    rows = []
    for *block, bounds in zip(inputs, targets, ends, strict=True):
        for start, end in itertools.pairwise([0, *np.unique(bounds).tolist()]):
            row = np.full((2, len(block[0])), IGNORE_INDEX)
            row[0] = padding_id
            row[:, : end - start] = [tokens[start:end] for tokens in block]
            rows.append(row)
    return np.stack(rows, axis=1)


def _separate_records(run: Run, batch: StepBatch) -> StepBatch:
    """Return the batch with one record per row, in the same number of micro-batches."""
    padding_id = run.data.tokenizer.eos_id
    rows = [tuple(unpack_rows(blocks, padding_id)) for blocks in batch.micro_batches]
    return replace(batch, micro_batches=rows)


def _train(
    run: Run, num_steps: int, steps: range | None = None, transform: Any = lambda _run, batch: batch
) -> dict[str, Any]:
    """Train for the given `steps` of a run with `num_steps` steps, by default for all of them.
    `transform` returns a replacement for the batch of each step."""
    losses, norms, answers = [], [], {}
    for step in range(num_steps) if steps is None else steps:
        run.engine.set_learning_rate(learning_rate(run.plan.config, step, num_steps))
        batch = transform(run, run.batch(step))
        if step == num_steps // 2:
            answers = _evaluate(run.engine, batch)
        result = run.engine.train_step(batch)
        losses.append(_mean_loss([result.loss_sum], batch))
        norms.append(float(result.grad_norm))
    state = run.engine.full_state()
    if state is not None:
        assert all(tensor.dtype is torch.float32 for tensor in state.values())
    return {"losses": losses, "grad_norms": norms, "state": state, **answers}


def _evaluate(engine: Engine, batch: Any) -> dict[str, Any]:
    """Return an engine's evaluation loss and, unless it splits the model, logits. Check that the
    evaluation does not change the training state."""
    weights_before = _own_weights(engine)
    evaluation = _mean_loss([engine.eval_step(*arrays) for arrays in batch.micro_batches], batch)
    answers = {"evaluation": evaluation}
    if engine.topology.tp * engine.topology.cp * engine.topology.pp == 1:
        answers["logits"] = _compute_logits(engine)
    is_equal = map(torch.equal, _own_weights(engine), weights_before)
    assert all(is_equal), "the evaluation changed the weights"
    return answers


def _own_weights(engine: Engine) -> list[torch.Tensor]:
    """Return copies of the weights that this rank would save."""
    parts = [part for part in engine.state_parts() if part.written_here]
    return [part.get().clone() for part in parts if part.name.startswith("weight/")]


def _compute_logits(engine: Engine) -> torch.Tensor:
    """Return an engine's logits. Check that all ranks agree, and that a cache changes nothing."""
    logits = engine.logits(PROMPT)
    # Pretrained models enlarge rounding errors: up to 1e-3 were seen for SmolLM2 in fp32. A cache
    # without the last token changes logits by 0.1 and more.
    tolerance = 0.01 if logits.dtype is torch.float32 else 0.05
    logits = logits.float().cpu()
    cache = KVCache()  # first a prompt, then single tokens
    half = PROMPT.shape[1] // 2
    chunks = [PROMPT[:, :half], *PROMPT[:, half:].split(1, dim=1)]
    cached_logits = torch.cat([engine.logits(chunk, cache) for chunk in chunks], dim=1)
    largest_error = tolerance * float(logits.abs().max())
    torch.testing.assert_close(cached_logits.float().cpu(), logits, rtol=0, atol=largest_error)
    rank_0_logits = logits.clone()
    dist.broadcast(rank_0_logits, src=0)
    torch.testing.assert_close(logits, rank_0_logits, msg="logits differ between ranks")
    return rank_0_logits


def _mean_loss(sums: list[torch.Tensor], batch: Any) -> float:
    """Return the mean loss over the global batch. `sums` contains the summed loss of each of this
    rank's micro-batches."""
    # With pairs of answers, sums of other values follow the loss.
    total = torch.stack([loss_sum.double().cpu().view(-1)[0] for loss_sum in sums]).sum()
    dist.all_reduce(total)
    return float(total) / batch.num_targets


def train_exactly(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train like `train`, and also return whether steps were replayed as a CUDA graph at the end.
    If "failing" is set, rank 0 synchronizes with the GPU during the capture, so that the capture
    fails."""

    def use(run: Run) -> dict[str, Any]:
        graph: Any = run.engine.step_graph  # type: ignore[attr-defined]
        step = graph.step

        def synchronizing_step(*tensors: torch.Tensor) -> Any:
            outputs = step(*tensors)
            if torch.cuda.is_current_stream_capturing() and dist.get_rank() == 0:
                outputs[0].item()
            return outputs

        if arguments.get("failing"):
            graph.step = synchronizing_step
        return {**_train(run, arguments["steps"]), "replayed": graph.graph is not None}

    return all_cases(arguments, use)


def resume(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compare uninterrupted and resumed training. Return four full states:

    - "straight": after uninterrupted training
    - "resumed": after training that was saved halfway and loaded into a new engine
    - "loaded": directly after a load
    - "kept": after further steps with a learning rate of 0"""
    return all_cases(arguments, lambda run: _resume(run, arguments["steps"]))


def _resume(run: Run, num_steps: int) -> dict[str, Any]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    path = Path(folder[0])

    def train_steps(steps: range) -> None:
        for step in steps:
            run.engine.train_step(run.batch(step))

    second_half = range(num_steps // 2, num_steps)
    train_steps(range(num_steps // 2))
    parts = [*run.engine.state_parts(), *rank_local_parts(run.engine, run.topology)]
    written_parts = [part for part in parts if part.written_here]
    write_parts(path / f"rank-{dist.get_rank():05d}", written_parts)
    counters = run.engine.counters()
    dist.barrier()
    train_steps(second_half)
    uninterrupted = run.engine.full_state()
    run.engine.close()
    run.engine = build_engine(run.plan, run.topology)
    saved = TensorFiles(sorted(path.iterdir()))
    # Load without the rank-private state, as if the number of processes had changed. With a
    # learning rate of 0, no weights may change.
    run.engine.load(saved, counters)
    run.engine.set_learning_rate(0.0)
    loaded = run.engine.full_state()
    train_steps(second_half)
    after_zero_rate = run.engine.full_state()
    run.engine.set_learning_rate(float(run.plan.config.learning_rate))
    run.engine.load(saved, counters)
    load_rank_local_parts(run.engine, saved, run.topology)
    train_steps(second_half)
    states = {"straight": uninterrupted, "resumed": run.engine.full_state()}
    return {**states, "loaded": loaded, "kept": after_zero_rate}


def save_halfway(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train for half of `steps`, then save a checkpoint. Return the run folder for each case."""

    def use(run: Run) -> str:
        step = arguments["steps"] // 2
        _train(run, arguments["steps"], range(step))
        if dist.get_rank() == 0:
            start_test_record(run.plan.run_dir).update(status="interrupted")
        plan, topology, fingerprint = run.plan, run.topology, run.data.fingerprint
        save_now(run.engine, plan, topology, step=step, data_fingerprint=fingerprint)
        return str(run.plan.run_dir)

    return all_cases(arguments, use)


def continue_training(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train like `train`, but from the checkpoint in each case's `resume` to step `steps`."""

    def use(run: Run) -> dict[str, Any]:
        assert any("is resharded" in note for note in run.plan.notes)
        load_arguments = (run.engine, run.plan, run.topology, run.data)
        step = load_checkpoint(run.plan.checkpoint, *load_arguments)
        return _train(run, arguments["steps"], range(step, arguments["steps"]))

    return all_cases(arguments, use)


DROPOUT_KINDS = {"dropout": "residual", "scaled_dot_product_attention": "attention"}


def _recording_functional(seen: dict[str, list[str]], kinds: dict[str, str]) -> Any:
    """Return a copy of torch.nn.functional in which the functions in `kinds` record the random
    generator's state before they draw numbers."""

    def record(name: str) -> Any:
        def recorded(*arguments: Any, **kwargs: Any) -> Any:
            if kwargs["dropout_p"] if name == "scaled_dot_product_attention" else arguments[2]:
                state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
                seen.setdefault(kinds[name], []).append(state)
            return getattr(torch.nn.functional, name)(*arguments, **kwargs)

        return recorded

    return SimpleNamespace(**vars(torch.nn.functional) | {name: record(name) for name in kinds})


def dropout_streams(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return, for each rank, lists with the keys "residual", "attention" and "adapter". Each entry
    of a list is a hash of the random number generator's state before one dropout in a training
    step. Equal states produce equal dropout masks."""
    seen: dict[str, list[str]] = {}
    attention.F = decoder.F = gpt2.F = _recording_functional(seen, DROPOUT_KINDS)
    lora.F = _recording_functional(seen, {"dropout": "adapter"})

    def step(run: Run) -> list[Any]:
        seen.clear()
        _train(run, 1)
        return gather(seen)

    return all_cases(arguments, step)


def exchange(arguments: dict[str, Any]) -> torch.Tensor:
    """Return the gradient of one matrix after the compressed exchange of each step. The result has
    shape [steps, rows, columns]. The argument "gradients" contains the gradients before the
    exchange, and has shape [processes, steps, rows, columns]."""
    options = strategy_options("compressed")(**arguments["options"])
    config = build_config({"strategy": "compressed"})
    engine = load_strategy(config).load_engine()
    process = current_process()
    assert process is not None
    store = worker.open_store(process, 60)
    with process_group(torch.device("cpu"), store, timeout_s=60):
        gradients = arguments["gradients"][dist.get_rank()]
        _, rows, columns = gradients.shape
        layer = torch.nn.Linear(columns, rows, bias=False)
        module = DistributedDataParallel(layer, bucket_cap_mb=2**20)

        def step(gradient: torch.Tensor) -> torch.Tensor:
            module.zero_grad()
            weight = module(torch.eye(columns)).t()
            (weight * gradient).sum().backward()
            assert layer.weight.grad is not None
            return layer.weight.grad.clone()

        step(torch.zeros(rows, columns))  # DDP fixes the order of its buckets in this step
        sys.modules[engine.__module__].apply_compression(module, options)
        return torch.stack([step(gradient) for gradient in gradients])
