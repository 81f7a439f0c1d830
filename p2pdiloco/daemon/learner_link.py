"""Link between the core and the learner process: copies out, encodings, and bases to train from.

A fragment that the learner copied out is encoded here (`tensors.outer_update`) and becomes a
contribution of the core. Versions go the other way, as the base that the learner measures against."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.events import CommitVersion
from p2pdiloco.core.base import Shared
from p2pdiloco.daemon.course import LearnerCount
from p2pdiloco.daemon.learner_host import TICK_S, Failures, LearnerExited, MakeHost, OnEvent, Silence
from p2pdiloco.daemon.payloads import Compute, Tickets
from p2pdiloco.daemon.run_files.saved_state import Resume
from p2pdiloco.errors import UserError
from p2pdiloco.learner import channel as ch
from p2pdiloco.learner.channel import InstallMode
from p2pdiloco.learner.lifeline import SAVE_S
from p2pdiloco.ports import PostEvent
from p2pdiloco.util import loop_s

logger = logging.getLogger(__name__)
STEP_AT_MOST_S = 60.0
"""Longest inner step whose end a leaving node waits for."""


@dataclass
class LearnerLink:
    """Link to the learner: starts, feeds and restarts it, and translates its events for the core."""

    _make_host: MakeHost
    _compute: Compute
    _tickets: Tickets
    _state_path: Path
    """File of the learner's state."""
    _post: PostEvent
    _tell: OnEvent
    """Function that hears what the learner says, too."""
    _spawn: Callable[..., asyncio.Task[None]]
    _swarm: Shared

    def __post_init__(self) -> None:
        self._host = self._make_host(self._on_event)
        self._learner_count = LearnerCount(self._swarm)
        self._slots = [Slot() for _ in self._compute.vault.layouts]
        self._life = 0
        """Number of learner processes: what was started for an earlier one is dropped."""
        self._ready = self._gives_up = self._appraises = False
        self.ready = asyncio.Event()
        """Event that is set while a learner makes inner steps."""
        self._stopping = False
        self._moved = asyncio.Event()
        """Event that is set when the learner took a version over, or ended."""
        self._saved_at_end = False
        self._failures = Failures()
        self._silence = Silence()
        self._saving = False
        """True: it was asked for its state and has not said that it is written."""
        self.questions = Questions(self._ask, lambda: self._answers and self._appraises)
        self._every = 1
        self._share: ch.DataShare | None = None
        self._left: Resume | None = None
        self._begun = False
        self._said_learners = 1
        self.device = ""
        self.status: ch.Status | None = None
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """Process id of the learner."""
        return self._host.pid

    @property
    def handed_over(self) -> bool:
        """True: it rests for its machine's owner, and all that it made is merged."""
        return self.status is not None and self.status.handed_over

    # --- life ----------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Start the process ahead, while the node catches up."""
        await self._host.prepare()

    async def start(self, left: Resume | None = None) -> None:
        """Start a learner from the vault's versions, with what its state file has:
        of displacements what an earlier life `left`. Learners are given that until one contributes or
        saves."""
        self._left, self._begun = left or self._left, True
        self._life += 1
        self._slots = [Slot() for _ in self._slots]
        bases = [await self._compute.run(self._compute.post, f, 0) for f in range(len(self._slots))]
        path = self._state_path if self._state_path.exists() else None
        modes = self._left.modes() if path and self._left else ()
        await self._host.start(bases, path, modes)
        if self._share is not None:
            self._host.send(ch.ShareData(self._share))
        for fragment, base in enumerate(bases):
            self._post(ev.LearnerApplied(fragment, base.number, 0))
        for fragment, base in enumerate(bases):  # versions committed between reading the vault and its start
            if self._compute.vault.version(fragment) != base.number:
                self._slots[fragment].lags()

    async def _use_up(self) -> bool:
        """Use up what an earlier life left: no later learner takes it up. False: it could not be."""
        try:
            if self._left is not None:
                await self._left.use_up()
            self._left = None
        except UserError as error:
            if not self.fatal.done():
                self.fatal.set_exception(error)
        return self._left is None

    @property
    def listens_in_s(self) -> float:
        """Time until the learner hears that it is to end: to the end of its inner step, if it cannot give
        that up."""
        if not self._ready or self._gives_up or self.status is None:
            return 0.0
        return min(STEP_AT_MOST_S, 1.5 * self.status.step_time_s)

    async def stop(self, timeout_s: float) -> bool:
        """Save and end the learner, in that time and `listens_in_s`. True: what it had at its end, not
        earlier, is on the disk, and nothing of it is in a version already."""
        step_s = self.listens_in_s
        ends_s = loop_s() + timeout_s + step_s
        if self._ready:
            self._host.send(ch.StopStepping())
        told = await self._told_everything(timeout_s / 2 + step_s)
        self._stopping = True
        saves = self._ready and await self._use_up() and self._ready
        left_s = ends_s - loop_s()
        if saves:
            await self._host.stop(self._state_path, left_s)
        else:
            await self._host.stop(None, min(left_s, SAVE_S))
        return self._saved_at_end and told

    async def _told_everything(self, timeout_s: float) -> bool:
        """Wait until the learner has taken over all that was committed. A copy of its own that was merged
        just now must not be saved as unmerged: it would be merged a second time after the return."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._ready and any(slot.installing or slot.next for slot in self._slots):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            logger.warning(
                "the learner did not take over the last versions in time; its state is not resumed"
            )
            return False
        return True

    def close(self) -> None:
        """Close the host after the learner's end: no other one comes."""
        self._stopping = True
        self._host.close()

    async def save(self) -> None:
        """Ask the learner for its state at the next boundary, for its moments (a program keeps its own)."""
        if self._can_save and await self._use_up() and self._can_save:
            self._saving = self._host.send(ch.Save(self._state_path))

    @property
    def _can_save(self) -> bool:
        return self._ready and not (self._saving or self._stopping or self._host.guest)

    @property
    def _answers(self) -> bool:
        return self._ready and not self.handed_over

    def _ask(self, question: ch.Command) -> bool:
        return self._answers and self._host.send(question)

    def take_part(self, every: int) -> None:
        """Let the learner contribute to every so-and-so-many-th version only; 1: to all. Holds for later
        ones too."""
        self._every = every
        if self._ready:
            self._host.send(ch.TakePart(every))

    def follow(self, course: ch.FollowCourse | ch.SpareMachine) -> None:
        """Let learners go by this course of the run, or by this wish of the machine's owner."""
        self._host.follow(course)

    def share_data(self, share: ch.DataShare) -> None:
        """Tell the learner who else reads its data, and what of it is begun. Holds for later ones too."""
        self._share = share
        if self._ready:
            self._host.send(ch.ShareData(share))

    # --- from the core -------------------------------------------------------------------------------

    def request(self, fragment: int) -> None:
        """Carry out a closing call: copy out what there is. If a version is about to be taken over, then
        after it."""
        if self._slots[fragment].call(self._ready):
            self._copy_out(fragment)

    def _copy_out(self, fragment: int) -> None:
        self._slots[fragment].copies()
        if not self._ready or not self._host.send(ch.CopyOut(fragment)):
            self._post(ev.NothingToContribute(fragment))

    def retire(self, fragment: int, ticket: int) -> None:
        """Free the slot: the copy in it will not be merged as it stands."""
        self._tickets.release(ticket)
        if self._slots[fragment].freed(ticket):
            self._host.send(ch.FreeSlot(fragment))
            self._spawn(self._compute.run(self._compute.vault.own.discard_residual, fragment))

    def committed(self, effect: CommitVersion) -> bool:
        """Let the learner go over to a version that is being committed; return whether its copy is in it."""
        self._learner_count.committed(effect)
        return self._slots[effect.version.header.fragment].committed(effect.merged_ticket, effect.overwrite)

    def after_commit(self, fragment: int) -> None:
        """Post the new version, which the vault holds, unless an install is under way."""
        if self._ready and self._slots[fragment].begin_install():
            self._spawn(self._install(fragment, self._life))

    async def _install(self, fragment: int, life: int) -> None:
        buffer = 1 - self._slots[fragment].buffer
        base = await self._compute.run(self._compute.post, fragment, buffer)
        mode = self._slots[fragment].installing
        if life == self._life and mode is not None:
            self._host.send(ch.Install(fragment, base.number, buffer, mode, base.tokens))
            self._slots[fragment].told()
            if self._slots[fragment].wanted:
                self._copy_out(fragment)

    # --- from the learner ----------------------------------------------------------------------------

    def _on_event(self, event: ch.LearnerEvent | LearnerExited) -> None:
        if self._silence.heard() and not isinstance(event, LearnerExited):
            logger.info("the learner is heard of again")
        match event:
            case ch.Ready():
                self._ready, self.device, self._gives_up = True, event.device, event.gives_up
                self._appraises = event.appraises
                self._failures.ready(loop_s())
                self.ready.set()
                self._said_learners = 1
                self.count_learners()
                self._spawn(self._listen(self._life))
                if self._every > 1:
                    self._host.send(ch.TakePart(self._every))
                for fragment in range(len(self._slots)):
                    self.after_commit(fragment)
            case ch.CopiedOut():
                self._slots[event.fragment].copied()
                self._spawn(self._encode(event, self._life))
            case ch.NothingToCopy():
                if self._slots[event.fragment].had_nothing(event.slot_in_use):
                    self._post(ev.NothingToContribute(event.fragment))
            case ch.Applied():
                slot = self._slots[event.fragment]
                slot.applied()
                self._moved.set()
                if slot.wanted and slot.next is None:
                    self._copy_out(event.fragment)
                self._post(ev.LearnerApplied(event.fragment, event.number, event.inner_step))
                self.after_commit(event.fragment)
            case ch.Status():
                self.status = event
                if event.loss is not None:
                    self._failures.made_step()
                self._post(core_status(event))
                self.count_learners()
            case ch.Evaluated() | ch.Appraised():
                self.questions.heard(event)
            case ch.StateSaved():
                self._saving = False
                self._saved_at_end = event.ok and event.last
            case LearnerExited():
                self._exited(event)
            case _:
                pass
        self._tell(event)

    def count_learners(self) -> None:
        """Tell the learner how many there are, if that has changed."""
        if not self._ready:
            return
        count = self._learner_count.at(loop_s())
        if count != self._said_learners and self._host.send(ch.Learners(count)):
            self._said_learners = count

    async def _encode(self, copied: ch.CopiedOut, life: int) -> None:
        """Encode what was copied out, if it is finite, and no overwrite that comes makes the copy void."""
        fragment, slot = copied.fragment, self._slots[copied.fragment]
        void, not_finite = slot.void, False
        if not void:
            try:
                encoded = await self._compute.run(self._compute.encode, fragment, copied.base_buffer)
            except ValueError as error:
                if slot.first_not_finite():
                    what = {"fragment": fragment, "error": str(error)}
                    logger.error("fragment %(fragment)d: parameters are kept out: %(error)s", what)
                not_finite = True
        if not await self._use_up() or life != self._life or self._stopping:
            return  # a stopping learner saves this work; sent as well, it could be merged twice
        if not slot.encoded() or void or not_finite:
            if not_finite and not slot.void:  # an overwrite frees it by itself
                self._host.send(ch.FreeSlot(fragment, not_finite))
            self._post(ev.NothingToContribute(fragment))
            return
        ticket = self._tickets.put(encoded.payload)
        slot.holds(ticket)
        self._post(
            ev.ContributionReady(
                fragment,
                ticket,
                copied.tokens,
                copied.inner_steps,
                encoded.digest,
                len(encoded.payload),
                copied.due,
                encoded.length,
            )
        )

    def _exited(self, exited: LearnerExited) -> None:
        self._ready = False
        self._moved.set()
        self.questions.ended()
        self._saving = False
        self.ready.clear()
        self._life += 1
        self._slots = [Slot() for _ in self._slots]
        if self._stopping or not self._begun:
            self._failures.reset()
        if self._stopping:
            return
        if not self._begun:  # a process that was started ahead: `start` makes another
            logger.warning("the learner ended before it was needed (%s)", exited.reason)
            return
        self._post(ev.LearnerLost())
        stepped = self._failures.stepped
        pause_s = self._failures.ended(exited, self._host.guest, loop_s())
        if pause_s == math.inf:
            if not self.fatal.done():
                verb = "go on" if stepped else "start"
                self.fatal.set_exception(
                    UserError(f"the learner cannot {verb}: {exited.reason}", exited.hint)
                )
            return
        if self._host.guest:
            logger.warning("%s; waiting for another", exited.reason)
        else:
            less = " with half as many tokens at a time" if exited.halved else ""
            words = "the learner ended (%(reason)s); starting it again%(less)s in %(pause_s).1f s"
            logger.warning(words, {"reason": exited.reason, "less": less, "pause_s": pause_s})
        self._spawn(self._restart(pause_s))

    async def _listen(self, life: int) -> None:
        """End a learner that hangs, so that another one trains. A program is its owner's to end."""
        while True:
            await asyncio.sleep(TICK_S)
            if life != self._life or self._stopping:
                return
            step_s = self.status.step_time_s if self._failures.stepped and self.status else 0.0
            found = self._silence.tick(step_s)
            if not found:
                continue
            what = {"silent_s": self._silence.silent_s}
            logger.warning("nothing has been heard of the learner for %(silent_s).0f s", what)
            if found == "hangs" and not self._host.guest:
                self._host.kill(f"it hung: nothing was heard of it for {self._silence.silent_s:.0f} s")
                return

    async def left_alone(self, for_s: float) -> None:
        """Wait until no learner has been here for so long."""
        await self._host.left_alone(for_s)

    async def _restart(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if not self._stopping and not self._host.running:
            await self.start()


SEVERITY: dict[InstallMode, int] = {"rebase": 0, "merged": 1, "overwrite": 2}


class Slot:
    """Slot of a fragment: whose which buffer is, what the learner is to take over, and its copy on its
    way."""

    def __init__(self) -> None:
        self.buffer = 0
        """Number of the base buffer that the learner's parameters are measured against."""
        self.installing: InstallMode | None = None
        self.next: InstallMode | None = None
        self.ticket: int | None = None
        """Ticket of the contribution whose copy occupies the slot."""
        self.encoding = False
        """True: a copy is being encoded, whose contribution is the answer to a closing call."""
        self.sent = False
        """True: the learner has been told of the install under way."""
        self.wanted = False
        """True: a closing call waits for an install, before which the learner has no room for another
        copy."""

        self._not_finite = False

    def call(self, ready: bool) -> bool:
        """Take in a closing call. True: it is to be answered now; False: a version is about to be taken over,
        and it waits for that."""
        self.wanted = ready and not self.sent and bool(self.installing or self.next)
        return not self.wanted

    def copies(self) -> None:
        """Note that the learner is asked for a copy: no closing call waits."""
        self.wanted = False

    def had_nothing(self, in_use: bool) -> bool:
        """Take in that the learner had no copy to give, `in_use`: for lack of room. True: that is the answer
        to the closing call."""
        # It crossed the version that makes room: ask again when the learner has that.
        free = in_use and self.ticket is None and not self.encoding
        self.wanted = free and bool(self.installing)
        return not self.encoding and not self.wanted

    def copied(self) -> None:
        """Note that a copy is here, to be encoded."""
        self.encoding = True

    def encoded(self) -> bool:
        """Note that the copy is encoded. False: it is void."""
        self.encoding = False
        return not self.void

    def first_not_finite(self) -> bool:
        """Note that a copy was not finite. True: none was before, since one was sent."""
        before, self._not_finite = self._not_finite, True
        return not before

    def holds(self, ticket: int) -> None:
        """Note under which ticket the copy goes out."""
        self.ticket, self._not_finite = ticket, False

    def freed(self, ticket: int) -> bool:
        """Free the slot, if the copy in it has that ticket. False: it has not."""
        if self.ticket != ticket:
            return False
        self.ticket = None
        return True

    def lags(self) -> None:
        """Note that the learner began with an older version than the newest."""
        self.next = self.next or "rebase"

    def begin_install(self) -> bool:
        """Begin to take over what is next. False: nothing is, or an install is under way."""
        if self.installing is not None or self.next is None:
            return False
        self.installing, self.next = self.next, None
        return True

    def told(self) -> None:
        """Note that the learner has been told of the install under way."""
        self.sent = True

    def applied(self) -> None:
        """Note that the learner has taken the new version over, into its other buffer."""
        self.buffer, self.installing, self.sent = 1 - self.buffer, None, False

    def committed(self, merged_ticket: int | None, overwrite: bool) -> bool:
        """Note that a new version is being committed, which the next install takes over.

        Returns whether our copy is in it.
        """
        merged = merged_ticket is not None and merged_ticket == self.ticket
        mode: InstallMode = "overwrite" if overwrite else "merged" if merged else "rebase"
        if mode != "rebase":
            self.ticket = None
        if self.next is None or SEVERITY[mode] > SEVERITY[self.next]:
            self.next = mode
        return merged

    @property
    def void(self) -> bool:
        """True: an overwrite that the learner has not yet taken over makes its copy void."""
        return "overwrite" in (self.installing, self.next)


@dataclass
class Questions:
    """Questions to the learner of one node: one for the held-out loss at a time, and one about each file.

    It answers between two inner steps. Whoever waits is told if it ends first.
    """

    _ask: Callable[[ch.Command], bool]
    """Function that posts a question; False: there is nobody to take it."""
    _appraises: Callable[[], bool]
    """Function that tells whether a learner is here that can measure contributions."""

    def __post_init__(self) -> None:
        self._waits: dict[Path | None, asyncio.Future[ch.LearnerEvent | None]] = {}
        """Waits for answers, by the question's file; None: for the held-out loss."""

    async def evaluate(self) -> float | None:
        """Let it measure the held-out loss of the global parameters, and wait until it has. Returns the
        seconds that it took; None: it has ended, takes no commands, or rests for its owner."""
        found = await self._answer(ch.Evaluate(), None)
        return found.took_s if isinstance(found, ch.Evaluated) else None

    @property
    def appraises(self) -> bool:
        """True: there is a learner that can measure contributions."""
        return self._appraises()

    async def appraise(self, question: ch.Appraise) -> ch.Appraised | None:
        """Let it measure two contributions, and wait until it has. None: as above. What it says of a file
        for which nobody waits any more counts for nothing."""
        found = await self._answer(question, question.path)
        return found if isinstance(found, ch.Appraised) else None

    async def _answer(self, question: ch.Command, file: Path | None) -> ch.LearnerEvent | None:
        self._waits[file] = waits = asyncio.get_running_loop().create_future()
        try:
            return await waits if self._ask(question) else None
        finally:
            if self._waits.get(file) is waits:
                del self._waits[file]

    def heard(self, event: ch.Evaluated | ch.Appraised) -> None:
        """Take in what the learner says."""
        waits = self._waits.pop(event.path if isinstance(event, ch.Appraised) else None, None)
        if waits is not None and not waits.done():
            waits.set_result(event)

    def ended(self) -> None:
        """Take in that the learner has ended: it answers nothing any more."""
        for waits in self._waits.values():
            if not waits.done():
                waits.set_result(None)
        self._waits.clear()


def core_status(found: ch.Status) -> ev.LearnerStatus:
    """Translate a status. Who rests for its machine's owner, with all handed over, is no learner for the
    others: no round waits for it."""
    return ev.LearnerStatus(
        running=not found.handed_over,
        inner_step=found.inner_step,
        tokens_total=found.tokens_total,
        tokens_per_s=found.tokens_per_s,
        step_time_s=found.step_time_s,
        loss=found.loss,
    )
