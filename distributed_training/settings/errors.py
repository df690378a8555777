"""The exception that users see, and the exit codes of the process."""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable

from distributed_training.settings.launchers import is_first

# A disk that is full or read-only, and files that belong to others
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


class UserError(ValueError):
    """A mistake the user can fix: what is wrong, why, and what to type instead, a sentence each.
    The command line prints the sentences as one line, without a traceback, and exits with code 2.
    """

    exit_code = 2

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        reason, remedy = (_capitalize(_sentence(part)) for part in (why, fix))
        super().__init__(" ".join(filter(None, (_sentence(what), reason, remedy))))


def _sentence(text: str) -> str:
    """Put a text on one line with a full stop, except after a command that a reader will copy."""
    line = printable(" ".join(text.split())).rstrip(".")
    ends_in_command = re.search(r"(?i)\b(run|type): ", line)
    return line if not line or line[-1] in "?:" or ends_in_command else f"{line}."


def _capitalize(sentence: str) -> str:
    """Start a sentence with a capital unless its first word is a path, a key or another name."""
    is_word = re.match(r"[a-z]+[ ,]|(run|type): ", sentence)
    return sentence[0].upper() + sentence[1:] if is_word else sentence


def printable(text: str) -> str:
    """Escape control characters: in the name of a file they could rewrite a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RunError(UserError):
    """The reason why a run that had begun ended, printed like a UserError. The exit code is 1."""

    exit_code = 1


def exit_code(act: Callable[[], int], *, trains: bool = True) -> int:
    """Run `act`, print a UserError as one line, and return the exit code."""
    try:
        code = act()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # Nobody reads the rest of the output, as with `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UserError as error:
        if is_first(os.environ):  # every rank finds the same mistake, and one prints it
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
