"""A model folder on disk: what it must contain and what every process reads from it.

Opens JSON and safetensors headers only. Knows neither torch nor where models come from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cache import model_folder
from baton.catalogue import CATALOGUE
from baton.digests import cached_sha256_of
from baton.errors import ModelError
from baton.fingerprint import canonical_attention, canonical_mlp, canonical_rope
from baton.limits import Limits
from baton.manifest import Manifest
from baton.model_config import ModelConfig
from baton.prefix_keys import KEY_VERSION
from baton.sampling import SAMPLER_VERSION
from baton.v1 import common_pb2
from baton.weights_files import find_weights_files


@dataclass(frozen=True, slots=True)
class ModelDir:
    """A complete model folder in the Hugging Face layout.

    path: the folder.
    config: content of config.json.
    generation_config: content of generation_config.json; empty when there is none.
    chat_template: Jinja source, or None when the model has none.
    tool_template: the one for chats with tools, where the model has another one for them; else None.
    weights_files: the safetensors files that make up the model, in the order of their names.
    manifest: baton.json, or None for a folder that was not pulled.
    model_config: what the two configurations say, every default resolved.

    Raises ModelError for a model that is not supported, naming the file and the setting.

    >>> model = ModelDir.open("smollm2-135m-instruct")  # doctest: +SKIP
    >>> model.max_model_len  # doctest: +SKIP
    8192
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    chat_template: str | None
    weights_files: tuple[Path, ...]
    manifest: Manifest | None
    model_config: ModelConfig = field(init=False)
    tool_template: str | None = None

    def __post_init__(self) -> None:
        try:
            model_config = ModelConfig.from_hf(self.config, self.generation_config)
        except ModelError as error:
            raise ModelError(f"{self.path}/{error.message}") from None
        object.__setattr__(self, "model_config", model_config)

    @classmethod
    def open(cls, path_or_name: str | Path) -> ModelDir:
        """Opens a folder, or a pulled model by its name.

        An existing folder of that name wins. Raises ModelError naming the missing or
        damaged file and what to do, or what of the model is not supported.
        """
        folder = _find_folder(path_or_name)
        config = _read_json(folder / "config.json")
        templates = _chat_templates(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(f"{folder} lacks tokenizer.json; run: baton pull <name>, or copy the file there")
        return cls(
            path=folder,
            config=config,
            generation_config=_read_json(folder / "generation_config.json", required=False),
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            weights_files=find_weights_files(folder),
            manifest=Manifest.read(folder),
        )

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation; may be none."""
        return self.model_config.eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, or None."""
        return self.model_config.bos_token_id

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus answer."""
        return self.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; token ids are below it."""
        return self.model_config.vocab_size

    @property
    def limits(self) -> Limits:
        """What the model can take."""
        return self.model_config.limits

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer.json file."""
        return self.path / "tokenizer.json"

    @property
    def tokenizer_id(self) -> str:
        """Hex SHA-256 of tokenizer.json."""
        return cached_sha256_of([self.tokenizer_path])

    @property
    def weights_id(self) -> str:
        """Hex SHA-256 over the weights files, as recorded by the pull.

        Computed, and remembered in the cache folder, when there is no record or the files'
        sizes contradict it; the first time this reads all weights.
        """
        if self.manifest is not None and self.manifest.describes(self.weights_files):
            return self.manifest.weights_id
        return cached_sha256_of(self.weights_files)

    def fingerprint(self) -> common_pb2.Fingerprint:
        """What must agree with every peer; see the message's comments."""
        model = self.model_config
        return common_pb2.Fingerprint(
            weights_id=self.weights_id,
            tokenizer_id=self.tokenizer_id,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            rope=canonical_rope(model),
            sampler_version=SAMPLER_VERSION,
            key_version=KEY_VERSION,
            attention=canonical_attention(model),
            mlp=canonical_mlp(model),
        )


def _find_folder(path_or_name: str | Path) -> Path:
    given = Path(path_or_name).expanduser()
    if given.is_dir():
        return given.absolute()
    # "org/model" is a hub repository; anything absolute, deeper or beginning with a dot can only be a path.
    is_path = str(path_or_name).startswith((".", "~")) or given.is_absolute() or ".." in given.parts
    if is_path or len(given.parts) not in (1, 2):
        raise ModelError(f"there is no model folder {path_or_name}; give the path of one that exists")
    pulled = model_folder(given.as_posix())
    if pulled.is_dir():
        return pulled
    # What else is no name that could be pulled.
    name, known = given.as_posix(), ""
    if name not in CATALOGUE and len(given.parts) == 1:
        name, known = "NAME", f", where NAME is {', '.join(sorted(CATALOGUE))} or org/model"
    raise ModelError(
        f"there is no model folder {path_or_name}; run: baton pull {name}{known}, or give a path"
    )


def _read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(
            f"{path.parent} lacks {path.name}; run: baton pull <name>, or give another path"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); pull the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object; pull the model again")
    return content


def _chat_templates(folder: Path) -> dict[str, str]:
    """By name: chat_template.jinja, else tokenizer_config.json's; one alone is "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    templates = _read_json(folder / "tokenizer_config.json", required=False).get("chat_template")
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return {"default": templates} if isinstance(templates, str) else {}
