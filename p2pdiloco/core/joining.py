"""Becoming a full member: design 5.1, "a newcomer neither votes nor gives state to others until…"."""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.core.events import PresenceSeen
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.shared import Shared


class Joining:
    """Decides when this node is *confirmed*: votes, stands, and gives state to others."""

    def __init__(
        self, shared: Shared, fragments: tuple[Fragment, ...], genesis: bool, saved: bool, now: float
    ) -> None:
        self._shared = shared
        self._fragments = fragments
        self._genesis = genesis
        self._saved = saved
        self._started_s = now
        self._presence_seen = False
        self._others_listed = False
        self._unreached = 0
        self.on_confirmed: Callable[[float], None] = lambda now: None

    def listed(self, event: PresenceSeen) -> None:
        """What the DHT says about who is here."""
        self._presence_seen = True
        self._unreached = event.unreached
        self._others_listed = any(peer != self._shared.me for peer, _ in event.members.members)

    def poll(self, now: float) -> None:
        """Look whether we may count as a full member now."""
        shared = self._shared
        if shared.confirmed:
            return
        waited_s = now - self._started_s
        alone = self._presence_seen and not shared.view.voters(now)
        if all(f.follower.verified for f in self._fragments):
            reason = "every fragment's version is confirmed by peers"
        elif self._genesis and alone and waited_s >= self._genesis_patience_s(now):
            reason = "starts the run"
        elif self._saved and alone and waited_s >= shared.timing.resume_alone_s:
            reason = "nobody else is here: goes on from the saved state"
        else:
            return
        shared.confirmed = True
        shared.out.record("join", None, f"full member: {reason}")
        self.on_confirmed(now)

    def _genesis_patience_s(self, now: float) -> float:
        """How long a node listens before it starts a run: others may be newcomers like itself, and say so
        soon; or members that hold the run's history and cannot be reached just now."""
        timing = self._shared.timing
        if self._unreached or self._shared.view.unheard(now):
            return timing.resume_alone_s
        return timing.genesis_wait_s if self._others_listed else 0.0
