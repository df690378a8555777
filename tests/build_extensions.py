"""Compiles DeepSpeed's C++ extensions once, so that no test waits for a compiler.

    TORCH_EXTENSIONS_DIR=FOLDER python tests/build_extensions.py

Does nothing where the versions installed now have been built there before. A build that was killed
leaves a lock that torch would wait for: it is removed, since only one of these scripts builds in
the folder at a time.
"""

from __future__ import annotations

import fcntl
import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.plan.checks import has_libaio


def main() -> None:
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    names = ["CPUAdamBuilder", "ShareMemCommBuilder"] + ["AsyncIOBuilder"] * has_libaio()
    wanted = " ".join([*names, *(f"{name}=={version(name)}" for name in ("torch", "deepspeed"))])
    with (folder / "built").open("a+") as built:
        fcntl.flock(built, fcntl.LOCK_EX)
        built.seek(0)
        if built.read() == wanted:
            return
        print("Compiling DeepSpeed's extensions for the tests (once, minutes) ...", file=sys.stderr)
        for lock in folder.glob("*/lock"):
            lock.unlink()
        os.environ["DS_ACCELERATOR"] = "cpu"
        from deepspeed.accelerator import get_accelerator

        for name in names:
            get_accelerator().create_op_builder(name).load(verbose=False)
        built.truncate(0)
        built.write(wanted)


if __name__ == "__main__":
    main()
