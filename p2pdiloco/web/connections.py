"""Connections of the page's server, bounded: in number, in time and in what waits to be sent.

uvicorn waits for ever for the rest of a request's head, and for a client that does not read. Here a
connection has `HEAD_S` for each request, and ends when nothing of what it was sent is read for `STALLED_S`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
MAX_PER_HOST = 64
"""Connections of one host, other than this one, or of one network of IPv6 (/64), which has many addresses."""
HEAD_S = 10.0
STALLED_S = 20.0


def origin_of(client: tuple[str, int] | None) -> str:
    """Name the host that a connection is from, or its network."""
    host = client[0] if client is not None else ""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None or address.is_loopback:
        return str(address.ipv4_mapped or address)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class BoundedProtocol(H11Protocol):
    """HTTP of one connection."""

    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless there are too many."""
        super().connection_made(transport)
        host = origin_of(self.client)
        of_host = sum(host == origin_of(getattr(other, "client", None)) for other in self.connections)
        is_local = host in ("", "127.0.0.1", "::1")
        if len(self.connections) > MAX_CONNECTIONS or (of_host > MAX_PER_HOST and not is_local):
            transport.abort()
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._watch_head()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._end_stall()

    def _watch_head(self) -> None:
        """Bound the time until a request is here; it begins with the connection or the answer before."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._end_head()
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
