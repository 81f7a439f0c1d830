"""Joining: how a node becomes a confirmed member, which votes, stands, and gives state to others.

Where a confirmed member is heard, a node is confirmed once every fragment of its own is at a version that
such a member has, or at a heavier one. Where none is heard, the whole swarm may be returning
(docs/protocol/membership.md, section 5). Then nodes with saved state compare their heads, and take the
heaviest of every fragment from each other. They go on when nothing heavier is left, and everybody who took
part lately is here or has been waited for. A node with nothing saved waits for them; only with `--genesis` it
starts a run, where nobody returns with one.
"""

from __future__ import annotations

from p2pdiloco.core.api.config import Restored
from p2pdiloco.core.api.effects import Confirmed
from p2pdiloco.core.api.events import PresenceSeen
from p2pdiloco.core.following.beginning import Grounds
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.shared import Shared

LATELY_VERSIONS = 16
"""Newest versions whose contributors are waited for after the death of all."""


class Joining:
    """Decision when this node is *confirmed*: votes, stands, and gives state to others."""

    def __init__(
        self, shared: Shared, fragments: tuple[Fragment, ...], genesis: bool, restored: Restored, now: float
    ) -> None:
        self._shared = shared
        self._fragments = fragments
        self._genesis = genesis
        self.saved = restored.saved
        """True: we came with saved state."""
        self._before = {
            mark.learner
            for found in restored.fragments
            for mark in found.watermarks
            if mark.learner != shared.me and mark.number > found.log[-1].header.number - LATELY_VERSIONS
        }
        self._started_s = now
        self._presence_seen = False
        self._others_listed = False
        self._unreached = 0
        self.serves_saved = False
        """True: others that return with saved state may take ours, though nobody is confirmed."""

    def listed(self, event: PresenceSeen) -> None:
        """Take in what the DHT says about who is here."""
        self._presence_seen = True
        self._unreached = event.unreached
        self._others_listed = any(peer != self._shared.me for peer, _ in event.members.members)

    def returning(self, now: float) -> bool:
        """Tell whether we and others may be all that is left of the run: what they saved counts."""
        shared = self._shared
        return self.saved and not shared.confirmed and not self._believed(now)

    def _believed(self, now: float) -> list[str]:
        """List the confirmed members whose word about heads counts, by any fragment's chain."""
        confirmed = self._shared.view.confirmed(now)
        standings = [fragment.context.standing for fragment in self._fragments]
        return [peer for peer in confirmed if any(standing.believes(peer, now) for standing in standings)]

    def _look_for_known(self, now: float) -> None:
        """Believe anybody, if after the longest wait nobody is here whom our chain knows; no more after
        twice that time: they give nothing."""
        wait_s = self._shared.timing.strangers_s
        late = wait_s <= now - self._started_s < 2 * wait_s
        here = [*self._shared.view.confirmed(now), *self._returned(now)]
        for fragment in self._fragments:
            standing = fragment.context.standing
            standing.believe_all(late and bool(here) and standing.strangers_only(here))

    def _strangers_ahead(self, now: float) -> bool:
        """Tell whether only strangers are here, and say that they have more than we: who goes on alone may
        leave the run, and who believes them may have made it theirs. Somebody whom our chain knows will
        tell."""
        if not self.saved or now - self._started_s >= self._shared.timing.strangers_s:
            return False
        confirmed = self._shared.view.confirmed(now)
        return any(
            f.context.standing.strangers_only(confirmed) and f.follower.heads.unproven.keys() & set(confirmed)
            for f in self._fragments
        )

    def poll(self, now: float) -> None:
        """Look whether we may count as a full member now."""
        shared = self._shared
        if shared.confirmed:
            return
        if self.saved:
            self._look_for_known(now)
        self.serves_saved = self.returning(now)
        if all(f.follower.heads.verified for f in self._fragments):
            self._confirm("every fragment's version is confirmed by peers", now)
        elif self._presence_seen and not self._believed(now) and not self._strangers_ahead(now):
            self._poll_alone(now)

    def _poll_alone(self, now: float) -> None:
        shared = self._shared
        waited_s = now - self._started_s
        if self.saved:
            heaviest = not any(f.follower.behind(now) for f in self._fragments)
            if heaviest and waited_s >= self._return_patience_s(now):
                here = len(self._returned(now))
                self._confirm(f"goes on from the saved state, the heaviest of {here + 1} that return", now)
        elif (
            self._genesis
            and not shared.guidance.vouches
            and not self._returned(now)
            and waited_s >= self._genesis_patience_s(now)
        ):
            self._confirm("starts the run", now)

    def _confirm(self, reason: str, now: float) -> None:
        self._shared.confirm()
        for fragment in self._fragments:
            fragment.context.standing.believe_all(False)
        self.serves_saved = False
        self._shared.out.record("join", None, f"full member: {reason}")
        if (grounds := self.grounds) is not None:
            basis = grounds.basis.value
            self._shared.out.record("join", None, grounds.words(), basis=basis, peer=grounds.peer)
        self._shared.out.put(Confirmed())
        self._shared.notices.confirmed(now)

    def _returned(self, now: float) -> list[str]:
        """List the members that are here with saved state, not confirmed either."""
        view = self._shared.view
        return [peer for peer in view.members(now) if (p := view.progress(peer)) is not None and p.saved]

    def _absent(self, now: float) -> set[str]:
        """Find the peers that took part lately and are not here."""
        return self._before.difference(self._shared.view.members(now))

    def _return_patience_s(self, now: float) -> float:
        return self._shared.timing.resume_alone_s if self._absent(now) else self._genesis_patience_s(now)

    def _genesis_patience_s(self, now: float) -> float:
        """Compute how long a node listens before it starts a run.

        Others may be newcomers like itself, and say so soon. Or they hold the run's history and cannot be
        reached just now.
        """
        timing = self._shared.timing
        if self._unreached or self._shared.view.unheard(now):
            return timing.resume_alone_s
        return timing.genesis_wait_s if self._others_listed else 0.0

    @property
    def grounds(self) -> Grounds | None:
        """Weakest grounds on which any fragment was taken; None: none was taken from others at the start."""
        found = [fragment.follower.heads.beginning.grounds for fragment in self._fragments]
        known = [grounds for grounds in found if grounds is not None]
        return max(known, key=lambda grounds: grounds.basis.rank, default=None)

    def waits_for(self, now: float) -> str:
        """Say for people why we are not a full member yet; empty if we are."""
        view = self._shared.view
        if self._shared.confirmed:
            return ""
        if any(f.follower.heads.beginning.waits for f in self._fragments):
            here, of = len(view.confirmed(now)), len(self._shared.guidance.witnesses)
            return f"one of the {of} members that the run's owner vouched for; {here} others are here"
        if self._believed(now):
            return "the state of the members"
        if self._strangers_ahead(now):
            return "a member whom this node's chain knows; those who are here may be strangers"
        if self.saved:
            if any(f.follower.behind(now) for f in self._fragments):
                return "a heavier saved state of others that return"
            return f"{len(self._absent(now))} that took part before"
        returned = self._returned(now)
        if returned:
            return f"{len(returned)} members that return with saved state"
        here = len(view.members(now))
        return f"somebody with the run's state; {here} are here without" if here else "a member"
