"""Work of a node with "tensors", and its learner.

`Worker` merges, makes outer steps and states, and goes over to versions. `LearnerModel` makes inner steps at
its own pace, with counters and slots of every fragment. `TicketBuffers` have contributions and updates by
ticket; wrong use of one is a bug of the core.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from p2pdiloco.core.api.events import (
    ApplyUpdate,
    Audit,
    Audited,
    Combine,
    Combined,
    CommitVersion,
    FetchFailed,
    FetchState,
    LossAudit,
    LossAudited,
    Merge,
    Merged,
    MergePartial,
    PartialMerged,
    StateFetched,
    Tried,
    TryStates,
    Undone,
    UpdateApplied,
)
from p2pdiloco.core.api.reasons import AuditOutcome, Verdict
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.api.versions import Stride
from p2pdiloco.core.pending import KEPT_MOST
from p2pdiloco_lab.simulation.lineage import (
    Displacement,
    FragmentLineage,
    MergeContribution,
    MergedPart,
    MergeOutcome,
    MergeTree,
    Mode,
    OuterUpdate,
    PartialSum,
    Resumed,
    Trainer,
    UnusableMatter,
    combine,
)
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_liars import LieKind
from p2pdiloco_lab.simulation.sim_network import Answer, GivenState

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.sim_host import Host

PARTIAL_PER_UPDATE_BYTES = 4
"""A partial merge (sums in fp32) is so many times as large as an encoded update."""
MAX_GROUPED_ERROR = 1e-4
"""Largest error as a share of the contributions' mean length.

The sums are fp32 in another order, stretched where directions cancel.
"""
FALSE_FROM = 4
"""First number of a version that has a false state: members vote by then. Of a younger one a newcomer could
never find out."""
MAX_FAILURES = 20
"""Merges of a fragment that may fail on one node within `FAILURES_S`: after each it pauses."""
FAILURES_S = 10.0

FALSELY_REFUSED = 0.1
"""Share of honest states that are found worse than what a node has."""


class Worker:
    """Carries out the effects that fill or take the spare copies, each after a while."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host = host
        self._rng = rng
        self._failed: dict[int, tuple[float, int]] = {}
        """Failed merges of each fragment: since when, and how many."""
        self._remade: set[bytes] = set()
        """False versions whose true update this node has, since it started."""

    def _work_s(self) -> float:
        return self._rng.uniform(0.002, 0.15)

    def _take_spare(self, fragment: int) -> int:
        generation = self._host.stores[fragment].take_spare()
        if generation is None:
            where = f"{self._host.peer} fragment {fragment}"
            raise Violation("one-spare", f"{where}: two jobs want the spare copy at once")
        return generation

    def merge(self, effect: Merge, answer: Answer) -> None:
        """Merge contributions into a new state."""
        host = self._host
        before = host.stores[effect.fragment].state
        made = self._made(effect, before, answer)
        if made is None:
            return
        update = self._update(effect, made)
        state = before.apply(update, host.world.substance)
        if host.peer in host.world.false_states and effect.number >= FALSE_FROM:
            state = state.miscomputed()
            if host.liar is not None and host.liar.kind is LieKind.STATES:  # it shows how it was made
                host.world.states_told.add(state.digest)
        host.world.watch.merged(host, before, state, update.parts)
        generation = self._take_spare(effect.fragment)
        if host.world.faults.chance(host.world.plan.mix.merge_fails):
            host.later(self._work_s(), self._merge_failed, effect, generation, answer)
            return
        host.later(self._work_s(), self._merged, effect, update, state, made, generation, answer)

    def _merge_failed(self, effect: Merge, generation: int, answer: Answer) -> None:
        host = self._host
        since_s, count = self._failed.get(effect.fragment, (host.now, 0))
        since_s, count = (since_s, count + 1) if host.now - since_s < FAILURES_S else (host.now, 1)
        self._failed[effect.fragment] = since_s, count
        if count > MAX_FAILURES:
            raise Violation("no-spinning", f"{host.peer} repeats a failed merge without a pause")
        host.stores[effect.fragment].fill_spare(generation, None)
        answer(Undone("worker failed"))

    def _below(self, effect: Merge | MergePartial) -> tuple[PartialSum, ...]:
        """Find the partial merges that are added up."""
        return tuple(self._host.tickets.partial(below.ticket) for below in effect.partials)

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
        for below in self._below(effect):
            parts += below.parts
        return tuple(parts)

    def _matter(self, effect: Merge | MergePartial) -> tuple[list[MergeContribution], list[bytes]]:
        """Payloads of contributions, with their labels, and of partial merges."""
        tickets, inputs = self._host.tickets, []
        for part in effect.inputs:
            who, matter = part.contributor, tickets.contribution(part.ticket).matter
            inputs.append(
                MergeContribution(
                    matter, who.tokens, who.inner_steps, part.mean, who.payload_digest, who.votes
                )
            )
        return inputs, [below.matter for below in self._below(effect)]

    def _tree(self, effect: Merge | MergePartial, made: MergeOutcome) -> MergeTree:
        """Note what was added up, and with which trust weights."""
        inputs = zip(self._matter(effect)[0], made.found, strict=True)
        works = [(g.matter, g.tokens, g.inner_steps, g.mean.trust(found.score)) for g, found in inputs]
        below = [partial.tree for partial in self._below(effect)]
        return MergeTree(tuple(works), tuple(below))

    def _made(self, effect: Merge, before: FragmentLineage, answer: Answer) -> MergeOutcome | None:
        """Make a merge; None: it fails.

        Raises:
            Violation: groups make another merge than all contributions at once.
        """
        fragment, number, substance = effect.fragment, effect.number, self._host.world.substance
        inputs, partials = self._matter(effect)
        limits, seed, steps = effect.limits, effect.seed, effect.longest_steps
        try:
            made = substance.merge(fragment, number, before.matter, inputs, partials, steps, limits, seed)
        except UnusableMatter as error:
            failed = Undone(str(error), _faulty_inputs(effect, error))
            self._host.later(self._work_s(), answer, failed)
            return None
        if effect.partials:
            error_share = substance.grouped_error(fragment, self._tree(effect, made))
            if error_share > MAX_GROUPED_ERROR:
                where = f"{self._host.peer} fragment {fragment} version {number}"
                raise Violation("global-merge", f"{where}: off by {error_share:.2g} of the mean length")
        return made

    def _update(self, effect: Merge, made: MergeOutcome) -> OuterUpdate:
        """Make the update that the syncer publishes."""
        false = self._host.peer in self._host.world.false_syncers
        repairs = effect.repairs.header.digest() if self._repairs(effect) and effect.repairs else b""
        return OuterUpdate.of(
            effect.fragment,
            effect.number,
            self._parts(effect),
            matter=made.matter,
            longest_steps=effect.longest_steps,
            false=false,
            repairs=repairs,
            partials=self._below(effect),
        )

    def _repairs(self, effect: Merge) -> bool:
        """Tell whether the merge takes a false version back: the true update is here, and the false one."""
        version = effect.repairs
        if version is None or version.header.digest() not in self._remade:
            return False
        found = self._host.stores[effect.fragment].log.get(version.header.number)
        if found is not None and not found[1].false:
            raise Violation(
                "only-false", f"{self._host.peer} repairs {version.header.number}, which is right"
            )
        return found is not None and found[0] == version

    def merge_partial(self, effect: MergePartial, answer: Answer) -> None:
        """Add a group's contributions up."""
        host, fragment, seed = self._host, effect.fragment, effect.seed
        try:
            made = host.world.substance.partial(fragment, *self._matter(effect), effect.limits, seed)
        except UnusableMatter as error:
            failed = Undone(str(error), _faulty_inputs(effect, error))
            host.later(self._work_s(), answer, failed)
            return
        tree, false = self._tree(effect, made), host.peer in host.world.false_groups
        whole = PartialSum(fragment, self._parts(effect), made.matter, tree, false, self._below(effect))
        host.later(self._work_s(), self._partial_merged, effect, whole, made, answer)

    def _partial_merged(
        self, effect: MergePartial, whole: PartialSum, made: MergeOutcome, answer: Answer
    ) -> None:
        host, faults = self._host, self._host.world.faults
        if faults.chance(host.world.plan.mix.merge_fails):
            answer(Undone("worker failed"))
            return
        size = host.max_payload_bytes(effect.fragment) * PARTIAL_PER_UPDATE_BYTES
        ticket, cut = host.tickets.new(whole), _cut_learners(effect, made)
        answer(PartialMerged(ticket, whole.digest(), size, cut, measured=made.found))

    def combine(self, effect: Combine, answer: Answer) -> None:
        """Add several contributions of ours up."""
        host = self._host
        parts = [host.tickets.contribution(ticket) for ticket in effect.tickets]
        try:
            whole = combine(parts)
        except ValueError as error:
            raise Violation("nothing-twice", str(error)) from error
        matter = host.world.substance.combine(effect.fragment, [part.matter for part in parts])
        whole = replace(whole, matter=matter)
        host.later(self._work_s(), self._combined, effect, whole, answer)

    def _combined(self, effect: Combine, whole: Displacement, answer: Answer) -> None:
        host = self._host
        ticket, size = host.tickets.new(whole), host.max_payload_bytes(effect.fragment)
        answer(Combined(ticket, whole.digest(), size))

    def _merged(
        self,
        effect: Merge,
        update: OuterUpdate,
        state: FragmentLineage,
        made: MergeOutcome,
        generation: int,
        answer: Answer,
    ) -> None:
        host, fragment = self._host, effect.fragment
        host.stores[fragment].fill_spare(generation, state)
        ticket = host.tickets.new(update)
        size = host.max_payload_bytes(fragment)
        invented = update.digest[0] / 256 * min(1.0, effect.limits.longest)
        norm = invented if made.norm is None else made.norm
        answer(
            Merged(
                ticket,
                update_digest=update.digest,
                update_bytes=size,
                state_digest=state.digest,
                norm=norm,
                cut=_cut_learners(effect, made),
                measured=made.found,
                repaired=bool(update.repairs),
            )
        )

    def apply_update(self, effect: ApplyUpdate, answer: Answer) -> None:
        """The outer step of a fetched update."""
        host = self._host
        update = host.tickets.update(effect.ticket)
        if effect.longest_steps != update.longest_steps:
            where = f"{host.peer} fragment {effect.fragment} version {effect.number}"
            said, made = effect.longest_steps, update.longest_steps
            raise Violation("longest-steps", f"{where}: applied as of {said} inner steps, made of {made}")
        generation = self._take_spare(effect.fragment)
        parent = host.stores[effect.fragment].state
        state = parent.apply(update, host.world.substance)
        wrong = state.digest != effect.stated
        certain = wrong and parent.apply(update, host.world.substance).digest == state.digest
        if host.world.faults.chance(host.world.plan.mix.miscompute):
            state, certain = state.miscomputed(), False
        cosine = float(update.has_truly(host.peer)) if effect.own is not None else None
        applied = UpdateApplied(state.digest, cosine=cosine, certain=certain)
        store = host.stores[effect.fragment]

        def done() -> None:
            store.fill_spare(generation, state)
            answer(applied)

        host.later(self._work_s(), done)

    def audit(self, effect: Audit, answer: Answer) -> None:
        """Make a merge again, from what its learners or its syncer still have."""
        self._host.later(self._host.world.auditing.uniform(0.1, 2.0), self._audited, effect, answer)

    def _audited(self, effect: Audit, answer: Answer) -> None:
        host, header = self._host, effect.version.header
        up = {other.peer for other in host.world.up_hosts()}
        entry = None if effect.part is None else effect.part.entry
        parts = header.contributors if effect.part is None else effect.part.parts
        makers = [part.entry.syncer for part in effect.below] or [part.learner for part in parts]
        there = (entry or header).syncer in up or up.issuperset(makers)
        found = host.stores[effect.fragment].log.get(header.number)
        if not there or found is None or found[0] != effect.version:
            outcome = AuditOutcome.MISSING
        else:
            update = found[1]
            false = update.false if entry is None else entry.payload_digest in update.false_partials
            outcome = AuditOutcome.DIFFERENT if false else AuditOutcome.SAME
        if entry is None and header.repairs is not None and header.repairs not in self._remade:
            outcome = AuditOutcome.MISSING
        remade = outcome is AuditOutcome.DIFFERENT and entry is None
        if remade:
            self._remade.add(header.digest())
        answer(Audited(outcome, remade))

    def loss_audit(self, _effect: LossAudit, answer: Answer) -> None:
        """Measure nothing: there is no loss here."""
        self._host.later(self._work_s(), answer, LossAudited())

    def try_states(self, effect: TryStates, answer: Answer) -> None:
        """Measure states that others gave: forged ones are worse, and now and then honest ones."""
        host = self._host
        forged = host.world.crowd.forged_states if host.world.crowd is not None else frozenset()
        spares = [host.stores[fragment].spare for fragment in effect.fragments]
        sound = all(spare is not None and spare.digest not in forged for spare in spares)
        passed = sound and host.world.auditing.random() >= FALSELY_REFUSED
        if passed:
            host.world.backing.passed(host, effect.fragments)
        host.later(host.world.auditing.uniform(0.1, 2.0), answer, Tried(passed, "tried"))

    def fetch_state(self, effect: FetchState, answer: Answer) -> None:
        """Pull a whole fragment into the spare copy."""
        host, store, generation = (
            self._host,
            self._host.stores[effect.fragment],
            self._take_spare(effect.fragment),
        )

        def here(given: GivenState | FetchFailed) -> None:
            store.fill_spare(generation, given.state if isinstance(given, GivenState) else None)
            if isinstance(given, FetchFailed):
                answer(given)
                return
            host.world.backing.arrives(host, effect.fragment)
            answer(StateFetched(given.version, given.watermarks))

        host.world.bulk.fetch(host, effect, here)

    def commit(self, effect: CommitVersion) -> None:
        """The spare copy becomes the state; the learner is told; now and then a checkpoint is written."""
        host, header = self._host, effect.version.header
        store = host.stores[header.fragment]
        if store.spare is None:
            where = f"{host.peer} fragment {header.fragment}"
            raise Violation("equal-state", f"{where}: version {header.number} from an empty spare copy")
        if host.world.crowd is not None:
            host.world.crowd.committed(host, header)
        host.world.backing.committed(host, effect)
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


def _cut_learners(effect: Merge | MergePartial, made: MergeOutcome) -> tuple[str, ...]:
    """Name those whose contributions were cut."""
    return tuple(effect.inputs[index].contributor.learner for index in made.cut)


def _faulty_inputs(effect: Merge | MergePartial, error: UnusableMatter) -> tuple[tuple[Ticket, Verdict], ...]:
    """List the inputs that are at fault, by ticket."""
    tickets = [*(part.ticket for part in effect.inputs), *(below.ticket for below in effect.partials)]
    return tuple((tickets[index], verdict) for index, verdict in error.faults.items())


# The learner.

TINY_S = 1e-7
"""Tolerance when a time is turned into a step number."""


@dataclass(slots=True)
class CommittedVersion:
    """A version that the daemon has committed and that the learner takes over at its next boundary."""

    fragment: int
    number: int
    digest: bytes
    merged: Displacement | None
    overwrite: bool
    state: bytes = b""
    """Matter of the version's state (`substance`)."""


@dataclass(slots=True)
class LearnerFragment:
    """State of the learner about one fragment."""

    base: bytes
    base_number: int
    unmerged_from: int
    """First inner step that no merged contribution of this learner carries."""
    due_step: int
    stride: Stride
    life_from: int = 0
    """Value of `unmerged_from` when the present process began."""
    slot: Displacement | None = None
    encoding: bool = False
    """The slot's copy is being encoded: its base may not move under it."""
    asked: bool = False
    freed: bool = False
    """The slot, since the last boundary at which something was done."""
    installs: list[CommittedVersion] = field(default_factory=list)

    def portion(self, step: int) -> int:
        """Compute how many inner steps the next copy carries; 0: there is nothing to copy."""
        return self.stride.carried(max(0, step - self.unmerged_from), step)


@dataclass(slots=True)
class Callbacks:
    """Ways of the learner to its daemon and to the clock."""

    wake_at: Callable[[float], None]
    """Call `LearnerModel.wake` at this virtual time."""
    copied_out: Callable[[Displacement, bool], None]
    nothing: Callable[[int], None]
    applied: Callable[[int, int, int], None]
    """(fragment, number, inner step)."""
    dropped: Callable[[int, int, int], None]
    """(fragment, first, end): an overwrite dropped these unmerged steps."""


class LearnerModel:
    """The learner of one node. `step_time_s` is fixed; freezes shift its clock, crashes end a life.

    Steps are never simulated one by one: their number follows from the clock, and the learner wakes only at
    those step boundaries at which something is due, so nothing that the network does can slow it down.
    """

    def __init__(
        self,
        peer: str,
        inner_steps: int,
        step_time_s: float,
        bases: list[tuple[bytes, int]],
        tell: Callbacks,
        trainer: Trainer | None = None,
        at_once: bool = True,
    ) -> None:
        """`at_once`: it answers closing calls within an inner step."""
        self.peer = peer
        self._at_once = at_once
        self.running = self.rests = False
        self.life = 0
        self.step_time_s = step_time_s
        self._inner_steps = inner_steps
        self._tell = tell
        self.trainer = trainer or Trainer()
        self._started_s = 0.0
        self._first_step = 0
        self._wake_s = math.inf
        self.fragments = [
            LearnerFragment(digest, number, 0, 0, Stride(inner_steps)) for digest, number in bases
        ]

    def resume_counting(self, first_step: int) -> None:
        """Earlier processes of this node made so many steps; ours get other numbers."""
        self._first_step = first_step

    # --- pace ----------------------------------------------------------------------------------------

    def step_at(self, now: float) -> int:
        """Number of inner steps that this learner has ever made."""
        if not self.running or self.rests:
            return self._first_step
        return self._first_step + math.floor((now - self._started_s) / self.step_time_s + TINY_S)

    def _time_of(self, step: int) -> float:
        return self._started_s + (step - self._first_step) * self.step_time_s

    def start(self, now: float, first_step: int, resumed: dict[int, Resumed] | None = None) -> None:
        """A new life: parameters are the daemon's, earlier unmerged steps are gone, unless `resumed` says
        (by fragment) that they were saved with the parameters."""
        again = resumed or {}
        self.running = True
        self.life += 1
        self._started_s, self._first_step = now, first_step
        count = len(self.fragments)
        for index, counters in enumerate(self.fragments):
            for install in counters.installs:
                counters.base, counters.base_number = install.digest, install.number
                self.trainer.install(index, install.number, install.state, "rebase")
            counters.installs.clear()
            counters.asked = counters.encoding = counters.freed = False
            counters.slot = None
            counters.stride = Stride(self._inner_steps, first_step)
            counters.unmerged_from = counters.life_from = again.get(index, (first_step, b""))[0]
            counters.due_step = first_step + max(1, (index + 1) * self._inner_steps // count)
        self.trainer.begin(first_step, again)
        self.plan(now)

    def stop(self, now: float) -> None:
        """The process died; copies that were not yet encoded are gone with it."""
        self._first_step = self.step_at(now)
        self.running = False
        self.trainer.end()
        self._wake_s = math.inf

    def set_pace(self, step_time_s: float, now: float) -> None:
        """Make a step take so long, from the last step boundary on."""
        if self.running:
            step = self.step_at(now)
            self._started_s, self._first_step = self._time_of(step), step
        self.step_time_s = step_time_s
        self._wake_s = math.inf
        self.plan(now)

    def rest(self, rests: bool, now: float) -> None:
        """Make no inner steps from now on, and copy out what is in no contribution; or go on."""
        if self.running:
            self._started_s, self._first_step = now, self.step_at(now)
        self.rests = rests
        self._wake_s = math.inf
        self.plan(now)

    def shift(self, by_s: float) -> None:
        """The process stood still for so long."""
        self._started_s += by_s

    # --- what the daemon asks ------------------------------------------------------------------------

    def request(self, fragment: int, now: float) -> None:
        """Copy the fragment out: now, or at the next boundary."""
        counters = self.fragments[fragment]
        if self._at_once and self.running and not (counters.installs or counters.freed):
            step = self.step_at(now)
            self.trainer.advance(step)
            if self._answer(fragment, step):
                counters.due_step += 1  # the step under way is none of the H
        else:
            counters.asked = True
        self.plan(now)

    def install(self, install: CommittedVersion, now: float) -> None:
        """Take a version over at the next boundary; without a learner, at once."""
        counters = self.fragments[install.fragment]
        counters.installs.append(install)
        if self.running and install.merged is not None and counters.slot == install.merged:
            self.trainer.committed(install.fragment)
        if not self.running:
            self._take_over(counters, now)
        self.plan(now)

    def retire(self, fragment: int, now: float) -> None:
        """The slot's copy will not be merged as it stands."""
        counters = self.fragments[fragment]
        if self.running:
            step = self.step_at(now)
            self.trainer.advance(step)
            if counters.slot is not None:
                counters.stride.given_up(step)
        counters.slot, counters.freed = None, True
        self.trainer.retire(fragment)
        self.plan(now)

    def encoded(self, fragment: int, now: float) -> None:
        """The slot's copy has been encoded."""
        self.fragments[fragment].encoding = False
        if not self.running:
            self._take_over(self.fragments[fragment], now)
        self.plan(now)

    def take_all_over(self, now: float) -> None:
        """Asked to end: every version that was handed over is taken over before anything is saved."""
        for counters in self.fragments:
            counters.encoding = False
            self._take_over(counters, now)

    # --- boundaries ----------------------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Be woken at the next boundary at which something is to be done."""
        if not self.running:
            return
        if self.rests:
            self._plan_at_rest(now)
            return
        following = self.step_at(now) + 1
        step = None
        for counters in self.fragments:
            if counters.asked or (counters.installs and not counters.encoding):
                step = following
                break
            if counters.slot is None:
                due = max(counters.due_step, following)
                step = due if step is None else min(step, due)
        if step is None:
            return
        time_s = self._time_of(step)
        if time_s < self._wake_s - TINY_S:
            self._wake_s = time_s
            self._tell.wake_at(time_s)

    def _plan_at_rest(self, now: float) -> None:
        step = self.step_at(now)
        for counters in self.fragments:
            takes_over = counters.installs and not counters.encoding
            if counters.asked or takes_over or (counters.slot is None and counters.portion(step)):
                self._wake_s = now
                self._tell.wake_at(now)
                return

    def wake(self, now: float) -> None:
        """A step boundary: installs first, then what was asked for or is due."""
        if not self.running or now < self._wake_s - TINY_S:
            return
        self._wake_s = math.inf
        step = self.step_at(now)
        self.trainer.advance(step)
        for index, counters in enumerate(self.fragments):
            self._take_over(counters, now)
            asked, counters.asked = counters.asked, False
            counters.freed = False
            due = self.rests or step >= counters.due_step
            if asked or due:
                self._answer(index, step, asked, due)
        self.plan(now)

    def _answer(self, fragment: int, step: int, asked: bool = True, due: bool = False) -> bool:
        """Copy a fragment out as it is at this step, if there is anything to copy and room for it."""
        counters = self.fragments[fragment]
        if counters.slot is None and (steps := counters.portion(step)):
            first = counters.unmerged_from
            end = first + steps
            matter = self.trainer.copy_out(fragment, end - first)
            counters.slot = Displacement(fragment, self.peer, first, end, counters.base, matter=matter)
            counters.encoding = True
            counters.due_step = step + self._inner_steps
            self._tell.copied_out(counters.slot, due)
            return True
        if asked and not counters.encoding:  # else the copy that is being encoded is the answer
            self._tell.nothing(fragment)
        return False

    def _take_over(self, counters: LearnerFragment, now: float) -> None:
        if counters.encoding:
            return
        step = self.step_at(now)
        if self.running:
            self.trainer.advance(step)
        for install in counters.installs:
            counters.base, counters.base_number = install.digest, install.number
            mine = install.merged is not None and counters.slot == install.merged
            mode: Mode = "overwrite" if install.overwrite else "merged" if mine else "rebase"
            self.trainer.install(install.fragment, install.number, install.state, mode)
            if install.merged is not None:
                counters.unmerged_from = max(counters.unmerged_from, install.merged.end)
                if mine:
                    counters.slot = None
                    counters.stride.merged(install.merged.end - install.merged.first, step)
            elif install.overwrite:
                if counters.unmerged_from < step:
                    self._tell.dropped(install.fragment, counters.unmerged_from, step)
                counters.unmerged_from = step
            counters.due_step = max(step + 1, step + self._inner_steps)
            self._tell.applied(install.fragment, install.number, step)
        counters.installs.clear()


# Buffers.

Content = Displacement | OuterUpdate | PartialSum

MAX_PER_FRAGMENT = 48
"""Buffers alive at one node per fragment, besides the log: own queue, one inbox entry per member, updates."""

MAX_SPILLED_PER_FRAGMENT = KEPT_MOST

PER_GROUP_SIZE = 2
"""More of them for every member that a group should have: groups by hash may be twice as large, and a syncer
has an inbox on every level."""


class TicketBuffers:
    """Opens, lends and closes buffers."""

    def __init__(self, peer: str, fragments: int, group_size: int) -> None:
        self._peer = peer
        self._limit = (MAX_PER_FRAGMENT + PER_GROUP_SIZE * min(group_size, MAX_PER_FRAGMENT)) * fragments
        self._made = 0
        self._contents: dict[int, Content] = {}
        self._spilled: set[int] = set()
        """Buffers that are on the disk."""
        self._spill_limit = MAX_SPILLED_PER_FRAGMENT * fragments

    def __len__(self) -> int:
        """Buffers in memory."""
        return len(self._contents) - len(self._spilled)

    def new(self, content: Content) -> int:
        """A buffer with this content. Raises: Violation when there are too many."""
        self._made += 1
        self._contents[self._made] = content
        if len(self) > self._limit:
            raise Violation("bounded", f"{self._peer} holds {len(self)} buffers")
        return self._made

    def spill(self, ticket: int) -> None:
        """The buffer goes to the disk. Raises: Violation for what is no contribution, and for too many."""
        self.contribution(ticket)
        self._spilled.add(ticket)
        if len(self._spilled) > self._spill_limit:
            raise Violation("bounded", f"{self._peer} has {len(self._spilled)} buffers on its disk")

    def free(self, ticket: int) -> None:
        """The buffer is not needed any more. Raises: Violation when it was freed before."""
        self._spilled.discard(ticket)
        if self._contents.pop(ticket, None) is None:
            raise Violation("tickets", f"{self._peer} frees buffer {ticket}, which it does not hold")

    def contribution(self, ticket: int) -> Displacement:
        """The contribution in a buffer. Raises: Violation when there is none."""
        content = self._contents.get(ticket)
        if not isinstance(content, Displacement):
            raise Violation("tickets", f"{self._peer}: no contribution in buffer {ticket}")
        return content

    def partial(self, ticket: int) -> PartialSum:
        """The partial merge in a buffer. Raises: Violation when there is none."""
        content = self._contents.get(ticket)
        if not isinstance(content, PartialSum):
            raise Violation("tickets", f"{self._peer}: no partial merge in buffer {ticket}")
        return content

    def update(self, ticket: int) -> OuterUpdate:
        """The outer update in a buffer. Raises: Violation when there is none."""
        content = self._contents.get(ticket)
        if not isinstance(content, OuterUpdate):
            raise Violation("tickets", f"{self._peer}: no outer update in buffer {ticket}")
        return content
