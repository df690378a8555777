"""Test which orders run, and which orders deadlock, if sends wait for their receives."""

from dataclasses import replace

import pytest
from pipedream.errors import UserError
from pipedream.schedules.ops import Op, Schedule
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.blocking import Action, blocking_programs, run_blocking
from pipedream.simulate.simulator import DeadlockError, build_costs, simulate

SIZES = [(p, m) for p in range(1, 7) for m in range(1, 15)]


def deadlocks(s: Schedule, *, paired: bool = False, buffered: bool = False) -> bool:
    try:
        ended = run_blocking(blocking_programs(s, paired=paired), buffered=buffered)
    except DeadlockError:
        return True
    check_run(s, ended)
    return False


def check_run(s: Schedule, ended: list[Action]) -> None:
    """Check that every operation ran once, in order, and only after its inputs had been
    received."""
    for rank, order in enumerate(s.orders):
        assert [a.op for a in ended if a.kind == "RUN" and a.peer == rank] == list(order)
    position = {(a.kind, a.op): k for k, a in enumerate(ended)}
    assert len(position) == len(ended)
    for kind, op in position:
        if kind == "RECV":
            consumer = Op(op.kind, op.stage + (1 if op.kind == "F" else -1), op.microbatch)
            assert position["RUN", op] < position["RECV", op] < position["RUN", consumer]
            assert ("SEND", op) in position


def test_blocking_1f1b_deadlocks_with_two_or_more_stages_and_microbatches() -> None:
    for p, m in SIZES:
        assert deadlocks(build_schedule("1f1b", p, m)) == (p >= 2 and m >= 2), (p, m)


def test_blocking_gpipe_naive_and_fused_1f1b_do_not_deadlock() -> None:
    for name, paired in (("gpipe", False), ("naive", False), ("1f1b", True)):
        assert not any(deadlocks(build_schedule(name, p, m), paired=paired) for p, m in SIZES)


def test_zb_h2_deadlocks_on_a_weight_gradient_between_send_and_receive() -> None:
    """A send and a receive are fused only if no operation runs between them. ZB-H2 runs a W between
    them."""
    for p, m in SIZES:
        s = build_schedule("zb-h2", p, m)
        assert deadlocks(s, paired=True) == (p >= 2 and m >= 2 * p)
    with pytest.raises(DeadlockError) as caught:
        run_blocking(blocking_programs(build_schedule("zb-h2", 2, 4), paired=True))
    assert str(caught.value) == (
        "deadlock: rank 0 is at SEND 0F3 to rank 1; rank 1 is at SEND 1I2 to rank 0"
    )


def test_receives_in_a_different_order_than_the_sends_deadlock() -> None:
    s = build_schedule("gpipe", 2, 2)
    sender, (first, second, *rest) = s.orders
    s = replace(s, orders=(sender, (second, first, *rest)))
    # The order of operations itself is valid, because each result exists before an operation uses
    # it.
    assert simulate(s, build_costs(s)).makespan > 0
    blocked = "rank 0 is at SEND 0F0 to rank 1; "
    # A buffered sender continues, even if its message is not received.
    for buffered in (False, True):
        with pytest.raises(DeadlockError) as caught:
            run_blocking(blocking_programs(s), buffered=buffered)
        message = f"deadlock: {'' if buffered else blocked}rank 1 is at RECV 0F1 from rank 0"
        assert str(caught.value) == message


def test_schedules_with_several_stages_per_rank_are_refused() -> None:
    for name in ("interleaved", "zb-v", "chimera"):
        with pytest.raises(
            UserError, match=f"{name} has several stages per rank; choose a schedule with one"
        ):
            blocking_programs(build_schedule(name, 2, 4))
