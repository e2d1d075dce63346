"""The generated protobuf code: writes it, or says whether the committed code is fresh.

python -m checks.protos --write     generates baton/v1/ from protos/
python -m checks.protos             compares without writing; 1 if something differs
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from importlib.resources import files
from pathlib import Path

PROTOS = Path("protos")
GENERATED = Path("baton/v1")


def generate(out: Path) -> None:
    """Generates the code of all protos under out/baton/v1. Raises RuntimeError if a proto is wrong."""
    # The plug-ins may not be on PATH when the virtual environment is not activated.
    scripts = Path(sysconfig.get_path("scripts"))
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    includes = [f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
    sources = [str(path) for path in sorted(PROTOS.rglob("*.proto"))]
    # In a process of its own: the compiler's library and NIXL's, loaded into one, end it.
    compiler = [sys.executable, "-m", "grpc_tools.protoc"]
    if subprocess.run([*compiler, *includes, *plugins, *outputs, *sources], check=False).returncode != 0:
        raise RuntimeError("protoc failed; its messages stand above")


def stale(out: Path) -> list[str]:
    """Names of files under baton/v1 that differ from those under out/baton/v1, or exist on one side only."""
    fresh, committed = _contents(out / GENERATED), _contents(GENERATED)
    return sorted(name for name in fresh | committed if fresh.get(name) != committed.get(name))


def main() -> int:
    """Writes or compares; 1 if the committed code is not what the protos say."""
    if "--write" in sys.argv[1:]:
        generate(Path())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        differing = stale(Path(folder))
    for name in differing:
        print(f"protos: {GENERATED / name} is not what protos/ generates; run `make protos` and commit")
    if not differing:
        print("protos: generated code is fresh")
    return 1 if differing else 0


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*_pb2*")}


if __name__ == "__main__":
    sys.exit(main())
