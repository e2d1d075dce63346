"""Certificates for tests of TLS, made anew in a folder of the test."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme

from baton.tls import TlsFiles


class Authority:
    """Signs certificates; each call of issue() is another peer that trusts this authority."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self._name = name
        self._num_issued = 0
        self.path = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, *names: str, not_after: datetime | None = None) -> TlsFiles:
        """Files of a peer whose certificate carries these host names and addresses."""
        issued = self._ca.issue_cert(*names, not_after=not_after)
        self._num_issued += 1
        stem = self._folder / f"{self._name}-{self._num_issued}"
        cert, key = stem.with_suffix(".cert.pem"), stem.with_suffix(".key.pem")
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return TlsFiles(cert=str(cert), key=str(key), ca=str(self.path))
