"""The models in the cache folder: what each one is, and what of it fits into a memory.

Reads config.json, file sizes and headers. Knows no torch and no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.cache import cache_dir
from baton.errors import ModelError
from baton.models import ModelDir

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfModel:
    """One folder.

    name: as `baton pull` and --model call it.
    weights_bytes: of its weights files, as they are loaded unless another dtype is asked for.
    kv_bytes_per_token: in all layers, in the dtype of the weights.
    problem: why it cannot be used, or ""; the other fields but name and path are then empty.
    """

    name: str
    path: Path
    architecture: str = ""
    dtype: str = ""
    weights_bytes: int = 0
    max_model_len: int = 0
    kv_bytes_per_token: int = 0
    problem: str = ""

    def kv_tokens_in(self, memory_bytes: int) -> int:
        """Tokens whose KV fits beside the weights of one worker; 0 where the weights alone do not."""
        if not self.kv_bytes_per_token:
            return 0
        return max(0, memory_bytes - self.weights_bytes) // self.kv_bytes_per_token

    def fits_in(self, memory_bytes: int) -> bool:
        """Whether one worker and one sequence of full length do."""
        return 0 < self.max_model_len <= self.kv_tokens_in(memory_bytes)


def pulled_models() -> Iterator[ShelfModel]:
    """What is in the cache folder, by name; folders of pulls under way are left out."""
    folder = cache_dir() / "models"
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                yield look_at(path)


def look_at(path: Path) -> ShelfModel:
    """What a folder holds."""
    # The slash of a hub repository is two dashes on disk.
    name = path.name.replace("--", "/", 1)
    try:
        model = ModelDir.open(path)
    except ModelError as error:
        return ShelfModel(name=name, path=path, problem=error.message)
    config = model.model_config
    dtype = _dtype(model)
    return ShelfModel(
        name=name,
        path=path,
        architecture=config.architecture,
        dtype=dtype,
        weights_bytes=sum(file.stat().st_size for file in model.weights_files),
        max_model_len=config.max_model_len,
        kv_bytes_per_token=(
            2 * config.num_layers * config.num_kv_heads * config.head_dim * _ITEM_BYTES.get(dtype, 4)
        ),
    )


def _dtype(model: ModelDir) -> str:
    """What config.json says, which newer files call dtype; without it float32, as in transformers."""
    return str(model.config.get("dtype") or model.config.get("torch_dtype") or "float32")
