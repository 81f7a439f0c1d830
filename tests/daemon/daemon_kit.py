"""Members on an in-memory network with a scripted learner in place of the process, and a rogue peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import msgspec
import numpy as np
import torch
from deadlines import Deadline
from scripted_learner import MOVE, ScriptedLearner

from p2pdiloco.adapters.data_dir import own_peer
from p2pdiloco.adapters.result_file import checksum, save_tensors
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.config.manifest import EndSection, Manifest, run_id, sign_manifest
from p2pdiloco.config.presets import for_run, with_seats
from p2pdiloco.config.settings import BootstrapSettings, NodeSettings
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.messages import encode as encode_message
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    NEVER,
    WHOLE_RUN,
    ContributionHeader,
    Head,
    SignedContribution,
    Stamp,
    signed_bytes,
)
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import Chain
from p2pdiloco.daemon import bootstrap, wire
from p2pdiloco.daemon.display.logs import RecentLines
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.member import Life, Member, OwnPeer
from p2pdiloco.daemon.payloads import Compute
from p2pdiloco.daemon.run_files import served_runs as signing
from p2pdiloco.daemon.run_files.known_runs import PublishedRun
from p2pdiloco.daemon.run_files.run import Run, genesis_versions, open_run, sign_run
from p2pdiloco.daemon.run_files.saved_state import RunResult, result_of
from p2pdiloco.daemon.run_files.shared_files import initial_beside
from p2pdiloco.hashing import content_digest
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, PushSink, Refusal
from p2pdiloco.tasks.registry import render_toml, task_of
from p2pdiloco.tensors.codecs import codec
from p2pdiloco_lab.memory_net import MemoryNetwork, MemoryTransport

torch.set_num_threads(1)
QUICK = Timing(
    heartbeat_s=0.05,
    genesis_wait_s=0.1,
    resume_alone_s=0.3,
    stagger_s=0.05,
    retry_s=0.02,
    leave_s=1.0,
    query_s=0.05,
    hold_floor_s=0.05,
    suspect_s=1.0,
    member_ttl_s=3.0,
)
PATIENCE_S = 20.0
FORGETFUL = {"log_versions": 2, "term_versions": 2, "max_base_age_versions": 2}
"""Of a group whose members keep few versions: see `signed_run`."""


def at_once(work: Callable[[], Any]) -> Future[Any]:
    """Do at once what else begins in a thread."""
    done: Future[Any] = Future()
    done.set_result(work())
    return done


async def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait for a condition with a deadline."""
    deadline = Deadline(PATIENCE_S)
    while not (value := condition()):
        assert not deadline.over(), f"did not happen within {deadline}: {what}"
        await asyncio.sleep(0.005)
    return value


def peer_of_folder(folder: Path) -> str:
    """The peer id of the member of that folder, which need not have started yet."""
    return own_peer(folder, parents=True)


def signed_run(
    folder: Path, name: str = "test", seed: int = 0, seats: Sequence[str] = (), **group: int
) -> Run:
    """A micro run, signed by an owner of its own. `seats`: names of members, in folders there, that have one.
    `group`: other values in that section of the manifest."""
    path = folder / f"{name}-{seed}.toml"
    manifest = with_seats(for_run("micro", name, seed), [peer_of_folder(folder / seat) for seat in seats])
    section = msgspec.structs.replace(manifest.group, **group)
    path.write_text(render_toml(msgspec.structs.replace(manifest, group=section)))
    return sign_run(path, Identity.generate())[0]


def short_run(
    folder: Path,
    schedule_tokens: int,
    learners: Literal["stop", "go-on"] = "stop",
    owner: Identity | None = None,
    seats: Sequence[str] = ("one",),
) -> Run:
    """A micro run with such a schedule, and such an end. `seats`: see `signed_run`."""
    base, path = for_run("micro", "short"), folder / "short.toml"
    base = with_seats(base, [peer_of_folder(folder / seat) for seat in seats])
    inner = msgspec.structs.replace(base.inner, schedule_tokens=schedule_tokens, warmup_tokens=0)
    manifest = msgspec.structs.replace(base, inner=inner, end=EndSection(learners=learners))
    path.write_text(render_toml(manifest))
    return sign_run(path, owner or Identity.generate())[0]


def write_given(path: Path, name: str) -> dict[str, np.ndarray]:
    """A run.toml whose version 0 is given, and that beside it. Returns the parameters."""
    base = for_run("micro", name)
    parameters = {name: value.numpy() + 0.5 for name, value in task_of(base).initial_parameters().items()}
    section = msgspec.structs.replace(base.run, initial=checksum(parameters), initial_name="hub")
    path.write_text(render_toml(msgspec.structs.replace(base, run=section)))
    save_tensors(initial_beside(path), parameters, {})
    return parameters


def version_0(file: Path) -> RunResult:
    """The parameters of version 0 of the run in this file, which is signed."""
    signed, vault = sign_run(file, Identity.generate())
    return result_of(signed, vault, list(genesis_versions(signed, vault)))


async def served_runs(data_dir: Path, *files: Path) -> list[PublishedRun]:
    """List what a bootstrap serves that is started with these. It signs in this process, which has torch."""
    data_dir.mkdir(exist_ok=True)  # noqa: ASYNC240  (nothing else is to be done in the meantime)
    settings = BootstrapSettings(data_dir=data_dir, run=files)

    async def sign(data_dir: Path, files: Sequence[Path], _log: str) -> None:
        signing.sign_all(data_dir, files)

    with mock.patch.object(bootstrap, "sign_apart", sign):
        return await bootstrap._served_runs(settings, asyncio.Event())


async def peer_on(hub: MemoryNetwork, door: FrontDoor | None = None) -> MemoryTransport:
    """A peer that has started, and serves nothing unless its door does."""
    transport = hub.transport(Identity.generate().peer_id)
    await transport.start(door or FrontDoor())
    return transport


def published(manifest: Manifest) -> PublishedRun:
    """A run as whoever looks at it finds it. No version 0 of it was made."""
    owner = Identity.generate()
    signed = sign_manifest(manifest, bytes(32), owner, owner.peer_id)
    return PublishedRun(id=run_id(signed), signed=signed, manifest=manifest)


class QuickMember(Member):
    """A member whose learner is scripted."""

    learner: ScriptedLearner

    def _make_host(self, on_event: Callable[[Any], None]) -> Any:
        self.learner = ScriptedLearner(self.holdings.exchange, on_event)
        return self.learner

    @property
    def compute(self) -> Compute:
        return self.holdings.compute

    @property
    def transport(self) -> Any:
        return self.peer.transport

    @property
    def store(self) -> RunStore:
        return self.holdings.store

    def chain_of(self, fragment: int) -> Chain:
        return self.core.fragments[fragment].chain

    def number(self, fragment: int = 0) -> int:
        return self.chain_of(fragment).head.number

    def head(self, fragment: int = 0) -> Head:
        return self.chain_of(fragment).head

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.settings.data_dir / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def refused(self) -> list[str]:
        """Reasons of the core's counted refusals."""
        return [line["reason"] for line in self.records("refusal")]


class Neighbourhood:
    """Members and rogues on one network; use as an async context manager."""

    def __init__(
        self, folder: Path, timing: Timing = QUICK, seats: Sequence[str] = ("one",), **group: int
    ) -> None:
        """`seats`, `group`: see `signed_run`."""
        self.folder = folder
        self.hub = MemoryNetwork()
        self.run = signed_run(folder, seats=seats, **group)
        self._timing = timing
        self._life: dict[QuickMember, asyncio.Task[None]] = {}
        self.lives: dict[QuickMember, Life] = {}
        self._transports: list[MemoryTransport] = []

    async def __aenter__(self) -> Neighbourhood:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        broken = [m.background.broken.exception() for m in self._life if m.background.broken.done()]
        if error is not None and broken:
            error.add_note(f"a member broke: {broken}")
        for member in list(self._life):
            await self.end(member)
        for transport in self._transports:
            await transport.close()
        if kind is None:
            assert not broken, f"a peer broke a member of ours: {broken}"

    async def member(
        self, name: str, genesis: bool = False, trained: bool = True, **more: Any
    ) -> QuickMember:
        """Start a member (again, when there was one of that name), and wait until it trains. `more`: of its
        settings."""
        data_dir = self.folder / name
        data_dir.mkdir(exist_ok=True)
        identity = Identity.load_or_create(data_dir / "identity.key")
        transport = self.hub.transport(identity.peer_id)
        door = FrontDoor()
        await transport.start(door)
        self._transports.append(transport)
        run, vault = open_run(self.run.signed, identity)
        more = {"daemon_nice": "0"} | more  # these threads are the test's own
        settings = NodeSettings(data_dir=data_dir, genesis=genesis, name=name, **more)
        peer = OwnPeer(identity, transport, door)
        member = QuickMember(peer, run, vault, settings, RecentLines(), self._timing)
        self.lives[member] = Life(member)
        self._life[member] = asyncio.create_task(self.lives[member].run())
        if trained:
            await until(lambda: member.report.state == "training", f"{name} trains")
        return member

    async def end(self, member: QuickMember, orderly: bool = False) -> None:
        """End a member; `orderly` as at SIGTERM."""
        task = self._life.pop(member)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if orderly:
            await self.lives[member].leave()
        await self.lives[member].close()
        await member.peer.transport.close()

    async def rogue(self, seat: str = "") -> Rogue:
        """A peer that knows the run and keeps to no rule. `seat`: the name of the seat that it has."""
        rogue = Rogue(self.hub, self.run, self.folder / seat / "identity.key" if seat else None)
        await rogue.transport.start(rogue)
        self._transports.append(rogue.transport)
        return rogue

    async def syncer(self, *members: QuickMember, fragment: int = 0) -> QuickMember:
        """Who stays in that office, for all of these: a majority of them elected it. That is not always the
        first one, whose vote alone is no majority once there are others."""

        def found() -> QuickMember | None:
            for member in members:
                me, proof = member.core.shared.me, member.core.fragments[fragment].office.certificate
                elected = proof is not None and proof.syncer == me and 2 * len(proof.votes) > len(members)
                if elected and all(m.core.fragments[fragment].office.syncer == me for m in members):
                    return member
            return None

        return await until(found, "a syncer of them all")

    async def round(self, *members: QuickMember, fragment: int = 0) -> None:
        """Everybody contributes once and all of it is merged, in everybody's chain: what must go on working
        whatever was tried."""
        mine = [m.core.shared.me for m in members]
        before = {m.core.shared.me: m.chain_of(fragment).marks.stamp(m.core.shared.me) for m in members}
        for member in members:
            await until(lambda m=member: fragment not in m.learner.slot_in_use, "a free slot")
            member.learner.contribute(fragment)
        for member in members:
            chain = member.chain_of(fragment)
            await until(
                lambda c=chain: all(c.marks.stamp(p) > before[p] for p in mine), "all merged, here too"
            )


@contextlib.asynccontextmanager
async def neighbours(
    folder: Path, *names: str, timing: Timing = QUICK, group: Mapping[str, int] | None = None, **first: Any
) -> AsyncIterator[tuple[Any, ...]]:
    """A neighbourhood, and its members of these names, which have its seats; without a name one that is
    called "one". `group`: see `signed_run`. `first`: settings of the first one, which begins the run."""
    seats = names or ("one",)
    async with Neighbourhood(folder, timing, seats=seats, **(group or {})) as around:
        begins = await around.member(seats[0], genesis=True, **first)
        yield around, begins, *[await around.member(name) for name in seats[1:]]


class Rogue:
    """Signs with its own key and can say anything. As a donor it serves what `pulls` says."""

    def __init__(self, hub: MemoryNetwork, run: Run, key: Path | None = None) -> None:
        self.identity = Identity.load_or_create(key) if key is not None else Identity.generate()
        self.id = self.identity.peer_id
        self.run = run
        self.transport = hub.transport(self.id)
        self.pulls: Callable[[Any], PullSource | Refusal] | None = None
        self.heard: list[bytes] = []

    def is_member(self, sender: str) -> None:
        return None

    async def on_message(self, sender: str, data: bytes) -> bytes:
        self.heard.append(data)
        return b""

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        return Refusal(wire.encode(wire.Answer(Verdict.NOT_READY, None)))

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        pull = wire.decode(request, wire.Pull)  # type: ignore[arg-type]
        return self.pulls(pull) if self.pulls else Refusal(wire.encode(wire.Refused("no")))

    async def say(self, member: QuickMember, message: Message) -> None:
        data = wire.MESSAGE + encode_message(self.run.id, message)
        await self.transport.send(member.core.shared.me, data, 2.0)

    def payload(self, member: QuickMember, fragment: int = 0, value: float = MOVE) -> bytearray:
        """An honest contribution's bytes."""
        numel = self.run.layouts[fragment].numel
        return codec(self.run.manifest.codec.contribution).encode(torch.full((numel,), value))

    def header(self, member: QuickMember, payload: bytes | bytearray, **changes: Any) -> ContributionHeader:
        """An acceptable label of a contribution of ours to that member, except for the changes."""
        head = member.head(changes.get("fragment", 0))
        honest = ContributionHeader(
            run=self.run.id,
            group=WHOLE_RUN,
            fragment=0,
            learner=self.id,
            stamp=Stamp(1, 1),
            after=NEVER,
            base_number=head.number,
            base_digest=head.digest,
            tokens=256,
            inner_steps=1,
            payload_digest=content_digest(payload),
            payload_bytes=len(payload),
            codec=self.run.manifest.codec.contribution,
            due=True,
        )
        return msgspec.structs.replace(honest, **changes)

    def sign(self, header: ContributionHeader, identity: Identity | None = None) -> SignedContribution:
        work = SignedContribution(header, b"").contributor().work(header.run, header.fragment)
        return SignedContribution(header, (identity or self.identity).sign(signed_bytes("work", work)))

    async def push(self, member: QuickMember, signed: SignedContribution, payload: Any) -> wire.Answer:
        """Offer a contribution; the member's answer."""
        header = wire.encode(wire.PushContribution(signed))
        _, raw = await self.transport.push(member.core.shared.me, header, (payload,), 5.0)
        return wire.decode(raw, wire.Answer)


def version(number: int, parent: bytes, term: int = 1) -> SignedVersion:
    fields = (
        "run",
        WHOLE_RUN,
        0,
        number,
        parent,
        term,
        "syncer",
        number,
        bytes(32),
        bytes(32),
        1,
        "int8",
        (),
    )
    return SignedVersion(VersionHeader(*fields), b"")
