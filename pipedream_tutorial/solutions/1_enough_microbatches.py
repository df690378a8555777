"""(p-1) of m+p-1 slots are idle, so m (percent) has to be (p-1) (100 - percent) or more."""


def microbatches_needed(p, percent):
    return max(1, -(-(p - 1) * (100 - percent) // percent))
