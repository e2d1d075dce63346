"""Who a call belongs to, and every way in which a tenants' file can be wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError, InvalidRequest, Unauthenticated
from baton.v1 import common_pb2
from router.tenancy.tenants import ANONYMOUS, Tenant, Tenants

LOW, NORMAL, HIGH = common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH


def sha256(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def load(folder: Path, text: str) -> Tenants:
    path = folder / "tenants.toml"
    path.write_text(text, encoding="utf-8")
    return Tenants.load(str(path))


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return load(
        tmp_path,
        f"""
        [tenants.search]
        keys = ["{sha256("search-key-number-1")}", "{sha256("search-key-number-2")}"]
        weight = 2
        requests_per_minute = 600
        tokens_per_minute = 100000
        max_priority = "high"

        [tenants.mail]
        keys = ["{sha256("mail-key-number-001")}"]
        """,
    )


def bearer(key: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {key}"), ("trace-bin", b"\xff")]


def test_a_key_names_its_tenant(tenants: Tenants) -> None:
    search = Tenant(
        name="search", weight=2.0, requests_per_minute=600, tokens_per_minute=100_000, max_priority=HIGH
    )
    mail = Tenant(
        name="mail", weight=1.0, requests_per_minute=None, tokens_per_minute=None, max_priority=NORMAL
    )
    assert tenants.of(bearer("search-key-number-1")) == search
    assert tenants.of(bearer("search-key-number-2")) == search
    assert tenants.of([("authorization", "bearer mail-key-number-001")]) == mail
    assert list(tenants) == [search, mail]
    assert [tenant.is_limited for tenant in tenants] == [True, False]


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("authorization", "mail-key-number-001")],
        [("authorization", "Basic mail-key-number-001")],
        [("authorization", "Bearer ")],
        [("authorization", b"Bearer mail-key-number-001")],
        [("authorization", "Bearer mail-key-number-001")] * 2,
        [("x-authorization", "Bearer mail-key-number-001")],
    ],
    ids=["none", "empty", "bare", "basic", "no-key", "bytes", "twice", "other-name"],
)
def test_a_call_without_a_key_is_told_how_to_send_one(tenants: Tenants, metadata: Any) -> None:
    with pytest.raises(Unauthenticated, match="each call needs one metadata 'authorization'") as error:
        tenants.of(metadata)
    assert error.value.field == "authorization"


@pytest.mark.parametrize(
    "key", ["mail-key-number-002", "MAIL-KEY-NUMBER-001", "\udcff", sha256("mail-key-number-001")]
)
def test_an_unknown_key_is_refused_and_not_repeated(tenants: Tenants, key: str) -> None:
    with pytest.raises(Unauthenticated, match="is not known here") as error:
        tenants.of(bearer(key))
    assert error.value.field == "authorization"
    assert key not in error.value.message


def test_without_a_file_everybody_is_the_same_and_may_do_anything() -> None:
    tenants = Tenants.load("")
    for metadata in (None, [], bearer("anything")):
        tenant = tenants.of(metadata)
        assert tenant == ANONYMOUS
        assert (tenant.name, tenant.weight, tenant.is_limited) == ("", 1.0, False)
        assert tenant.priority(HIGH) == HIGH
    assert list(tenants) == []


@pytest.mark.parametrize(
    ("highest", "wanted", "given"),
    [
        (NORMAL, common_pb2.PRIORITY_UNSPECIFIED, NORMAL),
        (LOW, common_pb2.PRIORITY_UNSPECIFIED, LOW),
        (HIGH, common_pb2.PRIORITY_UNSPECIFIED, NORMAL),
        (NORMAL, LOW, LOW),
        (HIGH, HIGH, HIGH),
    ],
)
def test_a_priority_is_what_is_asked_for_or_normal_or_the_highest_there_is(
    highest: Any, wanted: Any, given: int
) -> None:
    assert Tenant(name="a", max_priority=highest).priority(wanted) == given


@pytest.mark.parametrize(
    ("highest", "wanted", "why"), [(NORMAL, HIGH, "above"), (LOW, NORMAL, "above"), (HIGH, 4, "unknown")]
)
def test_a_priority_above_that_is_refused(highest: Any, wanted: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as error:
        Tenant(name="a", max_priority=highest).priority(wanted)
    assert error.value.field == "priority"


KEYS = f'keys = ["{sha256("a")}"]\n'


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "tenants"),
        ("[tenants]", "tenants"),
        ("tenants = 5", "tenants"),
        (f"[tenants.a]\n{KEYS}[limits]", "tenants"),
        (f'[tenants."a b"]\n{KEYS}', "tenants.a b"),
        (f'[tenants."{"a" * 65}"]\n{KEYS}', "tenants." + "a" * 65),
        ("[tenants]\na = 5", "tenants.a"),
        ("[tenants.a]", "tenants.a.keys"),
        ("[tenants.a]\nkeys = []", "tenants.a.keys"),
        ("[tenants.a]\nkeys = 'x'", "tenants.a.keys"),
        ("[tenants.a]\nkeys = ['my-own-plain-key']", "tenants.a.keys"),
        (f"[tenants.a]\nkeys = ['{sha256('a').upper()}']", "tenants.a.keys"),
        (f"[tenants.a]\n{KEYS}[tenants.b]\n{KEYS}", "tenants.b.keys"),
        (f"[tenants.a]\nkeys = ['{sha256('a')}', '{sha256('a')}']", "tenants.a.keys"),
        (f"[tenants.a]\n{KEYS}wait = 2", "tenants.a.wait"),
        (f"[tenants.a]\n{KEYS}weight = 0", "tenants.a.weight"),
        (f"[tenants.a]\n{KEYS}weight = -1.5", "tenants.a.weight"),
        (f"[tenants.a]\n{KEYS}weight = inf", "tenants.a.weight"),
        (f"[tenants.a]\n{KEYS}weight = nan", "tenants.a.weight"),
        (f"[tenants.a]\n{KEYS}weight = true", "tenants.a.weight"),
        (f"[tenants.a]\n{KEYS}weight = 1{'0' * 400}", "tenants.a.weight"),
        (f"[tenants.a]\n{KEYS}requests_per_minute = 0", "tenants.a.requests_per_minute"),
        (f"[tenants.a]\n{KEYS}requests_per_minute = true", "tenants.a.requests_per_minute"),
        (f"[tenants.a]\n{KEYS}tokens_per_minute = 1.5", "tenants.a.tokens_per_minute"),
        (f"[tenants.a]\n{KEYS}tokens_per_minute = 1{'0' * 400}", "tenants.a.tokens_per_minute"),
        (f"[tenants.a]\n{KEYS}max_priority = 'urgent'", "tenants.a.max_priority"),
        (f"[tenants.a]\n{KEYS}max_priority = 3", "tenants.a.max_priority"),
        ("not toml", "tenants_file"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_its_field(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert error.value.field == field
    assert "my-own-plain-key" not in error.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml'.*cannot be read") as error:
        Tenants.load(str(tmp_path / "missing.toml"))
    assert error.value.field == "tenants_file"
