"""Solution: p - r forwards fill the pipeline. After them, one backward precedes each remaining
forward."""


def order_of_1f1b(p, m, r):
    ahead = min(m, p - r)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(m):
        order.append(f"B{i}")
        if ahead + i < m:
            order.append(f"F{ahead + i}")
    return order
