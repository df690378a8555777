"""Test explorer.html in a headless browser."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, find_browser
from matplotlib.image import imread
from pipedream.config import SHARED_RULES
from pipedream.errors import UserError
from pipedream.schedules.ops import save_csv
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.simulator import build_costs, simulate

TUTORIAL = Path(__file__).resolve().parent.parent
PAGE, SOURCES = TUTORIAL / "explorer.html", TUTORIAL / "explorer"


def test_page_loads_only_its_local_scripts():
    page = PAGE.read_text()
    scripts = re.findall(r'<script src="(.*?)"></script>', page)
    assert page.count("<script") == len(scripts)
    assert {TUTORIAL / path for path in scripts} == {*SOURCES.glob("*.js")}
    assert not any("://" in path.read_text() for path in (PAGE, *SOURCES.iterdir()))


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    if find_browser() is None:
        assert "CI" not in os.environ, "CI needs Chromium or Chrome for explorer.html"
        pytest.skip("Chromium or Chrome, which opens the explorer, is not installed")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(started):
    started.errors.clear()
    yield started
    assert not started.errors


def text(browser, id_):
    return browser.js(f"document.getElementById('{id_}').textContent")


def click(browser, id_):
    browser.js(f"document.getElementById('{id_}').click()")


def numbers(browser, pane="main"):
    """Return the numbers above a timeline, such as {"time": "33", ...}."""
    return dict(
        browser.js(
            f"[...explorer.{pane}.numbers.children]"
            ".map(pair => [...pair.children].map(part => part.textContent))"
        )
    )


def middle(browser, operation):
    """Return the center (x, y) of an operation's cell, in window coordinates."""
    return browser.js(
        f"""(() => {{
            const {{ rank, index }} = explorer.main.run.timeline.cells.get("{operation}");
            const cell = explorer.main.chart.querySelector(`[data-at="${{rank}}.${{index}}"]`);
            cell.scrollIntoView({{ block: "center" }});
            const {{ left, top, width, height }} = cell.getBoundingClientRect();
            return [left + width / 2, top + height / 2];
        }})()"""
    )


def drag(browser, operation, to):
    """Drag an operation with the mouse to a point slightly to the right of the center of the
    operation `to`."""
    x, y = middle(browser, operation)
    end, _ = middle(browser, to)
    browser.mouse("mouseMoved", x, y)
    browser.mouse("mousePressed", x, y, "left")
    for share in (0.5, 1):
        browser.mouse("mouseMoved", x + share * (end + 3 - x), y, "left")
    browser.mouse("mouseReleased", end + 3, y, "left")


@pytest.mark.parametrize(("width", "dark"), [(1000, False), (400, True)])
def test_page_is_readable_at_every_width_in_light_and_dark_mode(browser, tmp_path, width, dark):
    hash_ = "#schedule=zb-h1&other=dualpipe-v&path=1&arrows=1&versions=1&stale=1&c=1&K=3"
    browser.open(PAGE, hash_, width=width, dark=dark)
    assert browser.js("document.documentElement.scrollWidth") <= width
    browser.screenshot(tmp_path / "page.png")
    shot = (255 * imread(tmp_path / "page.png")[:, :, :3]).round().astype(int)
    assert shot.shape[1] == width
    paper = shot[2, 2]
    assert paper.max() < 40 if dark else paper.min() > 240
    colors = {f"rgb({r}, {g}, {b})" for r, g, b in np.unique(shot.reshape(-1, 3), axis=0)}
    style = "getComputedStyle(document.querySelector('.chart .{}')).fill"
    assert {browser.js(style.format(kind)) for kind in "FIW"} <= colors


RANKS = replace(SHARED_RULES["num_stages"], high=16)


def type_into(browser, key, value):
    field = f"document.getElementById('{key if key == 'scale' else key + '-field'}')"
    browser.js(f"{field}.value = '{value}'")
    browser.js(f"{field}.dispatchEvent(new Event('change'))")


def test_rejected_values_give_the_error_of_the_command_line(browser):
    browser.open(PAGE)
    for key, name, value in (
        ("p", "num_stages", "17"), ("c", "communication", "-1"), ("F", "forward", "0"),
        ("saving", "overlap_saving", "two"),
    ):  # fmt: skip
        rule = RANKS if key == "p" else SHARED_RULES[name]
        with pytest.raises(UserError) as refused:
            rule.check(name, value)
        type_into(browser, key, value)
        assert text(browser, "said") == f"error: {refused.value}"
        assert numbers(browser)["time"] == "33"
    type_into(browser, "scale", "1,2")
    assert text(browser, "said").startswith("error: stage_scale has 2 factors for 4 ranks; give 4")
    type_into(browser, "m", "9")
    assert text(browser, "said") == ""
    assert numbers(browser)["time"] == "36"


def test_a_slider_changes_the_timeline_and_the_address(browser):
    browser.open(PAGE)
    assert numbers(browser)["time"] == "33"
    browser.js("document.getElementById('m').focus()")
    browser.key("ArrowRight")
    type_into(browser, "c", "1/3")
    type_into(browser, "scale", "1,2,1/2,1")
    schedule = build_schedule("1f1b", 4, 9)
    costs = build_costs(schedule, communication="1/3", stage_scale=[1, 2, "1/2", 1])
    expected = simulate(schedule, costs).makespan
    assert browser.js("explorer.main.run.numbers.makespan") == pytest.approx(float(expected))
    browser.wait("location.hash.includes('m=9') && location.hash.includes('c=1')")
    hash_ = browser.js("location.hash")
    browser.open(PAGE, hash_)
    assert browser.js("explorer.main.run.numbers.makespan") == pytest.approx(float(expected))


def test_every_schedule_is_drawn_or_says_why_not(browser):
    browser.open(PAGE)
    for name in browser.js("Object.keys(SCHEDULES)"):
        browser.js(f"explorer.store.change({{ schedule: '{name}', other: '{name}', m: 8 }})")
        assert numbers(browser) == numbers(browser, "beside"), name
    browser.js("explorer.store.change({ schedule: 'dualpipe-v', m: 7, other: '' })")
    assert "at least 2 microbatches per rank" in browser.js("explorer.main.error.textContent")
    assert browser.js("explorer.main.scroller.hidden")


def test_invalid_values_in_the_address_are_ignored_with_a_message(browser):
    browser.open(PAGE, "#p=99&m=x&F=-1&schedule=nonsense&moves=1.2&csv=%&scale=1,0&rate=0&zz=1")
    assert numbers(browser)["time"] == "33"
    message = text(browser, "said")
    assert message.startswith(f"error: num_stages=99 is not accepted; give {RANKS.describe()}")
    assert "unknown key zz" in message
    browser.open(PAGE, "#moves=9.9.9")
    assert "a move names a position that does not exist" in browser.js(
        "explorer.main.error.textContent"
    )
    browser.open(PAGE, "#schedule=csv&csv=0B0%2C0F0")
    assert "0B0" in browser.js("explorer.main.error.textContent")


def test_pointing_at_an_operation_says_what_it_waits_for(browser):
    browser.open(PAGE, "#c=1")
    browser.mouse("mouseMoved", *middle(browser, "1B3"))
    message = text(browser, "lines")
    assert "1B3: backward pass of microbatch 3 on stage 1. Rank 1, from 26 to 28." in message
    needs = "1F3 (on this rank, ended at 16) and 2B3 (from rank 2, arrived at 26)"
    assert f"It waits for {needs}. 2B3 arrived last." in message


def with_late_forward():
    """Return the makespan of 1F1B with c = 1 after swapping 0F4 and the 0B1 that follows it."""
    schedule = build_schedule("1f1b", 4, 8)
    first, *others = schedule.orders
    swapped = (*first[:5], first[6], first[5], *first[7:])
    changed = replace(schedule, orders=(swapped, *others))
    return simulate(changed, build_costs(changed, communication=1)).makespan


def test_a_drag_is_refused_or_can_be_undone(browser):
    browser.open(PAGE, "#c=1")
    drag(browser, "1B3", "1F3")
    assert text(browser, "said").startswith("Not possible: the ranks would wait for each other.")
    assert numbers(browser)["time"] == "49"
    drag(browser, "0F4", "0B1")
    expected = with_late_forward()
    assert text(browser, "said") == f"Costs {expected - 49}: the time rises from 49 to {expected}."
    assert numbers(browser)["time"] == str(expected)
    click(browser, "undo")
    assert numbers(browser)["time"] == "49"


def test_explorer_works_with_the_keyboard_alone(browser):
    browser.open(PAGE, "#c=1")
    browser.js("explorer.main.chart.focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        browser.key(key)
    assert "1F0" in text(browser, "lines")
    for key in ("ArrowUp", "Home", *["ArrowRight"] * 4):
        browser.key(key)
    browser.key("Home", shift=True)
    refused = "Not possible: 0B0 needs 0F0, which this rank would run later."
    assert text(browser, "said") == refused
    browser.key("ArrowRight")
    assert "0F4" in text(browser, "lines")
    browser.key("ArrowRight", shift=True)
    assert numbers(browser)["time"] == str(with_late_forward())
    browser.key("Space")
    browser.key("Space")  # answers the question, because its first answer has the focus
    browser.wait("explorer.player.time > 0")
    browser.key("Space")
    before = browser.js("explorer.player.time")
    browser.key(".")
    assert browser.js("explorer.player.time") > before


SOLUTIONS = [
    "schedule: 'gpipe', m: 12",
    "schedule: '1f1b'",
    "cut: true, moves: [{ rank: 2, from: 2, to: 11 }]",
    "schedule: 'eager-1f1b'",
    "schedule: 'pipedream-2bw'",
    "moves: [{ rank: 0, from: 5, to: 6 }, { rank: 0, from: 7, to: 9 }]",
]


def test_levels_start_unsolved_and_can_be_solved(browser):
    browser.open(PAGE)
    for level, solution in enumerate(SOLUTIONS, 1):
        browser.js(f"document.querySelectorAll('#levels button')[{level}].click()")
        assert text(browser, "lesson-title").startswith(f"Level {level}: ")
        assert browser.js("document.getElementById('learned').hidden"), level
        fresh = "JSON.stringify(fromHash('#level={}').chosen)"
        started = "JSON.stringify({ ...explorer.store.chosen, solved: [] })"
        assert browser.js(fresh.format(level)) == browser.js(started), level
        browser.js(f"explorer.store.change({{ {solution} }})")
        assert not browser.js("document.getElementById('learned').hidden"), level
    assert browser.js("explorer.store.chosen.solved") == [1, 2, 3, 4, 5, 6]


def upload(browser, id_, path):
    root = browser.send("DOM.getDocument")["root"]["nodeId"]
    node = browser.send("DOM.querySelector", nodeId=root, selector=f"#{id_}")["nodeId"]
    browser.send("DOM.setFileInputFiles", files=[str(path)], nodeId=node)
    browser.wait("document.getElementById('said').textContent !== ''")


def test_csv_can_be_exported_and_imported(browser, tmp_path):
    browser.open(PAGE, "#schedule=zb-v")
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    click(browser, "save-csv")
    save_csv(build_schedule("zb-v", 4, 8), tmp_path / "wanted.csv")
    expected = (tmp_path / "wanted.csv").read_bytes()
    browser.until(lambda: (tmp_path / "zb-v.csv").is_file())
    assert (tmp_path / "zb-v.csv").read_bytes() == expected
    browser.open(PAGE)
    upload(browser, "load-csv", tmp_path / "wanted.csv")
    assert numbers(browser)["time"] == "25.5"
    browser.wait("location.hash.includes('csv=')")
    browser.open(PAGE, browser.js("location.hash"))
    assert numbers(browser)["time"] == "25.5"
    (tmp_path / "broken.csv").write_text("0F0,1B0\n1F0,0B0\n")
    upload(browser, "load-csv", tmp_path / "broken.csv")
    assert "stage 1 is on ranks 0 and 1" in text(browser, "said")


def test_schedules_without_a_flush_run_four_consecutive_batches(browser):
    browser.open(PAGE, "#schedule=pipedream-2bw")
    assert numbers(browser)["weight versions"] == "2"
    assert browser.js("document.getElementById('n').value") == "4"
    browser.js("explorer.store.change({ schedule: '1f1b' })")
    assert browser.js("document.getElementById('n').value") == "1"
    browser.js("explorer.store.change({ other: 'pipedream' })")
    assert numbers(browser)["time"] == str(4 * 33)
    assert numbers(browser, "beside")["time"] == "105"


def box(browser, element):
    return browser.js(f"{element}.getBoundingClientRect().toJSON()")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1920, 1080)])
def test_both_timelines_are_in_view_beside_the_controls(browser, width, height):
    for hash_ in ("#other=zb-h1&versions=1&stale=1", "#schedule=zb-v&other=zb-h2&p=8&m=32"):
        browser.open(PAGE, hash_, width=width, height=height)
        main = box(browser, "explorer.main.chart")
        beside = box(browser, "explorer.beside.chart")
        assert 0 < main["top"] < main["bottom"] < beside["top"] < beside["bottom"] <= height
        left = box(browser, "document.getElementById('left')")
        assert left["right"] < main["left"] == beside["left"]
    browser.mouse("mouseMoved", *middle(browser, "1I3"))
    detail = box(browser, "document.getElementById('detail')")
    assert beside["bottom"] <= detail["top"] < detail["bottom"] <= height


@pytest.mark.parametrize("width", [360, 800, 1280, 1920])
def test_compared_timelines_have_one_scale_at_every_width(browser, width):
    browser.open(PAGE, "#schedule=1f1b&other=zb-v", width=width, height=800)
    rates = [browser.js(f"explorer.{pane}.layout.perUnit") for pane in ("main", "beside")]
    assert rates[0] == rates[1] > 0
    if width >= 1280:  # both ends are in view
        assert browser.js(
            "panes.every(({ scroller }) => scroller.scrollWidth === scroller.clientWidth)"
        )
    else:
        browser.js("explorer.beside.scroller.scrollLeft = 60")
        browser.wait("explorer.main.scroller.scrollLeft === 60")


CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', { value: %s, configurable: true })"


def test_copy_link_says_what_happened_and_shows_the_address(browser):
    cases = [
        ("{ writeText: async (text) => { window.copied = text; } }", "copied to the clipboard"),
        ("{ writeText: async () => { throw new DOMException('no'); } }", "does not let"),
        ("undefined", "does not let"),  # undefined over http
    ]
    for clipboard, message in cases:
        browser.open(PAGE, "#m=9")
        browser.js(CLIPBOARD % clipboard)
        click(browser, "share")
        browser.wait("document.getElementById('said').textContent !== ''")
        assert message in text(browser, "said")
        assert browser.js("document.getElementById('link').value === location.href")
        assert not browser.js("document.getElementById('link').hidden")
        assert browser.js("(window.copied === location.href)") == ("copied" in message)


def test_a_question_is_asked_before_playback_and_answered_after_it(browser):
    """Under 1F1B, rank r waits `3 * (p - 1 - r)` time units for later ranks. Under ZB-H2, no rank
    waits."""
    for hash_, answer, verdict in (
        ("", "rank 0", "Right: rank 0 idles longest, for 9. By rank: 9, 6, 3, 0."),
        ("", "all equally long", "No: rank 0 idles longest, for 9."),
        ("#schedule=zb-h2", "rank 1", "No: all ranks idle equally long, for 0."),
    ):
        browser.open(PAGE, hash_)
        click(browser, "play")
        assert "which rank idles longest" in text(browser, "question")
        assert browser.js("explorer.player.time") is None
        browser.js(
            "[...document.querySelectorAll('#question button')]"
            f".find((button) => button.textContent === '{answer}').click()"
        )
        assert browser.js("explorer.player.playing")
        browser.js("explorer.player.show(explorer.player.longest)")
        browser.wait("!explorer.player.playing")
        assert text(browser, "question").startswith(verdict)


def test_a_long_press_drags_an_operation_and_a_button_moves_it_to_the_end(browser):
    """Moving 2W0 to the end of its rank shortens the batch by 1 time unit, whether the user drags
    the operation by touch or presses the button."""

    def touch(kind, *points):
        points = [{"x": x, "y": y} for x, y in points]
        browser.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    browser.send("Emulation.setTouchEmulationEnabled", enabled=True)
    browser.open(PAGE, "#p=3&m=4&cut=1", width=390, height=844)
    (x, y), (end, _) = middle(browser, "2W0"), middle(browser, "2W3")
    touch("touchStart", (x, y))
    browser.wait("explorer.main.drag !== null")
    for share in (0.5, 1):
        touch("touchMove", (x + share * (end + 3 - x), y))
    touch("touchEnd")
    browser.send("Emulation.setTouchEmulationEnabled", enabled=False)
    assert text(browser, "said") == "Saves 1: the time falls from 16 to 15."
    click(browser, "undo")
    assert numbers(browser)["time"] == "16"
    browser.js("explorer.main.focus = explorer.main.run.timeline.cells.get('2W0')")
    browser.js("explorer.store.change({})")
    assert "No other rank waits for a W" in text(browser, "lines")
    click(browser, "last")
    assert numbers(browser)["time"] == "15"


def test_a_tap_on_a_phone_only_selects_and_goals_stay_in_view(browser):
    browser.send("Emulation.setTouchEmulationEnabled", enabled=True)
    browser.open(PAGE, width=390, height=844)
    browser.js("startLevel(3)")
    x, y = middle(browser, "2B3")
    scrolled = browser.js("scrollY")
    touch = partial(browser.send, "Input.dispatchTouchEvent")
    touch(type="touchStart", touchPoints=[{"x": x, "y": y}])
    touch(type="touchEnd", touchPoints=[])
    browser.wait("!document.getElementById('detail').hidden")
    browser.send("Emulation.setTouchEmulationEnabled", enabled=False)
    assert text(browser, "lines").startswith("2B3: ")
    assert browser.js("explorer.store.chosen.moves.length") == 0
    assert browser.js("scrollY") == scrolled
    goals, chart, detail = (
        box(browser, where) for where in ("byId('goals')", "explorer.main.chart", "byId('detail')")
    )
    assert 0 <= goals["top"] < goals["bottom"] <= chart["top"]
    assert y < detail["top"] < detail["bottom"] <= 844
