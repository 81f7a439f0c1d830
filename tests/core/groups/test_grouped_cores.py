"""Rotating groups of several cores: everything is merged once, by peers that each know only a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from above import Above
from core_swarm import Member, Swarm
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import (
    OF_SWARM,
    OWNER,
    RUN,
    certificate,
    child,
    config,
    contribution,
    digest,
    found,
    genesis,
    progress,
    sign,
    signed_part,
    table,
    vote,
    word,
)
from msgspec.structs import replace
from refusal_rows import Below
from scenes import doubted

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.events import MessageReceived, Offered, Tick
from p2pdiloco.core.api.reasons import Suspicion, Verdict, VersionFault, VoteRefusal
from p2pdiloco.core.api.types import NEVER, WHOLE_RUN, Certificate, Contributor, Stamp
from p2pdiloco.core.api.versions import (
    PartialHeader,
    SignedPartial,
    VersionHeader,
    level_sizes,
)
from p2pdiloco.core.chain import plan_of
from p2pdiloco.core.delegate import ASKED_PER_CHILD, LeafElectorate, UpperElectorate
from p2pdiloco.core.members import Claims
from p2pdiloco.core.pending import SendState
from p2pdiloco.core.voting import office_fault

ROUND_S = 8.0
"""Virtual: longer than an election in new groups takes."""


class Run:
    """A swarm that starts with so many members that they fall into groups, and what it did."""

    def __init__(self, members: int, group_size: int, term_versions: int = 3, **run: Any) -> None:
        groups = -(-members // group_size)
        self.swarm = Swarm(
            config(
                group_size=group_size,
                term_versions=term_versions,
                genesis_versions=(genesis(0, groups),),
                seats=OF_SWARM[:members],
                **run,
            )
        )
        self.peers = [f"m{index}" for index in range(members)]
        self.merges: list[tuple[str, ...]] = []
        self.partials: list[ev.MergePartial] = []
        self.told: dict[str, set[str]] = {peer: set() for peer in self.peers}
        self.swarm.on_effect = self._saw
        for peer in self.peers:
            self.swarm.join(peer, genesis=peer == "m0")
        self.swarm.run(20.0)

    def _saw(self, member: Member, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Merge):
            self.merges.append(self.swarm.merged(effect))
        elif isinstance(effect, ev.MergePartial):
            self.partials.append(effect)
        elif isinstance(effect, ev.Send | ev.Offer | ev.Offer | ev.FetchUpdate):
            self.told[member.peer].add(effect.peer)

    def round(self) -> None:
        self.swarm.contribute()
        self.swarm.run(ROUND_S)

    @property
    def header(self) -> VersionHeader:
        """The newest version's."""
        return self.swarm.members["m0"].core.fragments[0].chain.header

    def states(self) -> set[bytes]:
        return {m.states[0] for m in self.swarm.members.values()}


@settings(max_examples=12, deadline=None)
@given(members=st.integers(3, 14), group_size=st.integers(2, 4))
def test_every_contribution_is_merged_exactly_once_whatever_the_number_of_groups(
    members: int, group_size: int
) -> None:
    run = Run(members, group_size)
    for _ in range(3):
        run.round()
    times = Counter(peer for merge in run.merges for peer in merge)
    assert times == dict.fromkeys(run.peers, 3)
    assert len(run.states()) == 1, "and everybody holds the same bytes"
    chain = run.swarm.members["m0"].core.fragments[0].chain
    assert chain.head.tokens == 3 * members * 40
    learners = [part.learner for part in chain.header.contributors]
    assert learners == sorted(learners), "one order, whatever group they came from"


def test_a_leaf_syncer_hands_over_one_partial_and_the_root_alone_makes_the_version() -> None:
    run = Run(9, 3, term_versions=8)
    run.round()
    leaves = [p for p in run.partials if p.inputs]
    assert len(leaves) == len(run.header.partials) == len(run.partials), "one level of partials"
    assert sorted(i.contributor.learner for p in leaves for i in p.inputs) == run.peers
    assert run.merges == [tuple(run.peers)], "one version has them all"


def test_a_group_whose_learners_send_nothing_is_waited_for_for_an_interval_only() -> None:
    run = Run(9, 3, term_versions=8, quorum=3)
    run.round()
    before, leaf = run.header.number, run.swarm.members["m0"].core.fragments[0].posts.leaf.name
    cores = {peer: member.core for peer, member in run.swarm.members.items()}
    run.swarm.contribute(*[p for p, core in cores.items() if core.fragments[0].posts.leaf.name != leaf])
    run.swarm.run(30.0)
    assert run.header.number > before


def test_as_many_levels_as_the_members_need() -> None:
    run = Run(24, 2, term_versions=8)
    assert len(level_sizes(12, 2)) == 5
    run.round()
    levels = {p.group.split("/")[1] for p in run.header.partials}
    assert levels == {"0", "1", "2", "3"}, "all but the topmost make partials"
    assert sorted(peer for merge in run.merges for peer in merge) == sorted(run.peers)


@pytest.mark.parametrize(("members", "group_size"), [(24, 4), (40, 4)])
def test_nobody_talks_to_more_than_about_two_groups(members: int, group_size: int) -> None:
    run = Run(members, group_size, term_versions=50)
    for told in run.told.values():
        told.clear()
    run.round()
    run.round()
    most = max(len(told) for told in run.told.values())
    largest = max(len(leaf) for leaf in _leaves(run))
    assert most <= largest + 2 * group_size, "its leaf group and its fellows above, not the run"
    assert len(run.merges[-1]) == members


def _leaves(run: Run) -> list[tuple[str, ...]]:
    core = run.swarm.members["m0"].core
    header = core.fragments[0].chain.header
    return list(core.shared.listing.leaves(plan_of(header, core.shared.config)))


def test_groups_and_offices_rotate_until_everybody_had_one() -> None:
    run = Run(8, 2, term_versions=1)
    holders: set[str] = set()
    roots, groups = set(), set()
    for _ in range(16):
        run.round()
        chain = run.swarm.members["m0"].core.fragments[0].chain
        roots.add(chain.header.syncer)
        groups.add(run.swarm.members["m0"].core.fragments[0].posts.leaf.name)
        holders |= {p for p, m in run.swarm.members.items() if m.core.fragments[0].office.holding}
    assert holders == set(run.peers)
    assert len(roots) >= 4 and len({name.split("/")[0] for name in groups}) >= 8


def test_a_run_that_grows_beyond_a_group_falls_into_groups_and_back() -> None:
    swarm = Swarm(config(group_size=3, term_versions=2, seats=tuple("abcdefg")))
    for peer in ("a", "b", "c"):
        swarm.join(peer, genesis=peer == "a")
    swarm.run(5.0)

    def plans() -> set[tuple[int, int]]:
        headers = [m.core.fragments[0].chain.header for m in swarm.members.values()]
        return {(header.epoch, header.groups) for header in headers}

    def rounds(count: int) -> None:
        for _ in range(count):
            swarm.contribute()
            swarm.run(ROUND_S)

    rounds(2)
    assert plans() == {(0, 1)}
    for peer in ("d", "e", "f", "g"):
        swarm.join(peer)
    swarm.run(5.0)
    rounds(4)
    assert len(plans()) == 1 and plans().pop()[1] == 3
    for peer in ("d", "e", "f", "g"):
        swarm.kill(peer)
    swarm.list_members()
    swarm.run(15.0)
    rounds(6)
    assert len(plans()) == 1 and plans().pop()[1] == 1, "fewer members, one group again"
    assert len({tuple(m.states) for m in swarm.members.values()}) == 1


def test_a_dead_root_is_replaced_and_nothing_is_merged_twice() -> None:
    run = Run(9, 3, term_versions=50)
    run.round()
    root = run.swarm.members["m0"].core.fragments[0].chain.header.syncer
    run.swarm.kill(root)
    run.swarm.list_members()
    run.swarm.run(12.0)
    run.round()
    run.round()
    left = [peer for peer in run.peers if peer != root]
    times = Counter(peer for merge in run.merges for peer in merge)
    assert times == {**dict.fromkeys(left, 3), root: 1}
    assert len(run.states()) == 1


@pytest.mark.parametrize(("members", "size"), [(7, 2), (10, 2), (13, 3)])
def test_a_root_that_one_of_two_halves_elected_is_followed_at_once_by_groups_that_do_not_hear_it(
    members: int, size: int
) -> None:
    run = Run(members, size, term_versions=50)
    run.round()
    swarm, header = run.swarm, run.header
    plan = plan_of(header, swarm.config)

    def half(peer: str) -> tuple[int, int]:
        return plan.above(plan.leaf_of(peer), len(plan.sizes) - 2)

    for peer in run.peers:
        if half(peer) == half(header.syncer):
            swarm.kill(peer)
    records: list[ev.Record] = []
    swarm.on_effect = lambda member, effect: records.append(effect) if isinstance(effect, ev.Record) else None
    swarm.list_members()
    swarm.contribute()
    swarm.run(25.0)
    heads = {member.core.fragments[0].chain.head.number for member in swarm.members.values()}
    assert heads == {header.number + 1}
    unshown = {str(VersionFault.UNELECTED), str(VersionFault.OTHER_HOLDER)}
    assert not [record for record in records if record.reason in unshown]


def follows(member: Member, *voters: str) -> bool:
    """Tell whether a member would follow a next version of the first of these, by their votes alone."""
    context, syncer = member.core.fragments[0].context, voters[0]
    head = context.chain.header
    topmost = plan_of(head, member.core.shared.config).topmost
    proof = certificate(syncer, voters, head.term + 1, head.number, base=head.digest(), group=topmost)
    made = replace(head, number=head.number + 1, term=head.term + 1, syncer=syncer, elected=proof)
    return office_fault(context, made, syncer, member.swarm.now) is None


def test_nobody_follows_one_or_two_seats_that_elected_themselves_in_two_of_three_groups() -> None:
    """Also where groups have just changed, and nobody knows a syncer yet: one seat made three of four
    versions."""
    run = Run(9, 3, term_versions=3)
    swarm, asked = run.swarm, Counter[bool]()

    def regrouped(member: Member, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Record) and effect.kind == "groups":
            leaf_of = plan_of(member.core.fragments[0].chain.header, swarm.config).leaf_of
            others = [peer for peer in run.peers if peer != member.peer]
            one, two = next((a, b) for a in others for b in others if leaf_of(a) != leaf_of(b))
            asked[member.core.fragments[0].posts.leaf.office.syncer is None] += 1
            assert not follows(member, one) and not follows(member, one, two)

    swarm.on_effect = regrouped
    for _ in range(4):
        run.round()
    assert asked[True], "nobody is known"
    leaf_of = plan_of(run.header, swarm.config).leaf_of
    below = [peer for peer, member in swarm.members.items() if not member.core.fragments[0].office.holding]
    one, two = next((a, b) for a in below for b in below if leaf_of(a) != leaf_of(b))
    for peer, member in swarm.members.items():
        assert peer in (one, two) or not follows(member, one, two), "nor while all count on others"


def test_a_vote_request_of_an_epoch_that_we_are_not_in_is_asked_again_in_the_same_term() -> None:
    run = Run(4, 2, term_versions=50)
    swarm = run.swarm
    member = swarm.members["m0"].core
    head = member.fragments[0].chain.head
    request = msg.VoteRequest("7/0/0", 0, 9, head, "test")
    swarm.on_effect = lambda m, effect: None
    effects = member.handle(MessageReceived("m1", request), swarm.now)
    refused = [e.message for e in effects if isinstance(e, ev.Send)]
    assert isinstance(refused[0], msg.VoteRefused) and refused[0].reason is VoteRefusal.OTHER_EPOCH
    assert not [e for e in effects if isinstance(e, ev.Persist)]


def test_who_is_of_another_branch_and_epoch_has_no_vote_in_a_leaf_group() -> None:
    """It could give none, and its mate was never elected (partition 700080)."""
    run = Run(6, 3, term_versions=50)
    run.round()
    swarm = run.swarm
    lost, mate = (swarm.members[peer].core.fragments[0] for peer in ("m4", "m5"))
    assert lost.posts.leaf.office.holding and mate.posts.leaf.electorate.size(swarm.now) == 2
    other = child(genesis(0, 2).header, "m4", ("m4",), epoch=7)
    lost.chain.replace(other, table(other), yields=True)
    lost.follower.poll = lambda now: None  # as it found worse what the others have
    for _ in range(4):
        swarm.contribute(*(peer for peer in run.peers if peer != "m4"))
        swarm.run(ROUND_S)
    assert mate.posts.leaf.office.holding and "m5" in run.merges[-1]


def test_who_may_be_ahead_of_us_is_counted_also_if_it_judged_no_candidacy() -> None:
    """A member whose updates came late elected itself, alone in the old group of all others, and forked."""
    run = Run(6, 3, term_versions=50)
    run.round()
    core, now = run.swarm.members["m5"].core, run.swarm.now
    fragment = core.fragments[0]
    electorate, head = fragment.posts.leaf.electorate, fragment.chain.head
    electorate.leave_out({"m4"})
    for named, voters in ((replace(head, number=head.number + 1), 2), (replace(head, digest=bytes(32)), 1)):
        core.handle(MessageReceived("m4", progress((named,))), now)
        assert electorate.size(now) == voters


@pytest.mark.parametrize(
    ("epoch", "verdict"), [(0, Verdict.NOT_SYNCER), (7, Verdict.OTHER_EPOCH)], ids=["ours", "another"]
)
def test_who_has_no_seat_for_an_offer_of_its_own_epoch_says_that_it_is_no_syncer(
    epoch: int, verdict: Verdict
) -> None:
    """Else its sender would wait for the groups to rotate, which they do not where no version is made."""
    run = Run(9, 3, term_versions=50)
    swarm, core = run.swarm, run.swarm.members["m0"].core
    seats = core.fragments[0].posts
    index = next(i for i in range(3) if seats.named(f"0/0/{i}") is None)
    signed = contribution("m1", core.fragments[0].chain.head, group=f"{epoch}/0/{index}")
    effects = core.handle(Offered(1, "m1", signed), swarm.now)
    answers = [e.verdict for e in effects if isinstance(e, ev.AnswerTransfer)]
    assert answers == [verdict]


def test_who_lays_down_an_office_takes_its_claim_back_with_its_fellows() -> None:
    run = Run(9, 3, term_versions=50)
    swarm = run.swarm
    seats = {p: m.core.fragments[0].posts.taken for p, m in swarm.members.items()}
    loser, others = next(
        (peer, fellows)
        for peer, mine in seats.items()
        if len(mine) > 1 and (fellows := list(mine[1].electorate.others(swarm.now)))
    )
    office, named = seats[loser][0].office, seats[loser][0].name

    def believers() -> list[str]:
        return [p for p in others if loser in swarm.members[p].core.shared.claims.of(0, named)]

    assert believers() == others
    office.lay_down("test")
    swarm.members[loser].core.shared.vote_disk.failed(lambda: None, "disk full", swarm.now)
    swarm.post(loser, Tick())
    swarm.run(0.0)
    assert not believers()


def test_a_claim_that_is_not_repeated_is_void() -> None:
    claims = Claims(1)
    assert claims.heard("p", (("1/0/0", 0, 3),), 10.0) and claims.of(0, "1/0/0") == {"p": 3}
    claims.expire(10.0)
    assert claims.of(0, "1/0/0") == {"p": 3}
    claims.expire(10.1)
    assert not claims.of(0, "1/0/0")


def test_who_is_to_have_a_seat_keeps_the_offices_of_a_group_that_has_none() -> None:
    """A leaf's term begins no version's: laid down, its syncer would also lose the office above."""
    seats = OF_SWARM[:1]
    swarm = Swarm(config(group_size=3, genesis_versions=(genesis(0, 2),), seats=seats, owner=OWNER))
    ends: list[str] = []

    def saw(_member: Member, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Record) and effect.kind == "office":
            ends.append(effect.reason)

    swarm.on_effect = saw
    for peer in OF_SWARM[:6]:
        swarm.join(peer, genesis=peer == "m0")
    swarm.run(20.0)
    for peer in OF_SWARM[:6]:
        swarm.post(peer, ev.Guided(papers=tuple(map(word, OF_SWARM[1:6]))))
    swarm.run(8.0)
    assert "we are the syncer with 2 of 2 votes" in ends, "two of them are a group"
    swarm.contribute()
    swarm.run(8.0)
    assert not [why for why in ends if "wait for a term" in why]


# A group's partial on its way to the syncer above: sent until a version has it, and no longer.


@pytest.fixture
def below() -> Below:
    return Below()


def test_a_partial_whose_stream_broke_is_sent_again_after_a_pause(below: Below) -> None:
    below.undelivered()
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


def moved_on(below: Below) -> None:
    """Another chain took the place of the member's: what its group has merged does not fit any more."""
    fragment = below.member.core.fragments[0]
    doubted(fragment.chain)
    (seat,) = (s for s in fragment.posts.taken if s.level == 0)
    seat.round.chain_moved(below.swarm.now)


@pytest.mark.parametrize("answers", [lambda below: below.answer(Verdict.HELD), Below.undelivered])
def test_answers_to_what_is_no_more_change_nothing(below: Below, answers: Callable[[Below], None]) -> None:
    moved_on(below)
    assert below.again(1.0) == [] and below.swarm.run(5.0) is None
    answers(below)
    delegate = below.member.core.fragments[0].posts.leaf.delegate
    assert delegate.partial.state is SendState.OFFERED, "another, of which this says nothing"


def test_sums_that_come_too_late_are_released(below: Below) -> None:
    asked: list[tuple[Member, ev.MergePartial]] = []
    below.swarm._MergePartial = lambda *merge: asked.append(merge)  # type: ignore[method-assign]
    moved_on(below)
    below.swarm.contribute()
    below.swarm.run(2.0)
    below.member, effect = asked[0]
    moved_on(below)
    late = ev.Answered(below.swarm.tokens[id(effect)].token, ev.PartialMerged(7000, digest("late"), 400))
    assert ev.Release(7000) in below.member.core.handle(late, below.swarm.now)


def test_a_partial_whose_trust_weights_another_chain_does_not_have_is_made_anew(below: Below) -> None:
    moved_on(below)
    assert ev.Release(below.offer.ticket) in below.member.core.shared.out.take()


def test_a_group_whose_work_cannot_be_added_up_gets_another_syncer() -> None:
    below = Below(adds_up=False)
    assert "failed: out of memory" in below.recorded("partial")
    assert "laid down: out of memory" in below.recorded("office")


def test_a_partial_goes_to_the_next_syncer_above(below: Below) -> None:
    below.swarm.kill(below.offer.peer)
    below.undelivered()
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


def test_new_groups_count_members_and_groups_that_were_not_heard_of_yet() -> None:
    """Else each member would be a majority of one, and a syncer of its own."""
    above = Above()
    shared, now, timing = above.core.shared, above.swarm.now, above.core.shared.timing
    roster, plan = above.core.fragments[0].context.roster, plan_of(above.chain.header, above.swarm.config)
    own, leaf = above.seat.electorate._own_child, plan.leaf_of(shared.me)[1]
    upper = UpperElectorate(shared, roster, plan, (above.seat.level, above.seat.index), own, now)
    assert upper.size(now) == len(upper.children) > 1 and not upper.ready(now)
    assert upper.size(now + timing.settle_s) == 1 and upper.ready(now + timing.settle_s)
    mates = LeafElectorate(shared, roster, plan, leaf, now)
    for peer in mates.mates():
        shared.view.exclude(peer)
    assert mates.size(now) == len(mates.mates()) > 1
    assert mates.size(now + timing.suspect_s) == 1 and mates.ready(now + timing.suspect_s)


# --- finding the syncers of other groups -------------------------------------------------------------


def proof(syncer: str, group: str = WHOLE_RUN) -> Certificate:
    return Certificate(group, 0, 1, syncer, ())


def test_whom_strangers_name_is_asked_but_not_any_number_of_them() -> None:
    above = Above()
    seeking, now = above.seat.seeking, above.swarm.now + 100.0
    assert seeking is not None
    seeking.learned(proof("m5", above.child), now)
    electorate = above.seat.electorate
    for index in range(1000):
        seeking.learned(proof(f"stranger{index}"), now)
    asked = seeking.neighbours(now)
    assert len(asked) == ASKED_PER_CHILD * len(electorate.children)  # type: ignore[attr-defined]
    queries = [
        m for m in found(above.core.shared.out.take(), ev.Send) if isinstance(m.message, msg.OfficeQuery)
    ]
    assert {query.peer for query in queries} <= set(asked), "and only those of that group"
    assert not seeking.neighbours(now + 60.0), "in the end all are forgotten"


def test_nobody_is_asked_for_itself_or_twice_at_once() -> None:
    above = Above()
    seeking, now = above.seat.seeking, above.swarm.now + 100.0
    assert seeking is not None
    seeking.learned(proof(above.core.shared.me), now)
    assert not seeking.neighbours(now)


# A member of a grouped run hears nonsense about groups: it refuses or ignores it, and the run goes on.

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
    certificate = Certificate(group, fragment, term, draw(senders), (vote(sender, sender, term),))
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
)
def test_nothing_that_is_said_about_groups_breaks_a_member(
    said: list[Any], heard: list[Any], offered: list[Any]
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
    assert core.next_deadline() > 0
    swarm.run(30.0)
    before = chain.head.tokens
    run.round()
    run.round()
    assert chain.head.tokens > before, "training goes on"
    assert len(run.states()) == 1
