"""Files from the Hugging Face Hub or its local cache, with errors a user can act on."""

import sys
from functools import partial
from pathlib import Path

from distributed_training.settings.errors import UserError

TIMEOUT_S = 3.0
WIKITEXT_ID = "Salesforce/wikitext"
WIKITEXT_FILES = {
    split: f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet" for split in ("train", "validation")
}
WIKITEXT_COMMAND = f"hf download {WIKITEXT_ID} --repo-type dataset --include 'wikitext-2-raw-v1/*'"
TOKENIZER_ID = "openai-community/gpt2"
TOKENIZER_FILES = ("vocab.json", "merges.txt")
# Words in the names of files that tokenizers read.
_TOKENIZER_WORDS = ("token", "vocab", "merges", "chat_template", "spiece", "tekken", ".bpe")
_TEMPLATES = "additional_chat_templates/"
_COPY = "then copy ~/.cache/huggingface here"


def fetch_wikitext() -> dict[str, Path]:
    """WikiText-2's Parquet files by split; OSError where they are not available."""
    folder = fetch_folder(WIKITEXT_ID, tuple(WIKITEXT_FILES.values()), repo_type="dataset")
    return {split: folder / Path(name).name for split, name in WIKITEXT_FILES.items()}


def ask_for_dataset(key: str, dataset: str, *, download: bool) -> dict[str, list[Path]]:
    """Arrow files of a dataset (name or name:config) by split, through the library's cache; without
    `download` none, but UserError as well where it is not available."""
    name, _, config = dataset.partition(":")
    unanswered = None
    try:
        import datasets
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

        datasets.logging.set_verbosity_error()
        try:  # asks once, where the library would retry for half a minute
            url = hf_hub_url(name, "README.md", repo_type="dataset")
            get_hf_file_metadata(url, timeout=TIMEOUT_S)
        except (EntryNotFoundError, RepositoryNotFoundError):
            pass  # the Hub answered: what there is instead, or is not, the library says below
        except Exception as error:  # in the HTTP client's words: then what the cache has
            unanswered = error
            offline = constants.HF_HUB_OFFLINE
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        builder = datasets.load_dataset_builder(name, config or None)
        if not download:
            return {}
        builder.download_and_prepare()
        return {
            split: [Path(file["filename"]) for file in part.cache_files]
            for split, part in builder.as_dataset().items()
        }
    except Exception as error:  # its own, those of huggingface_hub, pyarrow, the HTTP client
        error = unanswered or error
        words = ", ".join(repr(word) for word in (name, config) if word)
        what = f"{key}={dataset!r} is neither a path nor a dataset that the Hugging Face Hub gives"
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        command = f'python -c "import datasets; datasets.load_dataset({words})"'
        fix = f"if it exists, on a machine with internet access run: {command}; {_COPY}"
        raise UserError(what, why, fix) from None
    finally:
        if unanswered:  # the end of the run may send its model there
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer, of whichever kind."""
    return folder.is_dir() and any(is_tokenizer_file(file.name) for file in folder.iterdir())


def fetch_tokenizer(repo_id: str) -> Path:
    """Folder with all files of a model's tokenizer; OSError as above."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(repo_id, timeout=TIMEOUT_S).siblings or []
    except Exception:  # no network: the cache has what was downloaded
        return fetch_folder(repo_id, ("tokenizer_config.json",))
    names = [file.rfilename for file in files]
    own = [name for name in names if "/" not in name and is_tokenizer_file(name)]
    if not own:
        raise OSError(f"{repo_id} has no files of a tokenizer")
    own += [name for name in names if name == "config.json" or name.startswith(_TEMPLATES)]
    return fetch_folder(repo_id, tuple(own))


def is_tokenizer_file(name: str) -> bool:
    """Whether a tokenizer may read a file of this name in its folder."""
    return any(word in name for word in _TOKENIZER_WORDS) and not name.endswith(".py")


def cannot_fetch(
    key: str, value: str, error: OSError, command: str, instead: str = ""
) -> UserError:
    """The error for something asked for by name that is neither cached nor downloadable; `instead`:
    another way out."""
    what = f"{key}={value!r} is not in the Hugging Face cache and cannot be downloaded"
    fix = f"on a machine with internet access run: {command}; {_COPY}"
    return UserError(what, str(error), f"{fix}; or {instead}" if instead else fix)


def check_push(repo_id: str) -> None:
    """Raise UserError unless `repo_id` is a name the Hub can have and there is a token for it."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        what = f"push={repo_id!r} is no name of a model"
        raise UserError(what, str(error), "user/name") from None
    if get_token() is None:
        what = f"push={repo_id!r} needs a token of the Hugging Face Hub"
        raise UserError(what, fix="type: hf auth login, or set HF_TOKEN")


def fetch_folder(repo_id: str, filenames: tuple[str, ...], *, repo_type: str = "model") -> Path:
    """Where the Hub's cache has these files, downloaded unless all are; OSError if it cannot."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import LocalEntryNotFoundError
        from huggingface_hub.utils import logging
    except ValueError as error:  # it reads HF_ENDPOINT and other variables when it is imported
        raise OSError(f"an HF_... environment variable is not valid: {error}") from None

    logging.set_verbosity_error()  # the OSError says what its warnings would
    ask = partial(hf_hub_download, repo_id, repo_type=repo_type, etag_timeout=TIMEOUT_S)
    try:
        try:
            paths = [ask(name, local_files_only=True) for name in filenames]
        except LocalEntryNotFoundError:  # asks once, where the download would retry for minutes
            url = hf_hub_url(repo_id, filenames[0], repo_type=repo_type)
            get_hf_file_metadata(url, timeout=TIMEOUT_S)
            paths = [ask(name) for name in filenames]
        return Path(paths[0]).parent
    except Exception as error:  # those of whichever HTTP client the library uses
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"{repo_id}: {type(error).__name__}: {reason[:200]}") from None
