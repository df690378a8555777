"""The fit of a scaling law against losses of known constants; the experiment that it is for."""

from __future__ import annotations

import random
import struct

import pytest

from distributed_training.advise.scaling import Fit
from distributed_training.models import find_model
from results.lab.analysis.law import fit_law, left_out, residuals
from results.lab.pages.learning import draw_scaling_law
from results.lab.scaling_law import MODELS, PLAN, cases, describe, summarise

SIZES = (1e5, 2.5e5, 1.1e6, 3.1e6, 1.06e7, 2.9e7)
TOKENS = (3.3e5, 6.6e5, 1.3e6, 2.6e6, 5.2e6)
KNOWN = Fit(
    name="known", source="", uncertainty="", irreducible=1.5, a=60.0, alpha=0.3, b=900.0, beta=0.45
)


def points(fit, noise=0.0, seed=0):
    draw = random.Random(seed)
    return [(n, d, fit.loss(n, d) * (1 + draw.gauss(0, noise))) for n in SIZES for d in TOKENS]


def test_known_constants_are_found():
    made = points(KNOWN)
    fit = fit_law(made)
    assert (fit.alpha, fit.beta) == pytest.approx((KNOWN.alpha, KNOWN.beta), rel=2e-3)
    assert fit.irreducible == pytest.approx(KNOWN.irreducible, rel=2e-3)
    assert (fit.a, fit.b) == pytest.approx((KNOWN.a, KNOWN.b), rel=3e-2)
    assert max(map(abs, residuals(fit, made))) < 1e-4
    assert max(abs(error) for errors in left_out(made).values() for error in errors) < 1e-3


def test_noise_ends_in_the_residuals_and_no_other_fit_is_better():
    made = points(KNOWN, noise=0.01)
    fit = fit_law(made)

    def squares(other):
        return sum(error**2 for error in residuals(other, made))

    assert 0.005**2 < squares(fit) / len(made) < 0.015**2
    assert squares(fit) < squares(KNOWN)
    values = {key: getattr(fit, key) for key in ("irreducible", "a", "alpha", "b", "beta")}
    for key, value in values.items():
        for factor in (0.97, 1.03):
            other = {**values, key: value * factor}
            assert squares(Fit(name="", source="", uncertainty="", **other)) > squares(fit)


def test_a_size_that_breaks_the_law_is_seen_when_left_out():
    made = [(n, d, loss * (1.2 if n == SIZES[-1] else 1)) for n, d, loss in points(KNOWN)]
    errors = left_out(made)[SIZES[-1]]
    assert all(error == pytest.approx(1 / 1.2 - 1, abs=5e-3) for error in errors)


def test_the_experiment_is_summed_up_and_drawn(tmp_path):
    """From losses that keep a known law; its runs themselves are too long for a test."""
    names = list(cases(PLAN["sizes"], PLAN["tokens"]))
    runs = {}
    for name in names:
        size, amount, _ = name.replace(",", "").split()
        spec = find_model(f"{MODELS}:{size}").size
        assert spec.num_parameters == pytest.approx(float(size[:-1]) * 1e6, rel=0.25)
        asked = PLAN["tokens"][amount]
        tokens = asked["num_samples"] * asked["epochs"] * PLAN["common"]["max_length"]
        assert tokens == pytest.approx(float(amount[:-1]) * 1e6, rel=0.1)
        loss = KNOWN.loss(spec.num_parameters, tokens)
        runs[name] = {"parameters": spec.num_parameters, "tokens": tokens, "loss": loss}
    summary = summarise(runs)
    assert summary["fit"]["alpha"] == pytest.approx(KNOWN.alpha, rel=0.01)
    assert len(summary["left_out"]) == 6
    assert list(summary["residuals"]) == names
    assert max(map(len, describe(summary).splitlines())) <= 80
    figure = draw_scaling_law({"runs": runs, "summary": summary})
    figure.savefig(tmp_path / "law.png")
    width, _ = struct.unpack(">II", (tmp_path / "law.png").read_bytes()[16:24])
    assert width == 900
    two = {name: run for name, run in runs.items() if name.startswith(("1M", "3M"))}
    assert summarise(two) is None
