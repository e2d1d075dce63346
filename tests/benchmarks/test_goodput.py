"""The command line: what cannot be measured is refused in words, before anything is started."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from benchmarks import goodput
from tests.engine.tiny_models import save_reference


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model for prompts of 4,000 tokens, and one for 160."""
    folders = {"long": tmp_path_factory.mktemp("long"), "short": tmp_path_factory.mktemp("short")}
    save_reference(folders["long"], max_position_embeddings=4096)
    save_reference(folders["short"])
    return {name: str(folder) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("long", "--minutes 1", "24 windows need 7.8 minutes"),
        ("long", "--headline --minutes 1", "take more minutes"),
        ("long", "--sides nothing disagregated", "1 x 2 threads, whole"),
        ("long", "--trace t.csv", "--trace needs --rate"),
        ("long", "--trace nowhere.csv --rate 1", "nowhere.csv"),
        ("long", "--arrivals bursty --cv 0.5", "cv is 0.5"),
        ("short", "", "the model takes 160 together"),
        ("missing", "", "missing"),
    ],
    ids=["minutes", "headline", "sides", "rate", "trace", "cv", "model-len", "model"],
)
def test_what_cannot_be_measured_is_refused(
    models: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["goodput", "--model", models.get(model, model), *arguments.split()])
    said = io.StringIO()

    with pytest.raises(SystemExit) as ended, redirect_stderr(said):
        goodput.main()

    assert ended.value.code == 2
    assert message in said.getvalue()
