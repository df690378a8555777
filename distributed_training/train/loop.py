"""Run the training loop and collect the results of its steps. The loop calls an `Engine` and does
not depend on the strategy."""

import math
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from distributed_training.checkpoint import export
from distributed_training.checkpoint.saver import Saver
from distributed_training.checkpoint.trained import trained_model_of_run
from distributed_training.data.pieces import ASSISTANT
from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import Engine, StepResult
from distributed_training.models.decoder import EXPERT_ENDS
from distributed_training.models.preference import METRICS
from distributed_training.parallel.agree import broadcast_from_rank_0, gather
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.records import metrics
from distributed_training.records import record as records
from distributed_training.records.display import Display, short_path
from distributed_training.records.folder import stamp_unfinished
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import RunError, UserError
from distributed_training.supervise.process import STOP_SIGNALS, handle_signals
from distributed_training.train.around_steps import Checkpoints, Recorder, keep_best, stop_early

FLUSH_EVERY_S = 1.0
DISK_INTERVAL_S = 1.0  # between two looks at files that are being written
# With on_nonfinite=skip, a run stops if more than this many steps in a row are skipped, because the
# cause is then not a single batch.
MAX_CONSECUTIVE_SKIPS = 10
GENERAL_QUESTION = {"role": "user", "content": "What is the capital of France?"}
IGNORE_SIGNALS_S = 10.0  # Signals within this time after the first one are ignored.


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """Return the learning rate for step `step` (0-based) of a run with `num_steps` steps. A linear
    warm-up is followed by the schedule `lr_schedule`."""
    peak = config.learning_rate
    warmup = config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.lr_schedule]


def has_nonfinite_gradients(result: StepResult, config: RunConfig) -> bool:
    """Return whether a step has non-finite gradients, according to this rank's result.

    An fp16 overflow does not count, because the engine skips the update and lowers the loss scale.
    If gradients are non-finite, an engine may report a norm of -1."""
    if result.skipped:
        return config.precision != "fp16"
    return result.grad_norm is not None and not 0 <= float(result.grad_norm) < math.inf


class StepResults:
    """Results of steps, which stay on the device until `flush`, so that the host does not wait for
    each step. All ranks must call each method that is not a property."""

    def __init__(
        self, plan: Plan, history: records.History, engine: Engine, device: torch.device
    ) -> None:
        self.config = plan.config
        self.names = ("loss", *(METRICS if plan.config.has_pairs else ()))  # of the loss's sums
        self.can_skip = plan.strategy.traits.averages_with_torch
        self.history = history
        self.engine = engine
        buffers = engine.model.named_buffers()
        # Index of a block in this rank's stages -> its buffer EXPERT_ENDS
        self.expert_ends = {
            int(name.partition("blocks.")[2].partition(".")[0]): ends
            for name, ends in buffers
            if name.endswith(EXPERT_ENDS)
        }
        stacks = (stack for kind in plan.size.kinds for stack in kind.stacks.values())
        self.num_experts = max((experts for experts, *_ in stacks), default=0)
        self.num_layers = plan.size.num_layers
        self.first_step = 0  # first step of this process, which includes compilation
        self.timer = metrics.StepTimer(device)
        self._pending: list[tuple[dict[str, Any], StepResult]] = []
        self._flushed_at = 0.0

    @property
    def flush_is_due(self) -> bool:
        """True if this rank's clock asks for a `flush` after this step."""
        waited_s = time.monotonic() - self._flushed_at
        return self.history.step == self.first_step or waited_s >= FLUSH_EVERY_S

    def restart(self) -> None:
        """Begin the next step now. The time since the last step is not attributed to any step."""
        self.timer.restart()
        self._flushed_at = time.monotonic()

    def add(self, row: dict[str, Any], result: StepResult) -> None:
        """Keep the result of a step that has just ended. `row` is the beginning of its row in
        metrics.jsonl."""
        self._pending.append((row, result))
        self.timer.mark()
        self.first_step = self.first_step or row["step"]

    def flush(self) -> tuple[list[dict[str, Any]], str | None]:
        """Sum the pending losses over the ranks, and add them to the history. Return the new rows
        of metrics.jsonl, and a description of the last row if its loss or a gradient is not finite
        and `on_nonfinite` does not allow the step to be skipped."""
        self._flushed_at = time.monotonic()
        pending = self._pending
        self._pending = []
        if not pending:
            return [], None
        losses = torch.stack([result.loss_sum for _, result in pending]).double().cpu()
        losses = losses.view(len(pending), -1) + torch.zeros(len(self.names))
        nonfinite = torch.tensor(
            [has_nonfinite_gradients(result, self.config) for _, result in pending]
        )
        sums = torch.cat([losses, nonfinite[:, None].double()], 1)
        dist.all_reduce(sums)
        rows = []
        fault = None
        for (row, result), (*totals, num_nonfinite), seconds in zip(
            pending, sums.tolist(), self.timer.durations_s(), strict=True
        ):
            engine_skipped = bool(result.skipped)
            may_skip = self.config.on_nonfinite == "skip"
            grad_norm = None if engine_skipped else result.grad_norm
            row |= {
                "skipped": engine_skipped or bool(num_nonfinite and may_skip),
                **{n: x / row["num_targets"] for n, x in zip(self.names, totals, strict=True)},
                "grad_norm": None if grad_norm is None else float(grad_norm),
                "step_time_s": seconds,
                # The clock of a virtual machine may not advance between two readings.
                "tokens_per_s": row["num_tokens"] / seconds if seconds > 0 else None,
            }
            if row["skipped"]:
                self.history.skipped_steps.append(row["step"])
            rows.append(row)
            self.history.loss_curve.append((row["step"], row["loss"]))
            if num_nonfinite or not math.isfinite(row["loss"]):
                fault = self.describe(row["step"], result)
                if fault is not None:
                    break  # The later steps ran on corrupted weights.
        if self.num_experts:
            self.history.expert_load = self._measure_expert_load()
            rows[-1]["expert_load"] = self.history.expert_load
        return rows, fault

    def _measure_expert_load(self) -> float:
        """Return the tokens of the most loaded expert, relative to the mean of its layer, in the
        latest micro-batch of all ranks. All ranks must call this method."""
        ends = torch.zeros(self.num_layers, self.num_experts, dtype=torch.int32)
        for layer, own_ends in self.expert_ends.items():
            ends[layer] = own_ends.cpu()
        dist.all_reduce(ends)
        counts = F.pad(ends[ends[:, -1] > 0], (1, 0)).diff()
        return float(counts.max() / counts.float().mean())  # layers have equally many rows

    def describe(self, step: int, result: StepResult) -> str | None:
        """Return text that names the ranks with a non-finite loss and the first non-finite gradient
        in model order. Return None if the step was skipped (`on_nonfinite=skip`) and the run can
        continue. The run stops if more than MAX_CONSECUTIVE_SKIPS consecutive steps are skipped.
        All ranks must call this method."""
        may_skip = self.config.on_nonfinite == "skip"
        skipped = set(self.history.skipped_steps)
        too_many = skipped.issuperset(range(step - MAX_CONSECUTIVE_SKIPS, step))
        if may_skip and step in skipped and not too_many:
            return None
        faults = []
        if not result.loss_sum.isfinite().all():
            faults.append("the loss is not finite")
        if result.param_grad_norms is not None and not result.param_grad_norms.isfinite().all():
            first_index = result.param_grad_norms.isfinite().logical_not().nonzero()[0]
            name = self.engine.gradient_names[int(first_index)]
            faults.append(f"the first non-finite gradient is {name}")
        reasons = []
        for rank, faults_of_rank in enumerate(gather(faults)):
            reasons += [f"{fault} on rank {rank}" for fault in faults_of_rank]
        what = f"step {step}: {', and '.join(reasons[:4]) or 'the gradients are not finite'}"
        if may_skip and too_many:
            what += f", as in the previous {MAX_CONSECUTIVE_SKIPS} steps"
        return what

    def build_error(self, what: str) -> RunError:
        """Return the error for a step with a non-finite loss or gradient, which `what`
        describes."""
        fix = "lower learning_rate, or look for a bad sample"
        if self.can_skip and self.config.on_nonfinite != "skip":
            fix = "lower learning_rate. To continue and skip such steps, repeat the command with "
            fix += "--resume auto --on_nonfinite skip"
        return RunError(what, fix=fix)


@dataclass
class StopSignal:
    """First signal that asks this process to stop."""

    display: Display
    number: int = 0  # 0 until a signal arrives
    previous_handlers: dict[signal.Signals, Any] = field(default_factory=dict)
    received_at: float = 0.0

    def handle(self, signum: int, _frame: Any) -> None:
        """Remember the first signal. If another signal arrives more than IGNORE_SIGNALS_S seconds
        later, leave it to the handler that was set before training.

        Launchers forward Ctrl-C and then send SIGTERM immediately. Therefore, only a later signal
        means that the user does not want to wait."""
        now = time.monotonic()
        if not self.number:
            self.number = signum
            self.received_at = now
            self.display.say_in_handler(f"received {signal.Signals(signum).name}; stopping")
        elif now - self.received_at > IGNORE_SIGNALS_S:
            signal.signal(signum, self.previous_handlers[signal.Signals(signum)])
            signal.raise_signal(signum)


@dataclass
class Trainer:
    """Training loop with evaluations and checkpoints between the steps of the engine.

    The history is the same on every rank, except for times. Callbacks record, print and track
    it. All ranks must call each method that is not a property."""

    engine: Engine
    plan: Plan
    topology: Topology
    data: Data
    sampler: Sampler
    display: Display
    recorder: Recorder
    history: records.History
    set_activity: Callable[[str], None]  # publishes the current activity (start/progress.py)
    profiler: torch.profiler.profile | None = None
    sample: str | None = None  # text that the trained model generated
    stop_signum: int = 0  # number of the signal that stops all ranks, or 0

    def __post_init__(self) -> None:
        assert self.plan.num_steps is not None, "the launching process counts the steps"
        self.num_steps = self.plan.num_steps
        self.peak_memory = metrics.PeakMemory(self.topology.device)
        self.checkpoints = Checkpoints(Saver(self.plan, self.topology))
        self.results = StepResults(self.plan, self.history, self.engine, self.topology.device)
        self.stop_signal = StopSignal(self.display)

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.history.step

    @property
    def epoch_ends(self) -> bool:
        """Whether the latest step was the last one of an epoch or of the run."""
        return self.step == self.num_steps or self.step % self.sampler.steps_per_epoch == 0

    @property
    def evaluation_is_due(self) -> bool:
        eval_every = self.plan.config.eval_every
        is_due = self.epoch_ends or (eval_every > 0 and self.step % eval_every == 0)
        return is_due and self.step not in [row["step"] for row in self.history.evaluations]

    def run(self) -> int:
        """Train to the end or until a signal arrives. Return the number of the signal that stopped
        the run, or 0 if there is none."""
        if self.step == 0 and self.plan.weights_dir is not None:  # random weights write nothing
            self._generate_sample("before")
        is_done = False
        handlers = dict.fromkeys(STOP_SIGNALS, self.stop_signal.handle)
        with handle_signals(handlers) as previous_handlers:
            self.stop_signal.previous_handlers = previous_handlers
            if self.profiler is not None:
                self.profiler.start()
            evaluations = self.history.evaluations
            # The run may have been killed after this evaluation, such as during an export.
            if evaluations and evaluations[-1]["step"] == self.step:
                self._act_on_evaluation(evaluations[-1])
            # Before the first step, and where the resumed run was killed before it evaluated
            if self.evaluation_is_due:
                self._evaluate()
            self._begin_measuring()
            while self.step < self.num_steps and not self.stop_signum:
                self._advance()
            self.peak_memory.end()
            if self.profiler is not None:
                self.profiler.stop()
            if self.step == self.num_steps:
                is_done = self._export_and_sample()
            self.checkpoints.finish(self)
        return 0 if is_done else self.stop_signum

    def _advance(self) -> None:
        """Run one step, then perform the tasks that are due: save and evaluate."""
        self._run_step()
        # Only rank 0's clock decides when to flush. If a save has ended on any rank, all finish it.
        write = self.checkpoints.saver.pending_write
        flush_is_due, save_has_ended = self._vote(
            self.topology.rank == 0 and self.results.flush_is_due,
            write is not None and write.done(),
        )
        if save_has_ended:
            self.checkpoints.finish(self)
        pause_is_due = self.checkpoints.is_due(self) or self.evaluation_is_due
        if flush_is_due or self.stop_signum or pause_is_due:
            self._flush()  # first, so that no bad step is saved or evaluated
        if pause_is_due:
            self.peak_memory.end()
            # Save before evaluating, so that a run that is killed in the evaluation loses no step.
            self.checkpoints.save_if_due(self)
            if self.evaluation_is_due:
                self._evaluate()
            self.checkpoints.save_if_due(self)  # if a signal arrived, or the run stops early
            self._begin_measuring()

    def _run_step(self) -> None:
        """Run one optimizer step. The results of the step stay on the device until `_flush`."""
        self.set_activity(f"step {self.step + 1}")
        rate = learning_rate(self.plan.config, self.step, self.num_steps)
        self.engine.set_learning_rate(rate)
        batch = self.sampler.step_batch(self.data.train, self.step)
        row = {
            "step": self.step + 1,
            "epoch": self.step // self.sampler.steps_per_epoch,
            "learning_rate": rate,
            "num_tokens": batch.num_tokens,
            "num_targets": batch.num_targets,
        }
        self.results.add(row, self.engine.train_step(batch))
        self.history.step += 1
        if self.profiler is not None:
            self.profiler.step()

    def _vote(self, *flags: bool) -> list[bool]:
        """Agree with the other ranks on `stop_signum`, because signals may reach ranks at different
        steps. Return for each flag whether it is set on any rank. The exchanged integers are on the
        CPU, so GPUs do not wait for the exchange."""
        votes = torch.tensor([self.stop_signal.number, *map(int, flags)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        self.stop_signum, *agreed = votes.tolist()
        return [flag > 0 for flag in agreed]

    def _should_stop(self) -> bool:
        """Agree with the other ranks whether a signal stops the run. After the last step, a run
        without checkpoints does not stop, because it could not be continued."""
        if self.step == self.num_steps and self.plan.config.checkpoint_every == 0:
            return False
        self._vote()
        return self.stop_signum > 0

    def _flush(self) -> None:
        """Collect the results of the pending steps, and record them.

        Raises RunError on all ranks at the first step with a non-finite loss or gradient,
        unless `on_nonfinite` allows the step to be skipped."""
        rows, fault = self.results.flush()
        if rows:
            self.recorder.add_steps(self, rows)
        if fault is not None:
            step = rows[-1]["step"]
            self.checkpoints.finish(self)
            self.history.truncate(step)
            self.recorder.store(self.history)
            raise self.results.build_error(fault)

    def _evaluate(self) -> None:
        """Compute loss, perplexity and bits per byte on the validation samples. If a signal arrives
        meanwhile, return at once: a resumed run evaluates first."""
        samples = self.data.validation
        names = self.results.names
        totals = torch.zeros(len(names), dtype=torch.float64)
        scale = samples.scale_likelihood(np.arange(len(samples)))
        for indices in self.sampler.eval_indices(len(samples)):
            if self._should_stop():
                return
            self.set_activity(f"the evaluation after step {self.step}")
            totals += self.engine.eval_step(*samples.batch(indices, scale)).double().cpu()
        dist.all_reduce(totals)
        num_targets = int(samples.num_targets.sum())
        row = {"step": self.step, "num_targets": num_targets}
        row |= dict(zip(names, (totals / num_targets).tolist(), strict=True))
        if not self.plan.config.has_pairs:
            num_bytes = samples.count_bytes(self.data.bytes_per_token)
            row |= metrics.evaluation(float(totals), num_targets, num_bytes)
        self.history.evaluations.append(row)
        self.recorder.add_evaluation(self, row)
        self._act_on_evaluation(row)

    def _act_on_evaluation(self, row: dict[str, Any]) -> None:
        keep_best(self, row)
        stop_early(self)

    def _export_and_sample(self) -> bool:
        """Export the model while the last checkpoint is being written, and generate a sample.
        Return False if a signal arrived before the export. A later signal only ends the sample."""
        if self._should_stop():
            return False
        if self.plan.config.export:
            last = self.plan.run_dir / records.LAST
            self.export(last, "the export")
            self.display.say(f"exported {short_path(last)} (Hugging Face format)")
        self.set_activity("the sample after training")
        self.sample = self._generate_sample("after")
        return True

    def _generate_sample(self, when: str) -> str | None:
        """Generate, print and return text that continues the prompts. Return None if there is no
        prompt, if the layout splits the model, if the chat template rejects a prompt, or if a
        signal arrives."""
        topology = self.topology
        if self.plan.config.generate is None:
            return None
        if topology.dp_size < topology.world_size:
            if when == "after":
                self.display.note("no sample is generated, because the layout splits the model")
            return None
        tokenizer = self.data.tokenizer
        is_chat = self.data.is_chat
        # Only rank 0 tokenizes, because many tokenizers import transformers.
        encoded = None
        if topology.rank == 0:
            try:
                stop_ids = export.find_stop_ids(tokenizer, is_chat, self.plan.weights_dir)
                encoded = self._encode_prompts(), stop_ids
            except UserError as error:  # Some chat templates require a system message.
                self.display.note(f"no sample is generated: {error}")
        encoded = broadcast_from_rank_0(encoded)
        if encoded is None:
            return None
        prompts, eos_ids = encoded
        texts = []
        for prompt_ids in prompts:
            new_ids = []
            # Rank 0 chooses each token. All ranks must continue to the end of the text, because
            # engines with sharded parameters gather them from all ranks.
            for token_id in export.generate_ids(
                self.engine.logits,
                prompt_ids,
                num_tokens=60,
                context=self.plan.size.context_length,
                seed=self.plan.config.seed,
                temperature=export.default_temperature(is_chat),
                eos_ids=eos_ids,
                broadcast_choice=lambda choice: dist.broadcast(choice, src=0),
            ):
                if self._should_stop():
                    return None
                new_ids.append(token_id)
            if topology.rank > 0:
                continue
            if is_chat:
                question = tokenizer.decode_question(prompt_ids)
                answer = tokenizer.decode(new_ids).strip()
                texts.append(f"user: {question}\n{ASSISTANT}: {answer}")
            else:
                texts.append(tokenizer.decode([*prompt_ids, *new_ids]))
        sample = str(broadcast_from_rank_0("\n".join(texts)))
        self.display.sample(f"sample {when} training:", sample)
        return sample

    def _encode_prompts(self) -> list[list[int]]:
        """Return the ids of the prompts for samples.

        The prompt is that of CONFIG's key `generate`. For conversations, it is a user message. If
        the model is trained on answers and the user did not set the key, the prompts are those of
        the first validation samples, those of the first dataset first. With pretrained weights, a
        general question follows, because a model can forget what it knew while its validation loss
        falls."""
        tokenizer = self.data.tokenizer
        held_out = self.data.validation
        is_chat = self.data.is_chat
        prompt = str(self.plan.config.generate)
        if held_out.loss_mask is not None and not self.plan.requested.is_set("generate"):
            prompts = []
            parts = held_out.owners.argsort(kind="stable")
            for part in parts[: 2 if is_chat else 1]:
                ids, mask = next(held_out.documents([part]))
                prompts.append(ids[: mask.argmax()].tolist())
            if is_chat and self.plan.weights_dir is not None:
                prompts.append(tokenizer.encode_chat_prompt([GENERAL_QUESTION]))
            return prompts
        if is_chat:
            return [tokenizer.encode_chat_prompt([{"role": "user", "content": prompt}])]
        return [tokenizer.encode_prompt(prompt)]

    def export(self, folder: Path, activity: str) -> None:
        """Gather the weights on rank 0, and write the model to `folder` there. `activity` is
        published."""
        self.set_activity(activity)
        state = self.engine.full_state()

        def write() -> None:
            if state is not None:
                trained = trained_model_of_run(
                    self.plan, state, state.__getitem__, self.engine.base_fingerprint
                )
                tokenizer, is_chat = self.data.tokenizer, self.data.is_chat
                export.write_folder(trained, self.plan, tokenizer, is_chat, folder)

        with ThreadPoolExecutor(1) as pool:
            pending_write = pool.submit(write)
            self.wait_for_disk(activity, pending_write)
        pending_write.result()

    def wait_for_disk(self, activity: str, write: Future[Any]) -> None:
        """Wait until `write` has ended on all ranks. However slow the disk is, `activity` counts as
        progress as long as a file changes, and no collective waits long enough to time out."""
        stamps = None
        is_writing = True
        while is_writing:
            earlier, stamps = stamps, stamp_unfinished(self.plan.run_dir)
            is_writing, has_progress = self._vote(not write.done(), stamps != earlier)
            if has_progress:
                self.set_activity(activity)
            wait([write], timeout=DISK_INTERVAL_S)

    def _begin_measuring(self) -> None:
        self.peak_memory.begin()
        self.results.restart()

    def say(self, text: str) -> None:
        """Print a line that begins with the step."""
        self.display.say(f"step {self.step:>6}/{self.num_steps}  {text}")
