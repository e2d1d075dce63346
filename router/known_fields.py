"""Refuses what a newer client says and this router does not know, such as a later sampling parameter.

Protobuf would skip it, and the answer would not be the one that was asked for.
"""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton import __version__
from baton.errors import InvalidRequest


def check_known(message: Message) -> None:
    """Raises InvalidRequest if there is a field, at any depth, that this release does not know."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    # Both sizes are computed of what was read: how it was encoded plays no part.
    if known.ByteSize() == message.ByteSize():
        return
    numbers = sorted({field.field_number for field in UnknownFieldSet(message)})  # type: ignore[attr-defined]
    name = type(message).__name__
    where = f"{name} has field {numbers[0]}" if numbers else f"a message inside of {name} has a field"
    raise InvalidRequest(
        f"{where}, which this router (release {__version__}) does not know; use a client of this release, "
        "or upgrade the routers",
        field=f"{name}.{numbers[0]}" if numbers else name,
    )
