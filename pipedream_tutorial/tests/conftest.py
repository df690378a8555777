"""Put the tutorial's folder first on sys.path, so that pytest can be started from any folder."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# The slowest test files, in the order in which workers should start them. Each worker runs one file
# at a time.
LONGEST_FIRST = (
    "test_runtime", "test_figures", "test_commands", "test_launch", "test_lecture",
    "test_studies", "test_simple", "test_explorer_page", "test_pipeline_by_hand", "test_torch",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    order = {here / f"{name}.py": index for index, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which the tests trigger often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
