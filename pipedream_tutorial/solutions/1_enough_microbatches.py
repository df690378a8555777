"""Solution: `p - 1` of `m + p - 1` slots are idle, so `m * percent` must be at least `(p - 1) *
(100 - percent)`."""


def microbatches_needed(p, percent):
    return max(1, -(-(p - 1) * (100 - percent) // percent))
