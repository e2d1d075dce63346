from __future__ import annotations

import hashlib
import json

import pytest

KEY = "0123456789abcdef"


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_the_digest_of_a_key_from_standard_input(baton, ending) -> None:
    ran = baton("tenants", "hash", stdin=(KEY + ending).encode())
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n"


@pytest.mark.parametrize("key", [b"", b"short", b"0123456789 abcdef", "schlüssel-schlüssel".encode()])
def test_a_key_that_cannot_be_sent_or_is_easily_guessed_is_refused(baton, key) -> None:
    ran = baton("tenants", "hash", stdin=key)
    assert (ran.code, ran.out) == (2, "")
    assert "the API key must be 16 to 256 ASCII characters without blanks" in ran.err


def test_what_it_prints_stands_for_the_key_in_a_tenants_file(baton, tmp_path) -> None:
    from router.tenancy.tenants import Tenants

    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenants.a]\nkeys = ["{baton("tenants", "hash", stdin=KEY.encode()).out.strip()}"]\n')
    assert Tenants.load(str(path)).of([("authorization", f"Bearer {KEY}")]).name == "a"


def test_json_has_the_digest_too(baton) -> None:
    key = b"0123456789abcdef0123456789abcdef\n"
    plain = baton("tenants", "hash", stdin=key)
    ran = baton("tenants", "hash", "--json", stdin=key)
    assert (ran.code, json.loads(ran.out)) == (0, {"digest": plain.out.strip()})
