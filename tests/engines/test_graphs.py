"""Test when a step is captured, and what a replay reads and returns. A stub replaces the graph."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distributed_training.engines.graphs import NUM_EAGER_STEPS, StepGraph

pytestmark = pytest.mark.usefixtures("process_group")
CPU = torch.device("cpu")


def make_graph(capture, **attributes):
    """Return a StepGraph whose step doubles its input. `capture` replaces the capture."""
    step_graph = StepGraph(lambda x: (2 * x,), CPU, captures=False)
    vars(step_graph).update(captures=True, **attributes)
    if capture is not None:
        step_graph._capture = lambda tensors: capture(step_graph, tensors)
    return step_graph


def capture_stub(step_graph, tensors):
    """Set a graph whose replay writes three times its input to its output."""
    step_graph.inputs, step_graph.outputs = [t.clone() for t in tensors], (torch.zeros(2),)

    def replay():
        step_graph.outputs[0].copy_(3 * step_graph.inputs[0])

    step_graph.graph = SimpleNamespace(replay=replay)


def run(step_graph, count):
    return [step_graph(np.full(2, float(step)))[0] for step in range(count)]


def test_a_step_is_captured_after_the_eager_steps_and_its_results_are_copies():
    step_graph = make_graph(capture_stub)
    results = run(step_graph, NUM_EAGER_STEPS + 2)
    factors = [2.0] * NUM_EAGER_STEPS + [3.0] * 2
    assert [float(result[0]) for result in results] == [
        factor * step for step, factor in enumerate(factors)
    ]
    assert results[-1].data_ptr() != step_graph.outputs[0].data_ptr()


def test_a_dropped_graph_is_captured_again():
    captured = []

    def capture(step_graph, tensors):
        captured.append(len(tensors))
        capture_stub(step_graph, tensors)

    step_graph = make_graph(capture)
    step_graph.drop_graph()
    assert step_graph.num_steps == 0
    run(step_graph, NUM_EAGER_STEPS + 1)
    step_graph.drop_graph()
    run(step_graph, NUM_EAGER_STEPS)
    assert captured == [1]
    run(step_graph, 1)
    assert captured == [1, 1]


def test_steps_stay_eager_if_there_is_too_little_memory(caplog):
    def check_memory():
        raise RuntimeError("a CUDA graph of the step would need 2 GiB")

    step_graph = make_graph(None, pool=None, _check_memory=check_memory)
    results = run(step_graph, NUM_EAGER_STEPS + 2)
    assert [float(result[0]) for result in results] == [2.0 * step for step in range(len(results))]
    assert not step_graph.captures
    assert "2 GiB" in caplog.text
