"""Files from the Hugging Face Hub or its cache, with errors a user can act on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from distributed_training.errors import UserError
from distributed_training.sizes import HUB_IDS

PROBE_TIMEOUT_S = 3.0
WIKITEXT_ID = "Salesforce/wikitext"
WIKITEXT_FILES = {
    "train": "wikitext-2-raw-v1/train-00000-of-00001.parquet",
    "validation": "wikitext-2-raw-v1/validation-00000-of-00001.parquet",
}
GPT2_ID = HUB_IDS["gpt2"]
TOKENIZER_FILES = ("vocab.json", "merges.txt")
WEIGHT_FILES = ("config.json", "model.safetensors")


def fetch(repo_id: str, filename: str, *, repo_type: str = "model", network: bool = True) -> Path:
    """Path of one file in the Hub's local cache, downloaded first when `network` allows.

    Raises OSError with one line on why when it cannot be had.
    """
    # The library raises classes of several HTTP stacks here, and which ones differs by version.
    # ValueError while it is imported is an HF_ENDPOINT that is no address.
    try:
        from huggingface_hub import hf_hub_download

        with _quiet():
            return Path(
                hf_hub_download(
                    repo_id,
                    filename,
                    repo_type=repo_type,
                    local_files_only=not network,
                    etag_timeout=PROBE_TIMEOUT_S,
                )
            )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise OSError(f"{repo_id}/{filename}: {type(error).__name__}: {reason[:200]}") from None


def fetch_all(repo_id: str, filenames: tuple[str, ...], *, repo_type: str = "model") -> list[Path]:
    """Cache paths of several files: from the cache if all are there, else through the network."""
    try:
        return [fetch(repo_id, name, repo_type=repo_type, network=False) for name in filenames]
    except OSError:
        check_reachable(repo_id, filenames[0], repo_type=repo_type)
        return [fetch(repo_id, name, repo_type=repo_type) for name in filenames]


def check_reachable(repo_id: str, filename: str, *, repo_type: str = "model") -> None:
    """Raise OSError unless the Hub answers for this file within `PROBE_TIMEOUT_S` seconds.

    Its client would ask again and again, with a minute each, where nobody has the file yet.
    """
    import http.client
    import urllib.error
    import urllib.request

    try:
        from huggingface_hub import constants, hf_hub_url
    except ValueError as error:  # it reads HF_ENDPOINT and other variables when it is imported
        raise OSError(f"one of the HF_... variables cannot be read: {error}") from None

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    url = hf_hub_url(repo_id, filename, repo_type=repo_type)
    try:
        request = urllib.request.Request(url, method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500 or error.code in (404, 408, 429):
            raise OSError(f"{url} answers {error.code} {error.reason}") from None
        # Anything else, a token that is wanted for one, is for the download to find out.
    except OSError as error:
        raise OSError(f"{constants.ENDPOINT} does not answer: {error}") from None
    except (ValueError, http.client.InvalidURL) as error:
        raise OSError(f"HF_ENDPOINT={constants.ENDPOINT!r} is no address: {error}") from None
    except http.client.HTTPException as error:
        reason = f"{type(error).__name__}: {str(error).strip()[:100]}"
        raise OSError(f"{constants.ENDPOINT} answers, but not as a Hub: {reason}") from None


def fetch_wikitext() -> dict[str, Path]:
    """Paths of WikiText-2's parquet files by split; OSError when they cannot be had."""
    paths = fetch_all(WIKITEXT_ID, tuple(WIKITEXT_FILES.values()), repo_type="dataset")
    return dict(zip(WIKITEXT_FILES, paths, strict=True))


def fetch_gpt2_tokenizer() -> Path:
    """Folder with GPT-2's vocab.json and merges.txt; OSError when it cannot be had."""
    return fetch_all(GPT2_ID, TOKENIZER_FILES)[0].parent


def fetch_weights(model: str) -> Path:
    """Folder with the published weights of `model`; OSError when they cannot be had."""
    return fetch_all(HUB_IDS[model], WEIGHT_FILES)[0].parent


def cannot_fetch(key: str, value: str, error: OSError, commands: tuple[str, ...]) -> UserError:
    """The error for something asked for by name that neither cache nor Hub could give."""
    return UserError(
        f"{key}={value!r} is neither in the Hub's cache nor to be had from the Hub",
        str(error),
        f"on a machine with internet run: {' && '.join(commands)}; then copy "
        "~/.cache/huggingface here",
    )


WIKITEXT_COMMANDS = (
    f"hf download {WIKITEXT_ID} --repo-type dataset --include 'wikitext-2-raw-v1/*'",
)


def tokenizer_commands() -> tuple[str, ...]:
    """What to type to pre-download GPT-2's tokenizer."""
    return (f"hf download {GPT2_ID} {' '.join(TOKENIZER_FILES)}",)


def weight_commands(model: str) -> tuple[str, ...]:
    """What to type to pre-download the weights of `model`."""
    return (f"hf download {HUB_IDS[model]} {' '.join(WEIGHT_FILES)}",)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the Hub client's retry warnings off the screen; the final error says it all."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "httpx", "urllib3")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
