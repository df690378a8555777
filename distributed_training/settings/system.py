"""Before a command begins, check the operating system and the environment variables that libraries
read. This module imports only modules that load quickly."""

import os
import platform
import re
import resource
import sys

from distributed_training.settings.errors import UserError, removed_folder_error
from distributed_training.settings.files import shown

# Files that torch, psutil and supervise/ read
_PROC_FILES = (
    "/proc/meminfo", "/proc/stat", "/proc/self/stat", "/proc/self/ns/net",
    "/proc/sys/kernel/random/boot_id",
)  # fmt: skip
_MIN_ADDRESS_BYTES = 1_300_000_000  # address space that a process with torch needs
_NUMBER = (r"\s*\d{1,9}\s*", "a whole number")
_SWITCH = (r"(?i)y|yes|1|t|true|n|no|0|f|false", "1 or 0")
# Environment variable -> (accepted values, their description). torch reads the first four in a
# separate thread. There, an invalid value aborts the process or makes it wait forever. gloo's error
# does not name the variable. huggingface_hub reads its two variables when a finished run writes the
# model card.
_VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": _NUMBER, "TORCH_NCCL_TRACE_BUFFER_SIZE": _NUMBER,
    "TORCH_FR_CPP_STACK": _SWITCH, "TORCH_NCCL_TRACE_CPP_STACK": _SWITCH,
    "GLOO_DEVICE_TRANSPORT": (r"TCP|TCP_TLS|LINUX", "TCP"),
    "HF_HUB_DOWNLOAD_TIMEOUT": _NUMBER, "HF_HUB_ETAG_TIMEOUT": _NUMBER,
}  # fmt: skip


def require_system() -> None:
    """Raise UserError if this command cannot work on this system. The possible reasons are:
    - The operating system is not Linux.
    - The current folder has been removed.
    - A file in /proc cannot be read.
    - The limit on address space is too low.
    - A library does not accept the value of an environment variable."""
    if sys.platform != "linux":
        fix = "use WSL 2" if sys.platform == "win32" else "use a Linux machine or a container"
        raise UserError(f"this suite runs on Linux, not on {platform.system()}", fix=fix)
    if folder_error := removed_folder_error():
        raise folder_error
    if missing := [file for file in _PROC_FILES if not os.access(file, os.R_OK)]:
        fix = "mount the proc file system. Run: mount -t proc proc /proc"
        raise UserError(f"{missing[0]} cannot be read", "this suite needs /proc", fix)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < _MIN_ADDRESS_BYTES:  # a negative value means no limit
        what = f"The limit of {limit / 1e9:.2f} GB of address space (ulimit -v) is too low"
        why = f"importing torch takes {_MIN_ADDRESS_BYTES / 1e9:g} GB"
        raise UserError(what, why, "raise the limit. Run: ulimit -v unlimited")
    for name, (accepted, description) in _VARIABLES.items():
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(accepted, value):
            what = f"{name}={shown(value)} is not accepted"
            raise UserError(what, fix=f"set {name} to {description}, or unset it")
