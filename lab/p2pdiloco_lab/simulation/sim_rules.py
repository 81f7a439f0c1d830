"""Rules that must hold at every instant, whatever the weather. A broken one ends the seed.

`InvariantWatch` sees everything that nodes do. `too_large` searches a core: every table and queue inside
stays below a bound, whatever it is called. `Exclusion` watches that liars whose lies can be proved are
excluded, by everybody, in time, and nobody else. Rules: docs/protocol/simulator.md, section 3.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.events import MILESTONES, VoteRecord
from p2pdiloco.core.api.evidence import Statement
from p2pdiloco.core.api.messages import Announce, Elected, Message, Progress, VoteGranted, VoteRequest
from p2pdiloco.core.api.papers import Admission
from p2pdiloco.core.api.types import (
    LEAST_TRUST,
    WHOLE_RUN,
    Certificate,
    ContributionHeader,
    Head,
    Vote,
    Watermark,
    signed_bytes,
)
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import (
    COUNTED_UNITS,
    COUNTED_WEIGHTS,
    LATELY_VERSIONS,
    MOST_GAP,
    MOST_INCARNATION,
    Chain,
)
from p2pdiloco.core.pending import KEPT_MOST
from p2pdiloco.core.proofs import FEWEST
from p2pdiloco.core.seating import LINK_PLACES
from p2pdiloco_lab.simulation.lineage import Displacement, FragmentLineage, MergedPart
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_liars import PROVABLE

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.sim_host import Host
    from p2pdiloco_lab.simulation.sim_world import World


class InvariantWatch:
    """Sees everything that nodes do, and raises `Violation`. Knows what no node can know: the whole world."""

    def __init__(
        self, config: CoreConfig, calm_from_s: float = math.inf, liars: frozenset[str] = frozenset()
    ) -> None:
        self._liars = liars
        self._calm_from_s = calm_from_s
        """Time from which nothing splits the swarm: no two sides can each have a syncer of their own."""
        self._first_unit = config.usual_tokens
        self.headers = {v.header.digest(): v for v in config.genesis_versions}
        """Every version that was ever committed by anybody, by header digest."""
        self._tables: dict[bytes, tuple[Watermark, ...]] = {}
        """Tables of those that were made before the world began, by the same."""
        self.states: dict[bytes, FragmentLineage] = {}
        self._seats: dict[bytes, frozenset[str]] = {}
        """Seats of every version, by the same."""
        self._payloads: set[bytes] = set()
        """Digests of all payloads that were merged."""
        self.versions = 0
        self.forks = 0
        self.elections = 0
        self.switches = 0
        self._yielded: dict[tuple[str, int], tuple[Chain, int]] = {}
        """Chain of this life, and times that a node took a lighter one: older or more members are on it."""
        self._last: Message | None = None
        self._begins: dict[tuple[str, int], list[int]] = {}
        self._reports: dict[str, tuple[float, int, tuple[float, ...]]] = {}
        self._candidates: dict[tuple[str, str, int, int], Head] = {}
        self._votes: dict[tuple[str, str, int, int], str] = {}
        self._finals: dict[int, dict[int, bytes]] = {}
        """Final versions of each fragment, number -> digest."""
        self._first_s: dict[Any, float] = {}
        """Time at which somebody was first elected into an office."""
        self._offices: dict[tuple[int, int, str], list[Certificate]] = {}
        self._in_office: set[tuple[int, int, str]] = set()
        """Fragment, term and syncer of all versions that an honest core has made, which it does in office,
        and of all elections."""

    def makes(self, header: VersionHeader) -> None:
        """A node's core makes a version of its own durable, also one whose node lies beside it."""
        self._in_office.add((header.fragment, header.term, header.syncer))

    def known(self, version: SignedVersion, table: tuple[Watermark, ...]) -> None:
        """Take in a version that was made before the world began, with its table."""
        self.headers[version.header.digest()] = version
        self._tables[version.header.digest()] = table

    # --- versions ------------------------------------------------------------------------------------

    def committed(
        self, host: Host, version: SignedVersion, old: SignedVersion, state: FragmentLineage
    ) -> None:
        """A node makes `version` its own, with this state."""
        header, parent = version.header, old.header
        digest, where = header.digest(), f"{host.peer} fragment {header.fragment} version {header.number}"
        self._seated(host, header.fragment)
        chain = host.core.fragments[header.fragment].chain
        before, count = self._yielded.get((host.peer, header.fragment), (chain, 0))
        yielded, seen = chain.yielded, count if before is chain else 0  # a new life counts anew
        self._yielded[host.peer, header.fragment] = chain, yielded
        if header.head().weight <= parent.head().weight and yielded <= seen:
            raise Violation("only-forward", f"{where} is lighter than {parent.number}")
        if header.parent == old.header.digest():
            if header.state_digest in host.world.states_told and host.peer not in host.world.perjurers:
                raise Violation("true-state", f"{where}: its update makes another state of the parent")
            if header.number != parent.number + 1:
                raise Violation("only-forward", f"{where} follows {parent.number}")
        elif header.number <= parent.number or not self._descends(digest, old):
            self.switches += 1
        if state.digest != header.state_digest:
            raise Violation("equal-state", f"{where}: the state is not the one that the header names")
        known = self.states.setdefault(digest, state)
        if known.digest != state.digest or known.matter != state.matter:
            raise Violation("equal-state", f"{where}: two states under one header")
        if digest not in self.headers:
            lies = header.syncer in self._liars
            if header.syncer != host.peer and not lies:
                raise Violation("durable-first", f"{where}: its syncer {header.syncer} never had it")
            if not lies:
                self._durable(host, version)
            earned = (header.fragment, header.term, header.syncer) in self._in_office
            if host.peer in self._liars and not (earned and header.parent in self.headers):
                return  # excluded, it may be alone with another
            if lies and not earned:
                raise Violation(
                    "authority", f"{where}: {header.syncer} holds no office in term {header.term}"
                )
            self._new_version(version, where)
        self._final(header, where)

    def _final(self, header: VersionHeader, where: str) -> None:
        """Of any two versions that are final one is an ancestor of the other."""
        final, line = header.finality.final, self._finals.setdefault(header.fragment, {0: bytes(32)})
        if line.get(final.number) == final.digest:
            return
        older = {digest for number, digest in line.items() if 0 < number < final.number}
        newer = [self.headers[digest] for number, digest in line.items() if number >= final.number]
        version = self.headers.get(final.digest)
        ours = self.ancestors(version) if version else set()
        if not older <= ours or any(final.digest not in self.ancestors(each) for each in newer):
            raise Violation("final", f"{where}: {final.number} is final beside {sorted(line)}")
        line[final.number] = final.digest

    def _seated(self, host: Host, fragment: int) -> None:
        """Check who has a seat where a node is: the same as everybody there, each by the run file or a paper,
        and by an invite so many at most."""
        chain, owner = host.core.fragments[fragment].chain, host.world.owner
        seats, where = chain.marks.seats, f"{host.peer} fragment {fragment} version {chain.head.number}"
        known = self._seats.setdefault(chain.head.digest, seats)
        if known != seats:
            raise Violation("seats", f"{where}: {sorted(seats)} have seats there, elsewhere {sorted(known)}")
        unfounded = seats - {*host.config.seats} - owner.papers.keys()
        if unfounded:
            raise Violation("seats", f"{where}: {sorted(unfounded)} have seats, and no paper says so")
        invited = [peer for peer in seats - {*host.config.seats} if isinstance(owner.papers[peer], Admission)]
        if invited and len(seats) > LINK_PLACES:
            raise Violation("seats", f"{where}: {sorted(invited)} have seats by an invite, beyond its places")

    def _durable(self, host: Host, version: SignedVersion) -> None:
        """A version that `host` made must be on its disk before anybody, itself included, goes by it."""
        header = version.header
        saved = host.disk.checkpoints.get(header.fragment)
        covered = saved is not None and saved.version.header.number >= header.number
        if header.digest() not in host.disk.updates.get(header.fragment, {}) and not covered:
            where = f"{host.peer} fragment {header.fragment} version {header.number}"
            raise Violation("durable-first", f"{where}: let out before it is saved")

    def restored(self, version: SignedVersion, state: FragmentLineage) -> None:
        """A node starts from this: durable, though perhaps nobody lived to see it committed."""
        digest = version.header.digest()
        if digest not in self.headers:
            self._new_version(version, f"restored fragment {version.header.fragment}")
        if self.states.setdefault(digest, state).matter != state.matter:
            where = f"fragment {version.header.fragment} version {version.header.number}"
            raise Violation("equal-state", f"{where}: other bytes come back from the disk")

    def _new_version(self, version: SignedVersion, where: str) -> None:
        header = version.header
        parent = self.headers.get(header.parent)
        if parent is None:
            raise Violation("known-parent", f"{where}: nobody ever had its parent")
        self._in_scale(header, parent.header, where)
        self.headers[header.digest()] = version
        self.versions += 1

    def _in_scale(self, header: VersionHeader, parent: VersionHeader, where: str) -> None:
        """Check that nobody's numbers move the chain's: neither its tokens, nor what it takes for usual."""
        unit, gain = parent.unit or self._first_unit, header.tokens - parent.tokens
        # Untrusted work counts nothing, nor do copies, and what has no seat perhaps little; where nothing
        # counts, the version counts one token.
        payloads = [part.payload_digest for part in header.contributors]
        counts = [
            part.votes
            and part.trust > LEAST_TRUST
            and payloads.count(payload) == 1
            and payload not in self._payloads
            for part, payload in zip(header.contributors, payloads, strict=True)
        ]
        self._payloads.update(payloads)
        tokens = [part.tokens for part, each in zip(header.contributors, counts, strict=True) if each] or [1]
        least, most = COUNTED_WEIGHTS * unit, self._most_counted(header, parent, unit)
        if not sum(min(each, least) for each in tokens) <= gain <= most:
            raise Violation("in-scale", f"{where}: {gain} tokens more, of {tokens} where {unit} are usual")
        ends = max((max(p.stamp.sequence, p.stamp.incarnation) for p in header.contributors), default=0)
        if ends > MOST_INCARNATION:
            raise Violation("in-scale", f"{where}: a stamp near its end, {ends}")
        if abs(header.unit - unit) * 8 > unit or not header.contributors:
            raise Violation("in-scale", f"{where}: {header.unit} tokens are usual after {unit}")

    def _most_counted(self, header: VersionHeader, parent: VersionHeader, unit: int) -> int:
        """Work out the most that a version may add to a chain's tokens: of nobody more than usual work of all
        others that were merged lately, for every version since its last."""
        last: dict[str, int] = {}
        at: VersionHeader | None = parent
        digest = header.parent
        while at is not None and at.number > max(0, parent.number - MOST_GAP - 1):
            for part in at.contributors:
                last.setdefault(part.learner, at.number)
            for mark in self._tables.get(digest, ()):
                last.setdefault(mark.learner, mark.number)
            digest = at.parent
            known = self.headers.get(digest)
            at = known.header if known else None
        others = sum(number >= parent.number - LATELY_VERSIONS for number in last.values()) - 1
        units = min(others, COUNTED_UNITS) if others > 1 else COUNTED_UNITS
        each = max(units * unit, COUNTED_WEIGHTS * max(unit, self._first_unit))
        gaps = (header.number - last.get(part.learner, 0) for part in header.contributors)
        most = (each * min(gap, 1 + MOST_GAP) for gap in gaps)
        return sum(min(part.tokens, each) for part, each in zip(header.contributors, most, strict=True))

    def _descends(self, digest: bytes, ancestor: SignedVersion) -> bool:
        sought, floor = ancestor.header.digest(), ancestor.header.number
        version = self.headers.get(digest)
        while version is not None and version.header.number > floor:
            if version.header.parent == sought:
                return True
            version = self.headers.get(version.header.parent)
        return False

    def ancestors(self, version: SignedVersion) -> set[bytes]:
        """Header digests of a version and everything before it."""
        found = set()
        at: SignedVersion | None = version
        while at is not None and at.header.number > 0:
            found.add(at.header.digest())
            at = self.headers.get(at.header.parent)
        return found

    def merged(
        self, host: Host, before: FragmentLineage, state: FragmentLineage, parts: tuple[MergedPart, ...]
    ) -> None:
        """A merge worker made a new state of the one before."""
        where = f"fragment {state.fragment} version {state.number} at {host.peer}"
        if state.repeated:
            part = state.repeated[0]
            raise Violation("nothing-twice", f"{where}: steps {part.first}..{part.end} of {part.learner}")
        for part in parts:
            spans = before.covered.get(part.learner, ())
            end = spans[-1][1] if spans else 0
            begins = self._begins.get((part.learner, state.fragment), [])
            # Work of an earlier life, never copied out, may be missing; of this life nothing, except after
            # a fork: what only the other branch had is sent again, but not always first.
            if end < part.first and not self.switches and not any(end < b <= part.first for b in begins):
                text = f"{where}: {part.learner} goes on at step {part.first}, the base contains {end}"
                raise Violation("right-base", text)

    def begins(self, peer: str, fragment: int, step: int) -> None:
        """Note the step from which a learner's displacement is made: a new life, or an overwrite."""
        self._begins.setdefault((peer, fragment), []).append(step)

    def reports(self, host: Host, steps: int, life: tuple[float, ...]) -> None:
        """A learner says how far it is. While `life` is the same, nothing has slowed it down."""
        known = self._reports.get(host.peer)
        self._reports[host.peer] = (host.now, steps, life)
        if known is not None and known[2] == life and host.learner.model.running:
            expected = (host.now - known[0]) / host.learner.model.step_time_s
            if abs(steps - known[1] - expected) > 1.0 + 1e-3:
                where = f"{host.peer} made {steps - known[1]} inner steps, not {expected:.1f}"
                raise Violation("steady-pace", f"{where}, in {host.now - known[0]:.2f} s")

    def offered(
        self, host: Host, header: ContributionHeader, held: Displacement, tokens_per_step: int
    ) -> None:
        """A node labels a contribution."""
        steps = held.steps
        honest = header.learner == host.peer == held.learner and header.inner_steps == steps
        if host.peer in host.world.substance.liars:
            return
        if not honest or header.tokens != steps * tokens_per_step or header.fragment != held.fragment:
            raise Violation("true-label", f"{host.peer} offers {held} as {header}")
        said = header.attestation
        if said and (MILESTONES, header.fragment, said.target.number) not in host.disk.votes:
            raise Violation("durable-first", f"{host.peer} attests {said.target.number}, not on its disk")
        base = self.headers.get(header.base_digest)
        if base is None or base.header.number != header.base_number:
            raise Violation("right-base", f"{host.peer} names base {header.base_number}, which nobody has")
        state = self.states.get(header.base_digest)
        spans = state.covered.get(held.learner, ()) if state is not None else ()
        if any(first < held.end and held.first < end for first, end in spans):
            text = f"{host.peer} offers {held.first}..{held.end} over a base that contains {spans[-1]}"
            raise Violation("right-base", text)

    # --- votes and offices ---------------------------------------------------------------------------

    def sent(self, host: Host, message: Message) -> None:
        """A node lets a control message out (the same object for every receiver of a broadcast)."""
        if message is self._last:
            return
        self._last = message
        if isinstance(message, Elected) and message.certificate.group == WHOLE_RUN:
            held = message.certificate
            self._in_office.add((held.fragment, held.term, held.syncer))
        if host.peer in self._liars and not isinstance(message, VoteRequest):
            return
        if isinstance(message, Announce):
            self._announced(host, message)
        elif isinstance(message, VoteGranted):
            self._voted(message.vote)
            body = message.vote.body
            kept = host.disk.votes.get((body.group, body.fragment, body.term))
            if kept is None or kept.candidate != body.candidate:
                raise Violation("durable-first", f"{host.peer} sends a vote that is not on its disk")
        elif isinstance(message, VoteRequest):
            self._candidates[(host.peer, message.group, message.fragment, message.term)] = message.head
        elif isinstance(message, Elected):
            self._elected(host, message.certificate)
            if message.certificate.syncer == host.peer:
                host.world.exclusion.certified(message.certificate)
            self._in_reach(host, message.certificate)
        elif isinstance(message, Progress):
            for fragment, head in message.heads:
                if head.digest not in self.headers:
                    raise Violation("durable-first", f"{host.peer} fragment {fragment} shows an unknown head")

    def _announced(self, host: Host, message: Announce) -> None:
        number, held = message.head.number, host.stores[message.fragment].version
        if held.header.number < number:
            raise Violation(
                "durable-first", f"{host.peer} announces version {number}, holds {held.header.number}"
            )
        if message.syncer == host.peer and held.header.digest() == message.head.digest:
            self._durable(host, held)

    def votes_for(self, host: Host, record: VoteRecord) -> None:
        """A node makes up its mind to vote."""
        head = self._candidates.get((record.candidate, record.group, record.fragment, record.term))
        own = host.stores[record.fragment].version.header.head()
        if record.candidate != host.peer and head is not None and head.weight < own.weight:
            where = f"{host.peer} at version {own.number}, fragment {record.fragment}"
            raise Violation("no-lighter-syncer", f"{where}: votes for {record.candidate} at {head.number}")

    def _voted(self, vote: Vote) -> None:
        body = vote.body
        if body.voter in self._liars:
            return
        first = self._votes.setdefault((body.voter, body.group, body.fragment, body.term), body.candidate)
        if first != body.candidate:
            where = f"{body.voter} fragment {body.fragment} group {body.group} term {body.term}"
            raise Violation("one-vote", f"{where}: for {first} and for {body.candidate}")

    def _by_roster(self, host: Host, certificate: Certificate) -> None:
        """Check that a new office of the whole run is by votes of seats of its holder's chain, or, where none
        of these is here, of those whom papers give one. In runs of several groups who holds a group's office
        votes."""
        fragment = host.core.fragments[certificate.fragment]
        if certificate.syncer != host.peer or fragment.context.grouped:
            return
        seats = fragment.chain.marks.seats | fragment.context.roster.entering
        others = {vote.body.voter for vote in certificate.votes} - seats
        if others:
            where = f"{host.peer} fragment {fragment.index} term {certificate.term}"
            raise Violation("roster", f"{where}: elected by {sorted(others)}, which have no seat")

    def _in_reach(self, host: Host, certificate: Certificate) -> None:
        """Check who takes an office of the whole run in calm weather.

        Nobody takes it whom others cannot dial, while there is a member whom they can. But the only voter of
        a chain decides by itself.
        """
        world, hidden = host.world, host.world.network.hidden
        own = certificate.syncer == host.peer and certificate.group == WHOLE_RUN
        if not own or host.peer not in hidden or host.now <= self._calm_from_s or world.network.was_cut:
            return
        voters = host.core.fragments[certificate.fragment].chain.marks.seats
        dialable = any(other.may_serve and other.peer not in hidden for other in world.up_hosts())
        if dialable and voters != {host.peer}:
            raise Violation("hidden-syncer", f"{host.peer} fragment {certificate.fragment}")

    def _elected(self, host: Host, certificate: Certificate) -> None:
        key = (certificate.fragment, certificate.term, certificate.group)
        known = self._offices.setdefault(key, [])
        if any(other.syncer == certificate.syncer for other in known):
            return
        self._by_roster(host, certificate)
        voters = {vote.body.voter for vote in certificate.votes}
        for vote in certificate.votes:
            self._voted(vote)
            signed = signed_bytes("vote", vote.body)
            if not vote.signature or vote.body.candidate != certificate.syncer or not signed:
                raise Violation("certificate", f"{certificate.syncer} fragment {key[0]} term {key[1]}")
        for other in known:
            shared = voters & {vote.body.voter for vote in other.votes} - self._liars
            # Two that nobody can dial have no link: as if it were cut.
            whole = not host.world.network.was_cut and not host.world.plan.hidden
            calm = self._first_s[key] > self._calm_from_s and whole
            if shared or calm:
                names = f"{other.syncer} and {certificate.syncer}"
                raise Violation(
                    "one-syncer",
                    f"fragment {key[0]} group {key[2]} term {key[1]}: {names} share {sorted(shared)}",
                )
        self._first_s.setdefault(key, host.now)
        if known:
            self.forks += 1
        known.append(certificate)
        self.elections += 1


# Bounds of tables and queues.

BASE = 32
PER_NODE = 2
LARGER = {
    **dict.fromkeys(("_parts", "parts", "_combining"), KEPT_MOST),
    "_of": 256,
    "_on": 256,
    "_handlers": 64,
}
"""Tables that may hold more, by name: contributions that are kept until they are beyond doubt, and heads on
which members stand, each on eight."""
CONTAINERS = (list, dict, set, frozenset, deque, tuple)
PLAIN = frozenset((bool, bytes, float, int, str, type(None)))
"""Types with nothing inside. Most values are of these, so they are told first."""


def too_large(core: object, nodes: int) -> str:
    """Find a container inside `core` that has outgrown its bound in a world of so many nodes; mostly none."""
    limit = BASE + PER_NODE * nodes
    for path, container in _containers(core, "core", set()):
        if len(container) > LARGER.get(path.rpartition(".")[2], limit):
            return f"{path} holds {len(container)}"
    return ""


def _containers(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Depth first through the core's own objects; values that travel (structs) are bounded by the wire."""
    if type(value) in PLAIN or id(value) in seen or isinstance(value, Struct):
        return
    if isinstance(value, CONTAINERS):
        seen.add(id(value))
        yield path, value
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            yield from _containers(item, path, seen)
    elif type(value).__module__.startswith("p2pdiloco.core"):
        seen.add(id(value))
        for name in _attributes(value):
            yield from _containers(getattr(value, name, None), f"{path}.{name}", seen)


def _attributes(value: object) -> list[str]:
    names = list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        names += cls.__dict__.get("__slots__", ())
    return names


# Exclusion of liars.

WITHIN_S = 20.0
"""Virtual time after which everybody excludes who has lied in a way that others must have seen. A member that
was confirmed since has so long from then on: before, it believed nobody. Of a false merge or accusation that
is so if most voters state it: who cannot make the merge again believes only these."""


class Exclusion:
    """Watch on who lies, and who excludes whom."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: dict[tuple[str, int, bytes, int], bytes] = {}
        self._taken: dict[tuple[str, int, bytes, int], set[bytes]] = {}
        self._certified: dict[tuple[str, str, int, int], set[str]] = {}
        self.seen: dict[str, float] = {}
        """Liars that others must have seen through, or did, and since when."""

    def makes(self, host: Host, version: SignedVersion) -> None:
        """A node makes a version of its own durable, or lets it out."""
        header = version.header
        if host.peer in self._world.perjurers or header.syncer != host.peer:
            return
        digest = header.digest()
        if self._kept.setdefault(_origin_of(header), digest) != digest:
            where = f"{host.peer} fragment {header.fragment} version {header.number} term {header.term}"
            raise Violation("one-version", f"{where}: two of one parent")

    def takes(self, host: Host, header: VersionHeader) -> None:
        """A node makes a version its own: of two by one liar, two honest nodes have one each."""
        if header.syncer in self._world.perjurers and host.peer not in self._world.perjurers:
            taken = self._taken.setdefault(_origin_of(header), set())
            taken.add(header.digest())
            if len(taken) > 1:
                self._must_be_seen(header.syncer)

    def certified(self, certificate: Certificate) -> None:
        """An honest node is elected, and tells all: two of one term know the liars that voted for both."""
        for body in (vote.body for vote in certificate.votes):
            if body.voter in self._world.perjurers:
                key = body.voter, body.group, body.fragment, body.term
                won = self._certified.setdefault(key, set())
                won.add(body.candidate)
                if len(won) > 1:
                    self._must_be_seen(body.voter)

    def excluded(self, host: Host, peer: str) -> None:
        """A node excludes a peer."""
        if peer not in self._world.perjurers:
            raise Violation("only-liars", f"{host.peer} excludes {peer}, which never lied")
        self._must_be_seen(peer)

    def said_to_leave_out(self, host: Host, peer: str) -> None:
        """A node finds that a syncer leaves its work out: an honest one never does."""
        if host.peer not in self._world.perjurers and peer not in self._world.perjurers:
            raise Violation("only-liars", f"{host.peer} finds that {peer} leaves its work out")

    def _must_be_seen(self, liar: str) -> None:
        if liar not in self.seen:
            clock = self._world.clock
            self.seen[liar] = clock.now
            clock.after(WITHIN_S, self._look, liar)

    def _look(self, liar: str) -> None:
        clock = self._world.clock
        trusting = self._trusting(liar)
        overdue = [host for host in trusting if host.confirmed_at_s + WITHIN_S <= clock.now]
        if overdue:
            raise Violation(
                "only-liars", f"{_still_count(liar, overdue)}, {WITHIN_S:g} s after it was seen through"
            )
        if trusting:
            clock.at(min(host.confirmed_at_s for host in trusting) + WITHIN_S, self._look, liar)

    def missing(self, liar: str) -> str:
        """Say who does not exclude that liar, of the honest members that are here; mostly empty."""
        trusting = self._trusting(liar)
        return _still_count(liar, trusting) if trusting else ""

    def _trusting(self, liar: str) -> list[Host]:
        here = [host for host in self._world.core_hosts() if host.core.confirmed and not host.frozen]
        trusting = [host for host in here if liar not in host.core.shared.excluded]
        if self._world.perjurers[liar].kind in PROVABLE:
            return trusting  # a proof holds for everybody
        known = [host.core.shared.excluded.proof_of(liar) for host in self._world.up_hosts()]
        authors = {statement.author() for statement in known if isinstance(statement, Statement)}
        return [host for host in trusting if _must_believe(host, liar, authors)]


def _must_believe(host: Host, liar: str, authors: set[str]) -> bool:
    """Tell whether so many state it that who cannot find out any more is to believe them, whatever the
    fragment: the contributions are gone where a syncer dies while others make its merge again."""
    shared = host.core.shared
    here = [peer for peer in shared.view.confirmed(host.local_now) if shared.has_seat(peer) and peer != liar]
    for fragment in host.core.fragments:
        voters = fragment.chain.marks.seats.difference(shared.excluded.peers, (liar,))
        if len(authors & voters) < max(FEWEST, len(voters) // 2 + 1, len(here) // 2 + 1):
            return False
    return True


def _still_count(liar: str, trusting: list[Host]) -> str:
    return f"{','.join(host.peer for host in trusting)} still count {liar}"


def _origin_of(header: VersionHeader) -> tuple[str, int, bytes, int]:
    return header.syncer, header.fragment, header.parent, header.term
