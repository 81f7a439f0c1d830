"""Laggards: newcomers for which a syncer that would merge alone lets the next version wait.

Rules: docs/protocol/rounds.md, section 4.
"""

from __future__ import annotations

from p2pdiloco.core.api.types import Head
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.shared import Shared
from p2pdiloco.util import BoundedDict

IN_VAIN = 3
"""Versions that wait for a newcomer whose head does not move. Whoever has come no further in all that time
(16 sync intervals each) does not take them."""
MOST = 16
"""Versions that wait for a newcomer in all, before anything of it is merged."""
MAX_PEERS = 4096


class _Lag:
    """Versions that waited for one newcomer."""

    __slots__ = ("at", "number", "vain", "waited")

    def __init__(self) -> None:
        self.at = self.number = -1
        self.vain = self.waited = 0


class Laggards:
    """Newcomers that have not said that they hold our last version, and how long they were waited for. What
    they say is their own word: without a bound a silent stranger would slow a lone node as much as it can."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lags: BoundedDict[str, _Lag] = BoundedDict(MAX_PEERS)

    def waits_for(self, peer: str, named: Head | None, chain: Chain) -> bool:
        """Tell whether the version after the chain's head waits for that peer, which named this head."""
        if self._shared.has_worked(peer):
            self._lags.pop(peer, None)
            return True
        lag = self._lags.setdefault(peer, _Lag())
        at = named.number if named is not None and chain.knows(named.number, named.digest) else lag.at
        if at > lag.at:
            lag.at, lag.vain = at, 0
        if lag.number != chain.head.number:
            lag.number = chain.head.number
            lag.vain, lag.waited = min(lag.vain + 1, IN_VAIN + 1), min(lag.waited + 1, MOST + 1)
        return lag.vain <= IN_VAIN and lag.waited <= MOST
