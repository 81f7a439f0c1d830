"""Membership of this node's run: the register with its files, the gate before it, and our introductions.

<data_dir>/runs/<run id, 16>/admitted   whom this node has seen admitted, by invite; at most a second old
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.types import PeerId, Signature, Wire
from p2pdiloco.daemon.admission.gate import Change, Gate
from p2pdiloco.daemon.admission.introductions import ROUND_S, Introductions
from p2pdiloco.daemon.admission.notice_file import load_notice, save_notice
from p2pdiloco.daemon.admission.own import own_admission
from p2pdiloco.daemon.admission.papers import NOTICE_WORDS, Admission, Grant, notice_figures
from p2pdiloco.daemon.admission.register import MAX_ADMITTED, Charter, Register
from p2pdiloco.daemon.run_files.listing import PublishedRun
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.ports import Transport
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
SAVE_PAUSE_S = 1.0
FIRST_ROUND_S = 5.0
"""Time after the start at which a node compares what it knows: its notice may be of long ago."""


class _Users(Wire, frozen=True):
    """Peers that came with one grant, as they are kept."""

    grant: Grant
    peers: Annotated[tuple[tuple[PeerId, Signature], ...], Meta(max_length=MAX_ADMITTED)]


class Membership:
    """Membership of one run, on one node."""

    def __init__(
        self,
        transport: Transport,
        run: PublishedRun,
        data_dir: Path,
        worked: Callable[[str], bool],
        settled: Callable[[], bool],
        on_notice: Callable[[], None] = lambda: None,
        proof_of: Callable[[str], Evidence | None] = lambda _peer: None,
        proven: Callable[[str, Evidence], None] = lambda _peer, _proof: None,
    ) -> None:
        """`worked`, `settled`, `proof_of`: see `Register`. `on_notice` is called when there is a newer
        notice; `proven` when a peer shows why it excludes us.

        Raises: StorageError, UserError (this node has no invite where one is needed).
        """
        self._folder = run_folder(data_dir, run.id)
        self._news = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None
        """Saving of the newest notice."""
        self._notice_is_new = self._register_is_new = False
        self._me, self._name = transport.peer_id, run.name
        self._on_notice = on_notice
        owner = run.signed.owner
        charter = Charter(run.id, owner, run.manifest.admission.mode)
        self.register = Register(charter, worked, settled, proof_of=proof_of)
        notice = load_notice(self._folder, run.id, owner)
        if notice is not None:
            self.register.take_notice(notice)
        for shown in self._load():
            self.register.take(shown.peer, shown, vouched=True)
        ours = own_admission(data_dir, run, transport.peer_id)
        if ours is None and run.manifest.admission.mode == "invite":
            raise UserError(
                f"run {run.name} takes members by invite, and this node has none",
                "ask the run's owner for one, who makes it with `p2pdiloco invite`: p2pdiloco node INVITE",
            )
        self._grant = ours.grant if ours is not None else None
        if ours is not None:
            self.register.take(transport.peer_id, ours, vouched=True)
        self.gate = Gate(self.register, ours, self._changed)
        self.introductions = Introductions(transport, self.register, ours, self._changed, proven)

    def _load(self) -> list[Admission]:
        decode = msgspec.msgpack.Decoder(tuple[_Users, ...]).decode
        users = read_note(self._folder / "admitted", decode, logger.warning) or ()
        found = [Admission(u.grant, peer, signature) for u in users for peer, signature in u.peers]
        return found[:MAX_ADMITTED]

    def _changed(self, what: Change) -> None:
        if what is Change.NOTICE:
            self._notice_is_new = True
            self._say_notice()
            self._saving = asyncio.ensure_future(self._save_notice())  # at once: it must never go back
            self._on_notice()
        else:
            self._register_is_new = True
        self._news.set()

    def _say_notice(self) -> None:
        notice = self.register.notice
        assert notice is not None
        figures = {"number": notice.sequence, **notice_figures(notice)}
        logger.info("the run's owner has a new notice, number %(number)d: " + NOTICE_WORDS, figures)
        fault = self.register.would_take(self._me, self._grant)
        if fault is not None:
            logger.error("%s: nobody of run %s takes anything from this node", fault, self._name)

    async def _save_notice(self) -> None:
        """Save the newest notice, after those before it."""
        async with self._one_at_a_time:
            notice = self.register.notice
            assert notice is not None
            try:
                await asyncio.to_thread(save_notice, self._folder, notice)
            except (StorageError, UserError) as error:
                logger.warning("%s", error)

    async def close(self) -> None:
        """Save what is not saved yet."""
        if self._saving is not None:
            await self._saving
        self.save()

    def save(self) -> None:
        """Save whom we have seen admitted, if that has changed. A failure is logged: it costs memory only."""
        if not self._register_is_new:
            return
        self._register_is_new = False
        users: dict[Grant, list[tuple[str, bytes]]] = {}
        for shown in self.register.admissions:
            users.setdefault(shown.grant, []).append((shown.peer, shown.signature))
        content = msgspec.msgpack.encode(tuple(_Users(g, tuple(peers)) for g, peers in users.items()))
        try:
            Files().save(self._folder / "admitted", [content], durable=False)
        except StorageError as error:
            logger.warning("%s", error)

    async def watch(self) -> None:
        """Keep what is new, pass it on, and compare notes with other members, for ever."""
        round_s = FIRST_ROUND_S
        while True:
            try:
                async with asyncio.timeout(round_s):
                    await self._news.wait()
            except TimeoutError:
                await self.introductions.compare()
                round_s = ROUND_S
            self._news.clear()
            if self._notice_is_new:
                self._notice_is_new = False
                assert self._saving is not None
                await asyncio.shield(self._saving)
                await self.introductions.pass_on()
            self.save()
            await asyncio.sleep(SAVE_PAUSE_S)
