"""A batch's forwards come after the last backward of the batch before it, on every stage.

In one long 1F1B, stage 0 runs the first forwards of a batch while the last gradients of the one
before are still on their way.
"""

from pipedream.schedules.ops import repeat
from pipedream.schedules.orders import build_schedule


def batches(p, m, num_batches):
    return repeat(build_schedule("1f1b", p, m), num_batches)
