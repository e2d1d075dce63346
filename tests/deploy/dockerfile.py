"""A Dockerfile as tests see it: its stages, and what they are told."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"


@dataclass(frozen=True)
class Instruction:
    """name: in capitals; flags: of the builder, such as --from=build; text: the rest, on one line."""

    name: str
    flags: tuple[str, ...]
    text: str

    @property
    def words(self) -> list[str]:
        """Of the JSON form, or as a shell splits them."""
        if self.text.startswith("["):
            return [str(word) for word in json.loads(self.text)]
        return shlex.split(self.text)

    @property
    def is_exec_form(self) -> bool:
        return self.text.startswith("[")


@dataclass(frozen=True)
class Stage:
    """What one FROM begins; base: as written."""

    base: str
    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[Instruction]:
        return [found for found in self.instructions if found.name == name]

    def only(self, name: str) -> Instruction:
        (found,) = self.all(name)
        return found

    @property
    def pairs(self) -> dict[str, str]:
        """Of ENV and LABEL."""
        words = [word for name in ("ENV", "LABEL") for found in self.all(name) for word in found.words]
        return dict(word.split("=", 1) for word in words)

    @property
    def sources(self) -> list[str]:
        """What is copied out of the build's context."""
        of_context = [
            found for found in self.all("COPY") if not any("--from=" in flag for flag in found.flags)
        ]
        return [source for found in of_context for source in found.words[:-1]]

    @property
    def shell(self) -> str:
        """Everything that is run."""
        return " && ".join(found.text for found in self.all("RUN"))

    def arguments_of(self, *command: str) -> list[str]:
        """Of every call of a command: its words that are no flags."""
        calls = re.split(r"&&|;|\|\|", self.shell)
        said = [shlex.split(call) for call in calls]
        found = [words for words in said if words[: len(command)] == list(command)]
        return [word for words in found for word in words[len(command) :] if not word.startswith("-")]


def stages(name: str) -> list[Stage]:
    """Of deploy/images/NAME.Dockerfile."""
    text = (IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    logical = "\n".join(lines).replace("\\\n", " ")
    found: list[tuple[str, list[Instruction]]] = [("", [])]
    for line in filter(str.strip, logical.splitlines()):
        instruction = _instruction(line)
        if instruction.name == "FROM":
            found.append((instruction.text, []))
        else:
            found[-1][1].append(instruction)
    return [Stage(base, tuple(told)) for base, told in found[1:]]


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().partition(" ")
    words = rest.split()
    flags = []
    while words and words[0].startswith("--"):
        flags.append(words.pop(0))
    return Instruction(name.upper(), tuple(flags), " ".join(words))
