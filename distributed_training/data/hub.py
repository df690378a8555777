"""Fetch files from the Hugging Face Hub or its local cache, with errors that tell users what to
do."""

import re
import sys
from functools import partial
from pathlib import Path

from distributed_training.data.folders import CARD, read_card
from distributed_training.settings.errors import UserError, describe, first_line

TIMEOUT_S = 3.0
WIKITEXT_ID = "Salesforce/wikitext"
WIKITEXT_FILES = {
    split: f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet" for split in ("train", "validation")
}
WIKITEXT_COMMAND = f"hf download {WIKITEXT_ID} --repo-type dataset --include 'wikitext-2-raw-v1/*'"
TOKENIZER_ID = "openai-community/gpt2"
TOKENIZER_FILES = ("config.json", "vocab.json", "merges.txt")
# Keys of a config.json by which transformers selects the tokenizer's class
CLASS_KEYS = ("model_type", "tokenizer_class")
# Strings that occur in the names of tokenizer files
_TOKENIZER_WORDS = ("token", "vocab", "merges", "chat_template", "spiece", "tekken", ".bpe")
_REPO_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
_TEMPLATES_FOLDER = "additional_chat_templates/"
_DOWNLOAD_ADVICE = (
    "copy ~/.cache/huggingface to this machine from a machine with internet access, on which you "
    "first run"
)


def fetch_wikitext() -> dict[str, Path]:
    """Return the Parquet file of each split of WikiText-2. Raises OSError if the files are not
    available."""
    folder = fetch_folder(WIKITEXT_ID, tuple(WIKITEXT_FILES.values()), repo_type="dataset")
    return {split: folder / Path(name).name for split, name in WIKITEXT_FILES.items()}


def fetch_dataset(key: str, dataset: str, *, download: bool) -> dict[str, list[Path]]:
    """Return the Arrow files of each split of a dataset on the Hub. `dataset` is `name`,
    `name:config` or `name:config:split`.

    If `download` is False, only check that the dataset is available, and return {}. Raises
    UserError if the dataset is neither on the Hub nor in the cache of the datasets library."""
    name, _, rest = dataset.partition(":")
    config, _, _ = rest.partition(":")
    connection_error = None
    try:
        import datasets
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

        datasets.logging.set_verbosity_error()
        try:  # Ask once, because the library would retry for half a minute.
            url = hf_hub_url(name, CARD, repo_type="dataset")
            get_hf_file_metadata(url, timeout=TIMEOUT_S)
            card = hf_hub_download(name, CARD, repo_type="dataset")
        except (EntryNotFoundError, RepositoryNotFoundError):
            pass  # The Hub answered, so the library reports below why it fails.
        except Exception as error:  # The Hub did not answer, so this process uses only the cache.
            connection_error = error
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        else:
            read_card(Path(card), f"{key}={dataset!r}")
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        builder = datasets.load_dataset_builder(name, config or None)
        if not download:
            return {}
        builder.download_and_prepare()
        return {
            split: [Path(file["filename"]) for file in split_data.cache_files]
            for split, split_data in builder.as_dataset().items()
        }
    except UserError:
        raise
    except Exception as error:  # errors from datasets, huggingface_hub, pyarrow or the HTTP client
        error = connection_error or error
        arguments = ", ".join(repr(argument) for argument in (name, config) if argument)
        what = f"{key}={dataset!r} is neither a path nor an available dataset on the Hub"
        command = f'python -c "import datasets; datasets.load_dataset({arguments})"'
        fix = f"if the dataset exists, {_DOWNLOAD_ADVICE}: {command}"
        raise UserError(what, describe(error), fix) from None


def is_repo_id(name: str) -> bool:
    """Return whether `name` is a valid name for a model on the Hub."""
    return _REPO_ID.fullmatch(name) is not None


def fetch_tokenizer(repo_id: str) -> Path:
    """Return the folder that contains all of a model's tokenizer files and configs, such as that
    of its image processor. Raises OSError if the files are not available."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(repo_id, timeout=TIMEOUT_S).siblings or []
    except Exception:  # Without a network connection, the cache may have the files.
        return fetch_folder(repo_id, ("tokenizer_config.json",))
    names = [
        file.rfilename
        for file in files
        if "/" not in file.rfilename.removeprefix(_TEMPLATES_FOLDER)
    ]
    tokenizer_files = [*filter(is_tokenizer_file, names)]
    if not tokenizer_files:
        raise OSError(f"{repo_id} has no tokenizer files")
    configs = [name for name in names if name.endswith("config.json")]
    return fetch_folder(repo_id, (*tokenizer_files, *configs))


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file with this name may be a tokenizer file."""
    return any(word in name for word in _TOKENIZER_WORDS) and not name.endswith(".py")


def fetch_error(missing: str, error: OSError, command: str, alternative: str = "") -> UserError:
    """Return the error for files that are neither cached nor downloadable. `missing` names the
    files and ends with "is" or "are". `command` is a command that downloads the files.
    `alternative` tells the user what to do instead of downloading."""
    what = f"{missing} not in the Hugging Face cache and cannot be downloaded"
    fix = f"{alternative}, or {_DOWNLOAD_ADVICE}" if alternative else _DOWNLOAD_ADVICE
    return UserError(what, str(error), f"{fix}: {command}")


def fetch_folder(repo_id: str, filenames: tuple[str, ...], *, repo_type: str = "model") -> Path:
    """Return the folder in the local Hub cache that contains the given files of a repository.
    Download the files if any are missing. Raises OSError if a file is not available."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # The OSError contains the same information.
    fetch = partial(hf_hub_download, repo_id, repo_type=repo_type, etag_timeout=TIMEOUT_S)
    try:
        try:
            paths = [fetch(name, local_files_only=True) for name in filenames]
        except LocalEntryNotFoundError:  # Ask once, because the download would retry for minutes.
            url = hf_hub_url(repo_id, filenames[0], repo_type=repo_type)
            get_hf_file_metadata(url, timeout=TIMEOUT_S)
            paths = [fetch(name) for name in filenames]
        return Path(paths[0]).parent
    except Exception as error:  # errors from the library's HTTP client
        reason = first_line(error)
        raise OSError(f"{repo_id}: {type(error).__name__}: {reason[:200]}") from None
