"""When certificates end, which the standard library tells only of those that a peer has shown.

Owns the reading of that one field. Whether a certificate is one that may be used is for OpenSSL to say.
"""

from __future__ import annotations

import re
from base64 import b64decode
from datetime import UTC, datetime
from typing import Final

_PEM: Final = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.+?)-----END", re.DOTALL)
# RFC 5280, 4.1.2.5: years up to 2049 have two digits.
_FORMATS: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_VERSION: Final = 0xA0


def ends_at(pem: bytes) -> float:
    """When the first of these certificates ends, in seconds since 1970. OpenSSL has accepted them."""
    return min(_end(b64decode(body)) for body in _PEM.findall(pem))


def _end(der: bytes) -> float:
    """RFC 5280, 4.1: a certificate's first part is version, serial, algorithm, issuer, validity, ..."""
    _, at, _ = _element(der, 0)
    _, at, _ = _element(der, at)
    tag, _, behind = _element(der, at)
    if tag == _VERSION:
        at = behind
    for _ in range(3):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)
    _, _, at = _element(der, at)
    tag, start, behind = _element(der, at)
    text = der[start:behind].decode("ascii")
    return datetime.strptime(text, _FORMATS[tag]).replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Of the element there: its tag, where its content starts, and what stands behind it."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        num_bytes = length & 0x7F
        length = int.from_bytes(der[start : start + num_bytes], "big")
        start += num_bytes
    return der[at], start, start + length
