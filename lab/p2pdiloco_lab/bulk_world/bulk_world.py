"""A bulk world: members that follow a chain through faults, and the rules that always hold."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import ContributionHeader
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.daemon import wire
from p2pdiloco.tensors.merge import Payload, digest_of
from p2pdiloco_lab.bulk_world.bulk_member import BulkMember, left_over, too_large
from p2pdiloco_lab.bulk_world.bulk_plan import (
    INTERVAL_S,
    BulkFault,
    BulkLinks,
    BulkPlan,
    BulkResult,
    Ledger,
    draw_plan,
    in_virtual_time,
)
from p2pdiloco_lab.memory_net import MemoryNetwork
from p2pdiloco_lab.simulation.seed_plan import random_stream
from p2pdiloco_lab.simulation.seed_report import Trace, Violation

LOOK_S = 0.1
"""Pause between two looks of a fault whether its member has started."""
REST_S = 150.0
"""Longer than anything is kept that belongs to a transfer."""


class BulkWorld:
    """Made and played inside a virtual loop."""

    def __init__(self, plan: BulkPlan, folder: Path, trace: Trace) -> None:
        self.plan, self.folder, self.trace = plan, folder, trace
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_error)
        self.ledger = Ledger(plan)
        self.rules = Rules(self)
        self.ways = BulkLinks(plan)
        self.hub = MemoryNetwork(self.ways)
        self.members: dict[str, BulkMember] = {}
        """The present life of each, or the last; the order in which they first started."""
        self.lives = dict.fromkeys((spec.name for spec in plan.members), 0)
        self._disks: dict[str, list[int | None]] = {}
        self._dead: set[str] = set()
        self._lying: list[BulkFault] = []
        self._syncers = [""] * plan.fragments
        self._rng: Random = random_stream(plan.seed, "bulk world")
        self._changed = [asyncio.Event() for _ in range(plan.fragments)]
        self.over = False
        """No learner begins anything new."""
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self.fault_kinds: dict[str, int] = {}
        self._moved_bytes: Counter[str] = Counter()
        """Taken and given by a member, since a fault last began to look."""
        self._moved = asyncio.Event()

    @property
    def moved_bytes(self) -> int:
        """Payload bytes that the present lives of all members received."""
        return sum(member.transport.payload_bytes()[1] for member in self.members.values())

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    def fail(self, violation: Violation) -> None:
        """A rule is broken: the first one ends the world."""
        if not self.failure.done():
            self.failure.set_exception(violation)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.rules.error("the loop", context.get("exception") or RuntimeError(context["message"]))

    def moved(self, taker: str, giver: str, nbytes: int) -> None:
        """Note that so many bytes of an update or a state went from one to the other."""
        self._moved_bytes[taker] += nbytes
        self._moved_bytes[giver] += nbytes
        self._moved.set()

    # --- what members know of each other ---------------------------------------------------------------

    def alive(self) -> list[BulkMember]:
        """List who is there."""
        return [member for name, member in self.members.items() if name not in self._dead]

    def listed(self) -> list[BulkMember]:
        """List who was there lately: nobody is told that somebody died."""
        return list(self.members.values())

    def newest(self, fragment: int, asker: BulkMember) -> int | None:
        """The newest version that anybody else has."""
        found = [m.numbers[fragment] for m in self.alive() if m is not asker]
        known = [number for number in found if number is not None]
        mine = asker.numbers[fragment]
        return max([*known, *([] if mine is None else [mine])], default=None)

    def syncer(self, fragment: int) -> str:
        """Name who makes the next version."""
        return self._syncers[fragment]

    def tell(self, fragment: int) -> None:
        """Somebody has a newer version of it."""
        self._changed[fragment].set()
        self._changed[fragment] = asyncio.Event()

    async def news(self, fragment: int) -> None:
        """Wait until then."""
        await self._changed[fragment].wait()

    def lies(self, peer: str) -> bool:
        """Tell whether what that member gives is false at this moment."""
        return any(fault.member == peer and fault.at_s <= self.now < fault.until_s for fault in self._lying)

    # --- a seed ----------------------------------------------------------------------------------------

    async def play(self) -> str:
        """Name what did not happen in time; mostly nothing. Raises: Violation."""
        playing = self._loop.create_task(self._play())
        either: set[asyncio.Future[Any]] = {playing, self.failure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.failure.done():
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            self.failure.result()
        self.failure.cancel()
        return playing.result()

    async def _play(self) -> str:
        jobs = [self._loop.create_task(self._starts(spec.name)) for spec in self.plan.members]
        await asyncio.sleep(0)
        chains = [self._loop.create_task(self._chain(f)) for f in range(self.plan.fragments)]
        jobs += chains + [self._loop.create_task(self._strike(fault)) for fault in self.plan.faults]
        try:
            await asyncio.sleep(self.plan.faults_until_s)
            self.trace.decision(self.now, "", "faults are over")
            deadline_s = self.now + self.plan.settle_s
            while stuck := self._missing(jobs):
                if self.now > deadline_s:
                    return stuck
                await asyncio.sleep(0.5)
            await asyncio.sleep(REST_S)
            gc.collect()  # a seed is played without: scratch is given back by whoever forgets it last
            for member in self.alive():
                self.rules.at_rest(member)
            await self._end()
            return ""
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def _missing(self, jobs: list[asyncio.Task[None]]) -> str:
        """Name what has not happened yet."""
        for job in jobs:
            if job.done() and not job.cancelled():
                job.result()
        if not all(job.done() for job in jobs):
            return "not all members are back, or not all versions made"
        last = self.plan.versions
        for member in self.alive():
            for fragment, number in enumerate(member.numbers):
                if number != last:
                    return f"{member.name} has version {number} of fragment {fragment}, the newest is {last}"
        self.over = True
        for member in self.alive():
            member.drop_inbox()
        for member in self.alive():
            if member.learning:
                return f"{member.name} has a contribution that nobody took"
        return ""

    async def _end(self) -> None:
        """Everybody goes; nobody leaves anything behind."""
        for member in list(self.members.values()):
            member.kill()
            await member.transport.close()
        await asyncio.sleep(1.0)
        here = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not here and not task.done()]
        names = sorted(str(task.get_coro()) for task in left if not _of_world(task))
        if names:
            self.rules.broken("rest", f"tasks are left: {', '.join(names)[:200]}")

    async def _starts(self, name: str) -> None:
        spec = next(spec for spec in self.plan.members if spec.name == name)
        await asyncio.sleep(spec.starts_s)
        first: list[int | None] = [None if spec.starts_s else 0] * self.plan.fragments
        await self._start(name, first)

    async def _start(self, name: str, numbers: list[int | None]) -> None:
        spec = next(spec for spec in self.plan.members if spec.name == name)
        member = BulkMember(self, spec, self.lives[name], numbers)
        self.members[name] = member
        self._dead.discard(name)
        member.say("starts with " + ", ".join("nothing" if n is None else f"version {n}" for n in numbers))
        await member.start()
        for fragment in range(self.plan.fragments):
            self.tell(fragment)

    async def _chain(self, fragment: int) -> None:
        """The versions of a fragment, one after the other, each made by somebody who has the one before."""
        for number in range(1, self.plan.versions + 1):
            made = False
            pause_s = self._rng.uniform(*INTERVAL_S)
            while not made:
                able = [m for m in self.alive() if m.numbers[fragment] == number - 1]
                if not able:
                    await asyncio.sleep(0.5)
                    continue
                syncer = self._rng.choice(able)
                self._syncers[fragment] = syncer.name
                await asyncio.sleep(pause_s)
                pause_s = 1.0
                if syncer.name in self._dead or self.members[syncer.name] is not syncer:
                    continue
                making = syncer.spawn(syncer.make(fragment, number))
                await asyncio.wait({making})
                made = not making.cancelled()

    # --- faults ----------------------------------------------------------------------------------------

    async def _strike(self, fault: BulkFault) -> None:
        await asyncio.sleep(fault.at_s)
        until_s, a, b = fault.until_s, fault.member, fault.other
        match fault.kind:
            case "kill" | "wipe":
                await self._kill(fault)
                return
            case "break":
                if await self._moment(fault) is None:
                    return
                for name in self.lives:
                    self.hub.break_off(a, name)
            case "cut":
                self.hub.cut(a, b)
            case "hold":
                self.ways.hold(a, b, until_s)
            case "stall":
                for name in self.lives:
                    self.ways.hold(a, name, until_s)
            case "slow":
                self.ways.slow_down(a, 20.0)
            case "lies":
                self._lying.append(fault)
        self._note(fault)
        await asyncio.sleep(max(0.0, until_s - self.now))
        if fault.kind == "cut":
            self.hub.heal(a, b)
        elif fault.kind == "slow":
            self.ways.slow_down(a, 1 / 20.0)

    def _note(self, fault: BulkFault) -> None:
        self.fault_kinds[fault.kind] = self.fault_kinds.get(fault.kind, 0) + 1
        whom = f", {fault.other}" if fault.kind in ("cut", "hold") else ""
        self.trace.decision(self.now, fault.member, f"fault: {fault.kind}{whom} until {fault.until_s:.3f}")

    async def _moment(self, fault: BulkFault) -> BulkMember | None:
        """The member, in the middle of what it takes or gives, or when it is time; None: it is not there."""
        name = fault.member
        while (member := self.members.get(name)) is None or name in self._dead:
            if self.now >= fault.until_s:
                return None
            await asyncio.sleep(LOOK_S)
        self._moved_bytes[name] = 0
        enough = fault.part * 8 * self.plan.numel
        with suppress(TimeoutError):
            async with asyncio.timeout_at(fault.until_s):
                while self._moved_bytes[name] < enough:
                    self._moved.clear()
                    await self._moved.wait()
        if name in self._dead or self.members[name] is not member:
            return None
        return member

    async def _kill(self, fault: BulkFault) -> None:
        name, member = fault.member, await self._moment(fault)
        if member is None:
            return
        self._note(fault)
        self._dead.add(name)
        member.kill()
        self.lives[name] += 1
        numbers = member.numbers
        if fault.kind == "wipe" and all(self._elsewhere(name, f, n) for f, n in enumerate(numbers)):
            numbers = [None] * self.plan.fragments
        await asyncio.sleep(max(0.5, fault.until_s - self.now))
        await self._start(name, list(numbers))

    def _elsewhere(self, name: str, fragment: int, number: int | None) -> bool:
        """Tell whether the version is not lost with that member's disk."""
        others = [m.numbers[fragment] for m in self.listed() if m.name != name]
        return number is None or any(n is not None and n >= number for n in others)


def _of_world(task: asyncio.Task[Any]) -> bool:
    return any(name in repr(task.get_coro()) for name in ("BulkWorld.", "_played"))


def run_bulk_seed(
    seed: int,
    mix: str | None = None,
    members: int | None = None,
    write: Callable[[str], None] | None = None,
) -> BulkResult:
    """Play one seed; `write` gets the trace line by line.

    Memory that only cycles hold is looked for at fixed moments: scratch is given back by whoever forgets it
    last, and the same seed must do the same in every process."""
    collects = gc.isenabled()
    gc.disable()
    gc.freeze()  # only what the world makes is looked through
    try:
        return _played(draw_plan(seed, mix, members), Trace(write))
    finally:
        gc.collect()
        gc.unfreeze()
        if collects:
            gc.enable()


def _played(plan: BulkPlan, trace: Trace) -> BulkResult:
    rng = random_stream(plan.seed, "jobs")

    def job_s() -> float:
        usual_s = rng.uniform(0.0, plan.mix.job_s)
        return usual_s * 50 if rng.random() < 0.02 else usual_s

    async def play(folder: Path) -> BulkResult:
        world = BulkWorld(plan, folder, trace)
        stuck, violation, detail = "", "", ""
        try:
            stuck = await world.play()
        except Violation as broken:
            violation, detail = broken.rule, str(broken)
        finally:
            for member in world.members.values():
                member.close()
        return BulkResult(
            seed=plan.seed,
            mix=plan.mix_name,
            members=len(plan.members),
            digest=trace.digest(),
            virtual_s=round(world.now, 3),
            versions=len(world.ledger.versions) - plan.fragments,
            moved_bytes=world.moved_bytes,
            faults=world.fault_kinds,
            violation=violation,
            detail=detail,
            stuck=stuck,
            tail=trace.tail() if violation or stuck else (),
        )

    with TemporaryDirectory() as folder:
        return in_virtual_time(play(Path(folder)), job_s)


# Rules.

LIARS_WORDS = frozenset({"wrong-digest", "digest-differs", "version-signature", "garbage", "wrong-version"})
"""Offences that only a liar commits."""
LEFT_OUT_S = 60.0
"""Time for which whoever gave a part of something that was wrong is not asked as a helper."""
KEEP_S = 100.0
"""Time for which what came of an update is kept at least."""
DEGREE = 2
LARGE_BYTES = 256 * 1024
"""Size from which on an update is passed on."""
Key = tuple[str, int, bytes]
"""BulkMember, its life, digest of a version's header."""


class Rules:
    """Looks at what is delivered, asked and left over. The first broken rule ends the world."""

    def __init__(self, world: BulkWorld) -> None:
        self._world = world
        self.liars = any(fault.kind == "lies" for fault in world.plan.faults)
        self._came: Counter[tuple[Key, str]] = Counter()
        """Bytes of a version's update or state."""
        self._since_s: dict[tuple[Key, str], float] = {}
        self._damaged: list[tuple[str, str, int, int, int, int, float]] = []
        """Lies that were taken: liar, member, its life, fragment, number, which fetch, when."""
        self._delivered: dict[tuple[str, int, int, int], int] = {}
        """BulkMember, life, fragment, number -> the fetch in which an update came."""
        self.insisted: Counter[tuple[int, int]] = Counter()
        """(fragment, number) -> requests for its update that its syncer has to answer with bytes."""

    def broken(self, rule: str, detail: str) -> None:
        """A rule does not hold."""
        self._world.fail(Violation(rule, detail))

    def error(self, peer: str, error: BaseException) -> None:
        """A task or a handler ended with an error that nobody expected."""
        if isinstance(error, Violation):
            self._world.fail(error)
        else:
            self.broken("no-error", f"{peer}: {error!r}")

    # --- what is delivered -----------------------------------------------------------------------------

    def update_delivered(self, member: BulkMember, version: SignedVersion, payload: Payload) -> None:
        """An update goes to the core side."""
        header = version.header
        if version != self._world.ledger.versions.get((header.fragment, header.number)):
            self.broken("true-version", f"{member.name} took version {header.number} that nobody made")
        if digest_of(payload) != header.update_digest:
            self.broken("sound", f"{member.name} took an update {header.number} with a wrong digest")
        fetch = member.fetching.get(header.fragment, 0)
        self._delivered[member.name, member.life, header.fragment, header.number] = fetch
        self._only_missing(member, header, "update", header.update_bytes)

    def same_state(self, member: BulkMember, version: SignedVersion, digest: bytes) -> None:
        """The state that an update leads to is everybody's."""
        if digest != version.header.state_digest:
            self.broken("equal-state", f"{member.name} reached another state {version.header.number}")

    def committed(self, member: BulkMember, version: SignedVersion) -> None:
        """A version is a member's state now."""
        header = version.header
        self.same_state(member, version, member.vault.state_digest_of(header.fragment, header.number))
        known = self._world.ledger.states.get((header.fragment, header.number))
        if known is None or [*map(bytes, member.vault.state_buffers(header.fragment))] != list(known):
            self.broken("sound", f"{member.name} took a state {header.number} with other bytes")
        self._only_missing(member, header, "state", 8 * self._world.ledger.layouts[0].numel)
        outgrown = too_large(member)
        if outgrown:
            self.broken("bounded", f"{member.name}: {outgrown}")

    def contribution_delivered(self, member: BulkMember, label: ContributionHeader, payload: Payload) -> None:
        """A contribution goes to the core side."""
        if digest_of(payload) != label.payload_digest:
            self.broken("sound", f"{member.name} took a contribution of {label.learner} with a wrong digest")
        if member.inbox.count(label) != 1:
            self.broken("once", f"{member.name} got {label.stamp} of {label.learner} again")

    def answered(self, member: BulkMember, syncer: str, label: ContributionHeader, verdict: Verdict) -> None:
        """A learner got the syncer's word."""
        there = self._world.members.get(syncer)
        lost = (
            there is None or there.life != self._world.lives[syncer] or there.born_s > self._world.now - 30.0
        )
        if verdict.taken and not lost and there is not None and not there.inbox.count(label):
            self.broken("true-word", f"{syncer} told {member.name} that {label.stamp} is there")

    def broken_off(self, member: BulkMember, label: ContributionHeader, verdict: Verdict) -> None:
        """A push did not end well."""
        if verdict.counted and not self.liars:
            self.broken("honest", f"{member.name} found a contribution of {label.learner} {verdict}")

    def failed(self, member: BulkMember, fragment: int, giver: str, why: ev.FetchFailed) -> None:
        """A fetch did not end well."""
        if not why.failure.innocent and not self.liars:
            self.broken("honest", f"{member.name} found what {giver} gave of {fragment} {why.detail}")

    # --- how much is moved -----------------------------------------------------------------------------

    def came(self, member: BulkMember, version: VersionHeader, nbytes: int) -> None:
        """Count bytes of a version that were pulled."""
        state = member.is_copying(version.fragment)
        key = (member.name, member.life, version.digest()), "state" if state else "update"
        self._came[key] += nbytes
        self._since_s.setdefault(key, self._world.now)

    def _only_missing(self, member: BulkMember, header: VersionHeader, kind: str, size: int) -> None:
        """Check that what is here was not asked for again. Excepted is what was forgotten for its age or for
        want of memory, and, where somebody lies, what was spoiled."""
        key = (member.name, member.life, header.digest()), kind
        came, since_s = self._came.pop(key, 0), self._since_s.pop(key, self._world.now)
        aged = kind == "update" and self._world.now - since_s > KEEP_S
        if came > size and not (member.spec.tight or aged or self.liars):
            what = f"{kind} {header.number} of fragment {header.fragment}"
            self.broken("only-missing", f"{member.name} pulled {came} bytes of {what}, which has {size}")

    def gave(self, member: BulkMember) -> None:
        """Check that nobody gives a large update of its own much more than twice where nothing goes wrong."""
        made = [v.header for v in self._world.ledger.versions.values() if v.header.syncer == member.name]
        if self._world.plan.faults or not made or made[0].update_bytes < LARGE_BYTES:
            return
        most = sum(h.update_bytes * (DEGREE + self.insisted[h.fragment, h.number]) for h in made)
        given = member.transfers.fanout.given_bytes
        if given > most:
            self.broken("fan-out", f"{member.name} gave {given} bytes of its updates, at most {most}")

    # --- who is asked ----------------------------------------------------------------------------------

    def asked(self, member: BulkMember, sender: str, pull: wire.PullUpdate | wire.PullState) -> None:
        """A member is asked for an update or a state."""
        if isinstance(pull, wire.PullState):
            return
        if pull.insist or not pull.relays:
            self.insisted[pull.fragment, pull.number] += 1
        asker = self._world.members.get(sender)
        if not pull.version or asker is None:
            return
        for liar, victim, life, fragment, number, fetch, at_s in self._damaged:
            same = (liar, victim, life) == (member.name, sender, asker.life) and fragment == pull.fragment
            if not same or number >= pull.number or self._world.now - at_s > LEFT_OUT_S:
                continue
            if self._delivered.get((victim, life, fragment, number)) == fetch:
                self.broken("left-out", f"{sender} asks {liar}, which gave it a damaged update {number}")

    def lied(
        self, member: BulkMember, sender: str, pull: wire.PullUpdate | wire.PullState
    ) -> Callable[[], None]:
        """A member gives something damaged. Returns what to call when it was taken."""
        asker = self._world.members[sender]
        fetch, life, number = asker.fetching.get(pull.fragment, 0), asker.life, pull.number

        def taken() -> None:
            if isinstance(pull, wire.PullUpdate) and pull.version:
                at_s = self._world.now
                entry = member.name, sender, life, pull.fragment, number, fetch, at_s
                self._damaged.append(entry)

        return taken

    # --- the end ---------------------------------------------------------------------------------------

    def at_rest(self, member: BulkMember) -> None:
        """Long after the last transfer nothing is held or remembered that belongs to one."""
        if not member.inbox.empty:
            self.broken("rest", f"{member.name} has contributions that nobody merges")
        self.gave(member)
        found = left_over(member)
        if found:
            self.broken("rest", f"{member.name}: {found}")
        strange = LIARS_WORDS & set(member.transport.refusals)
        if strange and not self.liars:
            self.broken("honest", f"{member.name} refused somebody: {', '.join(sorted(strange))}")
