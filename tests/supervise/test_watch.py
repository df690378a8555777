"""Test how ranks detect lost and hanging ranks, and when they give up."""

import re

import pytest

from distributed_training.supervise.process import Process
from distributed_training.supervise.watch import LOST_S, Watch, describe_late_ranks


@pytest.fixture
def watch():
    watch = Watch(Process(rank=0, world_size=1, local_rank=0, local_world_size=1))
    yield watch
    watch.end()


def test_time_limit_follows_measured_steps_and_is_ten_minutes_for_all_else(watch):
    watch.end()
    watch.world_size, watch._min_limit_s = 2, 60.0
    watch.set_activity("saving step 3")
    watch._clock += 200  # time that does not belong to a step
    limits = []
    for seconds in (1, 5, 5, 300):
        watch.set_activity("step", is_step=True)
        limits.append(watch.limit_s)
        watch._clock += seconds
    watch.set_activity("step", is_step=True)
    assert [*limits, watch.limit_s] == [600, 60, 60, 100, 100]
    watch.set_activity("the end")
    assert watch.limit_s == 600
    watch._timeout_s = 7
    assert watch.limit_s == 7
    watch._min_limit_s = 600.0  # the minimum for compiled steps
    watch.set_activity("step", is_step=True)
    assert watch.limit_s == 7
    watch._steps_s.clear()  # the first step
    assert watch.limit_s == 600
    watch._timeout_s = 0
    assert watch.limit_s == 0, "never, also while the first step is compiled"
    watch._timeout_s, watch.world_size = None, 1
    assert watch.limit_s == 0, "nobody waits for it"


@pytest.mark.parametrize(
    ("heard_s", "answered_s", "reason"),
    [
        (LOST_S + 1, 2, "lost rank 0 during startup: no heartbeat for 30 s, so the rank is"),
        # The last heartbeat was read twice before the node was disconnected. The node's launcher is
        # also disconnected and must end.
        (LOST_S + 1, LOST_S - 1, ""),
        (LOST_S + 3, LOST_S + 1, "rank 1 on .* lost rank 0 on node0: no heartbeat"),
    ],
)
def test_a_frozen_rank_0_is_distinguished_from_a_lost_connection(
    watch, monkeypatch, heard_s, answered_s, reason
):
    watch.end()
    watch.rank, watch.world_size = 1, 2
    monkeypatch.setenv("MASTER_ADDR", "node0")
    watch._heartbeat_at, watch._response_at = watch._clock - heard_s, watch._clock - answered_s
    reasons = [""]
    monkeypatch.setattr(watch, "_give_up", lambda reason, *_: reasons.append(reason))
    watch._check_other_ranks()
    assert re.match(reason or "$", reasons[-1])


def test_the_ranks_with_the_fewest_activities_are_named_as_late():
    late = {"count": 3, "host": "n", "activity": "step 3"}
    ahead = {"count": 4, "host": "n", "activity": "step 4"}
    text = describe_late_ranks([ahead, late, ahead])
    assert "rank 1 on n" in text
    assert "step 3" in text
    assert "all ranks" in describe_late_ranks([late, late])
