"""Compile DeepSpeed's C++ extensions once, so that no test waits for a compiler.

    TORCH_EXTENSIONS_DIR=FOLDER python tests/build_extensions.py

This script does nothing if the folder already contains extensions for the installed torch and
DeepSpeed. The process pool of tests/pool.py loads the extensions before it forks. Otherwise,
DeepSpeed's loader would start ninja and a compiler in each process."""

import functools
import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.planner.checks import has_libaio


def main() -> None:
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    if not _is_built(folder):
        print(
            "Compiling DeepSpeed's extensions for the tests. This happens once and takes minutes.",
            file=sys.stderr,
        )
        _load()
        (folder / "built").write_text(_build_key())


def load_built() -> None:
    """Load the extensions into this process if they were built for the installed torch and
    DeepSpeed. Also cache the CPU features. Otherwise, DeepSpeed's CPU Adam would start a process
    each time it detects them."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    if _is_built(Path(os.environ.get("TORCH_EXTENSIONS_DIR", ""))):
        _load()


def _is_built(folder: Path) -> bool:
    file = folder / "built"
    return file.is_file() and file.read_text() == _build_key()


def _names() -> list[str]:
    return ["CPUAdamBuilder"] + ["AsyncIOBuilder"] * has_libaio()


def _build_key() -> str:
    versions = (f"{name}=={version(name)}" for name in ("torch", "deepspeed"))
    return " ".join([*_names(), *versions])


def _load() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    for name in _names():
        get_accelerator().create_op_builder(name).load(verbose=False)


if __name__ == "__main__":
    main()
