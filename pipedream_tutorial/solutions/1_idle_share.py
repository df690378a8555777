"""A rank works for m (F + B) of the (m + p - 1) (F + B) that the batch takes."""


def idle_share(p, m):
    return (p - 1) / (m + p - 1)
