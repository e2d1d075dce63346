"""docs/clients.md: its programs run, and its load commands are those that `make clients` runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

from benchmarks.clients.__main__ import CLIENTS
from benchmarks.clients.environments import listed
from benchmarks.clients.record import SHOWN
from benchmarks.clients.runs import Client
from tests.docs.snippets import ROOT, blocks

GUIDE = ROOT / "docs" / "clients.md"
TEXT = GUIDE.read_text(encoding="utf-8")
CURLS = re.findall(r"^\$ (curl .+)$", TEXT, re.MULTILINE)


def test_the_program_runs_and_prints_what_it_should(
    http_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set here first, so that what the program sets is taken back.
    monkeypatch.setenv("OPENAI_BASE_URL", "")
    monkeypatch.setenv("OPENAI_API_KEY", "")
    (program,) = blocks(GUIDE)
    assert program.run({"127.0.0.1:8000": http_address}) == program.printed == "Hamburg\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    ("command", "said"),
    [(CURLS[0], '"text":"Hamburg"'), (CURLS[1], '"content":"burg"')],
    ids=["whole", "stream"],
)
def test_the_curls_run(command: str, said: str, http_address: str) -> None:
    words = shlex.split(command.replace("127.0.0.1:8000", http_address))
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    assert said in done.stdout.replace(": ", ":")


@pytest.mark.parametrize("client", CLIENTS.values(), ids=list(CLIENTS))
def test_a_load_client_is_shown_as_it_is_run_and_at_its_version(client: Client) -> None:
    texts = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    shown = [tuple(shlex.split(text.replace("\\\n", " "))) for text in texts]
    assert client.runs(SHOWN)[0].command in shown
    assert len(shown) == len(CLIENTS)
    assert f" {listed(client)[client.package]}" in TEXT
