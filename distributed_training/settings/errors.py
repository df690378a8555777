"""The one exception that is meant for users."""


class UserError(ValueError):
    """A mistake the user can mend: what is wrong, why, and what to type instead. The command line
    prints it as one line and exits with code 2; it is never a traceback."""

    exit_code = 2

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        parts = [part.strip().rstrip(".") for part in (what, why, fix) if part]
        super().__init__("; ".join(" ".join(part.split()) for part in parts))


class RunError(UserError):
    """What ended a run that had begun, said in the same way; exit code 1."""

    exit_code = 1
