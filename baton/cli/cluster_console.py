"""What a command that runs a cluster says, on standard error: progress first, events later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from baton.cli.progress_lines import ProgressLines
from baton.cluster.config import ClusterConfig

if TYPE_CHECKING:
    from baton.cluster.local_cluster import LocalCluster


class ClusterConsole:
    """A cluster's report: while it starts each line replaces the one before, afterwards each one stays."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: ProgressLines | None = None

    def __call__(self, line: str) -> None:
        """One report of the cluster."""
        if self._progress is not None:
            self._progress.show(line)
        else:
            self.say(line)

    def say(self, line: str) -> None:
        """A line that stays, exactly as it is."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    async def start(self, config: ClusterConfig, config_file: str = "") -> LocalCluster:
        """Starts a cluster and shows what it waits for."""
        # Redis' client is part of an extra that the rest of the command line does without.
        from baton.cluster.local_cluster import LocalCluster  # noqa: PLC0415

        async with ProgressLines(self.console) as progress:
            self._progress = progress
            try:
                return await LocalCluster.start(config, report=self, config_file=config_file)
            finally:
                self._progress = None
