"""Proofs by themselves: what holds, what does not, and how large they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from core_swarm import Swarm
from hypothesis import given, settings
from kit import (
    RUN,
    Solo,
    announce,
    branch,
    certificate,
    child,
    config,
    found,
    genesis,
    progress,
    reasons,
    restored_nothing,
    saved,
    sent,
    sign,
    signed_part,
    table,
    vote,
)
from msgspec.structs import replace
from scenes import one_round, syncer
from wire_strategies import proofs

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.evidence import MAX_PROOFS, cause_of, false_label, fingerprint, short_of, two_versions
from p2pdiloco.core.api.messages import Proven, decode, encode
from p2pdiloco.core.api.papers import (
    FalseLabel,
    Proof,
    SignedShort,
    SignedWork,
    TwoAttestations,
    TwoVersions,
    TwoVotes,
)
from p2pdiloco.core.api.reasons import CastOutWhy, MessageFault, Verdict
from p2pdiloco.core.api.types import Attestation, Contributor, Milestone, Stamp
from p2pdiloco.core.api.versions import MemberList, SignedVersion
from p2pdiloco.core.distrust import Excluded
from p2pdiloco.release import WIRE_VERSION
from p2pdiloco_lab.simulation.lineage import HashCrypto

VERIFY = HashCrypto("").verify
LEARNERS = tuple(f"p{i}" for i in range(9))


def version(learners: tuple[str, ...] = LEARNERS, **odd: object) -> SignedVersion:
    return child(genesis(0).header, "p1", learners, **odd)


def falsely_labelled() -> SignedVersion:
    """One that names a contribution of p4 which p5 signed."""
    made = version()
    parts = list(made.header.contributors)
    parts[4] = signed_part(replace(parts[4], tokens=39), by="p5")
    header = replace(made.header, contributors=tuple(parts))
    return SignedVersion(header, sign("p1", "version", header))


def short(made: SignedVersion, by: str = "", **odd: object) -> SignedShort:
    header = replace(made.header.short(), **odd)
    return SignedShort(header, sign(by or header.syncer, "version", header))


def two(**odd: object) -> TwoVersions:
    return TwoVersions(short(version()), short(version(LEARNERS[:8]), **odd))


def attests(target: int, source: int = 0, of: int = 1, by: str = "p1", fragment: int = 0) -> SignedWork:
    """Work that attests a link between versions of those numbers, of one history or another."""
    link = Attestation(Milestone(source, bytes(32)), Milestone(target, bytes([of]) * 32))
    part = Contributor(by, Stamp(1, target), 40, 4, attestation=link)
    label = part.work(RUN, fragment)
    return SignedWork(label, sign(by, "work", label))


GOOD: list[Callable[[], Proof]] = [
    two,
    lambda: TwoAttestations(attests(16), attests(16, of=2)),
    lambda: TwoAttestations(attests(16), attests(16, source=8)),
    lambda: TwoAttestations(attests(32), attests(16, source=8)),
    lambda: TwoVotes(vote("p1", "p2", 3), vote("p1", "p3", 3)),
    lambda: false_label(falsely_labelled(), 4),
]


@pytest.mark.parametrize("made", GOOD)
def test_what_is_proved(made: Callable[[], Proof]) -> None:
    proof = made()
    assert proof.holds(RUN, VERIFY) and proof.culprit() == "p1"
    assert not proof.holds("another", VERIFY), "of another run"
    assert not proof.holds(RUN, lambda *_: isinstance(proof, FalseLabel)), "nobody signed it"
    sent = encode(RUN, Proven(proof))
    assert decode(RUN, sent) == Proven(proof) and len(sent) < 1200


BAD: dict[str, Callable[[], Proof]] = {
    "one attestation": lambda: TwoAttestations(attests(16), attests(16)),
    "attestations one after the other": lambda: TwoAttestations(attests(16), attests(32, source=8)),
    "attestations of two fragments": lambda: TwoAttestations(attests(16), attests(16, of=2, fragment=1)),
    "attestations of two seats": lambda: TwoAttestations(attests(16), attests(16, of=2, by="p2")),
    "work that attests nothing": lambda: TwoAttestations(
        attests(16), SignedWork(replace(attests(16).label, attestation=None), b"")
    ),
    "one version": lambda: TwoVersions(short(version()), short(version())),
    "another parent": lambda: two(parent=bytes(32)),
    "another term": lambda: two(term=2),
    "another fragment": lambda: two(fragment=1),
    "another group": lambda: two(group="g"),
    "another run": lambda: two(run="another"),
    "another syncer": lambda: two(syncer="p2"),
    "signed by another": lambda: TwoVersions(short(version()), short(version(LEARNERS[:8]), by="p2")),
    "one vote": lambda: TwoVotes(vote("p1", "p2", 3), vote("p1", "p2", 3)),
    "votes of two terms": lambda: TwoVotes(vote("p1", "p2", 3), vote("p1", "p3", 4)),
    "votes of two fragments": lambda: TwoVotes(vote("p1", "p2", 3), vote("p1", "p3", 3, 1)),
    "votes of two voters": lambda: TwoVotes(vote("p1", "p2", 3), vote("p4", "p3", 3)),
    "a true label": lambda: false_label(version(), 4),
    "a label of no such version": lambda: replace(
        false_label(falsely_labelled(), 4), part=Contributor("p4", Stamp(1, 1), 1, 1)
    ),
    "another's place": lambda: replace(
        false_label(falsely_labelled(), 4), way=false_label(falsely_labelled(), 5).way
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_proof(what: str) -> None:
    assert not BAD[what]().holds(RUN, VERIFY)


@settings(max_examples=60, deadline=None)
@given(proofs())
def test_garbage_proves_nothing(proof: Proof) -> None:
    checks: list[str] = []
    asked = lambda peer, message, signature: bool(checks.append(peer)) or VERIFY(peer, message, signature)  # noqa: E731
    assert not proof.holds(RUN, asked) and len(checks) <= 2 and proof.culprit() and proof.words()


def test_two_that_do_not_belong_together_are_nothing_to_look_at() -> None:
    ours = version()
    assert two_versions(ours, version(LEARNERS[:8])) is not None
    assert two_versions(ours, short_of(version(LEARNERS[:8]))) is not None
    assert two_versions(ours, ours) is None and two_versions(None, ours) is None
    assert two_versions(ours, version(LEARNERS[:8], term=2)) is None


def test_a_fingerprint_is_of_a_set() -> None:
    assert fingerprint({"p1", "p2"}) == fingerprint({"p2", "p1"}) != fingerprint({"p1"})
    assert fingerprint(set()) == 0 and WIRE_VERSION >= 26


# Lies that a node notices, and what becomes of who told them.

PEERS = ("p1", "p2", "p3", "p4")
LIE = TwoVotes(vote("p1", "p2", 7), vote("p1", "p3", 7))
BOTH = ("p1", "p2")


def excluded(solo: Solo) -> tuple[str, ...]:
    return solo.core.shared.excluded.peers


def siblings() -> tuple[SignedVersion, SignedVersion]:
    """Two versions of p1, of one parent in one term: the first is the lighter one."""
    made = [child(genesis(0).header, "p1", BOTH, state_digest=bytes([n] * 32)) for n in range(2)]
    lighter, heavier = sorted(made, key=lambda v: v.header.head().weight)
    return lighter, heavier


def with_false_label() -> SignedVersion:
    made = child(genesis(0).header, "p1", BOTH)
    first, *rest = made.header.contributors
    header = replace(made.header, contributors=(replace(signed_part(first), signature=b"no"), *rest))
    return SignedVersion(header, sign("p1", "version", header))


# --- noticing ------------------------------------------------------------------------------------------


def test_who_hears_of_a_heavier_sibling_of_its_own_version_asks_for_it_and_has_a_proof() -> None:
    lighter, heavier = siblings()
    solo = Solo(peers=PEERS, restored=saved([genesis(0), lighter]))
    heads = (heavier.header.head(),)
    (pulled,) = found(solo.hear("p2", heads=heads), ev.FetchUpdate)
    assert pulled.number == 1
    effects = solo.answer(pulled, ev.UpdateFetched(heavier, 900))
    assert excluded(solo) == ("p1",)
    assert reasons(effects, "excluded") == ["it signed two versions 1 of fragment 0"]
    solo.says = {peer: {"heads": heads} for peer in PEERS[1:]}
    effects = [effect for peer in PEERS[1:] for effect in solo.hear(peer)] + solo.wait(8.0)
    copied = found(effects, ev.FetchState)[0]
    effects = solo.answer(copied, ev.StateFetched(heavier, table(heavier)))
    assert found(effects, ev.CommitVersion), "it takes the heavier one all the same"


def test_a_false_label_is_a_proof_against_the_syncer() -> None:
    solo, false = Solo(peers=PEERS), with_false_label()
    pull = found(solo.message("p1", announce(false)), ev.FetchUpdate)[0]
    effects = solo.answer(pull, ev.UpdateFetched(false, 900))
    assert excluded(solo) == ("p1",) and not found(effects, ev.ApplyUpdate)


def stands(peers: tuple[str, ...] = PEERS) -> tuple[Solo, int]:
    """We ask for votes, and have p1's."""
    solo = Solo(peers=peers)
    effects: list[ev.Effect] = []
    while not sent(effects, msg.VoteRequest):
        effects = solo.wait(0.1)
    term = sent(effects, msg.VoteRequest)[0].term
    solo.message("p1", msg.VoteGranted(vote("p1", "me", term)))
    return solo, term


def test_a_candidate_that_hears_of_its_own_votes_elsewhere_has_a_proof() -> None:
    solo, term = stands()
    solo.message("p2", msg.Elected(certificate("p2", ("p1", "p2", "p3"), term)))
    assert excluded(solo) == ("p1",)


def test_a_vote_that_comes_late_is_compared_as_well() -> None:
    solo, term = stands()
    solo.message("p2", msg.Elected(certificate("p2", ("p2", "p3", "p4"), term)))
    assert not excluded(solo) and solo.fragment.office.syncer == "p2"
    solo.message("p3", msg.VoteGranted(vote("p3", "me", term)))
    assert excluded(solo) == ("p3",)


def test_two_certificates_of_one_term_know_who_voted_for_both() -> None:
    solo = Solo(peers=PEERS)
    solo.message("p2", msg.Elected(certificate("p2", ("p1", "p2", "p3"), 4)))
    solo.message("p4", msg.Elected(certificate("p4", ("p1", "p4", "p3"), 5)))
    assert not excluded(solo), "another term"
    solo.message("p2", msg.Elected(certificate("p2", ("p1", "p2", "p3"), 5)))
    assert excluded(solo) == ("p1",), "one proof a message"


# --- exclusion -----------------------------------------------------------------------------------------


def told(solo: Solo, proof: TwoVotes | TwoVersions = LIE, by: str = "p4") -> list[ev.Effect]:
    return solo.message(by, msg.Proven(proof))


def test_everybody_is_told_once_and_it_is_saved() -> None:
    solo = Solo(peers=PEERS)
    effects = told(solo)
    assert found(effects, ev.KeepProofs) == [ev.KeepProofs((LIE,))]
    to = sorted(e.peer for e in found(effects, ev.Send) if isinstance(e.message, msg.Proven))
    assert to == ["p1", "p2", "p3"], "its author, too"
    assert not found(told(solo), ev.Send) and solo.core.shared.view.progress("p1") is None


def test_an_excluded_syncer_is_in_office_no_more() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    assert solo.fragment.office.syncer == "p1"
    told(solo)
    assert solo.fragment.office.syncer is None
    assert solo.fragment.office.why_open(solo.now) == "the syncer is excluded"
    effects = solo.elect("p1", term=3)
    assert reasons(effects, "refusal") == [str(MessageFault.EXCLUDED)]
    assert not solo.fragment.office.takes(solo.now)
    again = solo.message("p2", msg.Elected(certificate("p1", PEERS, 3)))
    assert reasons(again, "refusal") == [str(MessageFault.EXCLUDED)], "nor by a certificate"


def test_its_vote_counts_no_more() -> None:
    solo = Solo(peers=PEERS)
    told(solo)
    few = certificate("p2", ("p1", "p2"), 3)
    assert reasons(solo.message("p2", msg.Elected(few)), "refusal") == ["certificate-minority"]
    solo.message("p2", msg.Elected(certificate("p2", ("p2", "p3", "p4"), 3)))
    assert solo.fragment.office.syncer == "p2", "the others' do"


def test_what_it_says_is_refused_counted_once_and_answered_with_the_proof() -> None:
    solo = Solo(peers=PEERS)
    told(solo)
    effects = [e for _ in range(5) for e in solo.hear("p1")]
    assert reasons(effects, "refusal") == [str(MessageFault.EXCLUDED)]
    assert sent(effects, msg.Proven, "p1") == [msg.Proven(LIE)]
    solo.feed(ev.PresenceSeen(MemberList(tuple((p, 1) for p in (*PEERS, "me")))))
    assert "p1" not in dict(solo.core.shared.listing.members)
    assert not [e for e in found(solo.wait(30.0, silent=("p1",)), ev.Send) if e.peer == "p1"]


def test_its_contributions_are_refused() -> None:
    solo = Solo(peers=PEERS)
    solo.take_office()
    told(solo)
    answer = found(solo.offer("p1", 1), ev.AnswerTransfer)
    assert [a.verdict for a in answer] == [Verdict.EXCLUDED]
    assert found(solo.offer("p2", 2), ev.AcceptTransfer)


def test_what_it_made_is_followed_where_others_hold_it() -> None:
    solo = Solo(peers=PEERS)
    told(solo)
    made = child(genesis(0).header, "p1", BOTH)
    pull = found(solo.hear("p2", heads=(made.header.head(),)), ev.FetchUpdate)[0]
    assert pull.peer == "p2"
    effects = solo.answer(ev.FetchUpdate, ev.UpdateFetched(made, 900))
    assert found(effects, ev.ApplyUpdate)


def test_nothing_brings_it_back_into_the_view() -> None:
    solo = Solo(peers=PEERS)
    told(solo)
    view, now = solo.core.shared.view, solo.now
    view.listed("p1", 9, now)
    assert not view.may_come("p1", now) and not view.heard("p1", progress(()), now)


def test_its_word_on_versions_counts_no_more_though_we_had_its_certificate() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    heads = solo.fragment.follower.heads
    assert heads.counts("p1")
    told(solo)
    assert not heads.counts("p1") and heads.counts("p2")


def test_a_proof_about_nobody_is_not_even_checked() -> None:
    chain = branch(12, learners=("p1", "p2", "p3", "p4"))
    solo = Solo(peers=PEERS, restored=saved(chain))
    stranger = TwoVotes(vote("s1", "p2", 7), vote("s1", "p3", 7))
    checks: list[str] = []
    solo.core.shared.excluded._verify = lambda peer, *_: bool(checks.append(peer))  # type: ignore[method-assign]
    told(solo, stranger)
    assert not excluded(solo) and not checks
    told(solo)
    assert checks == ["p1"], "of who has worked it is"


def test_the_table_is_bounded_and_keeps_those_who_count() -> None:
    liars = [f"s{number}" for number in range(MAX_PROOFS + 10)]
    solo = Solo(config(seats=("me", *PEERS, *liars)), PEERS)
    for voter in liars:
        told(solo, TwoVotes(vote(voter, "p2", 7), vote(voter, "p3", 7)))
    assert len(excluded(solo)) == MAX_PROOFS


def test_in_a_full_table_who_has_no_vote_gives_way_to_who_has_one() -> None:
    voters = {"liar"}
    table_ = Excluded(RUN, "me", HashCrypto("").verify, lambda _: True, voters.__contains__)
    for number in range(MAX_PROOFS):
        assert table_.add(TwoVotes(vote(f"s{number}", "p2", 7), vote(f"s{number}", "p3", 7)))
    assert not table_.add(TwoVotes(vote("late", "p2", 7), vote("late", "p3", 7)))
    assert table_.add(TwoVotes(vote("liar", "p2", 7), vote("liar", "p3", 7)))
    assert "liar" in table_ and "s0" not in table_ and len(table_.peers) == MAX_PROOFS


def test_a_proof_against_ourselves_ends_this_node() -> None:
    solo = Solo(peers=PEERS)
    mine = TwoVotes(vote("me", "p2", 7), vote("me", "p3", 7))
    effects = told(solo, mine)
    assert found(effects, ev.CastOut) == [
        ev.CastOut("it voted twice in term 7 of fragment 0", CastOutWhy.TWO_LIVES)
    ]
    assert found(effects, ev.KeepProofs)
    again = Solo(peers=(), restored=replace(restored_nothing(config()), proofs=(mine,)))
    assert found(again.greeting, ev.CastOut), "also at every later start"


def test_what_was_saved_holds_after_a_restart_if_it_is_a_proof() -> None:
    false = TwoVotes(vote("p2", "p2", 7), vote("p2", "p2", 7))
    solo = Solo(peers=PEERS, restored=replace(restored_nothing(config()), proofs=(LIE, false)))
    assert excluded(solo) == ("p1",) and solo.core.shared.view.progress("p1") is None


# --- gossip ----------------------------------------------------------------------------------------------


def test_who_excludes_others_than_we_do_is_told_ever_more_rarely() -> None:
    solo = Solo(peers=PEERS)
    told(solo)
    at = []
    for _ in range(200):
        solo.now += 0.5
        if sent(solo.hear("p2"), msg.Proven, "p2"):
            at.append(solo.now)
    pauses = [b - a for a, b in itertools.pairwise(at)]
    assert pauses == sorted(pauses) and 3.0 <= pauses[0] < pauses[-1]
    solo.now += 100.0
    assert not sent(solo.hear("p2", proofs=solo.core.shared.excluded.mark), msg.Proven), "it knows by now"


def test_who_is_confirmed_by_now_is_told_soon_again_as_it_believed_nobody_before() -> None:
    solo = Solo(peers=PEERS)
    told(solo)
    for _ in range(60):
        solo.now += 0.5
        solo.hear("p2", confirmed=False)
    at = []
    for number in range(60):
        solo.now += 0.5
        if sent(solo.hear("p2"), msg.Proven, "p2"):
            at.append(number * 0.5)
    assert at[0] <= 3.0 and at[1] - at[0] >= 3.0


def test_who_excludes_somebody_that_we_do_not_is_greeted_so_that_it_tells_us() -> None:
    solo = Solo(peers=PEERS)
    assert sent(solo.hear("p2", proofs=77), msg.Progress, "p2")
    assert not sent(solo.hear("p2", proofs=77), msg.Progress, "p2"), "not at every heartbeat"


def test_our_heartbeat_says_whom_we_exclude() -> None:
    solo = Solo(peers=PEERS)
    before = sent(solo.wait(1.0), msg.Progress)[-1].proofs
    told(solo)
    assert before == 0 != sent(solo.wait(1.0, silent=("p1",)), msg.Progress)[-1].proofs
    assert progress(()).proofs == 0


@pytest.mark.parametrize("first", range(4))
def test_a_liar_that_is_excluded_at_different_times_blocks_nobody(first: int) -> None:
    """Two of five lie; each of the others hears of one at another time than the rest."""
    swarm = Swarm(config(term_versions=4, seats=tuple(f"p{index}" for index in range(5))))
    for index in range(5):
        swarm.join(f"p{index}", genesis=index == 0)
    swarm.run(10.0)
    for at, liar in enumerate(("p3", "p4")):
        lie = TwoVotes(vote(liar, "p0", 70), vote(liar, "p1", 70))
        swarm.post(
            f"p{(first + at) % 3}", ev.MessageReceived("p0" if (first + at) % 3 else "p1", msg.Proven(lie))
        )
        swarm.run(0.3)
    numbers = [swarm.members[f"p{i}"].core.fragments[0].chain.head.number for i in range(3)]
    for _ in range(6):
        swarm.contribute()
        swarm.run(10.0)
    cores = [swarm.members[f"p{i}"].core for i in range(3)]
    assert all(core.shared.excluded.peers == ("p3", "p4") for core in cores)
    assert all(core.fragments[0].chain.head.number > max(numbers) + 1 for core in cores)
    assert len({core.fragments[0].chain.head.digest for core in cores}) == 1


def test_whoever_made_something_false_is_not_told_of_copied_folders() -> None:
    version = child(Solo(peers=PEERS).fragment.chain.header, "me", ("p2",))
    label = FalseLabel(short_of(version), version.header.contributors[0], ())
    assert cause_of(label) is CastOutWhy.UNSOUND
    assert cause_of(TwoVersions(short_of(version), short_of(version))) is CastOutWhy.TWO_LIVES
    assert "copy" in str(CastOutWhy.TWO_LIVES) and "copy" not in str(CastOutWhy.UNSOUND)


# An honest syncer never makes two versions of one parent in one term.


def test_whose_chain_has_a_later_term_makes_no_version_of_an_earlier_one() -> None:
    """Nobody could take it."""
    solo = syncer()
    one_round(solo, "p1", "p2")
    later = child(branch(0)[0].header, "p1", ("p1",), solo.fragment.office.term + 3)
    solo.fragment.chain.replace(later, table(later), yields=True)
    solo.fragment.chain.copied = 0  # as where it came as an update
    effects = solo.offer("p1", 30) + solo.offer("p2", 31) + solo.wait(1.0)
    assert not found(effects, ev.Merge) and not solo.fragment.office.holding
    assert "laid down: our chain has a version of a later term" in reasons(effects, "office")


def test_who_went_back_to_a_lighter_chain_lays_the_office_down_before_it_makes_the_version_again() -> None:
    solo = syncer()
    first = branch(0)[0]
    one_round(solo, "p1", "p2")
    made = solo.fragment.chain.header
    assert made.number == 1 and solo.fragment.office.holding
    solo.fragment.chain.replace(first, table(first), yields=True)  # as where more stand on another chain
    solo.offer("p1", 30)
    effects = solo.offer("p2", 31) + solo.wait(1.0)
    assert not found(effects, ev.Merge) and not solo.fragment.office.holding
    assert "laid down: this parent has a version of ours in this term" in reasons(effects, "office")
    solo.take_office()
    assert solo.fragment.office.term > made.term, "in another term it may"
    solo.offer("p1", 40)
    assert found(solo.offer("p2", 41) + solo.wait(1.0), ev.Merge)
