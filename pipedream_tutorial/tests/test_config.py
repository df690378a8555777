"""Test which values CONFIG and --set accept, and that errors consist of one line."""

import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.config import FOLDER, MIN_DURATION, SHARED_RULES, Rule, parse_arguments
from pipedream.errors import UserError, main_with_errors

CONFIG = {
    "num_stages": 4,  # ranks
    "forward": 1,  # how long
    "stage_scale": None,  # factors
    "verbose": True,  # more
    "learning_rate": 0.1,  # of SGD
    "mode": "fast",  # how
    "path": None,  # where
}
RULES = {
    **{key: SHARED_RULES[key] for key in CONFIG if key in SHARED_RULES},
    "verbose": Rule(kind=bool),
    "learning_rate": Rule(kind=float, low=MIN_DURATION, high=100),
    "mode": Rule(kind=str, choices=("fast", "slow")),
    "path": Rule(kind=str, nullable=True),
}


def parse(*arguments: str) -> dict:
    return parse_arguments(CONFIG, RULES, "A test.", script=__file__, arguments=arguments)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_stages=8", 8),
        ("forward=1/3", Fraction(1, 3)),
        ("stage_scale=1,2,3/2", [1, 2, Fraction(3, 2)]),
        ("stage_scale=none", None),
        ("verbose=False", False),
        ("learning_rate=1/4", 0.25),
        ("mode=slow", "slow"),
        ("path=a=b.csv", "a=b.csv"),
    ],
)
def test_values_are_parsed_by_the_rule_of_their_key(argument, value):
    key = argument.partition("=")[0]
    for arguments in (["--set", argument], ["--" + argument.replace(" ", "")]):
        found = parse(*arguments)[key]
        assert (found, type(found)) == (value, type(RULES[key].check(key, value)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "num_stage=3"], "CONFIG has no key num_stage; did you mean 'num_stages'?"),
        (["--set", "num_stages"], "--set num_stages has no equals sign; write --set key=value"),
        (
            ["--set", "num_stages=0"],
            "num_stages=0 is not accepted; give a whole number from 1 to 64",
        ),
        (
            ["--set", "stage_scale=1,x"],
            "stage_scale=x is not accepted; give a comma-separated list, each item a number from "
            "1e-09 to 1000, or None",
        ),
        (["--set", "mode=slw"], "mode=slw is not accepted; did you mean 'slow'?"),
        (["--nun_stages", "3"], "unknown argument --nun_stages; did you mean '--num_stages'?"),
        (["--set"], "argument --set: expected at least one argument; --help lists all options"),
    ],
)
def test_errors_say_what_is_wrong_and_what_to_type(arguments, message):
    with pytest.raises(UserError) as caught:
        parse(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["1/0", "nan", "inf", "1e999999999", "9" * 5000, "", "1 2", "٣"])
def test_text_that_is_not_a_number_is_refused_quickly(text):
    with pytest.raises(UserError, match=r"forward=.* is not accepted"):
        parse("--set", f"forward={text}")


def test_help_lists_every_key_with_its_meaning_and_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    texts = ("ranks", "how long", "factors", "more", "of SGD", "how", "where")
    for (key, default), meaning in zip(CONFIG.items(), texts, strict=True):
        assert f"{key} {meaning} ({RULES[key].describe()}; default {default})" in text


@given(st.lists(st.text() | st.sampled_from([*CONFIG, "=", "1", "/", "[", ",", "none"])))
@settings(derandomize=True, max_examples=100)
def test_any_input_is_accepted_or_raises_a_user_error(parts):
    try:
        found = parse("--set", "".join(parts))
    except UserError:
        return
    assert found.keys() == CONFIG.keys()


def test_a_multiline_error_is_printed_on_one_line(capsys):
    def fail() -> None:
        raise UserError("two\nlines", "fix it")

    with pytest.raises(SystemExit) as caught:
        main_with_errors(fail)
    assert (caught.value.code, capsys.readouterr().err) == (2, "error: two lines; fix it\n")


WITHOUT_PACKAGES_SCRIPT = """
import runpy, sys
for name in ("torch", "matplotlib", "numpy"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("pipedream_visual.py", 2, "error: matplotlib is not installed"),
        ("pipedream/__main__.py --verbose no", 0, "Not trained: torch is not installed"),
    ],
)
def test_scripts_report_missing_packages_on_one_line(command, code, words):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES_SCRIPT, *command.split()],
        cwd=FOLDER, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    output = done.stderr if code else done.stdout
    assert words in " ".join(output.split())
    assert done.stderr.count("\n") == (code > 0)
