"""Claims of peers to offices: how the syncers of neighbouring groups know each other."""

from __future__ import annotations

from p2pdiloco.core.api.types import WHOLE_RUN

Claim = tuple[str, int, int]
"""(group, fragment, term) of an office that a peer says it holds."""
NOBODY: dict[str, int] = {}
NOTHING: dict[str, dict[str, int]] = {}


class Claims:
    """Claims from heartbeats, by group. A peer's new heartbeat replaces all that it claimed before."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._of: dict[int, dict[str, dict[str, int]]] = {}
        """Map fragment -> group -> peer -> term."""
        self._by: dict[str, tuple[Claim, ...]] = {}
        self._heard_s: dict[str, float] = {}
        """Time at which each claimant was last heard to claim."""
        self.version = 0
        """Counter that grows with every change."""

    def heard(self, peer: str, offices: tuple[Claim, ...], now: float) -> bool:
        """Take in what that peer claims now. Tell whether that is news."""
        if offices:
            self._heard_s[peer] = now
        else:
            self._heard_s.pop(peer, None)
        if offices == self._by.get(peer, ()):
            return False
        grouped = {(o[0], o[1]): o for o in offices if o[0] != WHOLE_RUN and o[1] < self._fragments}
        new = tuple(grouped.values())
        old = self._by.get(peer, ())
        if new == old:
            return False
        for group, fragment, _ in old:
            groups = self._of[fragment]
            del groups[group][peer]
            if not groups[group]:
                del groups[group]
        for group, fragment, term in new:
            self._of.setdefault(fragment, {}).setdefault(group, {})[peer] = term
        if new:
            self._by[peer] = new
        else:
            del self._by[peer]
        self.version += 1
        return True

    def expire(self, before_s: float) -> None:
        """Void the claims that were not repeated since then: a peer may have other neighbours by now."""
        for peer in [p for p, heard_s in self._heard_s.items() if heard_s < before_s]:
            self.heard(peer, (), before_s)

    def of(self, fragment: int, group: str) -> dict[str, int]:
        """Find the claimants of that office: peer -> term."""
        return self._of.get(fragment, NOTHING).get(group, NOBODY)
