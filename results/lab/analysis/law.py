"""Fitting loss = E + A / N^alpha + B / D^beta to runs of N parameters and D tokens. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from distributed_training.advise.scaling import Fit

Point = tuple[float, float, float]  # parameters, tokens, loss in nats a token
POWERS = 0.02, 2.0  # between which alpha and beta are looked for
ROUNDS = 14
SIDE = 13  # each round looks at SIDE x SIDE pairs of powers around the best so far


def fit_law(points: Sequence[Point], name: str = "ours") -> Fit:
    """Least squares of relative errors, E, A and B not below 0; needs three values of N and of D.

    With the powers given the law is linear in the other three, which are solved for; the powers are
    searched on a logarithmic grid that becomes finer around the best pair.
    """
    parameters, tokens, losses = (
        np.array(values, dtype=float) for values in zip(*points, strict=True)
    )
    assert min(len(set(parameters)), len(set(tokens))) >= 3, "too few to tell five constants"
    middle = np.exp(np.log(parameters).mean()), np.exp(np.log(tokens).mean())
    centre = np.full(2, np.log(POWERS).mean())
    reach = np.ptp(np.log(POWERS)) / 2
    found = np.inf, centre, np.zeros(3)
    for _ in range(ROUNDS):
        edges = np.clip(centre[:, None] + np.linspace(-reach, reach, SIDE), *np.log(POWERS))
        powers = np.array(list(itertools.product(*edges)))
        columns = np.stack([
            np.ones((len(powers), len(losses))),
            (parameters / middle[0]) ** -np.exp(powers[:, :1]),
            (tokens / middle[1]) ** -np.exp(powers[:, 1:]),
        ], axis=2)  # fmt: skip
        errors, factors = _not_negative(columns / losses[:, None])
        least = int(errors.argmin())
        if errors[least] < found[0]:
            found = errors[least], powers[least], factors[least]
        centre = found[1]
        reach = reach / 2
    alpha, beta = np.exp(found[1])
    irreducible, a, b = found[2]
    return Fit(
        name=name,
        source="results/lab/scaling_law.py",
        uncertainty="",
        irreducible=float(irreducible),
        a=float(a * middle[0] ** alpha),
        alpha=float(alpha),
        b=float(b * middle[1] ** beta),
        beta=float(beta),
    )


def _not_negative(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sums of squares [G], coefficients >= 0 [G, 3]) of columns [G, points, 3] that should add up
    to 1: the best of the least-squares solutions over all subsets of the columns."""
    count = columns.shape[2]
    best = np.full(len(columns), np.inf)
    factors = np.zeros((len(columns), count))
    for used in itertools.product((True, False), repeat=count):
        if not any(used):
            continue
        q, r = np.linalg.qr(columns[:, :, list(used)])
        solved = np.zeros_like(factors)
        with np.errstate(all="ignore"):
            solved[:, list(used)] = np.linalg.solve(r, q.sum(1)[..., None])[..., 0]
        errors = (((columns @ solved[..., None])[..., 0] - 1) ** 2).sum(1)
        better = (solved.min(1) >= 0) & (errors < best)
        best[better] = errors[better]
        factors[better] = solved[better]
    return best, factors


def residuals(fit: Fit, points: Sequence[Point]) -> list[float]:
    """By how much of the measured loss the fit is above it, point by point."""
    return [fit.loss(n, d) / loss - 1 for n, d, loss in points]


def left_out(points: Sequence[Point]) -> dict[float, list[float]]:
    """Of each size: the residuals of its points under the fit to all other sizes."""
    found = {}
    for size in sorted({n for n, _, _ in points}):
        others = [point for point in points if point[0] != size]
        own = [point for point in points if point[0] == size]
        found[size] = residuals(fit_law(others), own)
    return found
