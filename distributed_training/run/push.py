"""An exported model to the Hugging Face Hub, with its card.

python real_model_example.py push runs/latest user/name
"""

from __future__ import annotations

from pathlib import Path

from distributed_training.data.hub import check_push
from distributed_training.records.card import write_card
from distributed_training.records.display import short_path
from distributed_training.records.record import BEST, LAST, RECORD_FILE, load_record
from distributed_training.run.generate import find_weights
from distributed_training.settings.errors import UserError


def push(given: str, repo_id: str, *, best: bool) -> int:
    """Upload the last or the best weights of a run, or a folder of them; the exit code."""
    check_push(repo_id)
    _, folder = find_weights(given, BEST if best else LAST)
    print(f"pushed {push_folder(folder, repo_id)}")
    return 0


def push_folder(folder: Path, repo_id: str) -> str:
    """Upload `folder` to the model `repo_id`, made where it is not there; its address.

    Raises UserError for whatever the Hub or the network refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if (folder.parent / RECORD_FILE).is_file():
        write_card(folder, load_record(folder.parent), repo_id)
    disable_progress_bars()
    api = HfApi()
    try:
        address = str(api.create_repo(repo_id, exist_ok=True))
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Trained model")
    except Exception as error:  # those of whichever HTTP client the library uses
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {' '.join(lines)[:200]}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        may_not = "log in with a token that may write there, hf auth login, then " * (
            status in (401, 403)
        )
        fix = f"{may_not}type: python real_model_example.py push {short_path(folder)} {repo_id}"
        raise UserError(f"{short_path(folder)} was not pushed", why, fix) from None
    return address
