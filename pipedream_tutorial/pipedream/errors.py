"""Define the error for mistakes that a user can fix."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn


class UserError(ValueError):
    """Error for a mistake that the user can fix. It is shown on one line without a traceback, and
    the exit code is 2."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return advice on an unknown word: 'did you mean ...?' if an element of `known` is
    similar, otherwise 'choose from ...' with all elements."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    if close:
        return f"did you mean {lower[close[0]]!r}?"
    return f"choose from {', '.join(lower.values())}"


def main_with_errors(main: Callable[[], None]) -> NoReturn:
    """Run a script's main function and exit. The exit code is 0 on success. If an error occurs that
    the user can fix, print "error: ..." as one line on stderr and exit with code 2."""
    try:
        main()
        print(end="", flush=True)
        sys.exit(0)
    except UserError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("torch", "numpy", "matplotlib"):
            raise
        message = (
            f"{package} is not installed in this Python; "
            "run python -m pip install -r requirements.txt in the tutorial's folder"
        )
    except BrokenPipeError:  # the reader of the output, such as `| head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        name = error.filename or "a file or standard output"
        message = f"{name}: {error.strerror}; use a path that can be read or written"
    except KeyboardInterrupt:
        sys.exit(130)
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
