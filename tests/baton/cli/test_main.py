from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from baton.cli.commands import COMMANDS
from baton.cli.exit_codes import exit_code
from baton.cli.main import main
from baton.errors import (
    ConfigError,
    IncompatiblePeer,
    InvalidRequest,
    ModelError,
    PeerLost,
    Unavailable,
    UnknownModel,
)
from tests import bare_model


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=["nothing", "-h", "--help"])
def test_help_lists_the_commands(monkeypatch, capsys, arguments):
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "Usage: baton" in out
    for word in ("pull", "bench", "doctor", "--install-completion"):
        assert word in out
    codes = (
        "Exit codes: 0 done, 1 failed, 2 wrong usage or setting, "
        "3 nothing answers, 4 not ready yet, 5 the model cannot be used, 130 interrupted."
    )
    assert codes in " ".join(out.split())


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [entry.name for entry in COMMANDS])
def test_each_command_has_help(monkeypatch, capsys, command, option):
    code, out, _ = run(monkeypatch, capsys, command, option)
    assert code == 0
    assert f"Usage: baton {command}" in out


def test_version(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--version")
    assert code == 0
    assert out.startswith("baton ")


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["pull"]])
def test_wrong_usage_is_exit_code_2(monkeypatch, capsys, arguments):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert out == ""
    assert "Usage" in err


def test_an_error_is_one_line_on_standard_error(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "pull", "no-such-model")
    assert code == 2
    assert out == ""
    assert err.splitlines()[-1].startswith("error: there is no model 'no-such-model'")
    assert "Traceback" not in err


def test_a_missing_extra_is_named_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    monkeypatch.delitem(sys.modules, "baton.registry", raising=False)
    monkeypatch.delitem(sys.modules, "baton.cluster.local_cluster", raising=False)
    monkeypatch.delitem(sys.modules, "baton.redis_server", raising=False)
    code, _, err = run(monkeypatch, capsys, "up")
    assert code == 1
    assert "redis.asyncio is missing; install baton-serve[all]" in err


def test_a_full_disk_is_said_in_its_own_words(monkeypatch, capsys):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/full")

        def __getattr__(self, name):
            return getattr(sys.__stdout__, name)

    monkeypatch.setattr(sys, "argv", ["baton", "models", "--json"])
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: No space left on device: /dev/full\n"


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["baton", "--debug", "pull", "no-such-model"])
    with pytest.raises(UnknownModel):
        main()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError, 5),
        (InvalidRequest, 2),
        (UnknownModel, 2),
        (ConfigError, 2),
        (Unavailable, 3),
        (PeerLost, 3),
        (IncompatiblePeer, 3),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error("x")) == code


def test_pull_prints_folder_and_weights_id(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "models" / "org--small"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(bare_model.TEXT)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    record = {"weights_id": "abc", "source": "", "license": "", "conversion_version": 0}
    (folder / "baton.json").write_text(json.dumps({**record, "weights_sizes": {"model.safetensors": 10}}))
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))

    code, out, err = run(monkeypatch, capsys, "pull", "org/small")
    assert (code, out.splitlines()) == (0, [str(folder), "abc"])
    assert "already there" in err

    code, out, _ = run(monkeypatch, capsys, "pull", "org/small", "--json")
    assert json.loads(out) == {
        "name": "org/small",
        "path": str(folder),
        "weights_id": "abc",
        "was_present": True,
    }


def loaded_by(code: str) -> set[str]:
    code = f"import sys, contextlib, io, baton.cli.main\n{code}\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_no_command_imports_what_the_base_install_lacks():
    loaded = loaded_by("from baton.cli.commands import COMMANDS\nfor entry in COMMANDS: entry.load()")
    assert {f"baton.cli.{entry.name}" for entry in COMMANDS} <= loaded
    assert not loaded & {"torch", "numpy", "ray", "transformers", "huggingface_hub", "redis", "matplotlib"}


def test_help_and_completion_load_no_command():
    code = (
        "sys.argv = ['baton', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    baton.cli.main.main()"
    )
    loaded = loaded_by(code)
    assert "baton.cli.commands" in loaded
    assert not loaded & {f"baton.cli.{entry.name}" for entry in COMMANDS}
    assert not loaded & {"grpc", "google.protobuf", "structlog", "opentelemetry", "asyncio"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("baton sta", {"status"}),
        ("baton status --tls-c", {"--tls-ca", "--tls-cert"}),
        ("baton config show p", {"prefill", "pool"}),
    ],
)
def test_a_shell_completes(monkeypatch, capsys, words, expected):
    monkeypatch.setenv("_BATON_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    _, out, _ = run(monkeypatch, capsys)
    assert set(out.split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown(monkeypatch, capsys, shell):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, _ = run(monkeypatch, capsys, "--show-completion", shell)
    assert code == 0
    assert "_BATON_COMPLETE" in out


def test_an_interrupt_is_exit_code_130(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("baton.cli.pull.pull_model", interrupted)
    code, _, err = run(monkeypatch, capsys, "pull", "smollm2-135m-instruct")
    assert code == 130
    assert "Traceback" not in err


def test_a_defect_is_one_line_without_debug_and_raised_with_it(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("a defect")

    monkeypatch.setattr("baton.cli.pull.pull_model", broken)
    code, _, err = run(monkeypatch, capsys, "pull", "smollm2-135m-instruct")
    assert code == 1
    assert err == "error: RuntimeError: a defect (--debug shows where)\n"
    monkeypatch.setattr(sys, "argv", ["baton", "--debug", "pull", "smollm2-135m-instruct"])
    with pytest.raises(RuntimeError):
        main()
