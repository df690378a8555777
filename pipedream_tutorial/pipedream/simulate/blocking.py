"""Run orders with blocking sends and receives. An order that the simulator can run may then
deadlock.

In the simulator, results arrive without further action. Here every transfer is a SEND on one rank
and a RECV on the other. A SEND ends only when its RECV has been posted (a rendezvous). Each ordered
pair of ranks is a channel that delivers messages in sending order, without tags, as in NCCL. There
are no times, because whether a program deadlocks does not depend on speed.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from pipedream.errors import UserError
from pipedream.schedules.ops import Op, Schedule
from pipedream.simulate.simulator import DeadlockError


class Action(NamedTuple):
    """Action in a program: run an operation, or transfer its result between this rank and its
    peer."""

    kind: str  # RUN, SEND or RECV
    op: Op
    peer: int

    def __str__(self) -> str:
        direction = {"RUN": "on", "SEND": "to", "RECV": "from"}[self.kind]
        return f"{self.kind} {self.op} {direction} rank {self.peer}"


Step = tuple[Action, ...]  # actions posted together; the rank continues when all have ended


def blocking_programs(schedule: Schedule, *, paired: bool = False) -> list[list[Step]]:
    """Return each rank's program, in which each step waits for the previous step to end. For each
    operation, the program receives the input, runs the operation and sends the result. With
    `paired`, a send and the next action form one step if that action receives from the send's peer.
    Megatron-LM's 1F1B also pairs sends and receives in its steady state. Raises UserError for
    schedules with more than one stage per rank."""
    if schedule.copies > 1 or schedule.stages_per_rank > 1:
        raise UserError(
            f"{schedule.name} has several stages per rank",
            "choose a schedule with one stage per rank, such as 1f1b",
        )
    ranks = schedule.rank_by_op()
    programs = []
    for rank, order in enumerate(schedule.flat):
        steps: list[Step] = []
        for op in order:
            for need in schedule.needs(op):
                peer = ranks[need]
                if peer == rank:
                    continue
                send_step: Step = ()
                if paired and steps and len(steps[-1]) == 1 and steps[-1][0][::2] == ("SEND", peer):
                    send_step = steps.pop()
                steps.append((*send_step, Action("RECV", need, peer)))
            steps.append((Action("RUN", op, rank),))
            peer = rank + 1 if op.kind == "F" else rank - 1
            if op.kind != "W" and 0 <= peer < schedule.num_ranks:
                steps.append((Action("SEND", op, peer),))
        programs.append(steps)
    return programs


def run_blocking(programs: Sequence[Sequence[Step]], *, buffered: bool = False) -> list[Action]:
    """Run the programs until all ranks have ended. Return the actions in the order in which they
    ended. With `buffered`, messages are copied, so sends never wait. Raises DeadlockError with the
    current action of every rank in the cycle."""
    remaining_steps = [deque(program) for program in programs]
    # Actions of each rank's current step that have not ended
    posted: list[list[Action]] = [[] for _ in programs]
    sent: dict[tuple[int, int], deque[Op]] = defaultdict(deque)  # (sender, receiver) -> messages
    ended: list[Action] = []
    progressed = True
    while progressed:
        progressed = False
        for rank, steps in enumerate(remaining_steps):
            if posted[rank] or not steps:
                continue
            progressed = True
            for action in steps.popleft():
                if action.kind == "SEND":
                    sent[rank, action.peer].append(action.op)
                must_wait = action.kind == "RECV" or (action.kind == "SEND" and not buffered)
                (posted[rank] if must_wait else ended).append(action)
        for rank, actions in enumerate(posted):
            for action in [action for action in actions if action.kind == "RECV"]:
                channel = sent[action.peer, rank]
                # Only the oldest message of a channel can be received.
                if not channel or channel[0] != action.op:
                    continue
                progressed = True
                channel.popleft()
                actions.remove(action)
                ended.append(action)
                if not buffered:
                    send = Action("SEND", action.op, rank)
                    posted[action.peer].remove(send)
                    ended.append(send)
    waiting = {}
    for rank, actions in enumerate(posted):
        if actions:
            kind, op, peer = actions[0]
            is_blocked = kind == "RECV" and op in sent[peer, rank]  # other messages come first
            waiting[rank] = str(actions[0]), peer if posted[peer] and not is_blocked else rank
    if waiting:
        raise DeadlockError(waiting)
    return ended
