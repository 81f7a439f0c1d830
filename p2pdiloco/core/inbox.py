"""The syncer's inbox of one fragment: which contributions are admitted, which are in (design 5.8, hop 5)."""

from __future__ import annotations

from p2pdiloco.core.chain import Chain
from p2pdiloco.core.effects import Release
from p2pdiloco.core.shared import Shared
from p2pdiloco.core.types import ContributionHeader, SignedContribution, Ticket

MAX_INNER_STEPS = 1 << 32
"""No learner makes more between two merges; bounds what one lie can add to the token counts."""


class Spare:
    """Whether the fragment's one spare copy is in use: by a merge, an outer step or a fetched state."""

    def __init__(self) -> None:
        self.busy = False


class Held:
    """One learner's contribution; `ticket` is None while its payload is arriving."""

    def __init__(self, header: ContributionHeader, transfer: int, starts_round: bool, now: float) -> None:
        self.header = header
        self.transfer = transfer
        self.starts_round = starts_round
        """Due and measured against the newest version: a round may start with it. What came late, or
        early because of a closing call, waits for such a one."""
        self.arrived_s = now
        self.ticket: Ticket | None = None
        self.own = False


class Inbox:
    """At most one contribution per learner, at most `group_size` in all."""

    def __init__(self, shared: Shared, fragment: int, chain: Chain) -> None:
        self._shared = shared
        self._fragment = fragment
        self._chain = chain
        self._held: dict[str, Held] = {}

    def judge(self, signed: SignedContribution, sender: str, holding: bool) -> tuple[str, bool]:
        """On sight of its header: (why not to admit a contribution, whether that is the peer's fault)."""
        config, chain, header = self._shared.config, self._chain, signed.header
        if header.learner != sender:
            return "false-learner", True
        if not self._shared.signed_by(sender, "contribution", header, signed.signature):
            return "bad-signature", True
        if header.codec != config.contribution_codec:
            return "wrong-codec", True
        if not 0 < header.payload_bytes <= config.max_payload_bytes[self._fragment]:
            return "wrong-size", True
        plausible = min(header.inner_steps, MAX_INNER_STEPS) * config.tokens_per_step
        if not 0 < header.tokens <= plausible or header.inner_steps > MAX_INNER_STEPS:
            return "implausible-tokens", True
        if not holding:
            return "not-syncer", False
        if header.base_number > chain.head.number:
            return "behind", False
        if chain.head.number - header.base_number > config.max_base_age_versions:
            return "stale-base", False
        if not chain.knows(header.base_number, header.base_digest):
            return "unknown-base", False
        mark = chain.watermark(header.learner)
        if header.stamp <= mark:
            return "already-merged", False
        if mark != header.after:
            return ("overlap" if mark > header.after else "behind"), False
        return self._judge_place(header), False

    def _judge_place(self, header: ContributionHeader) -> str:
        held = self._held.get(header.learner)
        if held is None:
            return "" if len(self._held) < self._shared.config.group_size else "full"
        if held.header.stamp == header.stamp:
            return "already-held" if held.ticket is not None else "in-transfer"
        # Of an earlier life of the learner: that one is merged first, both are its own work.
        return "behind" if held.header.stamp < header.stamp else "overlap"

    def add(self, header: ContributionHeader, transfer: int, starts_round: bool, now: float) -> Held:
        """Give an admitted contribution its place."""
        held = Held(header, transfer, starts_round, now)
        self._held[header.learner] = held
        return held

    def arriving(self, transfer: int) -> Held | None:
        """The contribution whose payload comes by this transfer."""
        return next((h for h in self._held.values() if h.transfer == transfer and h.ticket is None), None)

    def has(self, learner: str) -> bool:
        """Whether that learner's contribution is in or arriving."""
        return learner in self._held

    def ready(self) -> list[Held]:
        """Contributions whose payload is here, in the order in which they are merged (by learner)."""
        return [held for _, held in sorted(self._held.items()) if held.ticket is not None]

    def all_late(self) -> None:
        """A version was made without these: none of them starts the next round by itself."""
        for held in self._held.values():
            held.starts_round = False

    def drop(self, held: Held) -> None:
        """Merged, or broken: no longer here."""
        if self._held.get(held.header.learner) is held:
            del self._held[held.header.learner]
        self._release(held)

    def drop_overlapping(self) -> None:
        """The chain moved: what it contains already, or what no longer follows from it, goes."""
        for learner, held in list(self._held.items()):
            if held.ticket is not None and self._chain.watermark(learner) != held.header.after:
                self.drop(held)

    def clear(self) -> None:
        """All go; their learners send again, elsewhere."""
        for held in list(self._held.values()):
            self.drop(held)

    def _release(self, held: Held) -> None:
        if held.ticket is not None and not held.own:
            self._shared.out.put(Release(held.ticket))
