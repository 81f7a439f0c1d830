"""Goals that must be reached once faults have stopped: equal heads, new versions, all merged (`Liveness`).

`Backing` watches that no full member copies a state that only liars stand on, or few seats, untried. Rules:
docs/protocol/simulator.md, section 1; docs/protocol/belief.md, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pdiloco.core.api.events import CommitVersion
from p2pdiloco.core.api.papers import Word
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import marks_of
from p2pdiloco.core.fork_choice import FEWEST, TRUSTED_PLACES
from p2pdiloco_lab.simulation.lineage import FragmentLineage, missing_spans
from p2pdiloco_lab.simulation.seed_plan import PaperKind
from p2pdiloco_lab.simulation.seed_report import Violation

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.sim_disk import Store
    from p2pdiloco_lab.simulation.sim_host import Host
    from p2pdiloco_lab.simulation.sim_world import World

LOOK_EVERY_S = 1.0
MIN_NEW_VERSIONS = 2
MAX_BEHIND = 3
"""Versions that a live node may be behind the head in the end."""


class Liveness:
    """Goals per fragment, looked at every virtual second until all are reached or time is up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fragments = world.plan.config.fragments
        self._begun_s: float | None = None
        self._heads_at_heal: list[int] = []
        self._agreed = [False] * self._fragments
        self._steps_at_heal: dict[str, int] = {}
        self.lost_to_forks = 0

    def begin(self) -> None:
        """Faults have stopped."""
        world = self._world
        self._begun_s = world.clock.now
        up = world.core_hosts()
        heads = [[h.stores[f].version.header.number for h in up] for f in range(self._fragments)]
        self._heads_at_heal = [max(numbers, default=0) for numbers in heads]
        self._steps_at_heal = {h.peer: h.learner.model.step_at(world.clock.now) for h in up}

    def committed(self, fragment: int) -> None:
        """Somebody has a new head: perhaps all heads are equal now."""
        if self._begun_s is None or self._agreed[fragment]:
            return
        up = self._world.core_hosts()
        if len(up) == self._world.staying():
            digests = {host.stores[fragment].version.header.state_digest for host in up}
            self._agreed[fragment] = len(digests) == 1

    def settle(self, within_s: float) -> str:
        """Run until every goal is reached. Returns what is missing at the end, or nothing.

        Raises: Violation when steps of a learner that lived through it all are in no chain."""
        clock = self._world.clock
        end_s = clock.now + within_s
        missing = "not looked at"
        while clock.now < end_s and missing:
            clock.run_until(clock.now + LOOK_EVERY_S)
            missing = self._missing()
        if self.lost_to_forks:
            raise Violation("nothing-lost", missing)
        return missing

    def _missing(self) -> str:
        world = self._world
        up = world.core_hosts()
        out = world.gone | world.broken | {host.peer for host in up} | world.perjurers.keys()
        down = sorted(peer for peer in world.specs if peer not in out)
        if down:
            return f"not started: {','.join(down)}"
        waiting = [host.peer for host in up if not host.may_serve]
        if waiting:
            return f"never became full members: {','.join(waiting)}"
        electable = [host for host in up if host.peer not in world.full]
        holder = self._hidden_holder(electable) or self._thin_holder(electable)
        if holder:
            return holder
        for liar in world.exclusion.seen:
            if trusting := world.exclusion.missing(liar):
                return trusting
        self.lost_to_forks = 0
        for fragment in range(self._fragments):
            reason = self._missing_of(fragment, up) or self._missing_seats(fragment, up)
            if reason:
                return f"fragment {fragment}: {reason}"
        return ""

    def _hidden_holder(self, up: list[Host]) -> str:
        """Offices of the whole run are held by those who can be dialled, once such a member is there."""
        hidden = self._world.network.hidden
        if all(host.peer in hidden for host in up):
            return ""
        for host in up:
            held = [f.index for f in host.core.fragments if f.office.holding and not f.context.grouped]
            if host.peer in hidden and held:
                return f"fragment {held[0]}: {host.peer}, which nobody can dial, is syncer"
        return ""

    def _thin_holder(self, up: list[Host]) -> str:
        """Offices of the whole run are held by nobody with a thin uplink, once somebody fitter is there."""
        hidden = self._world.network.hidden
        fit = {host.peer for host in up if not host.core.shared.uplink.thin} - hidden
        for host in up if fit else []:
            if not host.core.shared.uplink.thin:
                continue
            for fragment in host.core.fragments:
                held = fragment.office.holding and not fragment.context.grouped
                if held and fit & fragment.chain.marks.seats:
                    return f"fragment {fragment.index}: {host.peer}, whose uplink is thin, is syncer"
        return ""

    def _missing_of(self, fragment: int, up: list[Host]) -> str:
        best = self._best(fragment, up)
        if best.version.header.number < self._heads_at_heal[fragment] + MIN_NEW_VERSIONS:
            return f"stands at version {best.version.header.number}"
        if not self._agreed[fragment] and not self._one_chain(fragment, up, best.version):
            heads = ", ".join(f"{h.peer} {h.stores[fragment].version.header.number}" for h in up)
            return f"heads never were equal: {heads}"
        for host in up:
            reason = self._missing_steps(fragment, host, best.state)
            if reason:
                return reason
        return ""

    def _missing_seats(self, fragment: int, up: list[Host]) -> str:
        """The word on everybody here of the owner, or of most seats if they are here, counts in the end: it
        comes with a term's first version."""
        world, owner = self._world, self._world.owner
        seats = marks_of(self._best(fragment, up).watermarks).seats
        here = seats.intersection(host.peer for host in up)
        if world.plan.papers is PaperKind.SEATS and 2 * len(here) <= len(seats):
            return ""
        words = [host.peer for host in up if isinstance(owner.papers.get(host.peer), Word)]
        seatless = sorted({*words} - seats - {owner.unseated})
        if seatless:
            return f"{seatless[0]} has no seat, and the owner gave it one"
        return f"{owner.unseated} still has a seat" if owner.unseated in seats else ""

    def _best(self, fragment: int, up: list[Host]) -> Store:
        return max((host.stores[fragment] for host in up), key=lambda s: s.version.header.head().weight)

    def _waits_for_room(self, fragment: int, host: Host) -> bool:
        """Tell whether nobody in the node's leaf group has a seat and can save a vote: it has no syncer until
        the groups rotate."""
        full, up = self._world.full, self._world.core_hosts()
        core = host.core.fragments[fragment]
        mates = {h.peer for h in up if h.core.fragments[fragment].posts.leaf.name == core.posts.leaf.name}
        return core.context.grouped and not mates & core.chain.marks.seats - full

    def _one_chain(self, fragment: int, up: list[Host], best: SignedVersion) -> bool:
        """Tell whether all heads are close together on one chain.

        Versions that are made faster than they travel are never equal everywhere.
        """
        chain = self._world.watch.ancestors(best)
        versions = [host.stores[fragment].version.header for host in up]
        return all(v.digest() in chain and best.header.number - v.number <= MAX_BEHIND for v in versions)

    def _missing_steps(self, fragment: int, host: Host, best: FragmentLineage) -> str:
        """The steps of a learner's present life up to the end of the faults must be in the chain, and later
        ones too, so that we know that it was merged again."""
        if host.peer in self._world.bulk.liars or host.peer in self._world.substance.liars:
            return ""  # what it labels falsely is refused, and given up: that is its own loss
        first = host.learner.model.fragments[fragment].life_from
        healed_at = max(self._steps_at_heal.get(host.peer, 0), first)
        spans = best.covered.get(host.peer, ())
        if not host.learner.model.running:
            return f"{host.peer} has no learner"
        if not spans or spans[-1][1] <= healed_at:
            if not self._waits_for_room(fragment, host):
                return f"{host.peer} was not merged again"
            healed_at = min(healed_at, spans[-1][1]) if spans else first
        gaps = missing_spans(spans, first, healed_at)
        if gaps:
            self.lost_to_forks += sum(end - first for first, end in gaps)
            return f"steps {gaps[0][0]}..{gaps[0][1]} of {host.peer} are lost"
        return ""


class Backing:
    """Watch on who stands on which versions."""

    def __init__(self, liars: frozenset[str]) -> None:
        self._liars = liars
        self._stood: dict[bytes, set[str]] = {}
        """Peers that stood, or stand, on each version: honest ones."""
        self._gated: dict[tuple[str, int], frozenset[str] | None] = {}
        """Roster of a node and fragment when the state came that is judged now; None: it is not tried."""
        self._excused: set[tuple[str, int]] = set()
        """Nodes and fragments of which what comes now is beyond what support does."""
        self.excused = 0
        """States that were copied all the same, though only liars stood on them."""

    def known(self, version: SignedVersion) -> None:
        """Take in a version that was made before the world began."""
        self._stood[version.header.digest()] = set()

    def arrives(self, host: Host, fragment: int) -> None:
        """A state is here, and the core is about to judge it: note whether support has a say."""
        core = host.core.fragments[fragment]
        heads, now = core.follower.heads, host.local_now
        counted = heads.voices(now)
        many = 2 * len(self._liars.intersection(counted)) >= len(counted)
        beyond = heads.begins or many or len(counted) < FEWEST
        (self._excused.add if beyond else self._excused.discard)((host.peer, fragment))
        tries = core.chain.head.number and not heads.begins and core.chain.marks.places > TRUSTED_PLACES
        self._gated[host.peer, fragment] = core.chain.marks.seats if tries else None

    def passed(self, host: Host, fragments: Sequence[int]) -> None:
        """States of these fragments were no worse than the node's own."""
        self._gated.update(dict.fromkeys([(host.peer, fragment) for fragment in fragments]))

    def committed(self, host: Host, effect: CommitVersion) -> None:
        """A node makes a version its own."""
        if host.peer in self._liars:
            return
        header = effect.version.header
        digest, where = header.digest(), f"{host.peer} fragment {header.fragment} version {header.number}"
        stood = self._stood.setdefault(digest, set())
        if effect.update is None and not stood and header.syncer in self._liars:
            if (host.peer, header.fragment) not in self._excused:
                raise Violation("backed", f"{where}: copied of {header.syncer}, and only liars stand on it")
            self.excused += 1
        roster = self._gated.pop((host.peer, header.fragment), None) if effect.update is None else None
        riders = host.world.crowd.riders if host.world.crowd is not None else ()
        # A syncer may have died before it made its own version its own.
        named = stood.union(self._liars, riders, [header.syncer]).intersection(roster or ())
        if roster is not None and 2 * len(named) <= len(roster):
            raise Violation("gate", f"{where}: half of all seats or fewer stand on it, and it was not tried")
        stood.add(host.peer)
