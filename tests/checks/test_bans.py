"""ruff refuses clocks, chance and threads in a core or a shell, and lets the edges have them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def banned(source: str, name: str = "router/made_up.py") -> set[str]:
    """What ruff refuses in a file of that name, by the repository's settings."""
    options = ["--no-cache", "--select", "TID251", "--output-format", "json", "--stdin-filename", name]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options, "-"],
        input=source,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return {finding["message"].split("`")[1] for finding in json.loads(done.stdout)}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import time\ntime.monotonic()", "time"),
        ("from time import sleep", "time"),
        ("import uuid\nuuid.uuid4()", "uuid.uuid4"),
        ("import numpy as np\nnp.random.default_rng()", "numpy.random"),
        ("import threading\nthreading.Thread()", "threading.Thread"),
        ("from threading import Timer", "threading.Timer"),
        ("import asyncio\nrun = asyncio.to_thread", "asyncio.to_thread"),
        (
            "from concurrent.futures import ThreadPoolExecutor",
            "concurrent.futures.ThreadPoolExecutor",
        ),
        (
            "import asyncio\nrun = asyncio.AbstractEventLoop.run_in_executor",
            "asyncio.AbstractEventLoop.run_in_executor",
        ),
    ],
)
def test_a_shell_has_no_clock_and_no_thread(source: str, name: str) -> None:
    assert name in banned(source)
    assert banned(source, "router/__main__.py") == set()


def test_every_function_of_the_shared_generator_is_banned_and_no_class_is() -> None:
    classes = {name for name in random.__all__ if isinstance(getattr(random, name), type)}
    assert classes == {"Random", "SystemRandom"}
    source = "import random\n" + "".join(f"random.{name}\n" for name in random.__all__)
    # What a newer Python adds fails here until it is banned.
    functions = {f"random.{name}" for name in set(random.__all__) - classes}
    assert banned(source) == functions


@pytest.mark.parametrize(
    "folder", ["baton", "baton/cluster", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router"]
)
def test_the_bans_hold_in_every_package(folder: str) -> None:
    assert banned("import time", f"{folder}/made_up.py") == {"time"}


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import pickle\nx = pickle.loads(b'')\n", "S301"),
        ("import marshal\nx = marshal.loads(b'')\n", "S302"),
        ("import pickle\n", "S403"),
    ],
)
@pytest.mark.parametrize(
    "folder", ["baton", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router"]
)
def test_unpickling_is_refused(folder: str, source: str, rule: str) -> None:
    """By the repository's own settings, in every package that runs."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "json"),
            *("--stdin-filename", f"{folder}/made_up.py", "-"),
        ],
        input=source,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert rule in {finding["code"] for finding in json.loads(done.stdout)}
