from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.on_gpu.bare import Digest

ROOT = Path(__file__).parents[2]
# Without whatever the project depends on, but for three packages and what these need.
BARE = """
import importlib, importlib.metadata, json, re, sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
lines = sum(project["optional-dependencies"].values(), project["dependencies"])
packages = {re.match("[a-zA-Z0-9._-]+", line)[0].lower() for line in lines} - {"torch", "triton", "numpy"}
modules = importlib.metadata.packages_distributions()
MISSING = {name for name, owners in modules.items() if packages & {owner.lower() for owner in owners}}
MISSING -= {"baton", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router"}

sys.modules.update(dict.fromkeys(MISSING))

from benchmarks.on_gpu import bare
stood_in = bare.install()
for role in ("prefill", "decode"):
    importlib.import_module(f"benchmarks.on_gpu.transfer_{role}")
for name in ("engine.model.pass_choice", "engine.kernels.model_tuning"):
    importlib.import_module(name)
json.dump([sorted(MISSING), stood_in, bare.install(), bare.digest_name()], sys.stdout)
"""


def test_engine_and_transfer_layer_need_torch_triton_and_numpy_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stderr
    missing, stood_in, again, digest = json.loads(done.stdout)
    assert {"structlog", "xxhash", "google", "grpc", "opentelemetry", "pydantic"} <= set(missing)
    assert stood_in == again == ["structlog", "xxhash"]
    assert digest == "blake2b, 64 bits"


def test_a_digest_tells_bytes_apart_however_they_come() -> None:
    def digest(*pieces: bytes) -> int:
        made = Digest(pieces[0])
        for piece in pieces[1:]:
            made.update(memoryview(piece))
        return made.intdigest()

    assert digest(b"header", b"payload") == digest(b"headerpay", b"load")
    assert digest(b"header", b"payload") != digest(b"header", b"paylaod")
    assert 0 <= digest(b"") < 1 << 64
