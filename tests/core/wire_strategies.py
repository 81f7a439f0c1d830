"""Every message and value that crosses the wire, drawn at random (hypothesis)."""

from __future__ import annotations

from hypothesis import strategies as st

from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.evidence import (
    Accusation,
    FalsePartial,
    FalseState,
    FalseVersion,
    Refutation,
    Statement,
    short_of,
)
from p2pdiloco.core.api.papers import (
    FalseLabel,
    Proof,
    SignedShort,
    SignedWork,
    TwoAttestations,
    TwoVersions,
    TwoVotes,
    Word,
)
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.api.types import (
    NO_LIMITS,
    Attestation,
    Certificate,
    ContributionHeader,
    Contributor,
    Head,
    Milestone,
    Reach,
    SignedContribution,
    Stamp,
    Vote,
    VoteBody,
    WorkLabel,
)
from p2pdiloco.core.api.versions import PartialLabel, SignedVersion, VersionHeader

Draw = st.SearchStrategy
counts = st.one_of(st.integers(0, 6), st.integers(0, 1 << 62))
texts = st.text(min_size=1, max_size=12)
digests = st.binary(min_size=32, max_size=32)
signatures = st.binary(max_size=16)
words = st.text(max_size=20)
floats = st.floats(allow_nan=False)
losses = st.none() | floats


def tuples(of: Draw, most: int = 3) -> Draw:
    return st.lists(of, max_size=most).map(tuple)


def seat_words(peers: Draw[str] = texts) -> Draw[Word]:
    signed = tuples(st.tuples(peers, signatures), 2)
    numbers = st.integers(0, 1 << 53)
    return st.builds(Word, texts, peers, numbers, st.booleans(), peers, counts, signed)


def heads() -> Draw[Head]:
    return st.builds(Head, counts, digests, counts, counts)


def stamps() -> Draw[Stamp]:
    return st.builds(Stamp, counts, counts)


def votes(peers: Draw[str] = texts, fragments: Draw[int] = counts) -> Draw[Vote]:
    return st.builds(
        Vote, st.builds(VoteBody, texts, texts, fragments, counts, peers, peers, counts, digests), signatures
    )


def versions(fragments: Draw[int] = counts, groups: Draw[str] = texts) -> Draw[SignedVersion]:
    part = st.builds(Contributor, texts, stamps(), counts, counts)
    header = st.builds(
        VersionHeader,
        run=texts,
        group=groups,
        fragment=fragments,
        number=counts,
        parent=digests,
        term=counts,
        syncer=texts,
        tokens=counts,
        state_digest=digests,
        update_digest=digests,
        update_bytes=counts,
        codec=st.text(max_size=16),
        contributors=tuples(part),
    )
    return st.builds(SignedVersion, header, signatures)


def short_headers(fragments: Draw[int] = counts, groups: Draw[str] = texts) -> Draw[SignedShort]:
    return versions(fragments, groups).map(short_of)


def proofs(groups: Draw[str] = texts, fragments: Draw[int] = counts, peers: Draw[str] = texts) -> Draw[Proof]:
    shorts, two = short_headers(fragments, groups), votes(peers, fragments)
    part = st.builds(Contributor, texts, stamps(), counts, counts)
    way = tuples(st.tuples(st.booleans(), digests))
    milestones = st.builds(Milestone, counts, digests)
    works = st.builds(
        WorkLabel,
        texts,
        fragments,
        peers,
        stamps(),
        stamps(),
        counts,
        counts,
        digests,
        st.none() | st.builds(Attestation, milestones, milestones),
    )
    signed = st.builds(SignedWork, works, signatures)
    return st.one_of(
        st.builds(TwoAttestations, signed, signed),
        st.builds(TwoVersions, shorts, shorts),
        st.builds(TwoVotes, two, two),
        st.builds(FalseLabel, shorts, part, way),
    )


def statements(
    groups: Draw[str] = texts, fragments: Draw[int] = counts, peers: Draw[str] = texts
) -> Draw[Statement]:
    label = st.builds(
        PartialLabel, texts, fragments, groups, peers, digests, st.just(NO_LIMITS), digests, digests
    )
    subject = st.one_of(
        st.builds(FalseVersion, short_headers(fragments, groups)),
        st.builds(FalseState, short_headers(fragments, groups)),
        st.builds(FalsePartial, counts, digests, label, signatures),
    )
    accusation = st.builds(Accusation, subject, peers, signatures)
    return st.one_of(accusation, st.builds(Refutation, accusation, peers, signatures))


def contributions(
    runs: Draw[str] = texts, fragments: Draw[int] = counts, groups: Draw[str] = texts
) -> Draw[SignedContribution]:
    header = st.builds(
        ContributionHeader,
        run=runs,
        group=groups,
        fragment=fragments,
        learner=texts,
        stamp=stamps(),
        after=stamps(),
        base_number=counts,
        base_digest=digests,
        tokens=counts,
        inner_steps=counts,
        payload_digest=digests,
        payload_bytes=counts,
        codec=st.text(max_size=16),
        due=st.booleans(),
    )
    return st.builds(SignedContribution, header, signatures)


def message_strategies(
    groups: Draw[str] = texts, fragments: Draw[int] = counts, peers: Draw[str] = texts
) -> dict[type[msg.Message], Draw[msg.Message]]:
    """By class. The arguments narrow what would else almost never name anything that exists."""
    certificates = st.builds(Certificate, groups, fragments, counts, peers, tuples(votes(peers, fragments)))
    progress = st.builds(
        msg.Progress,
        incarnation=counts,
        step_time_s=floats,
        inner_step=counts,
        tokens_total=counts,
        tokens_per_s=floats,
        loss=losses,
        learning=st.booleans(),
        confirmed=st.booleans(),
        stands=st.booleans(),
        heads=tuples(st.tuples(counts, heads())),
        offices=tuples(st.tuples(texts, counts, counts)),
        saved=st.booleans(),
        reach=st.sampled_from(Reach),
        thin=st.booleans(),
        votes=st.booleans(),
        proofs=counts,
    )
    refusals = st.sampled_from(VoteRefusal)
    return {
        msg.Progress: progress,
        msg.Leaving: st.builds(msg.Leaving, counts),
        msg.Closing: st.builds(msg.Closing, groups, fragments, counts, counts, floats),
        msg.Pass: st.builds(msg.Pass, groups, fragments, counts, counts),
        msg.Announce: st.builds(msg.Announce, fragments, heads(), peers),
        msg.VoteRequest: st.builds(msg.VoteRequest, groups, fragments, counts, heads(), words),
        msg.VoteGranted: st.builds(msg.VoteGranted, votes(peers, fragments)),
        msg.VoteRefused: st.builds(
            msg.VoteRefused,
            groups,
            fragments,
            counts,
            counts,
            st.none() | heads(),
            refusals,
        ),
        msg.Elected: st.builds(msg.Elected, certificates),
        msg.OfficeQuery: st.builds(msg.OfficeQuery, groups, fragments, counts),
        msg.Proven: st.builds(msg.Proven, proofs(groups, fragments, peers)),
        msg.Stated: st.builds(msg.Stated, statements(groups, fragments, peers)),
        msg.Said: st.builds(msg.Said, seat_words(peers)),
    }


MESSAGES = message_strategies()


def messages() -> Draw[msg.Message]:
    """Any message."""
    return st.one_of(*MESSAGES.values())
