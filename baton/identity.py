"""Who a process is, and whether two processes may work together.

A peer is known by its incarnation, a random number drawn at process start, and
never by its address: a process that restarts on the same port is somebody else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from baton import __version__
from baton.errors import IncompatiblePeer
from baton.fingerprint import first_difference
from baton.v1 import common_pb2
from baton.versions import Versions

SESSION_VERSIONS: Final = Versions(oldest=1, newest=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a process says about itself in its Hello.

    name: unique among living processes of the cluster, for example "decode-1".
    role: a value of common_pb2.Role.
    incarnation: random 64-bit number, new at every process start.
    fingerprint: what must agree with every peer.
    versions: of the session protocol that it speaks.
    release: that it runs, for people.
    """

    name: str
    role: common_pb2.Role.ValueType
    incarnation: int
    fingerprint: common_pb2.Fingerprint
    versions: Versions = SESSION_VERSIONS
    release: str = __version__

    @classmethod
    def draw(
        cls,
        name: str,
        role: common_pb2.Role.ValueType,
        fingerprint: common_pb2.Fingerprint,
        rng: random.Random,
    ) -> Identity:
        """A new incarnation of the named process."""
        return cls(name=name, role=role, incarnation=rng.getrandbits(64), fingerprint=fingerprint)

    @property
    def role_name(self) -> str:
        """The role as the registry has it: "decode" for ROLE_DECODE."""
        return common_pb2.Role.Name(self.role).removeprefix("ROLE_").lower()

    def hello(self) -> common_pb2.Hello:
        """The first message of a session."""
        return common_pb2.Hello(
            oldest_version=self.versions.oldest,
            newest_version=self.versions.newest,
            release=self.release,
            name=self.name,
            incarnation=self.incarnation,
            role=self.role,
            fingerprint=self.fingerprint,
        )

    def check(self, peer: common_pb2.Hello) -> None:
        """Raises IncompatiblePeer, naming the differing field, unless the peer may work with this process."""
        self.versions.agree(
            Versions(peer.oldest_version, peer.newest_version),
            protocol="the session protocol",
            peer=f"{peer.name or 'the peer'} (release {peer.release or 'unknown'})",
            field="session_version",
        )
        field = first_difference(self.fingerprint, peer.fingerprint)
        if field is not None:
            raise IncompatiblePeer(
                f"{field} differs: {self.name} has {getattr(self.fingerprint, field)!r}, {peer.name} has "
                f"{getattr(peer.fingerprint, field)!r}; serve the same model from both",
                field=field,
            )
