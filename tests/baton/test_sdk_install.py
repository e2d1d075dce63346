"""The SDK as it is when it is installed alone: what it needs, what it loads, and what a wheel of it holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = {"torch", "numpy", "ray", "redis", "tokenizers", "jinja2", "starlette", "transformers"}

# Refuses what is not installed with the SDK, then does what users do, as far as that goes without a router.
SCRIPT = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import asyncio
from baton import *
import baton.errors

async def use():
    async with await AsyncClient.connect("127.0.0.1:1", lazy=True, retry=Retry(max_attempts=1)) as client:
        grammar = Grammar(kind="json_schema", source={"type": "object"})
        try:
            await client.chat("hello", grammar=grammar).text()
        except baton.errors.Unavailable:
            return "unavailable"

with Client.connect("127.0.0.1:1", lazy=True):
    told = asyncio.run(use())
loaded = {name.partition(".")[0] for name in sys.modules}
from baton.cli.main import main
print(json.dumps([told, sorted(loaded)]))
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(requirement: str) -> str:
    return normalized(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def closure(requirements: list[str]) -> set[str]:
    """The distributions that these requirements bring, extras and other platforms left out."""
    found: set[str] = set()
    todo = [_name(text) for text in requirements]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            # Of another platform, or of an older Python.
            continue
        found.add(name)
        of_extras = {"extra": ""}
        todo += [
            _name(text)
            for text in needed
            if (marker := Requirement(text).marker) is None or marker.evaluate(of_extras)
        ]
    return found


def absent_modules() -> set[str]:
    """Top-level modules of everything that is installed here and does not come with the SDK."""
    with_sdk = closure(PROJECT["dependencies"])
    homes = {
        module: {normalized(distribution) for distribution in distributions}
        for module, distributions in metadata.packages_distributions().items()
    }
    return {module for module, owners in homes.items() if not owners & (with_sdk | {"baton-serve"})}


def printed_by(script: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_what_the_project_names_as_needed_is_enough() -> None:
    absent = absent_modules()
    assert absent >= HEAVY
    script = f"ABSENT = {sorted(absent)!r}\n{SCRIPT}"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    told, loaded = json.loads(ran.stdout)
    assert told == "unavailable"
    # The command line's libraries are installed, so that `baton` works, and are not loaded by the SDK.
    assert not {"typer", "rich", "pydantic"} & set(loaded)


def test_the_sdk_loads_nothing_heavy_even_where_it_is_installed() -> None:
    script = (
        "import sys, json\nfrom baton import *\nfrom baton import AsyncClient, Client, SamplingParams\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(json.loads(ran.stdout))
    assert not HEAVY & loaded
    assert {"baton", "grpc"} <= loaded


def test_type_checkers_see_the_types() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "py.typed" in setuptools["package-data"]["baton"]
    assert (ROOT / "baton" / "py.typed").exists()
    assert (ROOT / "baton" / "v1" / "inference_service_pb2.pyi").exists()
