"""A chain of paper, for transfer layers without a core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.capacity import Meter
from p2pdiloco.daemon.bulk.pushes import PushesIn


class PaperChain:
    """A `pushes.ChainView` that says what the test wants. Everything is signed and may be served."""

    def __init__(self, head: Any = None, state_bytes: int = 0, update_bytes: int = 0) -> None:
        self.run = "run"
        self.may_serve = self.dialable = True
        self.peers: list[str] = []
        """Peers that hold every version."""
        self.updates: dict[int, Any] = {}
        """(version, payload) by number."""
        self.contributions: dict[bytes, Any] = {}
        """Our own payloads, by digest."""
        self.strangers: set[str] = set()
        self._head = head
        self._state_bytes, self._update_bytes = state_bytes, update_bytes

    def is_member(self, peer: str) -> bool:
        return peer not in self.strangers

    def head(self, _fragment: int) -> Any:
        return self._head

    def signed(self, _version: Any) -> bool:
        return True

    def holders(self, _fragment: int, _digest: bytes) -> list[str]:
        return self.peers

    def state_bytes(self, _fragment: int) -> int:
        return self._state_bytes

    def most_update_bytes(self, _fragment: int) -> int:
        return self._update_bytes

    async def contribution_of(self, _fragment: int, digest: bytes) -> Any:
        return self.contributions.get(digest)

    async def update_of(self, _fragment: int, number: int) -> Any:
        return self.updates.get(number)


class Welcome:
    """Stand-in for the core: takes every contribution that is offered, and writes down what it hears."""

    def __init__(self, compute: Any, tickets: Any, spool: Any = None, **more: Any) -> None:
        self.heard: list[ev.Event] = []
        chain: Any = PaperChain()
        self.pushes_in = PushesIn(chain.head, compute, tickets, self._post, spool=spool, **more)

    def _post(self, event: ev.Event) -> None:
        self.heard.append(event)
        if isinstance(event, ev.Offered):
            self.pushes_in.decided(ev.AcceptTransfer(event.transfer, 0, 0))


def no_meter() -> Meter:
    return Meter(lambda: 0, lambda: 0.0)


def uplink(bytes_per_s: float = float("inf")) -> Any:
    return SimpleNamespace(uplink_bytes_per_s=bytes_per_s, sent_bytes=0)
