"""Compare our orders with orders from the zero bubble authors' code, for random sizes and times.

    git clone --depth 1 https://github.com/sail-sg/zero-bubble-pipeline-parallelism CLONE
    python results/lab/tutorial/authors.py CLONE

The orders must be equal, operation by operation, except for ZB-H1 and ZB-H2. For these two
schedules, only the longest span of a rank must equal the longest span in the authors' automatic
schedule with the same memory limit. A rank's span lasts from the start of its first operation to
the end of its last. No other program here needs the clone.
"""

import argparse
import contextlib
import importlib
import io
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import checkout  # noqa: F401
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.simulator import build_costs, simulate

PACKAGE = "megatron.core.pipeline_parallel.zerobubble.scheduler"
OUR_KINDS = {"F": "F", "B": "I", "W": "W", "BW": "B"}  # their names -> ours
Times = tuple[int, int, int, int]  # durations of F, I, W and a message


def load(clone: Path) -> Callable[[str], Any]:
    """Return a function that imports one of the authors' modules. Empty packages replace the
    authors' packages, which would import all of Megatron. An empty module replaces pulp, which only
    the authors' integer program uses."""
    parts = PACKAGE.split(".")
    for k in range(len(parts)):
        package = ModuleType(".".join(parts[: k + 1]))
        package.__path__ = [str(clone.joinpath(*parts[: k + 1]))]
        sys.modules[package.__name__] = package
    sys.modules.setdefault("pulp", ModuleType("pulp"))
    return lambda name: importlib.import_module(f"{PACKAGE}.{name}")


def cells(orders: Iterable[Iterable[Any]]) -> list[list[str]]:
    """Return the authors' orders in our notation, such as 2F0."""
    return [
        [f"{node.layer_group_idx}{OUR_KINDS[node.type.value]}{node.microbatch}" for node in order]
        for order in orders
    ]


def authors_orders(
    load_module: Callable[[str], Any], name: str, p: int, m: int, v: int, times: Times
) -> Any:
    """Return the authors' orders, or None for sizes that their generator rejects."""
    f, i, w, c = times
    config = SimpleNamespace(n_stages=p, n_micro=m, max_chunks=v)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            if name == "zb-v":
                graph = load_module("zbv").PipelineGraph(p, m, f, i, w, c, 2, 0, -2)
                return cells(graph.create_schedule(config))
            if name in ("v-half", "v-min"):
                graph = load_module("zbv_greedy").PipelineGraph(p, m, name[2:], f, i, w, c)
                return cells(graph.create_schedule(config))
            return cells(
                load_module({"1f1b": "basic1f1b"}.get(name, "vpp")).create_schedule(config)
            )
        except (AssertionError, ValueError, IndexError):
            return None


def our_orders(name: str, p: int, m: int, v: int, times: Times) -> list[list[str]]:
    duration = dict(zip(("F", "I", "W", "send"), times, strict=True))
    orders = build_schedule(name, p, m, v, duration=duration).orders
    return [[str(op) for op in order] for order in orders]


def automatic_span(
    load_module: Callable[[str], Any], p: int, m: int, memory: int, times: Times
) -> int:
    """Return the longest span of a rank in the authors' automatic schedule."""
    f, i, w, _ = times
    config = SimpleNamespace(
        n_stages=p, n_micro=m, max_chunks=1, max_mem=[memory] * p, cost_comm=0, print_scaling=1,
        mem_f=[1] * p, mem_b=[0] * p, mem_w=[-1] * p,
        cost_f=[f] * p, cost_b=[i] * p, cost_w=[w] * p,
    )  # fmt: skip
    zb = load_module("zb")
    span, _, _ = zb.initial_solution(zb.Graph.build_graph(p, m, config), print_result=False)
    return int(span)


def our_span(name: str, p: int, m: int, times: Times) -> int:
    f, i, w, _ = times
    schedule = build_schedule(name, p, m)
    costs = build_costs(schedule, forward=f, input_gradient=i, weight_gradient=w)
    run = simulate(schedule, costs)
    spans = [ends[-1] - starts[0] for starts, ends in zip(run.starts, run.ends, strict=True)]
    return int(max(spans) * run.tick)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("clone", type=Path, help="a clone of zero-bubble-pipeline-parallelism")
    parser.add_argument(
        "--cases", type=int, default=300, help="random cases per schedule (default: 300)"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    load_module = load(arguments.clone)
    num_different = 0
    for name in ("1f1b", "interleaved", "zb-v", "v-half", "v-min", "zb-h1", "zb-h2"):
        equal, compared, difference = 0, 0, ""
        while compared < arguments.cases:
            p, v = rng.randint(1, 8), rng.randint(2, 4) if name == "interleaved" else 2
            m = p * rng.randint(2, 5) if name == "interleaved" else rng.randint(1, 4 * p)
            f, i, w, c = (rng.randint(low, 12) for low in (1, 1, 0, 0))
            times = (f, f, f, c) if rng.random() < 0.2 else (f, i, w, c)
            if name in ("zb-h1", "zb-h2"):
                m, times = max(m, 2 * p), (*times[:2], max(1, w), 0)
                memory = p if name == "zb-h1" else 2 * p - 1
                is_equal = automatic_span(load_module, p, m, memory, times) == our_span(
                    name, p, m, times
                )
            else:
                orders = authors_orders(load_module, name, p, m, v, times)
                if orders is None:
                    continue
                is_equal = orders == our_orders(name, p, m, v, times)
            compared += 1
            equal += is_equal
            difference = (
                difference if is_equal else f"; differs for p={p}, m={m}, v={v}, F, I, W, c={times}"
            )
        print(f"{equal} of {compared}  {name}{difference}", flush=True)
        num_different += compared - equal
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
