"""Build a wheel that contains strategies/ and configs/ in the package, where settings/files.py
finds them. pyproject.toml has everything else."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithSettings(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        ignored = shutil.ignore_patterns("__pycache__", "*.md", "*.sh")
        for folder in ("strategies", "configs"):
            target = Path(self.build_lib, "distributed_training", folder)
            shutil.copytree(folder, target, ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithSettings})
