"""Scenes that tests of several rooms begin with: a syncer at work, a newcomer that is served."""

from __future__ import annotations

from typing import Any

from kit import TABLES, Solo, branch, child, config, contribution, found, sign, table, vote
from msgspec.structs import replace

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.evidence import Accusation, FalseVersion, short_of
from p2pdiloco.core.api.papers import TwoVotes
from p2pdiloco.core.api.reasons import MessageFault, Verdict
from p2pdiloco.core.api.types import (
    NEVER,
    UNMEASURED,
    Contributor,
    Head,
    Seat,
    Stamp,
    Watermark,
    table_digest,
)
from p2pdiloco.core.api.versions import MergedPartial, SignedVersion
from p2pdiloco.core.chain import Chain, marks_of

FAR = branch(9, learners=("p1", "p2"))
"""Nine versions: more than the update log keeps."""


A_PARTIAL = MergedPartial("0/0/0", "p1", bytes(32), b"")
"""Partial merge that nobody signed."""


def with_table(version: SignedVersion, marks: tuple[Watermark, ...]) -> SignedVersion:
    """The same version as if these were its watermarks."""
    header = replace(version.header, table=table_digest(marks))
    TABLES[header.digest()] = marks_of(marks)
    return SignedVersion(header, sign(header.syncer, "version", header))


def syncer(
    peers: tuple[str, ...] = ("p1", "p2"),
    timing: dict[str, float] | None = None,
    founders: tuple[str, ...] = (),
    idle: tuple[str, ...] = (),
    **run: Any,
) -> Solo:
    """We are the syncer, and calls were answered at once so far; our own learner does not run unless the
    test starts it. `founders`: who alone has a seat, and has worked, from the start; `idle`: who has one
    beside them, and has not."""
    our_run = config(timing=timing, **run)
    marks = tuple(
        Watermark(learner, NEVER, 0, merges=2 * (learner in founders), seat=Seat(place))
        for place, learner in enumerate((*founders, *idle), 1)
    )
    restored = Restored(fragments=(RestoredFragment(log=our_run.genesis_versions, watermarks=marks),))
    solo = Solo(our_run, peers, restored if founders else None, genesis=bool(founders))
    solo.fragment.context.shared.answer_time(0).add(0.0)
    if founders:
        solo.wait(4.0)  # it starts the run
    solo.take_office()
    return solo


def shown_a_lie(solo: Solo, voter: str) -> Solo:
    """It hears that this peer voted twice."""
    proof = TwoVotes(vote(voter, "p8", 70), vote(voter, "p9", 70))
    solo.message("p2", msg.Proven(proof))
    return solo


def _hears_forged(audited: bool) -> list[ev.Effect]:
    """It hears an accusation that its accuser did not sign."""
    subject = FalseVersion(short_of(FAR[1]))
    solo = Solo(config(audited=audited), ("p1", "p2", "p3"))
    return solo.message("p3", msg.Stated(Accusation(subject, "p2", b"forged")))


FORGED_STATEMENTS = {
    MessageFault.FALSE_STATEMENT: lambda: _hears_forged(audited=True),
    MessageFault.NO_AUDITS: lambda: _hears_forged(audited=False),
}


def expels(solo: Solo, learner: str) -> Solo:
    """Its loss audits have shown that this learner's work does harm."""
    for _ in range(40):
        solo.core.shared.loss_audits.end(learner, (-1.0,), (1.0,), True, 0.0, solo.now)
    return solo


def one_round(solo: Solo, *learners: str, number: int = 1) -> list[ev.Effect]:
    """A version that merges these learners' next contributions."""
    effects: list[ev.Effect] = []
    for index, learner in enumerate(learners):
        mark = solo.fragment.chain.marks.stamp(learner)
        stamp = Stamp(1, mark.sequence + 1)
        effects += solo.offer(learner, 10 * number + index, stamp=stamp, after=mark)
    effects += solo.wait(1.0)
    return effects + solo.merged(found(effects, ev.Merge)[0])


def copied(author: str) -> list[ev.Effect]:
    """After a version, p2 offers the payload that was that learner's in it."""
    solo = syncer()
    one_round(solo, "p1", "p2")
    parts = {part.learner: part for part in solo.fragment.chain.header.contributors}
    mark, payload = solo.fragment.chain.marks.stamp("p2"), parts[author].payload_digest
    signed = contribution("p2", solo.head, Stamp(1, 2), after=mark, payload_digest=payload)
    return solo.feed(ev.Offered(90, "p2", signed))


def held_by_p1(says: Verdict = Verdict.IN_ROUND) -> Solo:
    """Our contribution was offered to the syncer p1, which says that."""
    solo = Solo(config(term_versions=64), peers=("p1", "p2", "p3", "p4"))
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    solo.answer(offer, ev.OfferAnswered(says, solo.head))
    return solo


def without_ours(
    solo: Solo, versions: int, says: Verdict = Verdict.ALREADY_HELD, head: Head | None = None
) -> list[ev.Effect]:
    """So many versions by p1 of others' work. Whenever we offer ours again, p1 says that, with that head."""
    effects: list[ev.Effect] = []
    for _ in range(versions):
        made = solo.announce(child(solo.fragment.chain.header, "p1", ("p2", "p3")))
        effects += made
        for offer in found(made, ev.Offer):
            effects += solo.answer(offer, ev.OfferAnswered(says, head or solo.head))
    return effects


def due_again(solo: Solo, learner: str, transfer: int) -> list[ev.Effect]:
    """Its work came too late for the last version, or was copied out long before it."""
    mark = solo.fragment.chain.marks.stamp(learner)
    return solo.offer(learner, transfer, stamp=Stamp(1, mark.sequence + 1), after=mark)


def serve(solo: Solo, effects: list[ev.Effect]) -> list[ev.Effect]:
    """Give everything that is asked for, from the chain `FAR`; all effects that came of it."""
    done = []
    while effects:
        done += effects
        asked, effects = effects, []
        for pull in found(asked, ev.FetchUpdate):
            effects += solo.answer(pull, ev.UpdateFetched(FAR[pull.number], pull.number))
        for job in found(asked, ev.ApplyUpdate):
            state = FAR[job.number].header.state_digest
            effects += solo.answer(job, ev.UpdateApplied(state))
        for copy in found(asked, ev.FetchState):
            far = FAR[copy.number]
            effects += solo.answer(copy, ev.StateFetched(far, table(far)))
    return done


def next_part(chain: Chain, learner: str) -> Contributor:
    """That learner's next contribution, of H inner steps, as a syncer of this chain states it."""
    mark, mean = chain.marks.stamp(learner), chain.marks.mean(learner)
    stamp = Stamp(1, mark.sequence + 1)
    trust, votes = mean.trust(UNMEASURED), learner in chain.marks.seats
    return Contributor(learner, stamp, 40, 4, mark, trust=trust, votes=votes)


def doubted(chain: Chain) -> None:
    """A heavier chain takes the place of this one: with the same stamps, and where nobody agrees with
    others."""
    table = tuple(replace(mark, agreement=-1000) for mark in chain.marks.table)
    header = replace(chain.header, tokens=chain.header.tokens + 1, table=table_digest(table))
    chain.replace(SignedVersion(header, b""), table)


def header(solo: Solo, learner: str, transfer: int, **odd: Any) -> list[ev.Effect]:
    """It is read and accepted; the payload follows, or not."""
    return solo.feed(ev.Offered(transfer, learner, contribution(learner, solo.head, **odd)))


def here(solo: Solo, transfer: int) -> list[ev.Effect]:
    """Its payload is here."""
    return solo.feed(ev.PayloadReceived(transfer, 100 + transfer))


def called(effects: list[ev.Effect]) -> list[str]:
    """To whom closing calls went."""
    return [send.peer for send in found(effects, ev.Send) if isinstance(send.message, msg.Closing)]
