"""Before a command begins, check the operating system. This module imports only modules that load
quickly."""

import platform
import sys

from distributed_training.settings.errors import UserError


def require_system() -> None:
    """Raise UserError unless this system is Linux."""
    if sys.platform != "linux":
        fix = "use WSL 2" if sys.platform == "win32" else "use a Linux machine or a container"
        raise UserError(f"this suite runs on Linux, not on {platform.system()}", fix=fix)
