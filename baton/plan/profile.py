"""What a device can do: peak, memory, link, and the shares of them that serving reaches."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from baton.errors import ConfigError

SHIPPED = Path(__file__).with_name("profiles.toml")
CASES = ("low", "expected", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device. prefill, decode: shares of peak and of memory's rate reached: low, expected, high."""

    name: str
    peak_tflops: float
    memory_gb: float
    memory_gbps: float
    gbps_link: float
    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]

    def __post_init__(self) -> None:
        for field in ("peak_tflops", "memory_gb", "memory_gbps", "gbps_link"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} of {self.name} must be above 0", field=field)
        for field in ("prefill", "decode"):
            shares = getattr(self, field)
            if len(shares) != len(CASES) or not 0 < shares[0] <= shares[1] <= shares[2] <= 1:
                raise ConfigError(
                    f"{field} of {self.name} is {list(shares)}; give three shares of (0, 1], low to high",
                    field=field,
                )

    @classmethod
    def of(cls, name: str, path: Path = SHIPPED) -> Self:
        """The profile of that name; raises ConfigError, field "device", if the file has none."""
        found = read_profiles(path)
        if name not in found:
            raise ConfigError(
                f"device {name!r} is not known; {path.name} has {', '.join(found)}", field="device"
            )
        return cls(name=name, **found[name])


def read_profiles(path: Path = SHIPPED) -> dict[str, dict[str, Any]]:
    """Tables by name; raises ConfigError naming the file, and the key that is wrong."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as profiles: {error}", field="profile") from None
    wanted = {field.name for field in fields(DeviceProfile)} - {"name"}
    for name, table in tables.items():
        if not isinstance(table, dict) or table.keys() != wanted:
            differs = sorted(wanted ^ set(table if isinstance(table, dict) else ()))
            raise ConfigError(f"{path}, [{name}]: {', '.join(differs)} missing or unknown", field="profile")
        for key, value in table.items():
            if isinstance(value, list):
                table[key] = tuple(value)
    return tables
