"""Check answers to the exercises in lecture.ipynb. Orders are simulated, and gradients are compared
with the gradients of plain backpropagation.
"""

import numbers
import re
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import wraps
from typing import Any, NamedTuple

import torch
from pipedream_simple import number
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipedream.lecture.pictures import run
from pipedream.schedules.ops import Op, Schedule, build_from_orders, repeat
from pipedream.schedules.orders import build_schedule
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.measures import idle, peak_activations
from pipedream.train.models import build_stages, build_task
from pipedream.train.oracle import copy_weights, relative_difference, train
from pipedream.train.trainer import Gradients, StageTrainer, Weights


class WrongAnswer(Exception):
    """Exception that explains to the student why an answer is wrong."""


class Verdict(NamedTuple):
    """Result of an exercise, and the message to show."""

    solved: bool
    text: str

    def __repr__(self) -> str:
        return f"{'Right' if self.solved else 'Not solved yet'}: {self.text}"


def graded(check: Callable[..., str]) -> Callable[..., Verdict]:
    """Turn a check that returns a message or raises WrongAnswer into a check that returns a
    Verdict. Any other exception is also reported, because the answer is the student's code."""

    @wraps(check)
    def judge(*answers: Any) -> Verdict:
        try:
            return Verdict(True, check(*answers))
        except WrongAnswer as wrong:
            return Verdict(False, str(wrong))
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            return Verdict(False, f"your code raises {type(error).__name__}: {text}")

    return judge


OrderOf = Callable[[int, int, int], Sequence[str]]  # (p, m, rank) -> operations, such as "F0"


@graded
def check_microbatches(needed: Callable[[int, int], float]) -> str:
    """Check exercise 1: the smallest number of microbatches for which the idle share of p ranks is
    at most a given percentage."""
    sizes = ((4, 50), (4, 20), (2, 10), (8, 30), (3, 1), (1, 5))
    for p, percent in sizes:
        answer = needed(p, percent)
        # numbers.Real includes numpy's numbers
        if not isinstance(answer, numbers.Real) or answer != int(answer) or answer < 1:
            returned = f"microbatches_needed({p}, {percent}) returns {answer!r}"
            raise WrongAnswer(f"{returned}, which is not a whole number of 1 or more")
        m = int(answer)
        limit = Fraction(percent, 100)
        case = f"for microbatches_needed({p}, {percent}) your answer is {m}"
        share = idle(run(build_schedule("gpipe", p, m))).makespan_fraction
        if share > limit:
            raise WrongAnswer(
                f"{case}. Then {float(share):.1%} of the time is idle, which is more than "
                f"{percent}%."
            )
        fewer = build_schedule("gpipe", p, max(1, m - 1))
        if m > 1 and idle(run(fewer)).makespan_fraction <= limit:
            raise WrongAnswer(f"{case}. That is enough, but so is a smaller number.")
    return f"your numbers agree with the simulator for {len(sizes)} inputs."


@graded
def check_one_f_one_b(order: OrderOf) -> str:
    """Check exercise 4: the order of one rank under 1F1B."""
    for p, m in ((4, 8), (2, 5), (4, 2), (3, 3)):
        schedule = _build_answer(order, p, m, "FB")
        case = f"with p={p} and m={m},"
        for rank, held in enumerate(peak_activations(schedule)):
            if held > min(m, p - rank):
                raise WrongAnswer(
                    f"{case} rank {rank} holds {held} microbatches at a time, but "
                    f"{min(m, p - rank)} would be enough. When can it run its first backward pass?"
                )
        best = build_schedule("1f1b", p, m)
        _check_time(schedule, best, case, "A rank waits although it could run a forward pass.")
    return "as fast as GPipe, with min(m, p - rank) microbatches in memory."


@graded
def check_batches(batches: Callable[[int, int, int], Schedule]) -> str:
    """Check exercise 5: several batches under 1F1B, each using the weights that the previous batch
    produced."""
    for p, m, num_batches in ((4, 4, 2), (3, 5, 3)):
        schedule = batches(p, m, num_batches)
        if not isinstance(schedule, Schedule):
            raise WrongAnswer("batches must return a Schedule")
        microbatches = sorted({op.microbatch for op in schedule.ops()})
        if microbatches != list(range(m * num_batches)):
            raise WrongAnswer(f"{num_batches} batches of {m} are {m * num_batches} microbatches")
        for stage, use in weight_use(schedule, POLICIES["flush"], m).items():
            for i, version in sorted(use.forward.items()):
                if version != i // m:
                    raise WrongAnswer(
                        f"with p={p} and m={m}, stage {stage} runs F{i}, of batch {i // m}, with "
                        f"version {version} of its weights. One GPU would use version {i // m}: "
                        f"the update of batch {i // m - 1} has to come first."
                    )
        case = f"with p={p} and m={m}, every batch sees the right weights, but"
        best = repeat(build_schedule("1f1b", p, m), num_batches)
        _check_time(schedule, best, case, "Keep 1F1B inside a batch.")
        if peak_activations(schedule) != peak_activations(best):
            raise WrongAnswer(f"{case} ranks hold more than under 1F1B. Keep 1F1B inside a batch.")
    return "every batch starts from the weights after the previous batch."


@graded
def check_zero_bubble(order: OrderOf) -> str:
    """Check exercise 8: an order that splits the backward pass into I and W, and runs W in the
    rank's idle time."""
    for p, m in ((4, 8), (3, 6), (2, 4)):
        schedule = _build_answer(order, p, m, "FIW")
        case = f"with p={p} and m={m},"
        for rank, held in enumerate(peak_activations(schedule)):
            if held > min(m, p):
                raise WrongAnswer(
                    f"{case} rank {rank} holds {held} microbatches, more than {min(m, p)}. A "
                    "microbatch stays in memory until its W is done, so delay W for less time."
                )
        hint = "A rank idles although it could run a W, for which no other rank waits."
        _check_time(schedule, build_schedule("zb-h1", p, m), case, hint)
    return "as short as ZB-H1, in 1F1B's memory."


def _check_time(schedule: Schedule, best: Schedule, case: str, hint: str) -> None:
    time, goal = run(schedule).makespan, run(best).makespan
    if time > goal:
        raise WrongAnswer(
            f"{case} the run takes {number(time)}; {number(goal)} is possible. {hint}"
        )


def _build_answer(order: OrderOf, p: int, m: int, kinds: str) -> Schedule:
    """Return the schedule that the answer defines for all ranks. Raises WrongAnswer if its orders
    are incomplete or cannot run."""
    lines = [_parse_order(order(p, m, rank), rank, kinds) for rank in range(p)]
    wanted = {(kind, i) for kind in kinds for i in range(m)}
    for rank, line in enumerate(lines):
        present = {(op.kind, op.microbatch) for op in line}
        for verb, ops in (("lacks", wanted - present), ("should not have", present - wanted)):
            for kind, i in sorted(ops):
                raise WrongAnswer(
                    f"with p={p} and m={m}, the order of rank {rank} {verb} {kind}{i}"
                )
    schedule = build_from_orders("yours", lines)
    try:
        run(schedule)
    except (RuntimeError, ValueError) as error:
        raise WrongAnswer(f"with p={p} and m={m}, your order cannot run: {error}") from error
    return schedule


def _parse_order(written: Sequence[str] | None, rank: int, kinds: str) -> list[Op]:
    if written is None:
        raise WrongAnswer(f"the order of rank {rank} is missing: the function returns nothing")
    ops = []
    for text in written:
        op = re.fullmatch(rf"([{kinds}])(\d+)", str(text))
        if op is None:
            raise WrongAnswer(f"{text!r} is not an operation; write, for example, {kinds[0]}0")
        ops.append(Op(op[1], rank, int(op[2])))
    return ops


Microbatches = Sequence[tuple[Tensor, Tensor]]  # (inputs, targets) for each microbatch
TOLERANCE = 1e-9  # float64 sums in different orders differ by less than this


class Channel:
    """First-in, first-out queue from one stage to the next. Messages are not labeled."""

    def __init__(self) -> None:
        self._queue: deque[Tensor] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send a copy of the tensor without its graph."""
        self._queue.append(tensor.detach().clone())

    def receive(self) -> Tensor:
        """Return the oldest message, as a new leaf tensor that requires a gradient."""
        if not self._queue:
            raise WrongAnswer("a stage waits forever: it receives a message that was never sent")
        return self._queue.popleft().requires_grad_()


def some_microbatches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` microbatches, each with inputs [8, 32] and target classes [8]."""
    task = build_task(seed=0)
    return [task.microbatch(i) for i in range(count)]


def gradient_on_one_gpu(model: nn.Module, microbatches: Microbatches) -> list[Tensor]:
    """For each parameter, return the gradient of the mean loss over all samples."""
    inputs, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    loss = cross_entropy(model(inputs), targets)
    return list(torch.autograd.grad(loss, list(model.parameters())))


@graded
def check_run_batch(run_batch: Callable[[Sequence[nn.Module], Microbatches], object]) -> str:
    """Check exercise 2: run a batch through two stages and leave its gradients in .grad."""
    for m in (4, 3):
        stages = build_stages(2, 1, seed=0)
        microbatches = some_microbatches(m)
        run_batch(stages, microbatches)
        exact = iter(gradient_on_one_gpu(nn.Sequential(*stages), microbatches))
        errors = []
        for stage, module in enumerate(stages):
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            if len(gradients) < len(list(module.parameters())):
                raise WrongAnswer(f"stage {stage} has no gradient")
            errors.append(relative_difference(gradients, [next(exact) for _ in gradients]))
        if max(errors) > TOLERANCE:
            raise WrongAnswer(
                f"with m={m}, the gradient is off by {errors[0]:.0%} on stage 0 and by "
                f"{errors[1]:.0%} on stage 1. All shapes are right and nothing crashed. "
                "Which microbatch's message does each receive return?"
            )
    return "both stages have the gradient that one GPU computes."


@graded
def check_batch_gradient(
    batch_gradient: Callable[[nn.Module, Microbatches], Sequence[Tensor]],
) -> str:
    """Check exercise 3: a batch's gradient, accumulated from its microbatches."""
    for m in (4, 3):
        model = build_stages(1, 1, seed=0)[0]
        microbatches = some_microbatches(m)
        gradients = batch_gradient(model, microbatches)
        if gradients is None:
            raise WrongAnswer("batch_gradient returns nothing")
        exact = gradient_on_one_gpu(model, microbatches)
        projection = sum(
            float((a.detach() * b).sum()) for a, b in zip(gradients, exact, strict=True)
        )
        ratio = projection / sum(float(b.square().sum()) for b in exact)
        if relative_difference(gradients, [ratio * b for b in exact]) > TOLERANCE:
            off = f"{relative_difference(gradients, exact):.0%}"
            raise WrongAnswer(
                f"with m={m}, the gradient is off by {off}, and its direction is wrong"
            )
        if abs(ratio - 1) > TOLERANCE:
            raise WrongAnswer(
                f"with m={m}, the gradient has the right direction, but is {ratio:.3g} times as "
                "long as it should be. Training would seem to work, but with a different "
                "effective learning rate."
            )
    return "the microbatches' gradients add up to the batch's."


@graded
def check_update(update: Callable[[Weights, Weights, float], Weights]) -> str:
    """Check exercise 6: how a stage updates its weights under PipeDream while microbatches are in
    flight. The answer computes the next weights from the current weights, the gradients and the
    learning rate."""
    replaced = False

    class Trainer(StageTrainer):
        """Trainer that computes the next weights with the student's `update` function."""

        def _next_weights(self, gradients: Gradients) -> list[Tensor]:
            nonlocal replaced
            old = self.weights
            before = copy_weights(old)
            gradients_by_name = dict(zip(old, gradients, strict=True))
            new = update(dict(old), gradients_by_name, self.learning_rate)
            if not isinstance(new, dict) or new.keys() != old.keys():
                raise WrongAnswer("update must return a dict with a tensor for each weight")
            replaced |= any(not torch.equal(old[name], before[name]) for name in old)
            return [new[name] for name in old]

    settings: dict[str, Any] = {
        "num_stages": 4, "num_microbatches": 8, "num_batches": 2, "layers_per_stage": 1,
        "learning_rate": 0.5, "seed": 0,
    }  # fmt: skip
    exact = train("pipedream", **settings).weights
    try:
        weights = train("pipedream", **settings, trainer_class=Trainer).weights
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise WrongAnswer(
            "autograd rejects a backward pass: the weights that its forward pass used were changed "
            "in place"
        ) from error
    pairs = zip(weights, exact, strict=True)
    errors = [relative_difference(ours.values(), theirs.values()) for ours, theirs in pairs]
    if max(errors) > TOLERANCE:
        shown = ", ".join(f"{100 * error:.2g}%" for error in errors)
        why = ". The new weights are not weight - learning_rate * gradient"
        if replaced:
            seen = "backward passes used different weights from their forward passes."
            why = f". Nothing crashed: {seen}"
        case = "after 16 microbatches the weights of the 4 stages"
        raise WrongAnswer(f"{case} are off by {shown}{why}")
    return "the old weights stay as they were for the microbatches that still need them."


@graded
def check_halves(
    input_gradient: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, object]],
    weight_gradient: Callable[[Tensor, object], Tensor],
) -> str:
    """Check exercise 7: the two halves of the backward pass of Y = tanh(X A). The second half
    receives only X and the values that the first half has kept."""
    generator = torch.Generator().manual_seed(0)
    x, a, dy = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (3, 4), (5, 4))
    )
    y = torch.tanh(x @ a)
    exact = torch.autograd.grad(y, (x, a), dy)
    with torch.no_grad():
        halves = input_gradient(dy, y.detach(), a)
        if not isinstance(halves, tuple) or len(halves) != 2:
            raise WrongAnswer("input_gradient must return two things: dX, and what W will need")
        answers = halves[0], weight_gradient(x, halves[1])
    for name, like, ours, theirs in zip(("dX", "dA"), "XA", answers, exact, strict=True):
        if ours is None:
            raise WrongAnswer(f"the function for {name} returns nothing")
        if ours.shape != theirs.shape:
            raise WrongAnswer(
                f"{name} has the shape {list(ours.shape)}; {like} has {list(theirs.shape)}"
            )
        off = relative_difference([ours], [theirs])
        if off > TOLERANCE:
            raise WrongAnswer(
                f"{name} has the right shape but is off by {off:.0%}. Which function is between "
                "Y and X A?"
            )
    return "both agree with autograd, and W needs nothing from another rank."
