"""The shapes alone allow nothing else: X is [n, k], W is [k, j], dY is [n, j]."""


def input_gradient(dy, w):
    return dy @ w.T


def weight_gradient(x, dy):
    return x.T @ dy
