"""What is final: how a node attests milestones, and how it knows of two histories."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from kit import RUN, Solo, branch, child, config, found, saved, sign
from msgspec.structs import replace

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.events import MILESTONES
from p2pdiloco.core.api.types import Attestation, Contributor, Finality, Milestone, Stamp
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.finality import coherent

PEERS = ("p1", "p2", "p3", "p4")
NINE = branch(9, learners=PEERS)
EIGHTH = Milestone(8, NINE[8].header.digest())
FIRST = Attestation(Milestone(0, bytes(32)), EIGHTH)
SAID = ev.VoteRecord(0, 8, hashlib.sha256(FIRST.named()).hexdigest(), MILESTONES)


def works(chain: list[SignedVersion], *votes: ev.VoteRecord, **run: Any) -> Solo:
    """We come back with this chain, and our learner runs."""
    solo = Solo(config(**run), PEERS, saved(chain, votes))
    solo.wait(1.0)
    solo.learn()
    return solo


def attested(solo: Solo) -> Attestation | None:
    """What our next label says."""
    (offer,) = found(solo.elect("p1", term=9, start=solo.head.number) + solo.ready(), ev.Offer)
    return offer.signed.header.attestation


def kept(solo: Solo) -> list[ev.VoteRecord]:
    return [job.record for job in solo.writing if isinstance(job.record, ev.VoteRecord)]


def test_a_checkpoint_is_attested_once_a_version_more_is_built_on_it() -> None:
    assert attested(works(NINE[:9])) is None
    assert attested(works(NINE)) == FIRST


def test_it_is_on_the_disk_before_a_label_says_it() -> None:
    solo = works(NINE[:9])
    solo.slow_disk = True
    solo.announce(NINE[9])
    assert [record for record in kept(solo) if record.group == MILESTONES] == [SAID]
    assert attested(solo) is None
    solo.write()
    (offer,) = found(solo.answer(ev.Offer, ev.Undone("cut")) + solo.wait(1.0), ev.Offer)
    assert offer.signed.header.attestation == FIRST


def test_a_disk_that_does_not_take_it_is_asked_again_after_a_pause() -> None:
    solo = works(NINE[:9])
    solo.slow_disk = True
    solo.announce(NINE[9])
    job = next(job for job in solo.writing if job.record == SAID)
    solo.writing.remove(job)
    solo.answer(job, ev.Undone("full"))
    assert SAID not in kept(solo)
    solo.wait(Timing().suspect_s + 1.0)
    assert SAID in kept(solo)


def test_it_is_said_until_our_chain_has_it() -> None:
    part = Contributor("me", Stamp(1, 1), 40, 4, attestation=FIRST)
    chain = [*NINE, child(NINE[9].header, contributors=(part,))]
    assert chain[-1].header.finality.target == EIGHTH
    assert attested(works(chain)) is None
    assert attested(works(NINE, SAID)) == FIRST, "said before we stopped, and not merged"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(replace(SAID, candidate=bytes(32).hex()), id="another-of-its-height"),
        pytest.param(replace(SAID, term=16), id="a-later-one"),
    ],
)
def test_no_two_histories_are_attested(said: ev.VoteRecord) -> None:
    assert attested(works(NINE, said)) is None


def test_no_source_is_below_one_that_was_attested() -> None:
    """We attested 8 to 16 elsewhere. Here nobody has attested 8."""
    chain = branch(33, learners=PEERS)
    said = ev.VoteRecord(0, 16, bytes(32).hex(), MILESTONES, source=8)
    assert attested(works(chain)) == Attestation(FIRST.source, Milestone(32, chain[32].header.digest()))
    assert attested(works(chain, said)) is None


def test_nobody_without_a_seat_attests() -> None:
    solo = Solo(config(), PEERS, saved(NINE), me="s1")
    solo.wait(1.0)
    solo.learn()
    assert attested(solo) is None


def test_two_thirds_make_a_checkpoint_final_and_the_others_do_not_matter() -> None:
    """Of five seats four work."""
    most, some = (branch(17, learners=PEERS, attest=PEERS[:n])[-1].header.finality for n in (4, 3))
    assert (most.justified, most.source.number, most.final.number) == (True, 8, 8)
    assert (some.justified, some.source.number, some.final.number) == (False, 0, 0)


@pytest.mark.parametrize(
    ("versions", "of", "absent"),
    [
        pytest.param(40, 4, set(), id="all-but-one-work"),
        pytest.param(16, 2, set(), id="in-time"),
        pytest.param(17, 2, set(), id="not-yet-late"),
        pytest.param(33, 2, {"p3", "p4", "me"}, id="late"),
    ],
)
def test_seats_that_attest_nothing_are_counted_where_nothing_becomes_final(
    versions: int, of: int, absent: set[str]
) -> None:
    solo = works(branch(versions, learners=PEERS, attest=PEERS[:of]))
    assert {*solo.fragment.chain.absent} == absent


def label(target: int, source: int = 0, of: int = 1) -> Contributor:
    """Work of p1 that attests versions of those numbers."""
    link = Attestation(Milestone(source, bytes(32)), Milestone(target, bytes([of]) * 32))
    return Contributor("p1", Stamp(1, target + of), 40, 4, attestation=link)


def in_turn(solo: Solo, *parts: Contributor) -> list[ev.Effect]:
    """They come to us, in versions that do not become ours."""
    for part in parts:
        signed = replace(part, signature=sign("p1", "work", part.work(RUN, 0)))
        solo.fragment.context.attested.seen("p2", [signed])
    return solo.wait(0.1)


@pytest.mark.parametrize(
    ("first", "second", "lie"),
    [
        (label(8), label(8, of=2), True),
        (label(16, source=8), label(32), True),
        (label(8), label(16, of=2), False),
        (label(8), label(16, source=8), False),
    ],
    ids=["two-of-one-height", "one-around-the-other", "two-branches", "one-after-the-other"],
)
def test_which_attestations_are_a_lie(first: Contributor, second: Contributor, lie: bool) -> None:
    for parts in ((first, second), (second, first)):
        solo = works(NINE)
        in_turn(solo, *parts)
        assert ("p1" in solo.core.shared.excluded) == lie


def test_what_is_merged_is_let_go_of_by_what_became_final_while_we_followed() -> None:
    """The other seats are silent. Of a copied state it is its giver's word what is final in it."""
    chain = branch(18, learners=PEERS, attest=PEERS)
    followed = works(chain[:8])
    for version in chain[8:]:
        followed.announce(version)
    assert followed.head == chain[18].header.head() and followed.fragment.chain.final == 8
    copied = works(chain)
    assert (copied.fragment.chain.header.finality.final.number, copied.fragment.chain.final) == (8, 0)


def test_a_copy_that_says_another_source_of_the_same_target_is_not_attested() -> None:
    """Two attestations of one height exclude whoever signed them, whatever it was told."""
    lie = Finality(EIGHTH, Milestone(0, bytes([9]) * 32))
    chain = [*NINE, child(NINE[9].header, finality=lie)]
    assert attested(works(chain, SAID)) is None


@pytest.mark.parametrize(
    "stated",
    [
        Finality(Milestone(9, bytes(32))),
        Finality(Milestone(16, bytes(32)), Milestone(32, bytes(32))),
        Finality(Milestone(64, bytes(32))),
        Finality(Milestone(0, bytes([1]) * 32)),
    ],
    ids=["no-milestone", "source-above-target", "above-the-version", "another-version-0"],
)
def test_no_version_states_such_milestones(stated: Finality) -> None:
    assert coherent(NINE[9].header.finality, 9) and not coherent(stated, 40)
