"""Solution: under 1F1B, rank 0 holds p microbatches and rank r holds p - r. Therefore rank r may
delay W by r microbatches."""


def zero_bubble_order(p, m, r):
    ahead = min(m, p - r)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(m):
        order.append(f"I{i}")
        if i >= r:
            order.append(f"W{i - r}")
        if ahead + i < m:
            order.append(f"F{ahead + i}")
    return order + [f"W{i}" for i in range(max(0, m - r), m)]
