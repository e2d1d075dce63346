"""Downloads a model repository from the Hugging Face hub into a folder.

Run as `python -m baton.hub REPOSITORY FOLDER`, a child process of `baton pull`. The one
place that touches huggingface_hub and translates its errors. Progress goes to standard
output as lines `progress BYTES 0`; an error is one line on standard error.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from huggingface_hub import errors, snapshot_download

from baton.errors import BatonError, ModelError, Unavailable

# Configuration, tokenizer and safetensors; never code, never pickled weights.
ALLOW_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
    "LICENSE*",
)
# Folders hold other formats of the same weights; so do Mistral's "consolidated" files.
IGNORE_PATTERNS = ("*/*", "consolidated*")

EXIT_REFUSED = 1
EXIT_UNREACHABLE = 3


def download(repository: str, folder: Path) -> None:
    """Fills the folder from the repository's main revision; finished files are not fetched again.

    Raises Unavailable when the hub cannot be reached, ModelError when it refuses.
    """
    try:
        snapshot_download(
            repository,
            local_dir=folder,
            allow_patterns=list(ALLOW_PATTERNS),
            ignore_patterns=list(IGNORE_PATTERNS),
        )
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        # A gated repository is reported as one that was not found, by inheritance.
        raise ModelError(
            f"the hub does not give out {repository} ({_first_line(error)}); check the name, and set "
            "HF_TOKEN if access to it is restricted"
        ) from error
    except OSError as error:
        raise Unavailable(
            f"{repository} cannot be fetched from the hub ({_first_line(error)}); try again later, what "
            "has arrived is kept"
        ) from error


def bytes_in(folder: Path) -> int:
    """Bytes of all files under the folder, unfinished downloads included."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            # A file may be renamed between being listed and being measured.
            total += path.stat().st_size if path.exists() else 0
    return total


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _print_progress(folder: Path, finished: threading.Event) -> None:
    while not finished.wait(1.0):
        sys.stdout.write(f"progress {bytes_in(folder)} 0\n")
        sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Runs the download; returns the exit status."""
    repository, folder = arguments[0], Path(arguments[1])
    finished = threading.Event()
    threading.Thread(target=_print_progress, args=(folder, finished), daemon=True).start()
    try:
        download(repository, folder)
    except BatonError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNREACHABLE if error.retryable else EXIT_REFUSED
    finally:
        finished.set()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
