"""Solution: on every stage, a batch's forwards follow the last backward of the previous batch. In a
single long 1F1B schedule, stage 0 runs the first forwards of a batch before the last gradients of
the previous batch have arrived.
"""

from pipedream.schedules.ops import repeat
from pipedream.schedules.orders import build_schedule


def batches(p, m, num_batches):
    return repeat(build_schedule("1f1b", p, m), num_batches)
