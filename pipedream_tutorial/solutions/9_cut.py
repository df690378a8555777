"""Solution: the slower stage sets the pace, so choose the cut whose slower stage is fastest."""


def best_cut(layer_ms):
    return min(
        range(1, len(layer_ms)), key=lambda cut: max(sum(layer_ms[:cut]), sum(layer_ms[cut:]))
    )
