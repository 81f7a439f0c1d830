"""Rules about lies that can be proved: the liars are excluded, by everybody, in time, and nobody else.

Rules: docs/protocol/simulator.md, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.core.api.evidence import Statement
from p2pdiloco.core.api.types import Certificate
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.proofs import FEWEST
from p2pdiloco_lab.simulation.rules.violation import Violation
from p2pdiloco_lab.simulation.world.perjurer import PROVABLE

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.node.host import Host
    from p2pdiloco_lab.simulation.world.world import World

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
        if self._kept.setdefault(_of(header), digest) != digest:
            where = f"{host.peer} fragment {header.fragment} version {header.number} term {header.term}"
            raise Violation("one-version", f"{where}: two of one parent")

    def takes(self, host: Host, header: VersionHeader) -> None:
        """A node makes a version its own: of two by one liar, two honest nodes have one each."""
        if header.syncer in self._world.perjurers and host.peer not in self._world.perjurers:
            taken = self._taken.setdefault(_of(header), set())
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
        return [host for host in trusting if _believes(host, liar, authors)]


def _believes(host: Host, liar: str, authors: set[str]) -> bool:
    """Tell whether so many state it that who cannot find out any more is to believe them, whatever the
    fragment: the contributions are gone where a syncer dies while others make its merge again."""
    shared = host.core.shared
    here = [
        peer for peer in shared.view.confirmed(host.local_now) if shared.has_worked(peer) and peer != liar
    ]
    for fragment in host.core.fragments:
        voters = fragment.chain.marks.voters.difference(shared.excluded.peers, (liar,))
        if len(authors & voters) < max(FEWEST, len(voters) // 2 + 1, len(here) // 2 + 1):
            return False
    return True


def _still_count(liar: str, trusting: list[Host]) -> str:
    return f"{','.join(host.peer for host in trusting)} still count {liar}"


def _of(header: VersionHeader) -> tuple[str, int, bytes, int]:
    return header.syncer, header.fragment, header.parent, header.term
