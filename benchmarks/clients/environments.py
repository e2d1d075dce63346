"""An environment of its own for each client, at the versions in its list beside this file.

A list has everything that is installed, with what the package asks for and does not need here left out, so
that nothing is resolved: the same versions everywhere, and no torchvision for a client that draws nothing.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from benchmarks.clients.processes import ProgramError, finish
from benchmarks.clients.runs import Client

LISTS = Path(__file__).parent
PIP = "pip==26.3"
INSTALL_S = 900.0


class NotInstalledError(Exception):
    """A client cannot be installed here; the message says why."""


def listed(client: Client) -> dict[str, str]:
    """Versions by package."""
    text = (LISTS / f"{client.name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.\-]+)==(\S+)$", text, re.MULTILINE))


def prepare(client: Client, folder: Path) -> Path:
    """The folder of the client's programs; installs it unless the same list was installed there already.

    Raises NotInstalledError.
    """
    place = folder / client.name
    requirements = LISTS / f"{client.name}.txt"
    stamp = place / "installed.txt"
    if not stamp.exists() or stamp.read_bytes() != requirements.read_bytes():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _install(client, place, requirements, folder / f"{client.name}.log")
        except ProgramError as error:
            raise NotInstalledError(str(error)) from None
        shutil.copyfile(requirements, stamp)
    return place / "bin"


def _install(client: Client, place: Path, requirements: Path, log: Path) -> None:
    python = str(place / "bin" / "python")

    def pip(*arguments: str) -> None:
        command = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments)
        finish(command, log=log, timeout_s=INSTALL_S)

    finish((sys.executable, "-m", "venv", "--clear", str(place)), log=log, timeout_s=INSTALL_S)
    pip(PIP)
    # What torch needs differs with its build; the rest is the same everywhere.
    if torch := listed(client).get("torch"):
        pip(f"torch=={torch}")
    pip("--no-deps", "--requirement", str(requirements))
    if client.metadata_of:
        _describe_as(client, place)


def _describe_as(client: Client, place: Path) -> None:
    """Lets a client find itself under the name that it looks for; `+cpu` tells vLLM which build it is."""
    (site,) = place.glob("lib/python*/site-packages")
    version = f"{listed(client)[client.package]}+cpu"
    folder = site / f"{client.metadata_of}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {client.metadata_of}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
