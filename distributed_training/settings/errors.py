"""The one exception that is meant for users, and how a process ends with it."""

import errno
import os
import signal
import sys
from collections.abc import Callable

from distributed_training.settings.launchers import is_first

# A disk that is full or read-only, and files that belong to others
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


class UserError(ValueError):
    """A mistake the user can mend: what is wrong, why, and what to type instead. The command line
    prints it as one line and exits with code 2; it is never a traceback."""

    exit_code = 2

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        parts = [part.strip().rstrip(".") for part in (what, why, fix) if part]
        super().__init__("; ".join(printable(" ".join(part.split())) for part in parts))


def printable(text: str) -> str:
    """Escape control characters: in the name of a file they could rewrite a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RunError(UserError):
    """What ended a run that had begun, said in the same way; exit code 1."""

    exit_code = 1


def exit_code(act: Callable[[], int], *, trains: bool = True) -> int:
    """What `act` returns, or what goes with what it raises, which is said in a line."""
    try:
        code = act()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # | head: what is left to say has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UserError as error:
        if is_first(os.environ):  # every rank finds the same mistake; one says it
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        named = f"{printable(str(error.filename))}: " if error.filename else ""
        print(f"error: {named}{error.strerror}", file=sys.stderr, flush=True)
        return UserError.exit_code
    except KeyboardInterrupt:
        # Once training has begun, Ctrl-C saves.
        print("interrupted before training began" if trains else "interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
