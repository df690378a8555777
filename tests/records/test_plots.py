import math
import warnings

import pytest
from matplotlib.figure import Figure

from distributed_training.records.plots import draw_plots, labels
from tests.support import made_record

GIB = 2**30
PLOTS = ["loss.png", "throughput.png", "memory.png"]


@pytest.fixture
def drawn(monkeypatch):
    """file name -> axes of every plot that is saved; a warning of matplotlib fails the test."""
    found = {}
    save = Figure.savefig

    def keep(figure, path, **words):
        found[path.name] = figure.axes[0]
        save(figure, path, **words)

    monkeypatch.setattr(Figure, "savefig", keep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield found


def bars(axes):
    """label -> length of a plot's bars, from the top."""
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert len(axes.patches) == len(names)
    assert axes.yaxis_inverted()
    return list(zip(names, [bar.get_width() for bar in axes.patches], strict=True))


def curves(axes):
    """label -> (steps, losses) of the lines."""
    return {line.get_label(): line.get_data() for line in axes.get_lines()}


def check_pictures(paths, folder, names=PLOTS):
    assert [path.name for path in paths] == names
    for path in paths:
        assert path.parent == folder
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000


@pytest.mark.parametrize("reserved", [12 * GIB, None], ids=["GPU", "CPU"])
def test_plots_show_the_records_figures(reserved, drawn, tmp_path):
    names = ("dp", "zero2", "fsdp")
    records = [
        made_record(
            strategy__name=name,
            memory__peak_reserved_bytes=reserved,
            performance__tokens_per_s=1000.0 * place,
        )
        for place, name in enumerate(names, 1)
    ]
    records.append(made_record(finished=False, status="oom"))
    folder = tmp_path / "new" / "plots"
    check_pictures(draw_plots(records, folder), folder)
    assert bars(drawn["throughput.png"]) == [("dp", 1000), ("zero2", 2000), ("fsdp", 3000)]
    memory = drawn["memory.png"]
    assert bars(memory) == [(name, 12.0 if reserved else 5.0) for name in names]
    assert ("GPU memory" if reserved else "host memory") in memory.get_xlabel()
    assert list(curves(drawn["loss.png"])) == list(names)
    steps, losses = curves(drawn["loss.png"])["dp"]
    assert (list(steps), list(losses)) == ([1, 64], [3.5, 3.0625])


def test_what_measured_no_gpu_has_no_bar_of_gpu_memory(drawn, tmp_path):
    """A bar of length 0 would say that it took none."""
    records = [
        made_record(strategy__name="dp", memory__peak_reserved_bytes=None),
        made_record(strategy__name="fsdp"),
    ]
    draw_plots(records, tmp_path)
    assert bars(drawn["memory.png"]) == [("fsdp", 12.0)]
    assert [name for name, _ in bars(drawn["throughput.png"])] == ["dp", "fsdp"]


def test_a_loss_that_was_not_finite_is_a_gap(drawn, tmp_path):
    record = made_record(loss_curve=[[1, 3.5], [2, None], [3, 3.0]])
    draw_plots([record], tmp_path)
    _, losses = curves(drawn["loss.png"])["zero2"]
    assert (losses[0], losses[2]) == (3.5, 3.0)
    assert math.isnan(losses[1])


@pytest.mark.parametrize("curve", [[], [[1, None], [2, None]]], ids=["empty", "null"])
def test_a_run_without_losses_has_no_line(curve, drawn, tmp_path):
    records = [made_record(strategy__name="dp", loss_curve=curve), made_record()]
    assert [path.name for path in draw_plots(records, tmp_path)] == PLOTS
    assert list(curves(drawn["loss.png"])) == ["zero2"]
    assert len(bars(drawn["throughput.png"])) == 2
    alone = draw_plots(records[:1], tmp_path / "alone")
    check_pictures(alone, tmp_path / "alone", PLOTS[1:])


def test_one_step_can_be_seen(drawn, tmp_path):
    draw_plots([made_record(loss_curve=[[1, 3.5]])], tmp_path)
    (line,) = drawn["loss.png"].get_lines()
    assert line.get_marker() == "o"


def test_a_run_too_short_to_be_timed_shows_the_rest(drawn, tmp_path):
    untimed = {"num_timed_steps": 0, "tokens_per_s": None, "mfu": None}
    paths = draw_plots([made_record(performance=untimed)], tmp_path)
    assert [path.name for path in paths] == ["loss.png", "memory.png"]


def test_equal_records_give_equal_plots(tmp_path):
    """Otherwise each regeneration would change the files that are committed."""
    first = draw_plots([made_record()], tmp_path / "a")
    second = draw_plots([made_record()], tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_runs_without_results_have_no_plots(tmp_path):
    assert draw_plots([made_record(finished=False)], tmp_path / "plots") == []
    assert draw_plots([], tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("changes", "first", "second"),
    [
        ({"strategy__name": "dp"}, "zero2", "dp"),
        ({"config__model": "gpt2"}, "zero2, model gpt2-medium", "zero2, model gpt2"),
        ({"batch__micro_batch_size": 8}, "zero2, batch 4 x 512", "zero2, batch 8 x 512"),
        ({"config__precision": "fp16"}, "zero2, precision bf16", "zero2, precision fp16"),
        ({"config__compile": False}, "zero2, compile yes", "zero2, compile no"),
        ({"world_size": 2}, "zero2, processes 4", "zero2, processes 2"),
        ({"run_dir": "runs/y"}, "zero2, x", "zero2, y"),
    ],
)
def test_labels_say_what_differs(changes, first, second):
    assert labels([made_record(), made_record(**changes)]) == [first, second]


def test_labels_tell_layouts_apart_and_name_or_count_equal_runs():
    mesh = {"pp": 4, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    pipelines = [
        made_record(
            strategy__name="pp", mesh=mesh, pipeline={"schedule": schedule, "num_microbatches": 8}
        )
        for schedule in ("1f1b", "gpipe")
    ]
    without_folder = [made_record(run_dir="") for _ in range(2)]
    assert labels([*pipelines, *without_folder]) == [
        "pp pp4 1f1b-m8", "pp pp4 gpipe-m8", "zero2, run 3", "zero2, run 4",
    ]  # fmt: skip
    named = [made_record(run_dir=f"runs/{number}") for number in (1, 2)]
    assert labels([*named, pipelines[0]]) == ["zero2, 1", "zero2, 2", "pp pp4 1f1b-m8"]


def test_even_one_run_given_twice_has_two_bars(drawn, tmp_path):
    draw_plots([made_record(), made_record()], tmp_path)
    assert bars(drawn["throughput.png"]) == [("zero2, x", 131072.0)] * 2
