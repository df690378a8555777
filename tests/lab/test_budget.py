"""Test the scaling formulas: compare closed forms with a search and with published figures, and
check that invalid input is rejected."""

import math

import pytest

from results.lab.budget import FITS, parse_budget
from tests.support import refused

CHINCHILLA, REPLICATION = FITS


@pytest.mark.parametrize("fit", FITS, ids=["Chinchilla", "replication"])
@pytest.mark.parametrize("flops", [1e18, 5.76e23])
def test_optimum_has_the_lowest_loss_of_all_sizes(fit, flops):
    parameters, tokens = fit.optimum(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)
    best = fit.loss(parameters, tokens)
    for step in range(-60, 61):
        other = parameters * 1.03**step
        assert fit.loss(other, flops / 6 / other) >= best
    assert fit.tokens_for(parameters) == pytest.approx(tokens)
    assert fit.flops_for(best) == pytest.approx(flops)


def test_optima_match_published_figures():
    """Compare the exponents with the values in the papers' abstracts. At Chinchilla's compute
    budget, the fit of the replication study gives about 20 tokens per parameter, as in Chinchilla's
    training. The original fit gives many more."""
    for fit, exponent in ((CHINCHILLA, 0.4565), (REPLICATION, 0.5126)):
        small, large = fit.optimum(1e20)[0], fit.optimum(1e22)[0]
        assert math.log(large / small) / math.log(100) == pytest.approx(exponent, abs=5e-4)
    found = (fit.optimum(5.76e23) for fit in FITS)
    chinchilla, replication = (tokens / parameters for parameters, tokens in found)
    assert replication == pytest.approx(20, abs=3)
    assert chinchilla > 55


def test_budgets_are_parsed_and_unreachable_losses_are_refused():
    cluster, seconds = parse_budget("2x8xH100-80GB 1.5d")
    assert (cluster.num_processes, seconds) == (16, 129600)
    with refused("8xH200 0h"):
        parse_budget("8xH200 0h")
    with refused("--target_loss"):
        REPLICATION.flops_for(1.69)
