"""What must hold at every instant, whatever the weather. A broken one ends the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.core.effects import VoteRecord
from p2pdiloco.core.messages import Announce, Elected, Message, Progress, VoteGranted, VoteRequest
from p2pdiloco.core.types import Certificate, ContributionHeader, Head, SignedVersion, Vote, signed_bytes
from p2pdiloco.simulation.lineage import Displacement, FragmentState

if TYPE_CHECKING:
    from p2pdiloco.simulation.host import Host


class Violation(Exception):
    """An invariant of the protocol does not hold. `rule` names it; one bug has one rule."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class Watch:
    """Sees everything that nodes do, and raises `Violation`. Knows what no node can know: the whole world."""

    def __init__(self, versions: tuple[SignedVersion, ...]) -> None:
        self.headers = {v.header.digest(): v for v in versions}
        """Every version that was ever committed by anybody, by header digest."""
        self.states: dict[bytes, FragmentState] = {}
        self.versions = 0
        self.forks = 0
        self.elections = 0
        self.switches = 0
        self._last: Message | None = None
        self._candidates: dict[tuple[str, int, int], Head] = {}
        self._votes: dict[tuple[str, int, int], str] = {}
        self._offices: dict[tuple[int, int], list[Certificate]] = {}

    # --- versions ------------------------------------------------------------------------------------

    def committed(self, host: Host, version: SignedVersion, old: SignedVersion, state: FragmentState) -> None:
        """A node makes `version` its own, with this state."""
        header, parent = version.header, old.header
        digest, where = header.digest(), f"{host.peer} fragment {header.fragment} version {header.number}"
        if header.head().weight <= parent.head().weight:
            raise Violation("only-forward", f"{where} is lighter than {parent.number}")
        if header.parent == old.header.digest():
            if header.number != parent.number + 1:
                raise Violation("only-forward", f"{where} follows {parent.number}")
        elif header.number <= parent.number or not self._descends(digest, old):
            self.switches += 1
        if state.digest != header.state_digest:
            raise Violation("equal-state", f"{where}: the state is not the one that the header names")
        known = self.states.setdefault(digest, state)
        if known.digest != state.digest:
            raise Violation("equal-state", f"{where}: two states under one header")
        if digest not in self.headers:
            self._new_version(version, where)

    def restored(self, version: SignedVersion, state: FragmentState) -> None:
        """A node starts from this: durable, though perhaps nobody lived to see it committed."""
        digest = version.header.digest()
        if digest not in self.headers:
            self._new_version(version, f"restored fragment {version.header.fragment}")
        self.states.setdefault(digest, state)

    def _new_version(self, version: SignedVersion, where: str) -> None:
        header = version.header
        parent = self.headers.get(header.parent)
        if parent is None:
            raise Violation("known-parent", f"{where}: nobody ever had its parent")
        merged = sum(part.tokens for part in header.contributors)
        if header.tokens != parent.header.tokens + merged:
            raise Violation("token-sum", f"{where}: {header.tokens} tokens after {parent.header.tokens}")
        self.headers[header.digest()] = version
        self.versions += 1

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

    def merged(self, host: Host, state: FragmentState) -> None:
        """A merge worker made a new state."""
        if state.repeated:
            part = state.repeated[0]
            where = f"fragment {state.fragment} version {state.number} at {host.peer}"
            raise Violation("nothing-twice", f"{where}: steps {part.first}..{part.end} of {part.learner}")

    def offered(
        self, host: Host, header: ContributionHeader, held: Displacement, tokens_per_step: int
    ) -> None:
        """A node labels a contribution."""
        steps = held.end - held.first
        honest = header.learner == host.peer == held.learner and header.inner_steps == steps
        if not honest or header.tokens != steps * tokens_per_step or header.fragment != held.fragment:
            raise Violation("true-label", f"{host.peer} offers {held} as {header}")

    # --- votes and offices ---------------------------------------------------------------------------

    def sent(self, host: Host, message: Message) -> None:
        """A node lets a control message out (the same object for every receiver of a broadcast)."""
        if message is self._last:
            return
        self._last = message
        if isinstance(message, Announce):
            self._announced(host, message.version)
        elif isinstance(message, VoteGranted):
            self._voted(message.vote)
            body = message.vote.body
            if host.disk.votes.get((body.fragment, body.term)) != body.candidate:
                raise Violation("durable-first", f"{host.peer} sends a vote that is not on its disk")
        elif isinstance(message, VoteRequest):
            self._candidates[(host.peer, message.fragment, message.term)] = message.head
        elif isinstance(message, Elected):
            self._elected(message.certificate)
        elif isinstance(message, Progress):
            for fragment, head in enumerate(message.heads):
                if head.digest not in self.headers:
                    raise Violation("durable-first", f"{host.peer} fragment {fragment} shows an unknown head")

    def _announced(self, host: Host, version: SignedVersion) -> None:
        header = version.header
        if header.syncer != host.peer:
            return
        digest = header.digest()
        held = host.stores[header.fragment].version.header.number
        if digest not in host.disk.updates.get(header.fragment, {}) and digest not in self.headers:
            raise Violation(
                "durable-first", f"{host.peer} announces version {header.number} before it is saved"
            )
        if held < header.number:
            raise Violation("durable-first", f"{host.peer} announces version {header.number}, holds {held}")

    def votes_for(self, host: Host, record: VoteRecord) -> None:
        """A node makes up its mind to vote."""
        head = self._candidates.get((record.candidate, record.fragment, record.term))
        own = host.stores[record.fragment].version.header.head()
        if record.candidate != host.peer and head is not None and head.weight < own.weight:
            where = f"{host.peer} at version {own.number}, fragment {record.fragment}"
            raise Violation("no-lighter-syncer", f"{where}: votes for {record.candidate} at {head.number}")

    def _voted(self, vote: Vote) -> None:
        body = vote.body
        first = self._votes.setdefault((body.voter, body.fragment, body.term), body.candidate)
        if first != body.candidate:
            where = f"{body.voter} fragment {body.fragment} term {body.term}"
            raise Violation("one-vote", f"{where}: for {first} and for {body.candidate}")

    def _elected(self, certificate: Certificate) -> None:
        key = (certificate.fragment, certificate.term)
        known = self._offices.setdefault(key, [])
        if any(other.syncer == certificate.syncer for other in known):
            return
        voters = {vote.body.voter for vote in certificate.votes}
        for vote in certificate.votes:
            self._voted(vote)
            signed = signed_bytes("vote", vote.body)
            if not vote.signature or vote.body.candidate != certificate.syncer or not signed:
                raise Violation("certificate", f"{certificate.syncer} fragment {key[0]} term {key[1]}")
        for other in known:
            shared = voters & {vote.body.voter for vote in other.votes}
            if shared:
                names = f"{other.syncer} and {certificate.syncer}"
                raise Violation(
                    "one-syncer", f"fragment {key[0]} term {key[1]}: {names} share {sorted(shared)}"
                )
        if known:
            self.forks += 1
        known.append(certificate)
        self.elections += 1
