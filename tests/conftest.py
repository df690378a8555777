"""Shared helpers and fixtures. The helpers run the script either as a user would or in warm
processes that have already imported its modules. One fixture hides the Hub from all tests."""

import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

# Let Triton run kernels in Python. It reads this variable when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from distributed_training.data import hub
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.records.record import versions
from tests.pool import HEAVY, LIGHT, ROOT, SCRIPT, Pool  # noqa: F401
from tests.support import small_text

# Background processes that a shell without job control starts ignore SIGINT and SIGQUIT, and
# processes under nohup ignore SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Use a cache that contains no costs of models that other versions of the code have computed.
CACHE = Path(tempfile.gettempdir(), f"distributed-training-{os.geteuid()}")
os.environ["DISTRIBUTED_TRAINING_CACHE"] = str(CACHE)

# clean_environment sets this variable to hide the Hub. Tests with a stub of the Hub remove it.
HUB_OFFLINE_VARIABLE = "HF_HUB_OFFLINE"

# CONFIG for runs that are so small that they spend most of their time importing torch
SMALL = {
    "model": "gpt2-tiny",
    "dataset": str(small_text()),
    "max_length": 32,
    "batch_size": 2,
    "num_samples": 32,
    "epochs": 1,
    "eval_samples": 8,
    "generate": None,
    "learning_rate": 1e-3,
}


LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """Remove launcher variables, such as RANK, that an earlier test left in this process."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def clean_environment(**extra: str) -> dict[str, str]:
    """Return a copy of the environment without launcher variables, GPUs or access to the Hub."""
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    repository_paths = [str(ROOT), str(ROOT / "results" / "lab")]
    path = os.pathsep.join([*repository_paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment.update(extra)
    return environment


def run_command(
    command: list[str], *, timeout_s: float = 240, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process group, and kill the group at the time limit."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{command} ran past {timeout_s} s\n{out[-3000:]}\n{err[-3000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@functools.cache
def light_pool() -> Pool:
    """Return a process pool for dry runs and for tests of rejected input. Its processes have
    imported all planning modules."""
    return Pool(LIGHT, clean_environment(OMP_NUM_THREADS="1"))


@functools.cache
def heavy_pool() -> Pool:
    """Return a process pool for training on CPUs. Its processes have imported torch and
    DeepSpeed."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return Pool(HEAVY, clean_environment(DS_ACCELERATOR="cpu", **threads))


@functools.cache
def hub_pool() -> Pool:
    """Return a process pool for runs that access a stub of the Hub. Its processes have not imported
    transformers, because this would also import the Hub client. The client reads the environment
    only when it is imported."""
    modules = [name for name in HEAVY if not name.startswith("transformers")]
    return Pool(modules, heavy_pool().environment)


def settings(values: dict[str, object]) -> list[str]:
    """Return the options for the given CONFIG values."""
    return [f"--{key}={value}" for key, value in values.items()]


def script(
    values: dict[str, object], *arguments: object, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run the script in a warm process that has not imported torch. `values` override CONFIG."""
    return light_pool().script([*settings(values), *arguments], **options)


def train(
    values: dict[str, object], *arguments: object, num_processes: int = 1, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run the script in warm processes, as a launcher would start it. `values` override the CONFIG
    of a very small run."""
    pool = hub_pool() if HUB_OFFLINE_VARIABLE in options.get("unset", ()) else heavy_pool()
    return pool.script(
        [*settings({**SMALL, **values}), *arguments], num_processes=num_processes, **options
    )


def only_record(output_dir: Path) -> dict:
    """Return the record of the only run in `output_dir`."""
    files = sorted(output_dir.glob("*-*/record.json"))  # not through the link "latest"
    assert len(files) == 1, f"expected one run in {output_dir}, found {files}"
    return json.loads(files[0].read_text())


def assert_ok(result: subprocess.CompletedProcess[str]) -> None:
    """Fail, and show the end of the output, unless the exit code is 0."""
    assert result.returncode == 0, (
        f"exit code {result.returncode}\n--- stdout\n{result.stdout[-3000:]}"
        f"\n--- stderr\n{result.stderr[-3000:]}"
    )


# The slowest files, in the order in which workers should start them. All other files follow.
# test_all_types.py measures the types of models whose sizes two other files read from the cache.
LONGEST_FIRST = (
    "tests/models/test_all_types.py", "tests/real/test_real_model.py",
    "tests/parity/test_layouts.py", "tests/parity/test_hub_layouts.py", "tests/models/test_hub.py",
    "tests/e2e/test_resume.py", "tests/e2e/test_engineers_path.py", "tests/e2e/test_faults.py",
    "tests/lab/test_documents.py", "pipedream_tutorial/tests/test_pipeline_by_hand.py",
    "pipedream_tutorial/tests/test_commands.py", "pipedream_tutorial/tests/test_runtime.py",
    "tests/e2e/test_launchers.py", "tests/e2e/test_nodes.py", "tests/e2e/test_parity.py",
    "tests/e2e/test_students_path.py", "pipedream_tutorial/tests/test_launch.py",
    "tests/lab/test_planner_page.py", "tests/tools/test_jobs.py",
    "tests/parity/test_shipped_config.py", "tests/parity/test_lora.py",
    "tests/parity/test_regions.py", "tests/models/test_adapters_in_peft.py",
    "tests/parity/test_expert_parallel.py", "tests/parity/test_resharding.py",
    "tests/checkpoint/test_export.py",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Empty the cache once per session, not in its workers and in processes that import this. Do
    not collect garbage while modules are imported."""
    gc.disable()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(CACHE / "configs", ignore_errors=True)


def _refuse_processes(event: str, _: object) -> None:
    if event in ("subprocess.Popen", "os.fork"):
        raise AssertionError("This test starts a process. Mark it with pytest.mark.processes.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long test files first, so that all workers finish at about the same time. Each worker
    runs one file at a time (see run.sh)."""
    order = {str(ROOT / name): position for position, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported modules from garbage collection, which the tests trigger often. In `make
    quick`, let tests start no processes."""
    if session.config.option.markexpr == "not processes":
        sys.addaudithook(_refuse_processes)
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cache and the Hub appear empty."""

    def fetch_folder(repo_id: str, *_: object, **__: object) -> None:
        raise OSError(f"{repo_id} is hidden from unit tests")

    monkeypatch.setattr(hub, "fetch_folder", fetch_folder)


_deselected: set[Path] = set()
_not_passed: dict[Path, set[str]] = {}  # tests of a module that have not passed in this session


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    _deselected.update(item.path for item in items)


@pytest.fixture
def run_if_changed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip the tests of a module that have all passed with the same code."""
    yield from skip_unchanged(request)


def skip_unchanged(request: Any) -> Iterator[None]:
    """Skip the tests of a module that have all passed with the same versions of packages and the
    same files: all that their process had imported, and the package's JSON files. Chosen tests are
    never skipped, and `--cache-clear` forgets what passed."""
    cache = getattr(request.config, "cache", None)
    chosen = request.path in _deselected or any("::" in name for name in request.config.args)
    if cache is None or chosen:
        yield
        return
    key = f"passed/{request.path.relative_to(ROOT)}"
    if request.path not in _not_passed:
        passed = cache.get(key, {})
        tests = {item.nodeid for item in request.session.items if item.path == request.path}
        _not_passed[request.path] = set() if passed == checksums(passed) else tests
    not_passed = _not_passed[request.path]
    if not not_passed:
        pytest.skip("all tests have passed with these versions and files")
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed == failed_before:
        not_passed.discard(request.node.nodeid)
    if not not_passed:
        modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        files = {Path(file) for file in modules if file and ".venv" not in file}
        files |= {*ROOT.glob("distributed_training/**/*.json"), *ROOT.glob("results/*.json")}
        own = [str(file.relative_to(ROOT)) for file in files if file.is_relative_to(ROOT)]
        cache.set(key, checksums(own))


def checksums(files: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages, and a checksum of each file, by its path from ROOT."""
    paths = {name: ROOT / name for name in files if (ROOT / name).is_file()}
    sums = {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in paths.items()}
    return versions() | sums


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Open a process group that contains only this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Return the tokenizer that is included in the repository."""
    return Tokenizer(EMBEDDED_DIR)
