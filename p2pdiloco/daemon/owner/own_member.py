"""Handle of a member for the owner of its machine, and for words on seats, as by `p2pdiloco seat`."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from p2pdiloco.config.values import expanded
from p2pdiloco.core.api.events import SayWord
from p2pdiloco.daemon.budgets import LinkCapacity
from p2pdiloco.daemon.display.snapshot import Proposed
from p2pdiloco.daemon.notice import Notice, with_word
from p2pdiloco.daemon.run_files.known_runs import usual_folders
from p2pdiloco.daemon.run_files.ownership import Ownership
from p2pdiloco.daemon.wire import GiveNotice
from p2pdiloco.errors import UserError, clean
from p2pdiloco.identity import public_of
from p2pdiloco.learner import channel as ch
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.util import loop_s

if TYPE_CHECKING:
    from p2pdiloco.daemon.member import Member


class OwnMember:
    """Handle of one member, for its machine's owner (`daemon.owner.control.MemberHandle`), and for the run's
    owner: who is proposed for a seat, and the owner's word that gives it.

    The owner's key may be in this node's folder, or, where that is a usual one, in the other usual one: there
    `p2pdiloco seat` finds it, too. It is read anew for each seat.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._is_owned = False
        with suppress(UserError):
            self._is_owned = bool(self._owned())

    def names(self) -> tuple[str, str, str]:
        member = self._member
        return member.peer.identity.peer_id, member.settings.name, member.run.name

    def state(self) -> str:
        return self._member.report.shown_state

    def recent(self) -> tuple[str, ...]:
        return self._member.diary.recent

    def has_handed_over(self) -> bool:
        link = self._member.learner_link
        return not link.ready.is_set() or link.handed_over

    def follow(self, wish: ch.SpareMachine) -> None:
        self._member.learner_link.follow(wish)

    def permit(self, link: LinkCapacity) -> None:
        up, down = link.upload_bits_per_s, link.download_bits_per_s
        self._member.meters.permit(link)
        self._member.peer.transport.allow(up if up < math.inf else 0.0, down if down < math.inf else 0.0)

    def carried_bytes(self) -> tuple[int, int]:
        return self._member.peer.transport.carried_bytes()

    def hand_over_bytes(self) -> int:
        """Count the bytes of a contribution and an update of every fragment."""
        run = self._member.run
        names = (run.manifest.codec.contribution, run.manifest.codec.update)
        return sum(codec(name).encoded_bytes(layout.numel) for name in names for layout in run.layouts)

    def note(self, words: str, reason: str) -> None:
        self._member.diary.say(logging.INFO, "rest", words, why=reason)

    def _owned(self) -> Ownership:
        folder = self._member.settings.data_dir
        return Ownership.find(
            self._member.run.id, None if expanded(folder) in usual_folders(None) else folder
        )

    def proposed(self) -> Proposed:
        """List the members that wait for the owner's word; nobody, where its key is not here."""
        return self._member.report.proposed(loop_s()) if self._is_owned else ()

    async def give(self, peer: str) -> str:
        """Give a seat to a member that is proposed. Returns a sentence.

        Raises: UserError (it is not proposed; the key is gone; the notice is full), StorageError.
        """
        membership = self._member.membership
        async with membership.one_at_a_time:
            if peer not in [seat.peer for seat in self.proposed()]:
                raise UserError("that peer waits for no seat now", "p2pdiloco seat gives one to any peer")
            notice = await asyncio.to_thread(self._sign, peer, membership.register.notice)
            membership.gate.answer(self._member.peer.identity.peer_id, GiveNotice(notice))
            if membership.register.notice != notice:
                raise UserError("the run's owner has said something else meanwhile", "try again")
        return f"{peer} has a seat, in each fragment from its next term on"

    def say(self, run: str, peer: str, seated: str, replaces: str) -> str:
        """Say as a seat of the run that a peer has one, or has none (`seated` is empty). Returns a sentence.

        Raises: UserError (another run's; this node's word does not count)."""
        member, me = self._member, self._member.peer.identity.peer_id
        if not (member.run.id.startswith(run) or run == member.run.name):
            raise UserError(f"this node is in run {member.run.title}", "name that one")
        marks = [part.context.chain.marks for part in member.core.fragments]
        if public_of(peer) is None or all((peer in each.seats) == bool(seated) for each in marks):
            has = "a" if seated else "no"
            raise UserError(f"{clean(peer)} has {has} seat already, or is no peer's id", "give the whole id")
        deputies = {peer for part in member.core.fragments for peer in part.context.roster.deputies}
        leaves = peer == me and not seated
        if me not in deputies and not leaves:
            hint = "the run's owner gives seats; so do more than half of the seats together"
            raise UserError("this node has no seat: its word on another's does not count", hint)
        member.post.put(SayWord(peer, bool(seated), replaces))
        if leaves:
            return "this node gives its seat up, in each fragment from its next term on"
        return (
            f"said; it counts once more than half of {len(deputies)} seats say the same: "
            f"`p2pdiloco seat {run} {peer}{'' if seated else ' --end'}` at each"
        )

    def _sign(self, peer: str, known: Notice | None) -> Notice:
        """Sign the word, after the newest notice: of this node, or of the folder that has the key."""
        owned = self._owned()
        notices = [notice for notice in (known, owned.notice) if notice] or [Notice(owned.run, 0)]
        newest = max(notices, key=lambda notice: notice.sequence)
        return owned.publish(with_word(newest, peer, True), newest.sequence)
