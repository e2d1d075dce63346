"""When certificates end, against what the library that wrote them says."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from baton.certificate_end import ends_at

START = datetime(2020, 1, 1, tzinfo=UTC)
KEY = ec.generate_private_key(ec.SECP256R1())
# Of `openssl x509 -req -days 3650`, "notAfter=Nov 28 02:46:14 2036 GMT".
FIRST_VERSION = b"""
-----BEGIN CERTIFICATE-----
MIIBFzCBvQIUUYhkXjnypRi1/YygNS/b7JhLZ0YwCgYIKoZIzj0EAwIwDjEMMAoG
A1UEAwwDb2xkMB4XDTI2MTIwMTAyNDYxNFoXDTM2MTEyODAyNDYxNFowDjEMMAoG
A1UEAwwDb2xkMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE8w/HthmTlME9PZTU
EkfeoFsyKitqQGF55jT5oWwzyDj4bPPOP1L/PERnZ/Loa8BJGUR83PH5suP7UkoH
rcX4eTAKBggqhkjOPQQDAgNJADBGAiEAqRKegruyxxTOq9f3h6Prfv13So25ARyX
yDzVMBJW9gsCIQCSVSqlCFkO1RezVPgmcXDIsO7cqVVT6Qc0Ym2WglFcfg==
-----END CERTIFICATE-----
"""


def certificate(end: datetime, name: str = "a") -> bytes:
    oids = (x509.NameOID.ORGANIZATION_NAME, x509.NameOID.COMMON_NAME)
    subject = x509.Name([x509.NameAttribute(oid, name) for oid in oids])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(START)
        .not_valid_after(end)
    )
    return builder.sign(KEY, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.mark.parametrize(
    "end",
    [
        datetime(2021, 2, 3, 4, 5, 6, tzinfo=UTC),
        datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),
        # From here on years have four digits.
        datetime(2050, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),
    ],
)
def test_the_end_of_a_certificate(end: datetime) -> None:
    pem = certificate(end)
    assert x509.load_pem_x509_certificate(pem).not_valid_after_utc == end
    assert ends_at(pem) == end.timestamp()


def test_names_that_need_a_longer_length_are_stepped_over() -> None:
    end = datetime(2031, 1, 1, tzinfo=UTC)
    # With its organization more than 127 bytes, which is where lengths take more than one byte.
    assert ends_at(certificate(end, name="n" * 64)) == end.timestamp()


def test_of_several_the_first_to_end_counts() -> None:
    later, sooner = datetime(2032, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC)
    both = certificate(later) + "# from the authority of Zürich\n".encode() + certificate(sooner)
    assert ends_at(both) == sooner.timestamp()


def test_a_certificate_of_the_first_version_does_not_name_it() -> None:
    assert x509.load_pem_x509_certificate(FIRST_VERSION).version is x509.Version.v1
    assert ends_at(FIRST_VERSION) == datetime(2036, 11, 28, 2, 46, 14, tzinfo=UTC).timestamp()
    # The label that OpenSSL gives to one with its own remarks behind it.
    assert ends_at(FIRST_VERSION.replace(b"CERTIFICATE", b"TRUSTED CERTIFICATE")) == ends_at(FIRST_VERSION)
