"""Ports that a cluster on this machine would take: free, or whose."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from baton.doctor.check import Check, ok, warning

# Of a Baton process, and of the Ray that it starts: words of their command lines.
_OURS = ("baton", "router", "ray", "raylet")
_LISTENING = "0A"
_PROC = Path("/proc")


def checks(ports: Mapping[str, int]) -> Iterator[Check]:
    """One per port. ports: by the name of its setting; 0 picks a free one and needs no look."""
    for setting, port in ports.items():
        if port:
            yield _check(setting, port)


def _check(setting: str, port: int) -> Check:
    name = f"port {port}"
    if not is_taken(port):
        return ok(name, f"free ({setting})")
    listener = find_listener(port)
    words = "a process of another user" if listener is None else f"process {listener[0]}: {listener[1]}"
    if listener is not None and _is_ours(listener[1]):
        return ok(name, f"{setting}: {words}")
    flag = "--" + setting.replace("_", "-")
    return warning(name, f"taken by {words} ({setting})", f"stop it, or choose another port with {flag}")


def is_taken(port: int) -> bool:
    """Whether a server on the loopback address could not have it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def find_listener(port: int) -> tuple[int, str] | None:
    """Process id and command line of who listens; None if that cannot be seen."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with suppress(OSError):
                    if str(descriptor.readlink()) in inodes:
                        return int(folder.name), _command_line(folder)
    return None


def _listening_inodes(port: int) -> set[str]:
    """The sockets that listen there, as links in /proc name them."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _command_line(folder: Path) -> str:
    return shown_words((folder / "cmdline").read_bytes())


def shown_words(command_line: bytes) -> str:
    """Which program runs, of a command line as /proc has it: of a Python process, its module or script too.

    Nothing else: further words may be anything, secrets among them.
    """
    program, *words = command_line.decode("utf-8", "replace").split("\0")
    # A process that has given itself a title has all of its words in the first one.
    program = program.partition(" ")[0]
    if not Path(program).name.startswith("python"):
        return program
    return " ".join([program, *_what_python_runs(words)])


def _what_python_runs(words: Sequence[str]) -> list[str]:
    """The words that name its module or script; none for code, or an interpreter that asks."""
    rest = iter(words)
    for word in rest:
        if word in ("-X", "-W"):
            next(rest, None)
        elif word == "-m":
            return [word, next(rest, "")]
        elif word.startswith("-c"):
            return []
        elif not word.startswith("-"):
            return [word] if word else []
    return []


def _is_ours(command_line: str) -> bool:
    words = {Path(word).name.partition(".")[0].partition(":")[0] for word in command_line.split()}
    return not words.isdisjoint(_OURS)
