"""Where numbers come from: what was typed, when, which code ran. No torch import."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
import zlib
from datetime import datetime, timezone
from typing import Any

from distributed_training.settings.files import ROOT

_PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "tokenizers")


def provenance(command: str, *, commit: str | None = None) -> dict[str, Any]:
    """The head of a measurement's record; `commit`: of this tree, where its .git does not say."""
    return {
        "command": command,
        "made_at": timestamp(),
        "git_commit": commit or git_commit(),
        "versions": versions(),
    }


def timestamp() -> str:
    """Now, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """Commit of this checkout, with "-dirty" when files differ; None outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
        return answer.stdout.strip() or None
    return None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **found}


@functools.cache
def code() -> dict[str, str]:
    """CRC-32 of each Python file of the package and of the strategies."""
    files = [*ROOT.glob("distributed_training/**/*.py"), *ROOT.glob("strategies/*/*.py")]
    found = {str(file.relative_to(ROOT)): zlib.crc32(file.read_bytes()) for file in sorted(files)}
    return {name: f"CRC-32 {checksum:08x}" for name, checksum in found.items()}
