"""Test the notebook start_here.ipynb on a CPU, with a tiny model."""

import shutil

import nbformat
from nbclient import NotebookClient

from tests.conftest import ROOT, only_record
from tests.data import test_tokenizer
from tests.support import tiny_qwen2

folder = test_tokenizer.folder


def test_the_notebook_trains_and_generates(folder, tmp_path, monkeypatch):
    tiny_qwen2().save_pretrained(tmp_path / "base")
    shutil.copytree(folder, tmp_path / "base", dirs_exist_ok=True)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the notebook runs in a checkout
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))  # instead of the user's kernels and settings
    book = nbformat.read(ROOT / "start_here.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    for cell in book.cells:
        cell.source = cell.source.replace("%pip", "# pip").replace(
            "real_model_example.py", str(ROOT / "real_model_example.py")
        )
        cell.source = cell.source.replace("Qwen/Qwen3-0.6B", str(tmp_path / "base"))
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, resources=resources, timeout=240, startup_timeout=240).execute()
    printed = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]
    first, _, _, plan, training, answer = printed
    verdict = first.splitlines()[-1]
    assert verdict.startswith("LoRA adapters of base fit on a T4: ")
    assert verdict in " ".join(plan.split())
    assert "error: " not in plan + training + answer
    record = only_record(tmp_path / "runs")
    assert record["status"] == "ok"
    assert record["data"]["num_train_records"] == 190
    assert answer
