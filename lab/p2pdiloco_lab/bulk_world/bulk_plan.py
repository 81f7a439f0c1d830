"""Parts of bulk worlds: the plan of a seed, the truth, the links, the verdict, and virtual time.

`BulkPlan` fixes members, sizes, links and faults before a seed starts. `Ledger` knows which versions there
are, and what their bytes are. `BulkLinks` are every member's uplink, and a way to every other with a delay of
its own. `BulkResult` is the verdict of one seed, `BulkSummary` that of many. `VirtualLoop` is an event loop
on which nothing takes time but waiting, and the waited time passes at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import Struct, field, to_builtins
from torch import Tensor

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api.types import WHOLE_RUN, Contributor, Stamp
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import plan_fragments
from p2pdiloco.tensors.outer_update import FragmentState, Pin
from p2pdiloco.tensors.sizes import TensorSpec
from p2pdiloco.tensors.vault import Vault
from p2pdiloco_lab.simulation.seed_plan import random_stream
from p2pdiloco_lab.simulation.seed_report import counted, rate

MIX_NAMES = ("calm", "churn", "datacentre", "partition", "storm", "wan")
"""Names as in the simulator of the core."""
INTERVAL_S = (4.0, 9.0)
"""Between two versions of a fragment."""
LARGE_NUMEL, SMALL_NUMEL = (270_000.0, 350_000.0), (3_000.0, 130_000.0)
"""Sizes of a fragment: large ones are copied in pieces from several, and passed on while they arrive."""


@dataclass(frozen=True, slots=True)
class Weather:
    """A kind of weather: the range of uplinks, and how many faults of which kind there are, at most."""

    uplink_bytes_s: tuple[float, float]
    latency_s: tuple[float, float]
    faults: tuple[tuple[str, int], ...] = ()
    tight_memory: float = 0.0
    """Share of members that have hardly more memory than they need, and little scratch on the disk."""
    job_s: float = 0.002
    """Longest usual job of a thread; some take fifty times as long."""


IN_THE_MIDDLE = frozenset({"break", "kill", "wipe"})
"""Faults that wait for a moment in the middle of a transfer; half of them strike a newcomer that copies."""
MIXES = {
    "calm": Weather((2e6, 2e7), (0.001, 0.04)),
    "datacentre": Weather((2e7, 2e8), (0.0002, 0.002), (("kill", 1), ("lies", 2))),
    "wan": Weather((2e5, 2e6), (0.01, 0.15), (("slow", 4), ("hold", 2)), 0.4),
    "churn": Weather((1e6, 2e7), (0.002, 0.05), (("kill", 4), ("wipe", 2), ("break", 2)), 0.2),
    "partition": Weather((1e6, 2e7), (0.002, 0.05), (("cut", 4), ("hold", 4), ("break", 4))),
    "storm": Weather(
        (4e5, 1e7),
        (0.002, 0.1),
        (
            ("kill", 2),
            ("wipe", 1),
            ("cut", 2),
            ("hold", 3),
            ("stall", 2),
            ("break", 4),
            ("lies", 2),
            ("slow", 2),
        ),
        0.3,
        0.01,
    ),
}


@dataclass(frozen=True, slots=True)
class BulkFault:
    """One thing that goes wrong.

    kill, wipe: the member dies, with its disk or without, when `part` of a fragment's state has moved through
    it since `at_s`, and is back at `until_s`. cut: no way between two members, what is under way fails.
    hold: bytes from one to the other wait until it is over. stall: so do all of a member's. break: all that
    is under way at a member fails once, at such a moment. slow: all that a member sends crawls. lies: what a
    member gives or pushes is not what its label says."""

    kind: str
    at_s: float
    until_s: float
    member: str
    other: str
    part: float


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """One machine."""

    name: str
    starts_s: float
    """0: it holds version 0 from the beginning. Later: a newcomer, that copies everything."""
    uplink_bytes_s: float
    tight: bool
    """Tells whether its memory is bounded closely."""


@dataclass(frozen=True, slots=True)
class BulkPlan:
    """Everything that a seed fixes in advance."""

    seed: int
    mix_name: str
    mix: Weather
    members: tuple[MemberSpec, ...]
    numel: int
    """Elements of each fragment."""
    fragments: int
    versions: int
    """Versions of each fragment, after version 0."""
    codec: str
    """Codec of contributions and updates."""
    log_versions: int
    """Updates that a member follows one by one; who is further behind copies the state."""
    faults: tuple[BulkFault, ...]
    faults_until_s: float

    @property
    def settle_s(self) -> float:
        """After the faults everything must have arrived in so much virtual time: pauses, patience and
        forgiveness are minutes, and each version may be fetched after another."""
        slowest = min(member.uplink_bytes_s for member in self.members)
        moved = len(self.members) * self.fragments * self.numel * (8 + 4 * self.versions)
        return 300.0 + 60.0 * self.versions + 2 * moved / slowest


def draw_plan(seed: int, mix_name: str | None = None, members: int | None = None) -> BulkPlan:
    """The plan of a seed. Mix and number of members are drawn too unless they are given."""
    rng = random_stream(seed, "bulk plan")
    drawn_mix, drawn_members = rng.choice(sorted(MIXES)), min(rng.randint(4, 12), rng.randint(4, 12))
    name, count = mix_name or drawn_mix, members or drawn_members
    mix = MIXES[name]
    newcomers = rng.randint(1, max(1, count // 3)) if count > 2 else 0
    names = [f"n{i}" for i in range(count)]
    starts = [0.0 if i < count - newcomers else rng.uniform(2.0, 20.0) for i in range(count)]
    specs = tuple(
        MemberSpec(peer, start_s, _between(rng, *mix.uplink_bytes_s), rng.random() < mix.tight_memory)
        for peer, start_s in zip(names, starts, strict=True)
    )
    versions = rng.randint(2, 3)
    until_s = versions * INTERVAL_S[1]
    faults = []
    for kind, most in mix.faults:
        for _ in range(rng.randint(0, most)):
            member, other = rng.sample(names, 2)
            at_s, part = rng.uniform(1.0, until_s - 1.0), rng.uniform(0.0, 1.0)
            length_s = rng.choice((rng.uniform(0.5, 4.0), rng.uniform(4.0, 25.0)))
            newcomer = next((spec for spec in specs[::-1] if 0.0 < spec.starts_s < until_s), None)
            if kind in IN_THE_MIDDLE and newcomer is not None and rng.random() < 0.5:
                member, at_s = newcomer.name, newcomer.starts_s
            elif kind == "lies":
                at_s, length_s = at_s / 2, until_s
            faults.append(BulkFault(kind, at_s, min(at_s + length_s, until_s), member, other, part))
    return BulkPlan(
        seed=seed,
        mix_name=name,
        mix=mix,
        members=specs,
        numel=int(_between(rng, *(LARGE_NUMEL if rng.random() < 0.3 else SMALL_NUMEL))),
        fragments=1 + (rng.random() < 0.3),
        versions=versions,
        codec=rng.choice(("int8", "int8", "int4", "bf16")),
        log_versions=rng.randint(1, 3),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        faults_until_s=until_s,
    )


def _between(rng: Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


# The truth.

RUN = "bulk"
INNER_STEPS = 8
COLUMNS = 64


class WatchedVault(Vault):
    """A vault that remembers what was ever pinned of it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pinned: list[FragmentState] = []

    def pin(self, fragment: int) -> Pin:
        if self._states[fragment] not in self._pinned:
            self._pinned.append(self._states[fragment])
        return super().pin(fragment)

    @property
    def pins(self) -> int:
        """Count pins that are not released, also of states that the vault has let go of."""
        return sum(state.pins for state in self._pinned)


class Ledger:
    """Versions of all fragments, each made once, and the states that they lead to."""

    def __init__(self, plan: BulkPlan) -> None:
        torch.set_num_threads(1)
        self._plan = plan
        rows = -(-plan.numel // COLUMNS)
        specs = [TensorSpec(f"t{f}", (rows, COLUMNS)) for f in range(plan.fragments)]
        self.layouts = plan_fragments(specs, plan.fragments)
        self._generator = torch.Generator().manual_seed(plan.seed)
        self.moves = [self._drawn() for _ in range(2)]
        """Parts of learners' contributions, fp32 [numel]."""
        self.versions: dict[tuple[int, int], SignedVersion] = {}
        """(fragment, number) -> the version."""
        self.states: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """Theta and momentum, by the same key."""
        self.updates: dict[tuple[int, int], bytes] = {}
        first = self.vault()
        first.load_initial({spec.name: self._drawn().view(spec.shape) for spec in specs})
        for layout in self.layouts:
            digest = first.state_digest_of(layout.index, 0)
            self.add(self.signed(layout.index, 0, RUN, digest, bytes(32), 0), b"", first)

    def _drawn(self) -> Tensor:
        return torch.rand(self.layouts[0].numel, generator=self._generator) - 0.5

    def vault(self) -> WatchedVault:
        """An empty one for a member."""
        name = self._plan.codec
        return WatchedVault(self.layouts, OuterSection(), INNER_STEPS, name, name)

    def load(self, vault: Vault, fragment: int, number: int) -> None:
        """Make a version the vault's own, as from a checkpoint."""
        vault.load_spare(fragment, number, *self.states[fragment, number])
        vault.commit(fragment, number)

    def contribution(self, fragment: int, rng: Random) -> bytearray:
        """A learner's work, encoded."""
        return codec(self._plan.codec).encode(self.moves[fragment] * (rng.random() + 0.5))

    def signed(
        self, fragment: int, number: int, syncer: str, state_digest: bytes, update_digest: bytes, size: int
    ) -> SignedVersion:
        """The next version of a fragment, signed by its syncer."""
        before = self.versions.get((fragment, number - 1))
        header = VersionHeader(
            run=RUN,
            group=WHOLE_RUN,
            fragment=fragment,
            number=number,
            parent=before.header.digest() if before else hashlib.sha256(RUN.encode()).digest(),
            term=1,
            syncer=syncer,
            tokens=number,
            state_digest=state_digest,
            update_digest=update_digest,
            update_bytes=size,
            codec=self._plan.codec,
            contributors=(Contributor(syncer, Stamp(1, number), INNER_STEPS, INNER_STEPS),) if number else (),
        )
        return SignedVersion(header, signature(header))

    def add(self, version: SignedVersion, update: bytes, vault: Vault) -> None:
        """A version was made: a vault has committed it."""
        header = version.header
        key = header.fragment, header.number
        theta, momentum = vault.state_buffers(header.fragment)
        self.versions[key], self.updates[key] = version, update
        self.states[key] = bytes(theta), bytes(momentum)


def signature(header: VersionHeader) -> bytes:
    """Sign as a version's syncer does: nobody else in a bulk world knows how."""
    return hashlib.sha256(b"syncer" + header.digest()).digest()


def sound(version: SignedVersion) -> bool:
    """Tell whether its syncer signed a version."""
    return version.signature == signature(version.header)


def forged(version: SignedVersion) -> SignedVersion:
    """Another version under the same signature."""
    header = msgspec.structs.replace(version.header, tokens=version.header.tokens + 1)
    return msgspec.structs.replace(version, header=header)


# The links.


class OutLane:
    """Lane out of a member: what it sends goes out one after the other, to whomever."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def through_s(self, nbytes: int, at_s: float) -> float:
        """Return when so many bytes are out that come at a time."""
        self._free_s = max(self._free_s, at_s) + nbytes / self.bytes_per_s
        return self._free_s


class BulkLinks:
    """Links of a world. Implements `memory_net.Delays`."""

    def __init__(self, plan: BulkPlan) -> None:
        self._uplinks = {spec.name: OutLane(spec.uplink_bytes_s) for spec in plan.members}
        rng = random_stream(plan.seed, "bulk ways")
        names = [spec.name for spec in plan.members]
        self._latency_s = {(a, b): rng.uniform(*plan.mix.latency_s) for a in names for b in names}
        self._held_until_s: dict[tuple[str, str], float] = {}
        self._last_s: dict[tuple[str, str], float] = {}

    def arrival_s(self, sender: str, receiver: str, nbytes: int, sent_s: float) -> float:
        way = sender, receiver
        out_s = self._uplinks[sender].through_s(nbytes, sent_s)
        on_s = max(out_s, self._held_until_s.get(way, 0.0)) + self._latency_s[way]
        self._last_s[way] = max(on_s, self._last_s.get(way, 0.0))
        return self._last_s[way]

    def hold(self, sender: str, receiver: str, until_s: float) -> None:
        """Let what goes that way arrive after this time, if a connection outlives it."""
        self._held_until_s[sender, receiver] = max(until_s, self._held_until_s.get((sender, receiver), 0.0))

    def slow_down(self, sender: str, factor: float) -> None:
        """Let what a member sends from now on take so many times longer."""
        self._uplinks[sender].bytes_per_s /= factor


# The verdict.


class BulkResult(Struct, frozen=True, kw_only=True):
    """Verdict on a seed. `violation` names a broken rule, `stuck` what did not happen after the faults."""

    seed: int
    mix: str
    members: int
    digest: str
    virtual_s: float
    versions: int
    moved_bytes: int
    faults: dict[str, int]
    violation: str
    detail: str
    stuck: str
    tail: tuple[str, ...] = ()
    """Last decisions before the end, of a failed seed."""

    @property
    def ok(self) -> bool:
        """No rule broken, everything arrived."""
        return not self.violation and not self.stuck


class BulkSummary(Struct, kw_only=True):
    """Counters over many seeds."""

    seeds: int = 0
    violations: int = 0
    stuck: int = 0
    versions: int = 0
    moved_bytes: int = 0
    virtual_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    failed: list[BulkResult] = field(default_factory=list)

    def add(self, result: BulkResult) -> None:
        """Count one seed in."""
        self.seeds += 1
        self.violations += bool(result.violation)
        self.stuck += bool(result.stuck)
        self.versions += result.versions
        self.moved_bytes += result.moved_bytes
        self.virtual_s = round(self.virtual_s + result.virtual_s, 1)
        for kind, count in result.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        if not result.ok:
            self.failed.append(result)

    def sentence(self, elapsed_s: float) -> str:
        """Sum up for people."""
        return (
            f"{counted(self.seeds, 'seed')}, {counted(self.violations, 'violation')}, {self.stuck} stuck; "
            f"{counted(self.versions, 'version')}, {self.moved_bytes / 2**20:.0f} MiB moved, "
            f"{counted(sum(self.faults.values()), 'fault')} in {self.virtual_s:.0f} virtual seconds; "
            f"{rate(self.seeds, elapsed_s):.0f} seeds per minute"
        )

    def as_dict(self, elapsed_s: float, members: int | None, mix: str | None) -> dict[str, Any]:
        """Sum up for machines: the counters, and every failed seed with the command that replays it."""
        numbers: dict[str, Any] = to_builtins(self)
        for entry, result in zip(numbers["failed"], self.failed, strict=True):
            entry["replay"] = replay_command(result, members, mix)
        return {**numbers, "seeds_per_minute": rate(self.seeds, elapsed_s)}


def replay_command(result: BulkResult, members: int | None, mix: str | None) -> str:
    """The one command that plays a seed again, with its trace."""
    options = f" --nodes {members}" if members else ""
    options += f" --mix {mix}" if mix else ""
    return f"p2pdiloco simulate --bulk --seed {result.seed}{options} --trace"


# Virtual time.

T = TypeVar("T")


class Standstill(Exception):
    """Everybody waits for everybody: no timer is left, and nothing is ready."""


class _Skipping(selectors.SelectSelector):
    """Never waits: the time that would have been waited has passed. Files are not looked at."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Standstill("nothing is ready, and no timer is left")
        self.passed_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop whose clock is virtual; it begins at 0.

    The order in which things happen depends on nothing but the program: there is no input or output, and jobs
    of executors are run by the loop itself, one after the other, at a price in virtual time.
    """

    def __init__(self, job_s: Callable[[], float] = lambda: 0.0) -> None:
        """`job_s`: seconds that the next job of an executor takes."""
        self._skipping = _Skipping()
        self._job_s = job_s
        self._free_s: dict[object, float] = {}
        """Executor -> when it is through with what it has to do."""
        super().__init__(self._skipping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._skipping.passed_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run the job here, when those before it are through; its result comes after the job's time."""
        done: asyncio.Future[T] = self.create_future()
        now = self.time()
        begins_s = max(now, self._free_s.get(executor, now))
        ends_s = self._free_s[executor] = begins_s + max(
            self._job_s(), 1e-6
        )  # so equal times keep their order
        if begins_s > now:
            self.call_at(begins_s, self._begin, done, ends_s, func, args)
        else:
            self._begin(done, ends_s, func, args)
        return done

    def _begin(
        self, done: asyncio.Future[T], ends_s: float, func: Callable[..., T], args: tuple[Any, ...]
    ) -> None:
        if done.cancelled():
            return
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - whoever waits for the job gets its error
            self.call_at(ends_s, _end, done, None, error)
        else:
            self.call_at(ends_s, _end, done, result, None)


def _end(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def in_virtual_time(work: Coroutine[Any, Any, T], job_s: Callable[[], float] = lambda: 0.0) -> T:
    """Run on such a loop. Raises: Standstill, and what the work raises."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(job_s)) as runner:
        return runner.run(work)
