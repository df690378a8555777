"""Test the times of pipeline operations, and the order in which ranks send their messages."""

import itertools

import pytest
from torch.distributed.pipelining import schedules

from distributed_training.parallel import private_pipelining as private
from distributed_training.plan import orders
from distributed_training.plan.plan import PLAN_AS_JSON
from distributed_training.planner.make_plan import draft_plan, make_plan
from distributed_training.predict.predict import parse_cluster
from distributed_training.predict.speed import StepCosts, predict_ends
from distributed_training.settings.request import build_config
from tests.planner.helpers import plan_for
from tests.support import GPU_MACHINE


def by_operation(plan, ends):
    """Return the expected end of each operation."""
    found = {}
    for order, times in zip(orders.find_orders(plan), ends, strict=True):
        found |= dict(zip(order, times, strict=True))
    return found


def test_the_plan_stores_times_that_use_the_machines_rates():
    """The planning process predicts the times with the machine's rates. All other processes read
    the times from the plan."""
    config = {"model": "gpt2-tiny-4-blocks", "strategy": "pp", "pipeline_schedule": "zb-v"}
    for cluster in map(parse_cluster, ("2xL4", "2xH200")):
        plan = make_plan(build_config(config), cluster)
        costs = StepCosts(plan, cluster.rates).operation_costs()
        ends = plan.operation_ends
        assert ends[0][0] == costs["F", 0].total_s
        for (kind, stage, number), end in by_operation(plan, ends).items():
            if kind == "W":  # which follows I on the same rank
                least = costs[kind, stage].total_s
                assert end >= by_operation(plan, ends)["I", stage, number] + least * (1 - 1e-9)
        assert PLAN_AS_JSON.validate_json(PLAN_AS_JSON.dump_json(plan)).operation_ends == ends


def test_a_split_backward_pass_moves_fewer_bytes(tmp_path):
    """Per micro-batch and weight, 1F1B moves 20 bytes more for the embedding, and 4 bytes more for
    the matrices of the blocks."""
    config = {"model": "gpt2", "strategy": "pp", "pipeline_cut": "6,6"}
    cluster = parse_cluster("2xH200")
    seconds = []
    for schedule in ("1f1b", "zb-h1"):
        plan = draft_plan(build_config({**config, "pipeline_schedule": schedule}), cluster)
        costs = StepCosts(plan, cluster.rates).operation_costs()
        seconds.append(costs["B", 0].total_s)
    size = plan.size
    moved_bytes = 20 * size.padded_vocab_size * size.hidden_size + 4 * 6 * size.kinds[0].parameters
    assert seconds[0] - seconds[1] == pytest.approx(moved_bytes / cluster.rates.memory_bytes_per_s)


def lowered(plan):
    """Return each process's actions: planned operations, FSDP's actions, and sends and receives
    where torch inserts them."""
    computing = {
        rank: schedules._add_reduce_grad(
            schedules._add_unshard_reshard(
                [schedules._Action(s, private._COMPUTATION_TYPES[kind], i) for kind, s, i in order]
            ),
            plan.batch.num_microbatches,
        )
        for rank, order in enumerate(orders.find_orders(plan))
    }
    ranks = plan.stages.ranks
    return schedules._add_send_recv(computing, lambda stage: ranks[stage], len(ranks))


PEERS = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1),
         "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}  # fmt: skip
# Action -> action of the same stage and micro-batch that must come first
NEEDS = {"SEND_F": "FORWARD", "SEND_B": "BACKWARD_INPUT",
         "FORWARD": "RECV_F", "BACKWARD_INPUT": "RECV_B"}  # fmt: skip


def run_blocking(found, ranks):
    """Simulate processes in which each message blocks the sender and the receiver until both have
    reached the message. Return the number of completed messages."""
    left = {
        rank: [(a.computation_type.name, a.stage_index, a[2]) for a in reversed(actions)]
        for rank, actions in found.items()
    }
    steps = {step for own in left.values() for step in own}
    done = set()
    met = 0
    while steps - done:
        before = len(done)
        for rank, own in left.items():
            while own:
                kind, stage, number = own[-1]
                ends = {rank: own[-1]}
                if kind in PEERS:
                    other, by = PEERS[kind]
                    ends[ranks[stage + by]] = (other, stage + by, number)
                if any(left[at][-1:] != [step] for at, step in ends.items()):
                    break
                met += len(ends) - 1
                for at, step in ends.items():
                    needed = (NEEDS.get(step[0]), *step[1:])
                    assert needed in done or needed not in steps, (at, step)
                    done.add(left[at].pop())
        assert len(done) > before, "a deadlock"
    return met


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_microbatches": 2, "compile": False, "precision": "fp32"},
        {"strategy": "3d", "pp": 2, "dp_shard": 2, "tp": 1},
        {"strategy": "3d", "pp": 2, "tp": 2},
    ],
)
def test_messages_are_received_in_the_order_in_which_they_are_sent(tmp_path, more):
    """The sender and the receiver must process messages in the same order. The receiver must be
    ready when a message is produced."""
    config = {"model": "gpt2-medium", "strategy": "pp", "pipeline_schedule": "zb-v", **more}
    plan = plan_for(tmp_path, GPU_MACHINE, 4, checked=False, batch_size=8, **config)
    ranks = plan.stages.ranks
    end_s = by_operation(plan, predict_ends(plan, parse_cluster("H200").rates))
    before = lowered(plan)
    found = {rank: private._sort_messages(actions, end_s) for rank, actions in before.items()}
    for rank, actions in before.items():
        assert sorted(map(str, found[rank])) == sorted(map(str, actions))
        own, theirs = (
            [action for action in each if action.computation_type.name not in PEERS]
            for each in (found[rank], actions)
        )
        assert own == theirs
    assert found != before
    edges = sum(a != b for a, b in itertools.pairwise(ranks))
    assert run_blocking(found, ranks) == 2 * edges * plan.batch.num_microbatches
    # A receive is posted before its message has been produced.
    for rank, actions in found.items():
        done = 0.0  # end of the previous operation
        for action in actions:
            kind, stage = action.computation_type, action.stage_index
            if kind in private._OPERATION_NAMES:
                done = end_s[private._OPERATION_NAMES[kind], stage, action[2]]
            elif kind.name in ("RECV_F", "RECV_B"):
                maker = ("F", stage - 1) if kind.name == "RECV_F" else ("I", stage + 1)
                assert done <= end_s[(*maker, action[2])], (rank, action)
