"""Define the exceptions that users see and the exit codes of the process."""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable

from distributed_training.settings.launchers import is_first

# A full or read-only disk, and files that belong to other users
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


class UserError(ValueError):
    """Mistake that the user can fix. Its three sentences say what is wrong, why, and what to type
    instead. The command line prints the sentences without a traceback and exits with code 2. A
    command at the end of `fix`, after "run:", gets a line of its own."""

    exit_code = 2

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        reason, remedy = (_capitalize(_sentence(part)) for part in (why, fix))
        command = re.search(r"(?i)\brun: (.+)", remedy)
        self.command = command[1] if command else ""
        super().__init__(" ".join(filter(None, (_sentence(what), reason, remedy))))

    @property
    def printed(self) -> str:
        """Message for a terminal, with the command on a separate line."""
        message = f"error: {self}"
        if not self.command:
            return message
        return f"{message.removesuffix(self.command).rstrip()}\n  {self.command}"


def _sentence(text: str) -> str:
    """Return a text on one line with a full stop, except after a command that the reader will
    copy."""
    line = printable(" ".join(text.split())).rstrip(".")
    ends_in_command = re.search(r"(?i)\brun: ", line)
    return line if not line or line[-1] in "?:" or ends_in_command else f"{line}."


def _capitalize(sentence: str) -> str:
    """Start a sentence with a capital letter unless its first word is a path, a key or another
    name."""
    is_word = re.match(r"[a-z]+[ ,]|run: ", sentence)
    return sentence[0].upper() + sentence[1:] if is_word else sentence


def printable(text: str) -> str:
    """Escape control characters, which could rewrite a terminal if they are in a file's name."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RunError(UserError):
    """Reason why a run ended after it had begun. It is printed like a UserError, and the exit code
    is 1."""

    exit_code = 1


def exit_code(act: Callable[[], int], *, trains: bool = True) -> int:
    """Run `act`, print a UserError without its traceback, and return the exit code."""
    try:
        code = act()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # The reader has closed the output, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UserError as error:
        if is_first(os.environ):  # every rank detects the same mistake, and one rank prints it
            print(error.printed, file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        prefix = f"{printable(str(error.filename))}: " if error.filename else ""
        print(f"error: {prefix}{error.strerror}", file=sys.stderr, flush=True)
        return UserError.exit_code
    except KeyboardInterrupt:
        # Once training has begun, Ctrl-C saves a checkpoint instead.
        print("interrupted before training began" if trains else "interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
