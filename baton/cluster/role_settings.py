"""What the user has set for a role itself, in the environment and in the settings file.

A cluster leaves that alone unless it was told otherwise. It knows no particular setting, and checks
nothing: the roles do, when they read the same places.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ConfigError


class RoleSettings:
    """Settings by section, the environment's over the file's.

    config_file: TOML file, or ""; BATON_CONFIG counts where it is not given.

    Raises ConfigError if the file cannot be read.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, config_file: str = "") -> None:
        self._environ = os.environ if environ is None else environ
        path = config_file or self._environ.get("BATON_CONFIG", "")
        try:
            self._document = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"file {path} cannot be read as TOML: {error}", field="config") from None

    def has(self, section: str, name: str) -> bool:
        """Whether the user has set it."""
        return self._variable(section, name) in self._environ or name in self._table(section)

    def text(self, section: str, name: str, default: str) -> str:
        """The setting as text, or the default."""
        found = self._environ.get(self._variable(section, name))
        return str(self._table(section).get(name, default)) if found is None else found

    def _variable(self, section: str, name: str) -> str:
        return f"BATON_{section.upper()}_{name.upper()}"

    def _table(self, section: str) -> Mapping[str, object]:
        table = self._document.get(section, {})
        return table if isinstance(table, dict) else {}
