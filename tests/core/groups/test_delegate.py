"""A group's partial on its way to the syncer above: sent until a version has it, and no longer."""

from __future__ import annotations

import pytest
from above import Above
from kit import digest, found
from refusal_rows import Below
from scenes import doubted

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import Suspicion, Verdict
from p2pdiloco.core.api.types import WHOLE_RUN, Certificate
from p2pdiloco.core.delegate import ASKED_PER_CHILD


@pytest.fixture
def below() -> Below:
    return Below()


def test_a_partial_whose_stream_broke_is_sent_again_after_a_pause(below: Below) -> None:
    below.swarm.post(below.member.peer, ev.OfferUndelivered(below.offer))
    assert not below.again(0.0)
    assert [offer.peer for offer in below.again(1.0)] == [below.offer.peer]


def test_whose_work_was_too_long_is_said_by_the_delegate_but_not_of_itself(below: Below) -> None:
    said = {(peer, dict(record.fields)["peer"]) for peer, record in below.records if record.kind == "cut"}
    merged = {
        (member.peer, part.learner) for member, offer in below.offers for part in offer.signed.header.parts
    }
    others = {(delegate, learner) for delegate, learner in merged if learner != delegate}
    assert others and others == merged & said and not any(delegate == learner for delegate, learner in said)


def test_a_syncer_above_that_does_nothing_with_it_is_doubted(below: Below) -> None:
    below.answer(Verdict.HELD)
    below.again(5.0)
    assert not below.recorded("suspicion"), "it has time for a round"
    below.again(20.0)
    assert below.recorded("suspicion") == [str(Suspicion.NO_VERSION)]


def test_answers_to_what_is_no_more_change_nothing(below: Below) -> None:
    older = ef.Offer(below.offer.peer, below.offer.signed, below.offer.ticket, below.offer.attempt - 1)
    below.answer(Verdict.NOT_SYNCER, older)
    below.swarm.post(below.member.peer, ev.OfferUndelivered(older))
    assert not below.again(1.0), "it is still under way"


def test_sums_that_come_too_late_are_released(below: Below) -> None:
    group = below.offer.signed.header.group
    late = ev.PartialMerged(0, group, below.offer.attempt + 9, 7000, digest("late"), 400)
    assert ef.Release(7000) in below.member.core.handle(late, below.swarm.now)
    nobodys = ev.PartialMerged(0, "0/0/99", 1, 7001, digest("late"), 400)
    assert ef.Release(7001) in below.member.core.handle(nobodys, below.swarm.now)
    assert not below.again(0.0)


def test_a_partial_whose_trust_weights_another_chain_does_not_have_is_made_anew(below: Below) -> None:
    fragment, now = below.member.core.fragments[0], below.swarm.now
    doubted(fragment.chain)
    (seat,) = (s for s in fragment.seats.taken if s.name == below.offer.signed.header.group)
    seat.round.chain_moved(now)
    assert ef.Release(below.offer.ticket) in below.member.core.shared.out.take()


def test_a_group_whose_work_cannot_be_added_up_gets_another_syncer() -> None:
    below = Below(adds_up=False)
    assert "failed: out of memory" in below.recorded("partial")
    assert "laid down: out of memory" in below.recorded("office")


def test_a_partial_goes_to_the_next_syncer_above(below: Below) -> None:
    below.swarm.kill(below.offer.peer)
    below.swarm.post(below.member.peer, ev.OfferUndelivered(below.offer))
    offers = below.again(20.0)
    assert offers and offers[-1].peer != below.offer.peer


def test_held_sums_go_when_their_trust_weights_do_not_follow_from_the_chain_any_more() -> None:
    """Everybody would refuse the version with them."""
    above = Above()
    above.offer(above.label())
    above.arrives()
    assert above.seat.round.inbox.has(above.child)
    doubted(above.chain)
    above.seat.round.chain_moved(above.swarm.now)
    assert not above.seat.round.inbox.has(above.child)


# --- finding the syncers of other groups -------------------------------------------------------------


def proof(syncer: str, group: str = WHOLE_RUN) -> Certificate:
    return Certificate(group, 0, 1, syncer, 0, ())


def test_whom_strangers_name_is_asked_but_not_any_number_of_them() -> None:
    above = Above()
    seeking, now = above.seat.seeking, above.swarm.now + 100.0
    assert seeking is not None
    seeking.learned(above.child, proof("m5", above.child), now)
    electorate = above.seat.electorate
    for index in range(1000):
        seeking.learned(above.child, proof(f"stranger{index}"), now)
    asked = seeking.neighbours(now)
    assert len(asked) == ASKED_PER_CHILD * len(electorate.children)  # type: ignore[attr-defined]
    queries = [
        m for m in found(above.core.shared.out.take(), ef.Send) if isinstance(m.message, msg.OfficeQuery)
    ]
    assert {query.peer for query in queries} <= set(asked), "and only those of that group"
    assert not seeking.neighbours(now + 60.0), "in the end all are forgotten"


def test_nobody_is_asked_for_itself_or_twice_at_once() -> None:
    above = Above()
    seeking, now = above.seat.seeking, above.swarm.now + 100.0
    assert seeking is not None
    seeking.learned(above.child, proof(above.core.shared.me), now)
    assert not seeking.neighbours(now)
