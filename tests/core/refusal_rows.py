"""How every refusal comes about: what `test_verdicts` goes over, by reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from above import Above
from core_swarm import Member, Swarm
from kit import OF_SWARM, Solo, child, config, contribution, digest, found, genesis, signed_part
from scenes import copied, expels, one_round, shown_a_lie, syncer

from p2pdiloco.core import inbox
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import NEVER, SignedContribution, Stamp
from p2pdiloco.core.api.versions import SignedPartial
from p2pdiloco.core.delegate import UpperElectorate

Effects = list[ev.Effect]


# --- contributions -----------------------------------------------------------------------------------


def labelled(**odd: Any) -> Callable[[], Effects]:
    """A learner offers a contribution with something odd in its label."""

    def row() -> Effects:
        solo = syncer()
        return solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head, **odd)))

    return row


def unsound(verdict: Verdict) -> Callable[[], Effects]:
    """A payload comes that is not what its label says, or finds no place, or does not come."""

    def row() -> Effects:
        solo = syncer()
        solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head)))
        effects = solo.feed(ev.PayloadBroken(1, verdict))
        assert not solo.fragment.round.inbox.busy(), "its place is free"
        return effects

    return row


def sent_twice(arrived: bool) -> Effects:
    solo = syncer()
    signed = contribution("p1", solo.head)
    solo.feed(ev.Offered(1, "p1", signed))
    if arrived:
        solo.feed(ev.PayloadReceived(1, 101))
    return solo.feed(ev.Offered(2, "p1", signed))


def merged_before() -> Effects:
    solo = syncer()
    signed = contribution("p1", solo.head)
    one_round(solo, "p1", "p2")
    return solo.feed(ev.Offered(5, "p1", signed))


def long_ago() -> Effects:
    solo = syncer(quorum=1, max_base_age_versions=0)
    old = solo.head
    one_round(solo, "p1", "p2")
    mark = solo.fragment.chain.marks.stamp("p1")
    return solo.feed(ev.Offered(90, "p1", contribution("p1", old, Stamp(1, 5), after=mark)))


def after_a_later_one() -> Effects:
    solo = syncer()
    solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head, Stamp(1, 2))))
    return solo.feed(ev.Offered(2, "p1", contribution("p1", solo.head, Stamp(1, 1))))


def moved_meanwhile() -> Effects:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=3)
    solo.feed(ev.Offered(9, "p2", contribution("p2", solo.head)))
    solo.announce(child(solo.fragment.chain.header, "p3", ("p2",), term=2))
    return solo.feed(ev.PayloadReceived(9, 109))


def no_room() -> Effects:
    solo = syncer(group_size=2)
    learners = [f"p{index}" for index in range(2 * inbox.ROOM + 1)]
    for transfer, learner in enumerate(learners):
        effects = solo.feed(ev.Offered(transfer, learner, contribution(learner, solo.head)))
    return effects


def in_time(due: bool) -> Effects:
    solo = syncer(quorum=2)
    solo.now += 60.0  # long after the last version
    solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head, due=due)))
    return solo.feed(ev.PayloadReceived(1, 101))


def forged() -> Effects:
    solo = syncer()
    honest = contribution("p1", solo.head)
    signed = SignedContribution(msgspec.structs.replace(honest.header, tokens=30), honest.signature)
    return solo.feed(ev.Offered(1, "p1", signed))


def out_of_office() -> Effects:
    solo = Solo()
    solo.elect("p1")
    return solo.feed(ev.Offered(1, "p2", contribution("p2", solo.head)))


def shut_out(solo: Solo) -> Effects:
    return solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head)))


def anothers() -> Effects:
    solo = syncer()
    return solo.feed(ev.Offered(1, "p1", contribution("p2", solo.head)))


# --- partial merges ----------------------------------------------------------------------------------


def partly(**odd: Any) -> Callable[[], Effects]:
    """A syncer below offers a partial with something odd in its label."""

    def row() -> Effects:
        above = Above()
        return above.offer(above.label(**odd))

    return row


def changed(**odd: Any) -> Callable[[], Effects]:
    """The same, with the first of its contributions changed; `after` too."""

    def row() -> Effects:
        above = Above()
        first, *others = above.parts()
        first = signed_part(msgspec.structs.replace(first, **odd))
        return above.offer(above.label(parts=(first, *others)))

    return row


def with_invented_work() -> Effects:
    """A syncer below says itself what one of its learners did."""
    above = Above()
    first, *others = above.parts()
    return above.offer(above.label(parts=(msgspec.structs.replace(first, tokens=39), *others)))


def out_of_order() -> Effects:
    """Its contributions are in another order than that of a version: no signature would hold there."""
    above = Above(genesis_versions=(genesis(0, 2),))
    return above.offer(above.label(parts=above.parts()[::-1]))


def without_limits() -> Effects:
    above = Above()
    below = tuple(msgspec.structs.replace(each, limits=None) for each in above.label().below)
    return above.offer(above.label(below=below))


def with_an_invented_partial() -> Effects:
    """A syncer below says itself what a group below made."""
    above = Above()
    below = tuple(msgspec.structs.replace(each, payload_digest=bytes(32)) for each in above.label().below)
    return above.offer(above.label(below=below))


def twice_in_one() -> Effects:
    above = Above()
    return above.offer(above.label(parts=above.parts() * 2))


def of_another_group() -> Effects:
    above = Above()
    electorate = above.seat.electorate
    assert isinstance(electorate, UpperElectorate)
    other = next(name for name in electorate.children if name != above.child and above.parts(name))
    return above.offer(above.label(parts=above.parts(other)))


def partial_twice(arrived: bool) -> Effects:
    above = Above()
    above.offer(above.label())
    if arrived:
        above.arrives()
    return above.offer(above.label(), 9001)


def group_merged_again_too_late() -> Effects:
    above = Above(quorum=1)
    above.offer(above.label())
    above.arrives()
    assert above.seat.round.closing
    return above.offer(above.label(payload_digest=digest("more")), 9001)


def no_syncer_above() -> Effects:
    above = Above(holding=False)
    return above.offer(above.label())


def of_a_stranger() -> Effects:
    above = Above()
    return above.offer(above.label(syncer="stranger"), sender="stranger")


def partial_forged() -> Effects:
    above = Above()
    return above.offer(above.label(), by="m9")


def too_many(patched: Callable[[str, Any], None]) -> Effects:
    """More contributions than a header may name."""
    above = Above()
    patched("p2pdiloco.core.inbox.MAX_CONTRIBUTORS", len(above.parts()) - 1)
    return above.offer(above.label())


LEAF: dict[Verdict, tuple[Callable[[], Effects], ...]] = {
    Verdict.IN_ROUND: (lambda: in_time(due=True),),
    Verdict.HELD: (lambda: in_time(due=False),),
    Verdict.ALREADY_HELD: (lambda: sent_twice(arrived=True),),
    Verdict.IN_TRANSFER: (lambda: sent_twice(arrived=False),),
    Verdict.NOT_SYNCER: (out_of_office,),
    Verdict.EXCLUDED: (lambda: shut_out(shown_a_lie(syncer(), "p1")),),
    Verdict.EXPELLED: (lambda: shut_out(expels(syncer(loss_audits=0.5), "p1")),),
    Verdict.STALE_BASE: (long_ago,),
    Verdict.UNKNOWN_BASE: (labelled(base_digest=bytes(32)),),
    Verdict.BEHIND: (
        labelled(base_number=9),
        labelled(after=Stamp(1, 1), stamp=Stamp(1, 2)),
    ),
    Verdict.OVERLAP: (after_a_later_one,),
    Verdict.ALREADY_MERGED: (merged_before,),
    Verdict.CHAIN_MOVED: (moved_meanwhile,),
    Verdict.FULL: (no_room,),
    Verdict.OTHER_EPOCH: (labelled(group="0/0/1"),),
    Verdict.UNKNOWN_TRANSFER: (lambda: syncer().feed(ev.PayloadReceived(77, 7)),),
    Verdict.UNKNOWN_FRAGMENT: (labelled(fragment=7), labelled(group="half")),
    Verdict.OTHER_RUN: (labelled(run="other"),),
    Verdict.FALSE_LEARNER: (anothers,),
    Verdict.BAD_SIGNATURE: (forged,),
    Verdict.WRONG_CODEC: (labelled(codec="fp8"),),
    Verdict.WRONG_SIZE: (labelled(payload_bytes=1001), labelled(payload_bytes=0)),
    Verdict.IMPLAUSIBLE_TOKENS: (labelled(tokens=41), labelled(tokens=0)),
    Verdict.COPY: (lambda: copied("p1"), lambda: copied("p2")),
}
GROUP: dict[Verdict, tuple[Callable[[], Effects], ...]] = {
    Verdict.NOT_SYNCER: (no_syncer_above,),
    Verdict.FALSE_SYNCER: (partly(syncer="m9"),),
    Verdict.NOT_HEARD_OF: (of_a_stranger,),
    Verdict.BAD_SIGNATURE: (partial_forged, with_invented_work, with_an_invented_partial),
    Verdict.REPEATED_LEARNER: (twice_in_one,),
    Verdict.FALSE_STAMP: (changed(stamp=NEVER),),
    Verdict.FALSE_PARTIALS: (partly(below=()), out_of_order, without_limits),
    Verdict.IMPLAUSIBLE_TOKENS: (changed(tokens=1 << 60),),
    Verdict.OTHER_GROUP: (of_another_group,),
    Verdict.UNKNOWN_BASE: (partly(digest=bytes(32)),),
    Verdict.BEHIND: (partly(number=99), changed(after=Stamp(1, 7), stamp=Stamp(1, 8))),
    Verdict.OVERLAP: (changed(after=NEVER),),
    Verdict.IN_TRANSFER: (lambda: partial_twice(arrived=False),),
    Verdict.ALREADY_HELD: (lambda: partial_twice(arrived=True),),
    Verdict.CLOSING: (group_merged_again_too_late,),
}
PAYLOAD = (
    Verdict.CUT,
    Verdict.BUSY,
    Verdict.NO_MEMORY,
    Verdict.WRONG_DIGEST,
    Verdict.WRONG_COUNT,
    Verdict.WRONG_WEIGHT,
    Verdict.IMPLAUSIBLE_WEIGHT,
    Verdict.NON_FINITE,
    Verdict.OUT_OF_RANGE,
)
"""What the environment finds when a payload that the core wants comes, or does not."""
ELSEWHERE = (Verdict.NOT_READY, Verdict.DAMAGED)
"""The environment's word where there is no core yet; and what a merge finds, which no peer hears."""


class Below:
    """A syncer of a leaf group that offers its partial to the group above; no partial arrives anywhere."""

    def __init__(self, adds_up: bool = True) -> None:
        self.swarm = swarm = Swarm(
            config(group_size=3, term_versions=20, genesis_versions=(genesis(0, 3),), seats=OF_SWARM[:9])
        )
        self.offers: list[tuple[Member, ev.Offer]] = []
        self.records: list[tuple[str, ev.Record]] = []
        for index in range(9):
            swarm.join(f"m{index}", genesis=index == 0)
        swarm.run(20.0)
        swarm.contribute()
        swarm.run(8.0)
        swarm.too_long = set(swarm.members)
        carried = swarm._Offer

        def hold(member: Member, effect: ev.Offer) -> None:
            if isinstance(effect.signed, SignedPartial):
                self.offers.append((member, effect))
            else:
                carried(member, effect)

        swarm._Offer = hold  # type: ignore[method-assign]
        swarm._Merge = lambda member, effect: None  # type: ignore[method-assign]  # the chain stands still
        swarm.on_effect = lambda m, e: self.records.append((m.peer, e)) if isinstance(e, ev.Record) else None
        if not adds_up:
            swarm._MergePartial = self._fail  # type: ignore[method-assign]
        swarm.contribute()
        swarm.run(2.0)
        if not adds_up:
            return
        self.member, self.offer = next(
            (member, offer) for member, offer in self.offers if offer.signed.header.group.split("/")[1] == "0"
        )

    def _fail(self, member: Member, effect: ev.MergePartial) -> None:
        """The first time; a group of one would try it again at once, and again."""
        self.member = member
        del self.swarm._MergePartial  # type: ignore[method-assign]
        self.swarm.answer(member.peer, effect, ev.Undone("out of memory"))

    def again(self, seconds: float) -> list[ev.Offer]:
        """How it is offered again in the next so many seconds."""
        self.offers.clear()
        self.swarm.run(seconds)
        return [
            offer
            for member, offer in self.offers
            if member is self.member and offer.ticket == self.offer.ticket
        ]

    def answer(self, verdict: Verdict, offer: ev.Offer | None = None) -> None:
        """The syncer above answers."""
        self.swarm.answer(self.member.peer, offer or self.offer, ev.OfferAnswered(verdict, None))

    def undelivered(self) -> None:
        """The stream broke."""
        self.swarm.answer(self.member.peer, self.offer, ev.Undone("cut"))

    def recorded(self, kind: str) -> list[str]:
        """What the member recorded."""
        return [r.reason for peer, r in self.records if peer == self.member.peer and r.kind == kind]


def verdicts(effects: Effects) -> list[Verdict]:
    """What was answered."""
    return [answer.verdict for answer in found(effects, ev.AnswerTransfer)]
