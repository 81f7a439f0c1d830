"""Work of a node with "tensors": merging, outer steps, states, and going over to a version."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from p2pdiloco.core.api.effects import (
    ApplyUpdate,
    Audit,
    Combine,
    CommitVersion,
    FetchState,
    Merge,
    MergePartial,
)
from p2pdiloco.core.api.events import (
    Audited,
    Combined,
    Measured,
    Merged,
    MergeFailed,
    PartialFailed,
    PartialMerged,
    StateFetched,
    UpdateApplied,
)
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.rounds.parts import NOTHING_FOUND
from p2pdiloco.lab.simulation.node.learner import CommittedVersion
from p2pdiloco.lab.simulation.node.lineage import (
    Displacement,
    FragmentLineage,
    MergedPart,
    OuterUpdate,
    PartialSum,
    combine,
)
from p2pdiloco.lab.simulation.node.substance import Work
from p2pdiloco.lab.simulation.rules.violation import Violation

if TYPE_CHECKING:
    from p2pdiloco.lab.simulation.node.host import Host

PARTIAL_PER_UPDATE_BYTES = 4
"""A partial merge (sums in fp32) is so many times as large as an encoded update."""
MAX_GROUPED_ERROR = 1e-4
"""Largest error as a share of the contributions' mean length.

The sums are fp32 in another order, stretched where directions cancel.
"""
MAX_FAILURES = 20
"""Merges of a fragment that may fail on one node within `FAILURES_S`: after each it pauses."""
FAILURES_S = 10.0


class Worker:
    """Carries out the effects that fill or take the spare copies, each after a while."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host = host
        self._rng = rng
        self._failed: dict[int, tuple[float, int]] = {}
        """Failed merges of each fragment: since when, and how many."""

    def _work_s(self) -> float:
        return self._rng.uniform(0.002, 0.15)

    def _take_spare(self, fragment: int) -> int:
        generation = self._host.stores[fragment].take_spare()
        if generation is None:
            where = f"{self._host.peer} fragment {fragment}"
            raise Violation("one-spare", f"{where}: two jobs want the spare copy at once")
        return generation

    def merge(self, effect: Merge) -> None:
        """Merge contributions into a new state."""
        host = self._host
        before = host.stores[effect.fragment].state
        measured = self._measured(effect)
        update = self._update(effect, before, measured)
        state = before.apply(update, host.world.substance)
        host.world.watch.merged(host, before, state, update.parts)
        generation = self._take_spare(effect.fragment)
        if host.world.faults.chance(host.world.plan.mix.merge_fails):
            host.later(self._work_s(), self._merge_failed, effect, generation)
            return
        host.later(self._work_s(), self._merged, effect, update, state, measured, generation)

    def _merge_failed(self, effect: Merge, generation: int) -> None:
        host = self._host
        since_s, count = self._failed.get(effect.fragment, (host.now, 0))
        since_s, count = (since_s, count + 1) if host.now - since_s < FAILURES_S else (host.now, 1)
        self._failed[effect.fragment] = since_s, count
        if count > MAX_FAILURES:
            raise Violation("no-spinning", f"{host.peer} repeats a failed merge without a pause")
        host.stores[effect.fragment].fill_spare(generation, None)
        host.feed(MergeFailed(effect.fragment, effect.term, effect.number, "worker failed"))

    def _parts(self, effect: Merge | MergePartial) -> tuple[MergedPart, ...]:
        """List what contributions and partial merges carry together."""
        tickets = self._host.tickets
        parts = []
        for part in effect.inputs:
            content = tickets.contribution(part.ticket)
            if content.learner != part.contributor.learner:
                raise Violation("tickets", f"{self._host.peer} merges the wrong buffer {part.ticket}")
            stamp = part.contributor.stamp
            parts += [MergedPart(content.learner, stamp, first, end) for first, end in content.spans]
        for ticket in effect.partials:
            parts += tickets.partial(ticket).parts
        return tuple(parts)

    def _matter(
        self, effect: Merge | MergePartial, measured: tuple[Measured, ...]
    ) -> tuple[list[Work], list[bytes], tuple[Work, ...]]:
        """Payloads of contributions, of partial merges, and of all the contributions in both."""
        tickets, inputs = self._host.tickets, []
        for part, found in zip(effect.inputs, measured or [NOTHING_FOUND] * len(effect.inputs), strict=True):
            who = part.contributor
            matter = tickets.contribution(part.ticket).matter
            trust = part.mean.trust(found.score)
            inputs.append((matter, who.tokens, who.inner_steps, trust))
        partials = [tickets.partial(ticket) for ticket in effect.partials]
        flat = tuple(inputs) + tuple(work for partial in partials for work in partial.flat)
        return inputs, [partial.matter for partial in partials], flat

    def _measured(self, effect: Merge | MergePartial) -> tuple[Measured, ...]:
        """Find what a merge tells of its inputs; none, where there are none."""
        digests = [part.contributor.payload_digest for part in effect.inputs]
        inputs = self._matter(effect, ())[0]
        substance = self._host.world.substance
        return substance.measure(effect.fragment, inputs, digests, effect.seed) if inputs else ()

    def _update(self, effect: Merge, before: FragmentLineage, measured: tuple[Measured, ...]) -> OuterUpdate:
        """Make the update that the syncer publishes.

        Raises:
            Violation: groups make another merge than all contributions at once.
        """
        fragment, number, substance = effect.fragment, effect.number, self._host.world.substance
        inputs, partials, flat = self._matter(effect, measured)
        steps = effect.longest_steps
        matter = substance.merge(fragment, number, before.matter, inputs, partials, steps)
        if partials:
            error = substance.grouped_error(fragment, inputs, partials, list(flat))
            if error > MAX_GROUPED_ERROR:
                where = f"{self._host.peer} fragment {fragment} version {number}"
                raise Violation("global-merge", f"{where}: off by {error:.2g} of the mean length")
        false = self._host.peer in self._host.world.false_syncers
        return OuterUpdate.of(fragment, number, self._parts(effect), matter, steps, false)

    def merge_partial(self, effect: MergePartial) -> None:
        """Add a group's contributions up."""
        measured = self._measured(effect)
        inputs, partials, flat = self._matter(effect, measured)
        matter = self._host.world.substance.partial(effect.fragment, inputs, partials)
        whole = PartialSum(effect.fragment, self._parts(effect), matter, flat)
        self._host.later(self._work_s(), self._partial_merged, effect, whole, measured)

    def _partial_merged(
        self, effect: MergePartial, whole: PartialSum, measured: tuple[Measured, ...]
    ) -> None:
        host, faults = self._host, self._host.world.faults
        key = (effect.fragment, effect.group, effect.attempt)
        if faults.chance(host.world.plan.mix.merge_fails):
            host.feed(PartialFailed(*key, "worker failed"))
            return
        size = host.max_payload_bytes(effect.fragment) * PARTIAL_PER_UPDATE_BYTES
        ticket = host.tickets.new(whole)
        host.feed(PartialMerged(*key, ticket, whole.digest(), size, (), measured))

    def combine(self, effect: Combine) -> None:
        """Add several contributions of ours up."""
        host = self._host
        parts = [host.tickets.contribution(ticket) for ticket in effect.tickets]
        try:
            whole = combine(parts)
        except ValueError as error:
            raise Violation("nothing-twice", str(error)) from error
        matter = host.world.substance.combine(effect.fragment, [part.matter for part in parts])
        whole = replace(whole, matter=matter)
        host.later(self._work_s(), self._combined, effect, whole)

    def _combined(self, effect: Combine, whole: Displacement) -> None:
        host, fragment = self._host, effect.fragment
        ticket, size = host.tickets.new(whole), host.max_payload_bytes(fragment)
        host.feed(Combined(fragment, effect.attempt, ticket, whole.digest(), size))

    def _merged(
        self,
        effect: Merge,
        update: OuterUpdate,
        state: FragmentLineage,
        measured: tuple[Measured, ...],
        generation: int,
    ) -> None:
        host, fragment = self._host, effect.fragment
        host.stores[fragment].fill_spare(generation, state)
        ticket = host.tickets.new(update)
        size = host.max_payload_bytes(fragment)
        norm = update.digest[0] / 256 * min(1.0, effect.limits.longest)
        key = (fragment, effect.term, effect.number)
        done = Merged(*key, ticket, update.digest, size, state.digest, norm, (), measured)
        host.feed(done)

    def apply_update(self, effect: ApplyUpdate) -> None:
        """The outer step of a fetched update."""
        host = self._host
        update = host.tickets.update(effect.ticket)
        if effect.longest_steps != update.longest_steps:
            where = f"{host.peer} fragment {effect.fragment} version {effect.number}"
            said, made = effect.longest_steps, update.longest_steps
            raise Violation("longest-steps", f"{where}: applied as of {said} inner steps, made of {made}")
        generation = self._take_spare(effect.fragment)
        state = host.stores[effect.fragment].state.apply(update, host.world.substance)
        if host.world.faults.chance(host.world.plan.mix.miscompute):
            state = state.miscomputed()
        cosine = float(not update.false) if effect.own is not None else None
        host.later(self._work_s(), self._applied, effect, state, generation, cosine)

    def _applied(
        self, effect: ApplyUpdate, state: FragmentLineage, generation: int, cosine: float | None
    ) -> None:
        host = self._host
        host.stores[effect.fragment].fill_spare(generation, state)
        key = effect.fragment, effect.number, effect.ticket
        host.feed(UpdateApplied(*key, state.digest, cosine=cosine))

    def audit(self, effect: Audit) -> None:
        """Make a merge again, from what its learners or its syncer still have."""
        self._host.later(self._host.world.auditing.uniform(0.1, 2.0), self._audited, effect)

    def _audited(self, effect: Audit) -> None:
        host, header = self._host, effect.version.header
        up = {other.peer for other in host.world.up_hosts()}
        there = header.syncer in up or all(part.learner in up for part in header.contributors)
        found = host.stores[effect.fragment].log.get(header.number)
        if not there or found is None or found[0] != effect.version:
            outcome = AuditOutcome.MISSING
        else:
            outcome = AuditOutcome.DIFFERENT if found[1].false else AuditOutcome.SAME
        host.feed(Audited(effect.fragment, header.number, header.digest(), outcome))

    def fetch_state(self, effect: FetchState) -> None:
        """Pull a whole fragment into the spare copy."""
        self._host.world.bulk.fetch_state(self._host, effect, self._take_spare(effect.fragment))

    def state_arrived(
        self,
        effect: FetchState,
        generation: int,
        version: SignedVersion,
        state: FragmentLineage,
        watermarks: tuple[Watermark, ...],
    ) -> None:
        """A donor's fragment is here."""
        self._host.stores[effect.fragment].fill_spare(generation, state)
        self._host.feed(StateFetched(effect.fragment, effect.peer, version, watermarks))

    def state_failed(self, effect: FetchState, generation: int) -> None:
        """No donor's fragment came."""
        self._host.stores[effect.fragment].fill_spare(generation, None)

    def commit(self, effect: CommitVersion) -> None:
        """The spare copy becomes the state; the learner is told; now and then a checkpoint is written."""
        host, header = self._host, effect.version.header
        store = host.stores[header.fragment]
        if store.spare is None:
            where = f"{host.peer} fragment {header.fragment}"
            raise Violation("equal-state", f"{where}: version {header.number} from an empty spare copy")
        host.world.watch.committed(host, effect.version, store.version, store.spare)
        update = None
        if effect.update is not None:
            update = host.tickets.update(effect.update)
            host.tickets.free(effect.update)
        store.commit(effect.version, update, effect.watermarks, host.config.log_versions)
        ticket = effect.merged_ticket
        merged = host.tickets.contribution(ticket) if ticket is not None else None
        state, number = store.state.matter, header.number
        install = CommittedVersion(header.fragment, number, header.digest(), merged, effect.overwrite, state)
        host.learner.install(install)
        host.world.committed(host, header)
        if host.now - store.saved_s >= host.spec.checkpoint_every_s:
            store.saved_s = host.now
            host.writer.write(store.checkpoint())
