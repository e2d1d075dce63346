from __future__ import annotations

import json
import subprocess
import sys

import pytest

from baton.cli.main import app, exit_code, main
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
    assert "pull" in out
    codes = (
        "Exit codes: 0 done, 1 failed or the model cannot be used, 2 wrong usage or setting, "
        "3 nothing answers, 130 interrupted."
    )
    assert codes in " ".join(out.split())


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [command.callback.__name__ for command in app.registered_commands])
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


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["baton", "--debug", "pull", "no-such-model"])
    with pytest.raises(UnknownModel):
        main()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError, 1),
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


def test_the_command_line_imports_no_torch():
    code = "import sys, baton.cli.main; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert "baton.cli.main" in loaded
    assert not loaded & {"torch", "numpy", "ray", "transformers", "huggingface_hub"}


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
