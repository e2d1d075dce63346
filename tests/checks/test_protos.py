"""The proto check sees a proto that was changed without generating."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checks import protos

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["protos"])
    protos.generate(tmp_path)
    return tmp_path


def test_fresh_code_passes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert protos.main() == 0
    assert "fresh" in capsys.readouterr().out


def test_a_changed_proto_and_a_left_over_file_are_named(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = tree / "protos/baton/v1/common.proto"
    proto.write_text(proto.read_text() + "\nmessage Added {\n  uint32 value = 1;\n}\n")
    (tree / "baton/v1/removed_pb2.py").write_text("")
    assert protos.main() == 1
    output = capsys.readouterr().out
    assert "baton/v1/common_pb2.py " in output
    assert "baton/v1/removed_pb2.py " in output
    assert "baton/v1/admin_service_pb2.py " not in output


def test_a_wrong_proto_is_an_error(tree: Path) -> None:
    (tree / "protos/baton/v1/common.proto").write_text("nonsense")
    with pytest.raises(RuntimeError, match="protoc"):
        protos.generate(tree)
