"""Solution: both halves start from dZ, the gradient of Z = X W. I computes dZ and keeps it for W.
This is the cost of a delayed W: X and dZ stay in memory until W has run.
"""


def input_gradient(dy, y, w):
    dz = dy * (1 - y**2)
    return dz @ w.T, dz


def weight_gradient(x, kept):
    return x.T @ kept
