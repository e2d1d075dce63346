"""What is written in the Dockerfiles, which cannot be built here: pins, sources, users, and what is run."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.baton.test_sdk_install import closure, normalized
from tests.deploy.dockerfile import IMAGES, ROOT, Instruction, Stage, stages

NAMES = ("router", "worker-cpu", "worker-cuda")
WORKERS = ("worker-cpu", "worker-cuda")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
# What a router imports of this repository, and all of it.
PACKAGES = {
    "router": {"baton", "router"},
    "worker-cpu": {"baton", "decode_worker", "engine", "kvtransfer", "prefill_worker", "router"},
    "worker-cuda": {"baton", "decode_worker", "engine", "kvtransfer", "prefill_worker", "router"},
}
EXTRAS = {"router": "router", "worker-cpu": "all", "worker-cuda": "all,nixl"}
METADATA = {"LICENSE", "constraints.txt", "pyproject.toml"}
# Beside what the base has. Triton builds the code that launches its kernels with a C compiler, when workers
# start; KubeRay's probes call wget.
DEBIAN = {
    "router": set(),
    "worker-cpu": {"wget", "$EXTRA_PACKAGES"},
    "worker-cuda": {"gcc", "libc6-dev", "wget", "$EXTRA_PACKAGES"},
}


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", path]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def last(name: str) -> Stage:
    return stages(name)[-1]


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_has_nothing_to_say(name: str, tmp_path: Path) -> None:
    found = hadolint(IMAGES / f"{name}.Dockerfile")
    assert (found.returncode, found.stdout) == (0, "")
    spoilt = tmp_path / "Dockerfile"
    text = (IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8")
    spoilt.write_text(re.sub(r"FROM python:\S+ AS", "FROM python:latest AS", text), encoding="utf-8")
    assert "DL3007" in hadolint(spoilt).stdout


@pytest.mark.parametrize("name", NAMES)
def test_bases_have_a_full_version_and_can_be_given_a_digest(name: str) -> None:
    build, run = stages(name)
    image = run.base
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+\$\{BASE_DIGEST:\+@\$BASE_DIGEST\}", image)
    # Compiled parts fit the interpreter for which they were installed.
    assert build.base == f"{image} AS build"
    assert run.pairs["org.opencontainers.image.base.name"] == image.partition("$")[0]
    assert f"ARG BASE_DIGEST=\n\nFROM {image}" in (IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_installed_is_pinned(name: str) -> None:
    build, run = stages(name)
    own = dict(pin.split("==") for pin in build.arguments_of("pip", "install") if "==" in pin)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"PIP_VERSION := {own['pip']}\n" in makefile
    extras = EXTRAS[name]
    assert f".[{extras}]" in _with_arguments(build)
    requirements = [*PROJECT["dependencies"], *_of_extras(extras.split(","))]
    pinned = {normalized(line.partition("==")[0]) for line in CONSTRAINTS.splitlines() if "==" in line}
    assert closure(requirements) - pinned - set(own) == set()
    # The rest of what pip is told is this repository and what constraints.txt has.
    own_pins = {f"{name}=={version}" for name, version in own.items()}
    told = set(_with_arguments(build)) - own_pins - {"torch"}
    assert told == {"constraints.txt", f".[{extras}]", "."}
    assert "pip install" not in run.shell


def _with_arguments(build: Stage) -> list[str]:
    """What pip is told to install, where builders give no arguments of their own."""
    defaults = dict(found.text.split("=", 1) for found in build.all("ARG"))
    shell = re.sub(r"\$\{(\w+):\+[^}]*\}", lambda found: defaults[found[1]], build.shell)
    for name, value in defaults.items():
        shell = shell.replace(f"${name}", value)
    return replace(build, instructions=(Instruction("RUN", (), shell),)).arguments_of("pip", "install")


def _of_extras(extras: list[str]) -> list[str]:
    named = PROJECT["optional-dependencies"]
    found = [requirement for extra in extras for requirement in named[extra]]
    inner = [requirement for requirement in found if requirement.startswith("baton-serve[")]
    names = [name for requirement in inner for name in requirement[len("baton-serve[") : -1].split(",")]
    return [*(set(found) - set(inner)), *(_of_extras(names) if names else [])]


@pytest.mark.parametrize("name", NAMES)
def test_images_hold_the_packages_of_the_project_and_nothing_else_of_this_folder(name: str) -> None:
    build, run = stages(name)
    assert set(build.sources) == PACKAGES[name] | METADATA
    assert run.sources == []
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    for source in build.sources:
        assert (ROOT / source).exists()
        assert source in allowed


def test_the_workers_have_every_package_that_the_project_names() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    named = {folder for folder in folders if any(fnmatch.fnmatch(folder, pattern) for pattern in patterns)}
    assert named == PACKAGES["worker-cpu"] == PACKAGES["worker-cuda"]


def test_a_wheel_of_what_is_copied_holds_all_of_it(tmp_path: Path) -> None:
    """Built as the images build it, from the same folders."""
    source = tmp_path / "src"
    source.mkdir()
    for name in stages("worker-cpu")[0].sources:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    (source / "README.md").touch()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "--wheel-dir", tmp_path], cwd=source, check=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES["worker-cpu"]
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"baton/v1/common_pb2.py", "baton/v1/common_pb2.pyi", "baton/py.typed"} <= files
    assert files - held == set()
    assert {name.partition("/")[0] for name in held} - PACKAGES["worker-cpu"] == {
        f"baton_serve-{PROJECT['version']}.dist-info"
    }


@pytest.mark.parametrize("name", NAMES)
def test_nobody_is_root_and_both_know_the_same_number(name: str) -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/baton/values.yaml").read_text(encoding="utf-8"))
    pod = chart["podSecurityContext"]
    assert last(name).only("USER").text == f"{pod['runAsUser']}:{pod['runAsGroup']}"
    uid = str(pod["runAsUser"])
    run = last(name).shell
    assert f"groupadd --gid {pod['runAsGroup']} baton" in run
    assert re.search(rf"useradd --uid {uid} --gid {pod['runAsGroup']} .*--shell /usr/sbin/nologin baton", run)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_to_is_named_and_belongs_to_the_user(name: str) -> None:
    written = {key: last(name).pairs[key] for key in ("HOME", "BATON_CACHE_DIR")}
    assert written == {"HOME": "/tmp", "BATON_CACHE_DIR": "/var/cache/baton"}
    owned = "install --directory --owner=10001 --group=10001 --mode=700"
    assert f"{owned} /var/cache/baton /var/cache/baton/models" in last(name).shell
    assert last(name).pairs["PYTHONDONTWRITEBYTECODE"] == "1"
    # `python -m` imports from where it is started.
    assert last(name).only("WORKDIR").text == "/"


@pytest.mark.parametrize("name", NAMES)
def test_signals_reach_the_process(name: str) -> None:
    entry, command = last(name).only("ENTRYPOINT"), last(name).only("CMD")
    assert entry.is_exec_form
    assert command.is_exec_form
    assert entry.words == ["python", "-m"]
    assert last(name).only("STOPSIGNAL").text == "SIGTERM"


@pytest.mark.parametrize(
    ("name", "module"),
    [("router", "router"), ("router", "baton"), ("router", "baton.probe"), ("router", "baton.doors_check")]
    + [
        (name, module)
        for name in WORKERS
        for module in ("decode_worker", "prefill_worker", "baton.pool", "router")
    ],
)
def test_what_images_are_started_with_can_be_started(name: str, module: str) -> None:
    assert module.partition(".")[0] in PACKAGES[name]
    found = importlib.util.find_spec(module)
    assert found is not None
    is_package = found.submodule_search_locations is not None
    main = f"{module}.__main__" if is_package else module
    assert importlib.util.find_spec(main) is not None


def test_images_start_what_they_are_named_after() -> None:
    assert [last(name).only("CMD").words for name in NAMES] == [
        ["router"],
        ["decode_worker"],
        ["decode_worker"],
    ]
    assert last("router").only("HEALTHCHECK").text.endswith('CMD ["python", "-m", "baton.probe"]')


@pytest.mark.parametrize("name", NAMES)
def test_the_last_stage_has_no_tools_but_those_that_run(name: str) -> None:
    assert set(last(name).arguments_of("apt-get", "install")) == DEBIAN[name]
    assert last(name).arguments_of("python", "-m", "pip", "uninstall") == ["pip"]


@pytest.mark.parametrize("name", NAMES)
def test_labels_say_what_an_image_is(name: str) -> None:
    labels = last(name).pairs
    prefix = "org.opencontainers.image."
    told = {key.removeprefix(prefix) for key in labels if key.startswith(prefix)}
    assert told == {"title", "description", "licenses", "version", "revision", "base.name"}
    assert labels[f"{prefix}licenses"] == PROJECT["license"]
    version = next(found.text for found in last(name).all("ARG") if found.text.startswith("VERSION="))
    assert version == f"VERSION={PROJECT['version']}"


def test_ports_that_are_named_are_those_of_the_code() -> None:
    from router.config import RouterConfig

    default = RouterConfig(model="m")
    health = int(last("router").pairs["BATON_ROUTER_HEALTH_PORT"])
    expected = [default.port, default.http_port, default.admin_port, health]
    assert last("router").only("EXPOSE").text.split() == [str(port) for port in expected]
