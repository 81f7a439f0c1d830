"""Proofs by themselves: what holds, what does not, and how large they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from kit import RUN, child, genesis, sign, signed_part, vote
from msgspec.structs import replace
from wire_strategies import proofs

from p2pdiloco.core.api.evidence import (
    FalseLabel,
    Proof,
    SignedShort,
    TwoVersions,
    TwoVotes,
    false_label,
    fingerprint,
    short_of,
    two_versions,
)
from p2pdiloco.core.api.messages import Proven, decode, encode
from p2pdiloco.core.api.types import Contributor, Stamp
from p2pdiloco.core.api.versions import SignedVersion
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


GOOD: list[Callable[[], Proof]] = [
    two,
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
