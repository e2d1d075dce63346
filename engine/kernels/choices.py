"""Which configuration each kernel runs with, and where it runs at all: as measured on this device.

What was not measured runs as a kernel, in the first configuration that it declares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.kernels.kernel import Config, Launch, Shape


@dataclass(frozen=True, slots=True)
class Choices:
    """measured: by name of the kernel and shape.

    crossings: of an operator, the fewest tokens from which its kernel is faster than the vendor's operators;
        None if it never is.
    """

    measured: Mapping[tuple[str, Shape], Config] = field(default_factory=dict)
    crossings: Mapping[str, int | None] = field(default_factory=dict)

    def config(self, launch: Launch) -> Config:
        """The configuration for a call."""
        measured = self.measured.get((launch.kernel.name, launch.shape))
        return measured or launch.kernel.configs_for(launch.shape)[0]

    def run(self, *launches: Launch) -> None:
        """Runs calls in their order."""
        for launch in launches:
            launch.run(self.config(launch))

    def uses_kernel(self, op: str, num_tokens: int) -> bool:
        """Whether so many tokens are the kernel's rather than the vendor's operators'."""
        if op not in self.crossings:
            return True
        crossing = self.crossings[op]
        return crossing is not None and num_tokens >= crossing


UNMEASURED = Choices()
