"""Define the process's exit codes and the exceptions that users see."""

import errno
import os
import re
import sys
from collections.abc import Callable

from distributed_training.settings.launchers import prints_messages

# Errors for a full or read-only disk, an exceeded file-size limit, missing permissions, a file
# where a folder is expected, and a name that is too long
STORAGE_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
)


class UserError(ValueError):
    """Error that the user can fix. The message says what is wrong, why, and how to fix it. Commands
    print the message without a traceback and exit with `exit_code`. A command after "run:" at the
    end of `fix` is printed on a separate line."""

    exit_code = 2
    label = "error"

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        reason, remedy = (_capitalize(_sentence(part)) for part in (why, fix))
        super().__init__(" ".join(filter(None, (_sentence(what), reason, remedy))))

    @property
    def terminal_text(self) -> str:
        """Return the message for a terminal, with the command on a separate line."""
        message = f"{self.label}: {self}"
        return re.sub(r"(?i)\b(run:) (.+)", r"\1\n  \2", message)


def _sentence(text: str) -> str:
    """Return `text` on one line, ending with a period. No period follows a question mark, a colon
    or a command that the reader will copy."""
    line = printable(" ".join(text.split())).rstrip(".")
    ends_in_command = re.search(r"(?i)\brun: ", line)
    return line if not line or line[-1] in "?:" or ends_in_command else f"{line}."


def _capitalize(sentence: str) -> str:
    """Capitalize the first letter of a sentence unless its first word is a path, a key or another
    name."""
    is_word = re.match(r"[a-z]+[ ,]|run: ", sentence)
    return sentence[0].upper() + sentence[1:] if is_word else sentence


def printable(text: str) -> str:
    """Escape nonprintable characters. Control characters, for example in a file name, could
    otherwise overwrite text on a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe(error: BaseException) -> str:
    """Return an exception's type and the beginning of its message, on one line. The message of a
    UserError needs no type."""
    message = " ".join(str(error).split())[:300]
    return message if isinstance(error, UserError) else f"{type(error).__name__}: {message}"


class RunError(UserError):
    """Error that ends a run after it has begun. The message is printed in the same way as for a
    UserError, but the exit code is 1."""

    exit_code = 1


class FinishedError(UserError):
    """Raised if nothing remains to be done. The message is a note, and the exit code is 0."""

    exit_code = 0
    label = "note"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def print_stderr(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def run_and_report_errors(act: Callable[[], int]) -> int:
    """Call `act` and return the exit code. Errors that the user can fix, such as a UserError or a
    disk-full error, are printed without a traceback."""
    try:
        code = act()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # The reader has closed the output, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # SIGPIPE
    except UserError as error:
        if prints_messages(os.environ):  # all ranks detect the same mistake, and one prints it
            print_stderr(error.terminal_text)
        return error.exit_code
    except KeyboardInterrupt:
        print_stderr("interrupted")  # once training has begun, Ctrl-C saves a checkpoint instead
        return 128 + 2  # SIGINT
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS:
            raise
        prefix = f"{printable(str(error.filename))}: " if error.filename else ""
        print_stderr(f"error: {prefix}{error.strerror}")
        return UserError.exit_code
