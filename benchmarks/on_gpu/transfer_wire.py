"""Messages between two processes of one machine, over a Unix-domain stream socket.

Owns a connection and its bytes. What frames are, and what is done with a message, is not known here.

    message  = kind (1 byte), length of its head (4), length of its body (4), head, body; little endian
    PAIR     head: the sender's format          --> PAIRED, or REFUSED with the field that differs
    OPEN     head: a ticket                     --> ADMITTED, or ANSWER: what ended it before
    FRAME    head: a frame's header, body: its payload
    COMMIT   head: frames and the first token   --> ANSWER: committed, gone, or frames to send again

One connection for each write, which ends with it. Heads but for a frame's are JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import Any

from kvtransfer.contract import (
    MAX_PAYLOAD_BYTES,
    Answer,
    Committed,
    FirstToken,
    Gone,
    GoneReason,
    KvFormat,
    Resend,
    Ticket,
)

_PREFIX = struct.Struct("<BII")
_MAX_HEAD_BYTES = 1 << 20
# As much as the system lets a process have: fewer changes between the two processes.
_BUFFER_BYTES = 4 << 20


class Kind(IntEnum):
    """Of a message."""

    PAIR = 1
    PAIRED = 2
    REFUSED = 3
    OPEN = 4
    ADMITTED = 5
    FRAME = 6
    COMMIT = 7
    ANSWER = 8


class Wire:
    """One end of a connection. One task sends and one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._prefix = bytearray(_PREFIX.size)
        self._head = bytearray(_MAX_HEAD_BYTES)
        self._body = bytearray(0)

    @classmethod
    async def connect(cls, address: str) -> Wire:
        """Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, address)
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    async def say(self, kind: Kind, said: Any) -> None:
        """Sends a message without a body; raises OSError."""
        await self.send(kind, json.dumps(said).encode())

    async def send(self, kind: Kind, head: bytes, runs: Sequence[memoryview] = ()) -> None:
        """Sends a message whose body comes in pieces; raises OSError."""
        prefix = _PREFIX.pack(kind, len(head), sum(run.nbytes for run in runs))
        await self._loop.sock_sendall(self._socket, prefix + head)
        for run in runs:
            await self._loop.sock_sendall(self._socket, run)

    async def receive(self) -> tuple[Kind, memoryview, memoryview]:
        """The next message, borrowed until the next call; raises OSError, or EOFError if there is none."""
        await self._fill(memoryview(self._prefix))
        kind, head_bytes, body_bytes = _PREFIX.unpack(self._prefix)
        if head_bytes > _MAX_HEAD_BYTES or body_bytes > MAX_PAYLOAD_BYTES:
            raise ConnectionError(f"a message of {head_bytes} and {body_bytes} bytes")
        if body_bytes > len(self._body):
            self._body = bytearray(body_bytes)
        head, body = memoryview(self._head)[:head_bytes], memoryview(self._body)[:body_bytes]
        await self._fill(head)
        await self._fill(body)
        return Kind(kind), head, body

    async def hear(self) -> tuple[Kind, Any]:
        """The next message, one of JSON."""
        kind, head, _ = await self.receive()
        return kind, json.loads(bytes(head))

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self._socket.close()

    async def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            count = await self._loop.sock_recv_into(self._socket, view)
            if not count:
                raise EOFError("the connection has ended")
            view = view[count:]


def ticket_json(ticket: Ticket) -> dict[str, Any]:
    """Read back by ticket_of()."""
    return {
        "lease_id": ticket.lease_id.hex(),
        "attempt_id": ticket.attempt_id.hex(),
        "incarnation": ticket.incarnation,
        "format": asdict(ticket.format),
    }


def ticket_of(said: dict[str, Any]) -> Ticket:
    """What ticket_json() wrote."""
    return Ticket(
        lease_id=bytes.fromhex(said["lease_id"]),
        attempt_id=bytes.fromhex(said["attempt_id"]),
        incarnation=said["incarnation"],
        format=KvFormat(**said["format"]),
    )


def token_of(said: dict[str, Any]) -> FirstToken:
    """What asdict() made of a first token."""
    return FirstToken(**{**said, "top": tuple((token_id, logprob) for token_id, logprob in said["top"])})


def answer_json(answer: Answer) -> dict[str, Any]:
    """Read back by answer_of()."""
    if isinstance(answer, Resend):
        return {"resend": answer.frame_indices}
    if isinstance(answer, Gone):
        return {"gone": answer.reason.name}
    return {"verify_s": answer.verify_s, "convert_s": answer.convert_s}


def answer_of(said: dict[str, Any]) -> Answer:
    """What answer_json() wrote."""
    if "resend" in said:
        return Resend(tuple(said["resend"]))
    if "gone" in said:
        return Gone(GoneReason[said["gone"]])
    return Committed(**said)
