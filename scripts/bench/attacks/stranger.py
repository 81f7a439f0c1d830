"""A stranger: an identity of its own on the real transport, which knows the run and keeps to no rule."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.core.api.messages import Message, Progress, VoteGranted, VoteRefused, decode
from p2pdiloco.core.api.reasons import PullRefusal, Verdict
from p2pdiloco.core.api.types import Head, Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import decode_status
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, PushSink, Refusal

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
LIFETIME_S = 45.0
SEND_S = 2.0
HEARTBEAT_S = 0.5


class Work(Struct, frozen=True, kw_only=True):
    """Task of an attacker's process."""

    attack: str
    folder: str
    join: str
    run: str
    run_name: str
    members: Mapping[str, Iterable[str]]
    """Honest nodes: peer id -> addresses."""
    manifest: str
    """Path of the run's signed manifest."""
    seconds: float


class Stranger:
    """One identity. Implements `ports.TransportHandlers`; `gives` answers those who pull from it."""

    def __init__(self, work: Work, name: str) -> None:
        folder = Path(work.folder) / name
        folder.mkdir(parents=True)
        self.work = work
        self.identity = Identity.load_or_create(folder / "identity.key")
        self.id = self.identity.peer_id
        options = P2PDOptions(relay=False)
        key = folder / "identity.key"
        self.transport = HivemindTransport(self.identity, key, folder, LISTEN, (work.join,), options)
        self.gives: Callable[[str, Any], PullSource | Refusal] = lambda _peer, _pull: wire.refuse(
            PullRefusal.BUSY
        )
        self.lists: tuple[wire.RunSummary, ...] = ()
        self.granted: list[VoteGranted] = []
        self.refusals: list[VoteRefused] = []
        self.heads: dict[int, Head] = {}
        """Heaviest head of every fragment that members told of, in heartbeats or, shortened, in a report."""
        self.greeted_by: set[str] = set()
        """Peers that sent a heartbeat: also those that came later."""
        self.done: Counter[str] = Counter()

    async def start(self) -> None:
        """Join the network, and connect to every member."""
        await self.transport.start(self)
        for peer, addresses in self.work.members.items():
            await self.transport.connect(peer, tuple(addresses))

    # --- what others ask ---------------------------------------------------------------------------------

    def is_member(self, sender: str) -> None:
        """See `ports.TransportHandlers`."""

    def is_stranger(self, sender: str) -> bool:
        """See `ports.TransportHandlers`: it asks no papers."""
        return True

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """Take in what members say; answer who asks which runs there are."""
        if data[:1] == wire.QUERY:
            return wire.encode(wire.RunList(self.lists))
        message = decode(self.work.run, data[1:])
        if isinstance(message, Progress):
            self.take(message.heads)
            self.greeted_by.add(sender)
        elif isinstance(message, VoteGranted):
            self.granted.append(message)
        elif isinstance(message, VoteRefused):
            self.refusals.append(message)
        return b""

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        """Take nothing."""
        return Refusal(wire.encode(wire.Answer(Verdict.NOT_READY, None)))

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        """Give what the attack gives."""
        self.done["pulls of members"] += 1
        return self.gives(sender, wire.decode(request, cast(Any, wire.Pull)))

    # --- what it does ------------------------------------------------------------------------------------

    def take(self, heads: Iterable[tuple[int, Head]]) -> None:
        """Remember the heaviest heads."""
        for fragment, head in heads:
            if fragment not in self.heads or head.weight > self.heads[fragment].weight:
                self.heads[fragment] = head

    async def look(self) -> None:
        """Ask members how the run is doing, until one answers with its heads."""
        query = wire.QUERY + wire.encode(wire.StatusQuery(self.work.run))
        while not self.heads:
            for peer in self.work.members:
                with self.counting("status"):
                    report = decode_status(await self.transport.send(peer, query, SEND_S))
                    self.take(
                        (
                            row.index,
                            Head(
                                row.number, bytes.fromhex(row.digest).ljust(32, b"\0"), row.tokens, row.term
                            ),
                        )
                        for row in report.fragments
                    )
                    return
            await asyncio.sleep(0.2)

    @contextlib.contextmanager
    def counting(self, what: str) -> Iterator[None]:
        """Context of an attempt: counted, with the reason if it fails."""
        try:
            yield
            self.done[f"{what}: taken"] += 1
        except RemoteError as error:
            self.done[f"{what}: {error.reason}"[:60]] += 1
        except TransportError as error:
            self.done[f"{what}: {type(error).__name__}"] += 1

    async def say(self, message: Message, what: str) -> None:
        """Send a message of the run to every member, and to whoever greeted us."""
        data = wire.message(self.work.run, message)

        async def to(peer: str) -> None:
            with self.counting(what):
                await self.transport.send(peer, data, SEND_S)

        await asyncio.gather(*map(to, {*self.work.members, *self.greeted_by}))

    async def beat(self, heads: Mapping[int, Head], **changes: Any) -> None:
        """Send a heartbeat of a full member, except for the changes."""
        progress = Progress(
            incarnation=1,
            step_time_s=0.1,
            inner_step=1,
            tokens_total=256,
            tokens_per_s=1000.0,
            loss=3.0,
            learning=True,
            confirmed=True,
            stands=True,
            heads=tuple(sorted(heads.items())),
            offices=(),
            saved=False,
            reach=Reach.DIRECT,
            thin=False,
            votes=True,
        )
        await self.say(msgspec.structs.replace(progress, **changes), "heartbeat")

    async def be_listed(self) -> None:
        """Put a presence record, as a member does."""
        from p2pdiloco.release import WIRE_VERSION

        record = wire.Presence(WIRE_VERSION, 1, "stranger", tuple(self.transport.addresses()[:4]))
        await self.transport.put_record(wire.members_key(self.work.run), wire.encode(record), LIFETIME_S)


class Attack:
    """Attack of strangers on a run: of one, as a rule."""

    def __init__(self, work: Work, identities: int = 1) -> None:
        self.strangers = [Stranger(work, f"stranger-{number}") for number in range(identities)]
        """Identities that take part, not started."""
        self._stranger = self.strangers[0]

    async def attack(self) -> None:
        """Attack until cancelled; the strangers are connected."""
        raise NotImplementedError
