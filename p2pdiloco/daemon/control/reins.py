"""Reins of a membership, for the owner's controls: what there is of a member, in the words of `Reins`."""

from __future__ import annotations

import logging
import math

from p2pdiloco.daemon.links.link import Link
from p2pdiloco.daemon.member import Member
from p2pdiloco.learner import channel as ch
from p2pdiloco.tensors.codecs import codec


class MemberReins:
    """Reins of one member (`daemon.control.owner.Reins`)."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def names(self) -> tuple[str, str, str]:
        """See `Reins.names`."""
        member = self._member
        return member.peer.identity.peer_id, member.settings.name, member.run.name

    def state(self) -> str:
        """See `Reins.state`."""
        return self._member.report.word

    def recent(self) -> tuple[str, ...]:
        """See `Reins.recent`."""
        return self._member.diary.recent

    def has_handed_over(self) -> bool:
        """See `Reins.has_handed_over`."""
        link = self._member.learner_link
        return not link.ready.is_set() or link.handed_over

    def follow(self, wish: ch.SpareMachine) -> None:
        """See `Reins.follow`."""
        self._member.learner_link.follow(wish)

    def permit(self, link: Link) -> None:
        """See `Reins.permit`."""
        up, down = link.upload_bits_per_s, link.download_bits_per_s
        self._member.meters.permit(link)
        self._member.peer.transport.allow(up if up < math.inf else 0.0, down if down < math.inf else 0.0)

    def carried_bytes(self) -> tuple[int, int]:
        """See `Reins.carried_bytes`."""
        return self._member.peer.transport.carried_bytes()

    def hand_over_bytes(self) -> int:
        """See `Reins.hand_over_bytes`: a contribution and an update of every fragment."""
        run = self._member.run
        names = (run.manifest.codec.contribution, run.manifest.codec.update)
        return sum(codec(name).encoded_bytes(layout.numel) for name in names for layout in run.layouts)

    def note(self, words: str, reason: str) -> None:
        """See `Reins.note`."""
        self._member.diary.say(logging.INFO, "rest", words, why=reason)
