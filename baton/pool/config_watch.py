"""Whether a pool's settings file says something else than when the pool started.

Owns when that is looked at, and that settings which cannot be used change nothing. By content: a ConfigMap is
mounted as a link that is turned to another folder.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from baton.config import load_config
from baton.errors import ConfigError
from baton.logs import get_logger
from baton.pool.config import PoolConfig

LOOK_EVERY_S: Final = 2.0

log = get_logger(__name__)


class ConfigWatch:
    """Looks until the file has changed for good.

    sections: class and section of every table that the pool reads.
    """

    def __init__(
        self, path: Path, sections: Mapping[str, type[Any]], argv: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self.has_changed = False
        self._path = path
        self._sections = sections
        self._argv = argv
        self._environ = environ
        self._known = self._read()

    @classmethod
    def of(
        cls, config: PoolConfig, classes: Mapping[str, Any], argv: Sequence[str], environ: Mapping[str, str]
    ) -> Self | None:
        """The watch that the settings ask for. classes: the pools that run, by role."""
        path = environ.get("BATON_CONFIG")
        if not config.follow_config or not path:
            return None
        roles = {role: pool.actor_class.role.config_class for role, pool in classes.items()}
        return cls(Path(path), {"pool": PoolConfig, **roles}, argv, environ)

    async def run(self, stop: asyncio.Event) -> None:
        """Sets stop once there are other settings that can be used."""
        while not self.has_changed:
            await asyncio.sleep(LOOK_EVERY_S)
            found = self._read()
            if found is None or found == self._known:
                continue
            self._known = found
            if self._is_sound():
                self.has_changed = True
                log.info("settings have changed; a new pool takes over", file=str(self._path))
                stop.set()

    def begin_anew(self, module: str) -> NoReturn:
        """Runs the module in this process instead of what runs now, with the same arguments."""
        os.execv(sys.executable, [sys.executable, "-m", module, *self._argv])

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError as error:
            log.warning("the settings file cannot be read", file=str(self._path), reason=error.strerror)
            return None

    def _is_sound(self) -> bool:
        try:
            for section, cls in self._sections.items():
                argv = self._argv if section == "pool" else []
                load_config(cls, section=section, argv=argv, environ=self._environ)
        except ConfigError as error:
            log.warning("changed settings are ignored: they cannot be used", reason=error.message)
            return False
        return True
