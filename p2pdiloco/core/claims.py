"""Which offices peers say that they hold: how the syncers of neighbouring groups know each other."""

from __future__ import annotations

from p2pdiloco.core.types import WHOLE_RUN

Office = tuple[str, int, int]
"""(group, fragment, term)."""
NOBODY: dict[str, int] = {}


class Claims:
    """From heartbeats, by group. A peer's new heartbeat replaces all that it claimed before."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, str], dict[str, int]] = {}
        self._by: dict[str, tuple[Office, ...]] = {}
        self.version = 0
        """Grows with every change."""

    def heard(self, peer: str, offices: tuple[Office, ...]) -> bool:
        """What that peer claims now. Whether that is news."""
        new = tuple(office for office in offices if office[0] != WHOLE_RUN)
        old = self._by.get(peer, ())
        if new == old:
            return False
        for group, fragment, _ in old:
            holders = self._of.get((fragment, group))
            if holders is not None:
                holders.pop(peer, None)
                if not holders:
                    del self._of[(fragment, group)]
        for group, fragment, term in new:
            self._of.setdefault((fragment, group), {})[peer] = term
        if new:
            self._by[peer] = new
        else:
            del self._by[peer]
        self.version += 1
        return True

    def of(self, fragment: int, group: str) -> dict[str, int]:
        """Who claims that office: peer -> term."""
        return self._of.get((fragment, group), NOBODY)
