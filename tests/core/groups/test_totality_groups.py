"""A member of a grouped run hears nonsense about groups: it refuses or ignores it, and the run goes on."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit import RUN, contribution, digest, progress, sign, signed_part, vote
from test_grouped_cores import Run

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import Verdict, VoteRefusal
from p2pdiloco.core.api.types import NEVER, Certificate, Contributor, Stamp
from p2pdiloco.core.api.versions import PartialHeader, SignedPartial

MEMBERS, SIZE = 6, 2
peers = st.sampled_from([f"m{index}" for index in range(1, MEMBERS)])
senders = st.one_of(peers, st.just("stranger"))
groups = st.sampled_from(
    ("all", "0/0/0", "0/0/1", "0/0/2", "0/1/0", "0/1/1", "0/2/0", "0/9/0", "0/0/77", "1/0/0", "9/1/1", "no")
)
numbers = st.integers(0, 3)
fragments = st.integers(0, 1)


@st.composite
def claims(draw: Any) -> tuple[str, tuple[tuple[str, int, int], ...]]:
    return draw(senders), tuple(draw(st.lists(st.tuples(groups, fragments, numbers), max_size=4)))


@st.composite
def talk(draw: Any) -> tuple[str, msg.Message]:
    group, fragment, term, number = draw(groups), draw(fragments), draw(numbers), draw(numbers)
    sender = draw(senders)
    certificate = Certificate(group, fragment, term, draw(senders), number, (vote(sender, sender, term),))
    kinds: list[msg.Message] = [
        msg.Closing(
            group, fragment, term, number, draw(st.sampled_from((0.0, 1.0, float("inf"), float("nan"))))
        ),
        msg.Pass(group, fragment, term, number),
        msg.VoteRefused(group, fragment, term, number, None, VoteRefusal.OTHER_EPOCH),
        msg.Elected(certificate),
        msg.OfficeQuery(group, fragment, term),
        msg.VoteGranted(vote(sender, "m0", term, fragment)),
    ]
    return sender, draw(st.sampled_from(kinds))


@st.composite
def partials(draw: Any) -> tuple[str, str, int, tuple[tuple[str, int], ...], bool]:
    parts = draw(st.lists(st.tuples(senders, st.integers(0, 2)), min_size=1, max_size=3))
    return draw(senders), draw(groups), draw(fragments), tuple(parts), draw(st.booleans())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    said=st.lists(claims(), max_size=6),
    heard=st.lists(talk(), max_size=12),
    offered=st.lists(partials(), max_size=8),
    stale=st.lists(st.tuples(groups, fragments, numbers, peers), max_size=4),
)
def test_nothing_that_is_said_about_groups_breaks_a_member(
    said: list[Any], heard: list[Any], offered: list[Any], stale: list[Any]
) -> None:
    run = Run(MEMBERS, SIZE, term_versions=20)
    run.round()
    swarm = run.swarm
    core = swarm.members["m0"].core
    chain = core.fragments[0].chain

    def feed(event: ev.Event) -> None:
        core.handle(event, swarm.now)  # what it wants done in answer to nonsense is not done

    for peer, offices in said:
        feed(ev.MessageReceived(peer, progress((chain.head,), offices=offices)))
    for peer, message in heard:
        feed(ev.MessageReceived(peer, message))
    for transfer, (peer, group, fragment, parts, right) in enumerate(offered, start=9000):
        told = tuple(
            signed_part(
                Contributor(
                    learner, Stamp(1, sequence), 40, 4, chain.marks.stamp(learner) if right else NEVER
                )
            )
            for learner, sequence in parts
        )
        payload = digest("sums", transfer)
        header = PartialHeader(
            RUN, group, fragment, peer, chain.head.number, chain.head.digest, told, True, payload, 400
        )
        feed(ev.Offered(transfer, peer, SignedPartial(header, sign(peer, "partial", header))))
        signed = contribution(peer, chain.head, group=group, fragment=fragment)
        feed(ev.Offered(transfer + 500, peer, signed))
        feed(ev.PayloadBroken(transfer, Verdict.NON_FINITE))
        feed(ev.PayloadBroken(transfer + 500, Verdict.CUT))
    for group, fragment, attempt, peer in stale:
        if fragment == 0:
            feed(ev.PartialMerged(fragment, group, attempt, 7000, digest("late"), 400))
            feed(ev.PartialFailed(fragment, group, attempt, "late"))
            header = PartialHeader(
                RUN, group, fragment, "me", 0, chain.head.digest, (), True, digest("late"), 400
            )
            late = ef.Offer(peer, SignedPartial(header, b""), 7000, attempt)
            feed(ev.OfferAnswered(late, Verdict.IN_ROUND, None))
            feed(ev.OfferUndelivered(late))
    assert core.next_deadline() > 0
    swarm.run(30.0)
    before = chain.head.tokens
    run.round()
    run.round()
    assert chain.head.tokens > before, "training goes on"
    assert len(run.states()) == 1
