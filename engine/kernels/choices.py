"""Which configuration each kernel runs with: as measured on this device, else the first one declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.kernels.kernel import Config, Launch, Shape


@dataclass(frozen=True, slots=True)
class Choices:
    """measured: by name of the kernel and shape."""

    measured: Mapping[tuple[str, Shape], Config] = field(default_factory=dict)

    def config(self, launch: Launch) -> Config:
        """The configuration for a call."""
        measured = self.measured.get((launch.kernel.name, launch.shape))
        return measured or launch.kernel.configs_for(launch.shape)[0]

    def run(self, *launches: Launch) -> None:
        """Runs calls in their order."""
        for launch in launches:
            launch.run(self.config(launch))


UNMEASURED = Choices()
