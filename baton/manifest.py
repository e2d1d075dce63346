"""baton.json: what a pulled model folder records about itself.

It is the last file a pull writes, so a folder that has one was complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.errors import ModelError

FILE_NAME = "baton.json"

# Raise it whenever engine/convert.py would make other files of the same download:
# folders of an older version are then pulled again.
CONVERSION_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Origin and identity of a pulled model.

    weights_id: SHA-256 over the safetensors files in the order of their names.
    source: where the model came from, for people.
    license: SPDX identifier, or "" when the source states none.
    conversion_version: CONVERSION_VERSION of the pull; 0 when nothing was converted.
    weights_sizes: bytes of each safetensors file, by file name.
    """

    weights_id: str
    source: str
    license: str
    conversion_version: int
    weights_sizes: dict[str, int]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The folder's manifest, or None when it has none; ModelError when it cannot be understood."""
        path = folder / FILE_NAME
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ModelError(f"{path} is damaged ({error}); delete it, or pull the model again") from error

    def write(self, folder: Path) -> None:
        """Writes baton.json into the folder."""
        (folder / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def describes(self, weights_files: Sequence[Path]) -> bool:
        """Whether these are the files of the pull, judged by name and size."""
        return self.weights_sizes == {path.name: path.stat().st_size for path in weights_files}
