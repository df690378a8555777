"""Test the scaling formulas: compare closed forms with a search and with published figures, and
check that invalid input is rejected."""

import math

import pytest

from distributed_training.records.display import format_count
from distributed_training.settings.files import ROOT
from results.lab.budget import FITS, parse_budget
from tests.conftest import assert_ok, heavy_pool
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


def budget(*words):
    return heavy_pool().script(words, script=ROOT / "results/lab/budget.py")


def test_budget_command_prints_a_table():
    """Run budget.py as a user would type it, and check one row of its table."""
    shown = budget("1xH200 24h", "--batch_size", "8")
    assert_ok(shown)
    assert "1 x H200 for 24 hours" in shown.stdout
    rows = {line.split()[0]: line.split() for line in shown.stdout.splitlines() if line.strip()}
    assert rows["gpt2-xl"][3] == format_count(CHINCHILLA.tokens_for(1_557_611_200))
    assert max(map(len, shown.stdout.splitlines())) <= 80
    reverse = budget("--target_loss", "2.5", "--cluster", "1xH200")
    assert "according to replication: " in reverse.stdout
