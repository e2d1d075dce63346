"""The thread that waits for a device's events, so that the one that reads its cache need not.

Otherwise frames that can be read would queue behind those that are still computed. Owns the waiting, and
knows nothing about what comes after it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvtransfer.sender_thread import SenderThread
from kvtransfer.side_stream import SideStream, Stream

if TYPE_CHECKING:
    import torch


class EventThread:
    """Waits for one event at a time, in the order of asking. Call close() at the end.

    Steps' events fire in the order in which they are told of, so this costs those who wait next to nothing.
    """

    def __init__(self, device: torch.device, *, stream: Stream | None = None) -> None:
        self._device = device
        self._stream = stream
        self._thread = SenderThread("kv-events")

    async def fired(self, event: torch.cuda.Event) -> None:
        """Returns once the event has fired. Cancelling the wait stops nothing that has begun."""
        if not event.query():  # type: ignore[no-untyped-call]
            await self._thread(partial(self._sleep, event))

    def close(self) -> None:
        """Ends the thread after what is queued. Idempotent."""
        self._thread.close()

    def _sleep(self, event: torch.cuda.Event) -> None:
        # Steps' events are of the kind that is waited for by spinning on a core.
        stream = self._stream = self._stream or SideStream(self._device)
        with stream.behind(event):
            pass
