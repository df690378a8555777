"""Compare training in a single process with direct implementations of each policy."""

from collections.abc import Callable

import pytest
import torch
from pipedream.train.models import build_stages, build_task
from pipedream.train.oracle import train
from pipedream.train.trainer import Weights
from torch import nn

SEED, RATE = 5, 0.4


def trained(name: str, p: int, m: int, num_batches: int, layers: int = 1) -> list[Weights]:
    return train(
        name, num_stages=p, num_microbatches=m, layers_per_stage=layers, learning_rate=RATE,
        num_batches=num_batches, seed=SEED,
    ).weights  # fmt: skip


def same_bits(left: list[Weights], right: list[Weights]) -> bool:
    return all(
        torch.equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a
    )


def gradient_at(
    stages: list[nn.Module], weights: list[Weights], microbatch: int, m: int
) -> list[Weights]:
    """Return each stage's gradient of `loss / m` for one microbatch, with `weights` in all
    stages."""
    inputs, target = build_task(seed=SEED).microbatch(microbatch)
    leaves = {
        f"{s}.{name}": w.detach().clone().requires_grad_()
        for s, stage_weights in enumerate(weights)
        for name, w in stage_weights.items()
    }
    out = torch.func.functional_call(nn.Sequential(*stages), leaves, (inputs,))
    loss = nn.functional.cross_entropy(out, target) / m
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return [
        {name: found[f"{s}.{name}"] for name in stage_weights}
        for s, stage_weights in enumerate(weights)
    ]


def initial(stages: list[nn.Module]) -> list[Weights]:
    return [{n: w.detach().clone() for n, w in stage.named_parameters()} for stage in stages]


def sgd_step(weights: Weights, gradients: Weights) -> Weights:
    return {n: torch.add(w, gradients[n], alpha=-RATE) for n, w in weights.items()}


def recurrence(
    p: int, m: int, num_microbatches: int, version: Callable[[int, int], int]
) -> list[Weights]:
    """Compute the final weights from the recurrence `W_s(i + 1) = W_s(i) - lr * g_s(i)`. Here
    `g_s(i)` is the gradient of microbatch i with respect to `W_s`, evaluated at the weights
    `W_0(v_0), W_1(v_1), ...` with `v_s = version(s, i)`. No schedule or stash is needed, because
    all versions of all stages are kept."""
    stages = build_stages(p, 1, seed=SEED)
    history = [[stage_weights] for stage_weights in initial(stages)]
    for i in range(num_microbatches):
        used = [history[s][version(s, i)] for s in range(p)]
        for s, gradient in enumerate(gradient_at(stages, used, i, m)):
            history[s].append(sgd_step(history[s][i], gradient))
    return [stage_weights[-1] for stage_weights in history]


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 3), (3, 4), (4, 8)])
def test_stashing_and_vertical_sync_equal_their_recurrences_bitwise(p: int, m: int) -> None:
    stashed = recurrence(p, m, 4 * m, lambda s, i: max(0, i - (p - 1 - s)))
    assert same_bits(trained("pipedream", p, m, 4), stashed)
    vertical = recurrence(p, m, 4 * m, lambda s, i: max(0, i - (p - 1)))
    assert same_bits(trained("pipedream-vertical", p, m, 4), vertical)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 2), (3, 2), (4, 4), (4, 8)])
def test_2bw_equals_its_recurrence_bitwise(p: int, m: int) -> None:
    """The recurrence is `W(t + 1) = W(t) - lr * g(W(t - 1))` with `W(-1) = W(0)` (arXiv
    2006.09503). Here `g(W)` is the gradient at the weights W."""
    stages = build_stages(p, 1, seed=SEED)
    old = new = initial(stages)
    for t in range(5):
        batch = [
            {n: torch.zeros_like(w) for n, w in stage_weights.items()} for stage_weights in old
        ]
        for i in range(t * m, (t + 1) * m):
            for total, g in zip(batch, gradient_at(stages, old, i, m), strict=True):
                for n in g:
                    total[n] += g[n]
        old, new = new, [sgd_step(w, g) for w, g in zip(new, batch, strict=True)]
    assert same_bits(trained("pipedream-2bw", p, m, 5), new)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 3), (4, 8)])
def test_flushing_schedules_give_bitwise_equal_weights(p: int, m: int) -> None:
    """Under all these schedules, each stage adds the microbatches' gradients in the order 0, 1, 2,
    ..., so even the rounding errors are equal."""
    first, *others = [
        trained(name, p, m, 4) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
    ]
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_two_stages_per_rank_give_the_same_weights(name: str) -> None:
    """Splitting the layers into twice as many stages does not change the results. They are
    bit-identical to 1F1B's results, except under DualPipeV, where they differ by rounding errors.
    DualPipeV sums gradients in a different order, because some W operations run after W operations
    of later microbatches."""

    def final(name: str) -> list[torch.Tensor]:
        return [
            w for stage_weights in trained(name, 3, 6, 3, layers=2) for w in stage_weights.values()
        ]

    rtol = 1e-12 if name == "dualpipe-v" else 0
    torch.testing.assert_close(final(name), final("1f1b"), rtol=rtol, atol=0)
