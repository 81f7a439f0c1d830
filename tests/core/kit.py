"""One core at a time with hand-made peers (`Solo`); the swarm of several is in `core_swarm`."""

from __future__ import annotations

import hashlib
import random
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from partials_kit import partials_of

from p2pdiloco.core import chain
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import CoreConfig, Restored, RestoredFragment, Timing
from p2pdiloco.core.api.papers import THE_OWNER, Admission, Grant, Word, paper_bytes
from p2pdiloco.core.api.types import (
    NEVER,
    WHOLE_RUN,
    Certificate,
    ContributionHeader,
    Contributor,
    Head,
    Reach,
    SignedContribution,
    Stamp,
    Vote,
    VoteBody,
    Watermark,
    Wire,
    signed_bytes,
)
from p2pdiloco.core.api.versions import (
    MemberList,
    SignedVersion,
    VersionHeader,
    group_name,
    in_a_version,
    level_sizes,
)
from p2pdiloco.core.chain import Chain, Marks, founding, marks_of
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.node import Core
from p2pdiloco_lab.simulation.lineage import HashCrypto

RUN = "run"
STEP_S = 0.1
FIRST = Stamp(1, 1)
TERM_VERSIONS = 4
Found = TypeVar("Found")
SEATS = ("me", *(f"p{n}" for n in range(1, 5)))
"""Founding seats of hand-made runs, in the order of places. Whoever is to have none has another name."""
OF_SWARM = tuple(f"m{index}" for index in range(40))
"""Members of swarms, who are given the founding seats."""


def restored_nothing(config: CoreConfig) -> Restored:
    """The state of a first start: version 0 everywhere, no vote given."""
    return Restored(fragments=tuple(RestoredFragment(log=(v,)) for v in config.genesis_versions))


def digest(*parts: object) -> bytes:
    """32 bytes that depend on everything given."""
    return hashlib.sha256(repr(parts).encode()).digest()


def signed_part(part: Contributor, fragment: int = 0, by: str = "") -> Contributor:
    """The same part of a merge, signed by its learner, or by another."""
    return replace(part, signature=sign(by or part.learner, "work", part.work(RUN, fragment)))


def sign(peer: str, domain: str, value: Wire) -> bytes:
    """That peer's signature."""
    return HashCrypto(peer).sign(signed_bytes(domain, value))


def genesis(fragment: int, groups: int = 1) -> SignedVersion:
    """Version 0."""
    state, parent = digest("genesis", fragment), hashlib.sha256(RUN.encode()).digest()
    header = VersionHeader(
        RUN, WHOLE_RUN, fragment, 0, parent, 0, RUN, 0, state, digest("none"), 0, "bf16", (), 0, groups
    )
    return SignedVersion(header, b"")


def config(fragments: int = 1, timing: dict[str, float] | None = None, **changes: Any) -> CoreConfig:
    """A run with K = 2, tau = 2, H = 4, four versions a term."""
    values: dict[str, Any] = {
        "run": RUN,
        "inner_steps": 4,
        "delay_steps": 2,
        "quorum": 2,
        "grace_fraction": 0.5,
        "grace_cap_s": 10.0,
        "group_size": 8,
        "term_versions": TERM_VERSIONS,
        "log_versions": 6,
        "max_base_age_versions": 3,
        "tokens_per_step": 10,
        "update_codec": "bf16",
        "contribution_codec": "int8",
        "genesis_versions": tuple(genesis(f) for f in range(fragments)),
        "max_payload_bytes": (1000,) * fragments,
        "timing": Timing(**(timing or {})),
        "seats": SEATS,
    }
    return CoreConfig(**(values | changes))


TABLES: dict[bytes, Marks] = {}
"""Watermarks of the versions that `child` made, by their headers' digests."""


def marks_at(parent: VersionHeader, seats: tuple[str, ...] = SEATS) -> Marks:
    """The table of this version; that of version 0 has these founding seats."""
    return TABLES.get(parent.digest()) or (marks_of(()) if parent.number else founding(seats))


def chain_to(parent: VersionHeader, seats: tuple[str, ...] = SEATS) -> Chain:
    """The chain that ends in this version."""
    return Chain((SignedVersion(parent, b""),), marks_at(parent, seats).table, 64)


def child(
    parent: VersionHeader,
    syncer: str = "p1",
    learners: tuple[str, ...] = ("p1",),
    term: int | None = None,
    by: str = "",
    group_size: int = 8,
    seats: tuple[str, ...] = SEATS,
    attest: tuple[str, ...] = (),
    **odd: Any,
) -> SignedVersion:
    """A rightly signed next version, into which each learner's next stamp of its first life went. `by`:
    somebody who signed for all learners. `attest`: those of them that attest the newest checkpoint.
    `seats`: the founding ones, if the parent is version 0. `term`: if none is named, the one in which it is
    where all are as long as they may be."""
    parts = tuple(Contributor(p, Stamp(1, parent.number + 1), 40, 4) for p in learners)
    before, parent_chain = marks_at(parent, seats), chain_to(parent, seats)
    given = [
        replace(
            p,
            votes=p.learner in before.seats,
            attestation=parent_chain.link if p.learner in attest else p.attestation,
        )
        for p in odd.pop("contributors", parts)
    ]
    unsigned = (
        replace(p, after=before.stamp(p.learner), trust=before.mean(p.learner).trust(p.score)) for p in given
    )
    merged = tuple(signed_part(part, parent.fragment, by) for part in unsigned)
    usual = chain.scale_after(parent_chain, merged, config(parent.fragment + 1))
    next_term = max(1 + parent.number // TERM_VERSIONS, parent.term + (syncer != parent.syncer))
    values: dict[str, Any] = {
        "run": RUN,
        "group": WHOLE_RUN,
        "fragment": parent.fragment,
        "number": parent.number + 1,
        "parent": parent.digest(),
        "term": next_term if term is None else term,
        "syncer": syncer,
        "tokens": usual.tokens,
        "state_digest": digest("state", parent.state_digest, learners),
        "update_digest": digest("update", parent.number + 1, learners),
        "update_bytes": 100,
        "codec": "bf16",
        "contributors": merged,
        "unit": usual.unit,
        "limits": chain.limits_after(parent_chain, config(parent.fragment + 1)),
    }
    marks = parent_chain.marks_with(parent.number + 1, merged, odd.get("papers", ()))
    plan = chain.plan_of(parent, config(parent.fragment + 1, group_size=group_size))
    values["partials"] = in_a_version(values["limits"], partials_of(plan, merged, values["limits"]))
    values["finality"] = parent_chain.finality_after(marks)
    made = values | {"table": marks.digest} | odd
    if (parent.term, parent.syncer) != (made["term"], made["syncer"]) and "elected" not in odd:
        top = len(level_sizes(parent.groups, group_size)) - 1
        made["elected"] = certificate(
            made["syncer"],
            tuple(before.seats),
            made["term"],
            parent.number,
            parent.fragment,
            parent.digest(),
            group_name(parent.epoch, parent.groups, top, 0),
        )
    header = VersionHeader(**made)
    TABLES[header.digest()] = marks
    return SignedVersion(header, sign(header.syncer, "version", header))


def table(version: SignedVersion) -> tuple[Watermark, ...]:
    """Watermarks of a version that `child` made, or of version 0."""
    return marks_at(version.header).table


def branch(length: int, fragment: int = 0, syncer: str = "p1", **odd: Any) -> list[SignedVersion]:
    """Version 0 and `length` versions on top of it."""
    chain = [genesis(fragment)]
    for _ in range(length):
        chain.append(child(chain[-1].header, syncer, **odd))
    return chain


def vote(
    voter: str,
    candidate: str,
    term: int,
    fragment: int = 0,
    base: bytes = b"",
    group: str = WHOLE_RUN,
    number: int = 0,
) -> Vote:
    """A signed vote. `base`: the head from which the candidate goes on, of that number; version 0, if none is
    named."""
    digest = base or genesis(fragment).header.digest()
    body = VoteBody(RUN, group, fragment, term, candidate, voter, number, digest)
    return Vote(body, sign(voter, "vote", body))


def certificate(
    syncer: str,
    voters: tuple[str, ...],
    term: int = 1,
    start: int = 0,
    fragment: int = 0,
    base: bytes = b"",
    group: str = WHOLE_RUN,
) -> Certificate:
    """The votes of these voters for this syncer."""
    votes = tuple(vote(v, syncer, term, fragment, base, group, start) for v in sorted(voters))
    return Certificate(group, fragment, term, syncer, votes)


def contribution(learner: str, base: Head, stamp: Stamp = FIRST, **odd: Any) -> SignedContribution:
    """A rightly signed offer: four inner steps of ten tokens, due."""
    values: dict[str, Any] = {
        "run": RUN,
        "group": WHOLE_RUN,
        "fragment": 0,
        "learner": learner,
        "stamp": stamp,
        "after": NEVER,
        "base_number": base.number,
        "base_digest": base.digest,
        "tokens": 40,
        "inner_steps": 4,
        "payload_digest": digest("payload", learner, stamp),
        "payload_bytes": 100,
        "codec": "int8",
        "due": True,
    }
    header = ContributionHeader(**(values | odd))
    unsigned = SignedContribution(header, b"")
    return SignedContribution(header, signed_part(unsigned.contributor(), header.fragment).signature)


OWNER = "owner"
"""Owner of runs that have one."""


def word(peer: str, number: int = 1, seated: bool = True, replaces: str = "", by: str = OWNER) -> Word:
    """A word of the owner, or of somebody else, on one seat."""
    unsigned = Word(RUN, peer, number, seated, replaces)
    return replace(unsigned, signatures=((THE_OWNER, HashCrypto(by).sign(paper_bytes(unsigned))),))


def said(
    peer: str, *authors: str, number: int = 0, seated: bool = True, replaces: str = "", turn: int = 1
) -> Word:
    """A word of these seats."""
    unsigned = Word(RUN, peer, number, seated, replaces, turn)
    signatures = ((author, HashCrypto(author).sign(paper_bytes(unsigned))) for author in authors)
    return replace(unsigned, signatures=tuple(signatures))


def admission(peer: str, key: str = "link", uses: int = 1, by: str = OWNER, signer: str = "") -> Admission:
    """An admission by an invite's key. `by`: who signed the grant; `signer`: who signed the admission, if it
    is not that key."""
    grant = Grant(RUN, key, 0, uses, b"")
    grant = replace(grant, signature=HashCrypto(by).sign(paper_bytes(grant)))
    unsigned = Admission(grant, peer, b"")
    return replace(unsigned, signature=HashCrypto(signer or key).sign(paper_bytes(unsigned)))


def progress(heads: tuple[Head, ...], **odd: Any) -> msg.Progress:
    """The heartbeat of a confirmed learner."""
    values: dict[str, Any] = {
        "incarnation": 1,
        "step_time_s": STEP_S,
        "inner_step": 7,
        "tokens_total": 70,
        "tokens_per_s": 100.0,
        "loss": 3.0,
        "learning": True,
        "confirmed": True,
        "stands": True,
        "heads": tuple(enumerate(heads)),
        "offices": (),
        "saved": False,
        "reach": Reach.DIRECT,
        "thin": False,
        "votes": True,
    }
    return msg.Progress(**(values | odd))


def announce(version: SignedVersion) -> msg.Announce:
    """What a version's syncer tells of it."""
    header = version.header
    return msg.Announce(header.fragment, header.head(), header.syncer)


def saved(log: list[SignedVersion], votes: tuple[ev.VoteRecord, ...] = ()) -> Restored:
    """What a node with this chain of its only fragment finds at start."""
    fragment = RestoredFragment(log=tuple(log), watermarks=table(log[-1]))
    return Restored(fragments=(fragment,), votes=votes, saved=True)


def found(effects: list[ev.Effect], kind: type[Found]) -> list[Found]:
    """The effects of one kind, in order."""
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: list[ev.Effect], kind: type[Found], to: str | None = None) -> list[Found]:
    """The messages of one kind, to one peer or to all."""
    sends = [e for e in found(effects, ev.Send) if to in (None, e.peer)]
    return [e.message for e in sends if isinstance(e.message, kind)]


def reasons(effects: list[ev.Effect], kind: str) -> list[str]:
    """What was recorded for people under this kind."""
    return [record.reason for record in found(effects, ev.Record) if record.kind == kind]


def offer_to(peer: str, stamp: Stamp = FIRST, fragment: int = 0) -> ev.Offer:
    """What we offered to that peer, as far as its answers go."""
    return ev.Offer(peer, contribution("me", genesis(fragment).header.head(), stamp, fragment=fragment), 0)


PULLS = ev.FetchUpdate, ev.FetchState


class Solo:
    """A core, its clock, and peers that say what the test makes them say. Disk writes succeed at once
    unless `slow_disk`; then they wait in `writing`."""

    def __init__(
        self,
        cfg: CoreConfig | None = None,
        peers: tuple[str, ...] = ("p1", "p2"),
        restored: Restored | None = None,
        genesis: bool = False,
        me: str = "me",
        incarnation: int = 1,
        **heard: Any,
    ) -> None:
        self.config = cfg or config()
        self.me, self.now, self.slow_disk = me, 1000.0, False
        self.writing: list[ev.Persist] = []
        self.unanswered: list[ev.Ask] = []
        """What is not answered yet."""
        self.peers = peers
        self.heard: dict[str, Any] = heard
        self.says: dict[str, dict[str, Any]] = {}
        """What single peers say of themselves."""
        found_on_disk = restored or restored_nothing(self.config)
        rng = random.Random(1)
        self.core = Core(self.config, me, incarnation, HashCrypto(me), rng, found_on_disk, genesis, self.now)
        self.greeting = self.feed(ev.PresenceSeen(MemberList(tuple((p, 1) for p in (*peers, me)))))
        for peer in peers:
            self.greeting += self.hear(peer)

    @property
    def fragment(self) -> Fragment:
        """The first fragment."""
        return self.core.fragments[0]

    @property
    def head(self) -> Head:
        """Its head."""
        return self.fragment.chain.head

    def heads(self) -> tuple[Head, ...]:
        """Of all fragments."""
        return tuple(f.chain.head for f in self.core.fragments)

    def feed(self, event: ev.Event) -> list[ev.Effect]:
        """One event; disk writes are answered and their continuations are among the effects."""
        effects = self._handled(event)
        return effects + ([] if self.slow_disk else self.write())

    def _handled(self, event: ev.Event) -> list[ev.Effect]:
        return self.taken(self.core.handle(event, self.now))

    def taken(self, effects: list[ev.Effect]) -> list[ev.Effect]:
        """Note what is to be answered; all effects, and those that were inside an `Ask`."""
        self.unanswered += found(effects, ev.Ask)
        effects = [effect.effect if isinstance(effect, ev.Ask) else effect for effect in effects]
        self.writing += found(effects, ev.Persist)
        return effects

    def token(self, asked: ev.Effect | type[ev.Effect] | tuple[type[ev.Effect], ...]) -> int:
        """Take out the token of an effect, or of the newest one of a kind, that is to be answered."""
        is_kind = isinstance(asked, type | tuple)
        for ask in reversed(self.unanswered):
            if isinstance(ask.effect, asked) if is_kind else ask.effect is asked:
                self.unanswered.remove(ask)
                return ask.token
        raise AssertionError(f"nobody asked for {asked}")

    def answer(
        self, asked: ev.Effect | type[ev.Effect] | tuple[type[ev.Effect], ...], answer: Struct | None
    ) -> list[ev.Effect]:
        """That is what came of an effect, or of the newest one of a kind."""
        return self.feed(ev.Answered(self.token(asked), answer))

    def write(self) -> list[ev.Effect]:
        """The disk is done with everything."""
        effects: list[ev.Effect] = []
        while self.writing:
            job = self.writing.pop(0)
            effects += [*job.then]
            effects += self._handled(ev.Answered(self.token(job), None))
        return effects

    def message(self, sender: str, message: msg.Message) -> list[ev.Effect]:
        """A control message arrives."""
        return self.feed(ev.MessageReceived(sender, message))

    def hear(self, peer: str, **odd: Any) -> list[ev.Effect]:
        """A heartbeat arrives, of a peer that holds the heads that we hold."""
        values = {"heads": self.heads()} | self.heard | self.says.get(peer, {}) | odd
        return self.message(peer, progress(**values))

    def wait(self, seconds: float, silent: tuple[str, ...] = ()) -> list[ev.Effect]:
        """Let time pass; every core deadline is met, and all peers but the silent go on to be heard."""
        effects: list[ev.Effect] = []
        end = self.now + seconds
        beat = self.now
        while self.now < end:
            beat = beat if beat > self.now else self.now + 0.5
            self.now = max(self.now, min(self.core.next_deadline(), beat, end))
            effects += self.feed(ev.Tick())
            if self.now >= beat:
                for peer in self.peers:
                    effects += [] if peer in silent else self.hear(peer)
        return effects

    def learn(self, step_s: float = STEP_S) -> None:
        """Our learner runs."""
        self.feed(ev.LearnerStatus(True, 5, 50, 100.0, step_s, 3.0))

    def ready(
        self, ticket: int = 1, due: bool = True, steps: int = 4, fragment: int = 0, length: float = 0.0
    ) -> list[ev.Effect]:
        """Our learner copied a fragment out."""
        payload = digest("payload", self.me, ticket)
        return self.feed(ev.ContributionReady(fragment, ticket, steps * 10, steps, payload, 100, due, length))

    def elect(self, syncer: str, term: int = 1, start: int = 0) -> list[ev.Effect]:
        """All peers voted for one of them."""
        proof = certificate(syncer, self.peers, term, start, base=self.fragment.chain.digest_of(start) or b"")
        return self.message(syncer, msg.Elected(proof))

    def take_office(self) -> list[ev.Effect]:
        """Wait for our turn to stand, and get every vote."""
        effects: list[ev.Effect] = []
        for _ in range(100):
            effects = self.wait(0.1)
            requests = sent(effects, msg.VoteRequest)
            if self.fragment.office.holding:
                break  # nobody else votes
            if requests:
                for peer in self.peers:
                    effects += self.message(peer, msg.VoteGranted(self.vote_of(peer, requests[0].term)))
                break
        assert self.fragment.office.holding, self.fragment.words(self.now)
        return effects

    def vote_of(self, peer: str, term: int, fragment: int = 0) -> Vote:
        """A peer's vote for us, to go on from our head."""
        head = self.core.fragments[fragment].chain.head
        return vote(peer, self.me, term, fragment, head.digest, number=head.number)

    def offer(self, learner: str, transfer: int, **odd: Any) -> list[ev.Effect]:
        """A peer offers a contribution to us, and if it is accepted its payload arrives."""
        signed = contribution(learner, self.head, **odd)
        effects = self.feed(ev.Offered(transfer, learner, signed))
        if found(effects, ev.AcceptTransfer):
            effects += self.feed(ev.PayloadReceived(transfer, 100 + transfer))
        return effects

    def merged(self, merge: ev.Merge, cut: tuple[str, ...] = ()) -> list[ev.Effect]:
        """The merge worker is done. `cut`: learners whose contributions were too long."""
        update, state = digest("update", merge.number), digest("state", merge.number)
        return self.answer(merge, ev.Merged(500 + merge.number, update, 100, state, 0.0, cut))

    def announce(self, version: SignedVersion, ticket: int = 900) -> list[ev.Effect]:
        """A peer's new version is announced, pulled and applied."""
        header = version.header
        effects = self.message(header.syncer, announce(version))
        for pull in found(effects, ev.FetchUpdate):
            effects += self.answer(pull, ev.UpdateFetched(version, ticket))
        for job in found(effects, ev.ApplyUpdate):
            effects += self.answer(job, ev.UpdateApplied(header.state_digest))
        return effects
