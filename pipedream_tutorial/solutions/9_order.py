"""Solution: the order of 1F1B, for `order` in pipeline_by_hand.py. The losses stay the same because
each stage adds the gradients of the micro-batches in the same sequence as under GPipe."""


def order(p: int, m: int, r: int) -> list[str]:
    ahead = min(m, p - r)
    steps = [f"F{i}" for i in range(ahead)]
    for i in range(m):
        steps += [f"B{i}"] + [f"F{ahead + i}"] * (ahead + i < m)
    return steps
