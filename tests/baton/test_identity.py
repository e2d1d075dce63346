"""Who may work with whom."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from baton import __version__
from baton.errors import IncompatiblePeer
from baton.identity import SESSION_VERSIONS, Identity
from baton.v1 import common_pb2
from baton.versions import Versions

FINGERPRINT = common_pb2.Fingerprint(
    weights_id="w", tokenizer_id="t", num_layers=2, num_heads=8, num_kv_heads=2, head_dim=16, vocab_size=300,
    rope='{"rope_theta":10000.0}', sampler_version=1, key_version=1,
)  # fmt: skip


def identity(name: str = "router-0", seed: int = 1) -> Identity:
    return Identity.draw(name, common_pb2.ROLE_ROUTER, FINGERPRINT, random.Random(seed))


def test_hello_says_who_is_there() -> None:
    me = identity()
    hello = common_pb2.Hello.FromString(me.hello().SerializeToString())
    assert (hello.name, hello.role, hello.incarnation) == ("router-0", common_pb2.ROLE_ROUTER, me.incarnation)
    assert Versions(hello.oldest_version, hello.newest_version) == SESSION_VERSIONS
    assert hello.release == __version__
    assert hello.fingerprint == FINGERPRINT


def test_every_start_is_another_incarnation() -> None:
    rng = random.Random(7)
    drawn = {Identity.draw("d", common_pb2.ROLE_DECODE, FINGERPRINT, rng).incarnation for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(0 <= incarnation < 2**64 for incarnation in drawn)
    assert max(drawn) > 2**63


def test_equals_may_work_together() -> None:
    assert identity().check(identity("decode-0", 2).hello()) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("field", [field.name for field in common_pb2.Fingerprint.DESCRIPTOR.fields])
def test_a_differing_field_is_named_with_both_values(field: str) -> None:
    other = common_pb2.Fingerprint()
    other.CopyFrom(FINGERPRINT)
    ours = getattr(FINGERPRINT, field)
    theirs = f"{ours}x" if isinstance(ours, str) else ours + 1
    setattr(other, field, theirs)
    peer = replace(identity("decode-3", 2), fingerprint=other)
    with pytest.raises(IncompatiblePeer) as error:
        identity().check(peer.hello())
    assert error.value.field == field
    for part in (f"{field} differs", f"router-0 has {ours!r}", f"decode-3 has {theirs!r}"):
        assert part in error.value.message


def test_the_next_release_may_work_with_this_one() -> None:
    newest = SESSION_VERSIONS.newest
    following = replace(identity("decode-3", 2), versions=Versions(newest, newest + 1), release="9.9")
    identity().check(following.hello())
    following.check(identity().hello())


def test_another_protocol_is_refused_before_anything_else() -> None:
    newest = SESSION_VERSIONS.newest
    later = replace(identity("decode-9"), versions=Versions(newest + 1, newest + 2), release="9.9")
    hello = later.hello()
    hello.ClearField("fingerprint")
    with pytest.raises(IncompatiblePeer, match=r"decode-9 \(release 9\.9\) speaks versions") as error:
        identity().check(hello)
    assert error.value.field == "session_version"


def test_a_peer_that_does_not_introduce_itself_is_refused() -> None:
    with pytest.raises(IncompatiblePeer):
        identity().check(common_pb2.Hello())
