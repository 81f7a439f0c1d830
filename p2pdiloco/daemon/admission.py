"""Membership as a run decides it: invites, admissions and the owner's notice, at the door and on the disk.

`Membership` has the `Register` of this node's run with its files, the `Gate` before it, and our
`Introductions` to others. The functions at the end find out what this node itself shows: by an invite, by the
owner's key in its folder, or from an earlier start.

    <data_dir>/runs/<run id, 16>/admission   what this node shows its peers
    <data_dir>/runs/<run id, 16>/admitted    whom this node has seen admitted, by invite; at most a second old

Rules: docs/protocol/belief.md, section 2.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.config.settings import BootstrapSettings, NodeSettings
from p2pdiloco.config.values import expanded
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.papers import (
    MAX_USES,
    RECOVERY_FROM,
    Admission,
    Grant,
    admission_fault,
    grant_fault,
    is_timely,
    paper_bytes,
)
from p2pdiloco.core.api.reasons import AdmissionFault, Unheard
from p2pdiloco.core.api.types import PeerId, Signature, Wire
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import LISTING_BYTES, LISTING_S, Budget, Enough
from p2pdiloco.daemon.notice import (
    NOTICE_WORDS,
    Invite,
    Notice,
    admission,
    encode_notice,
    grant,
    is_true_notice,
    load_notice,
    may_follow,
    notice_figures,
    save_notice,
    signed,
)
from p2pdiloco.daemon.run_files.known_runs import (
    PublishedRun,
    Way,
    WaysIn,
    read_link,
    way_of,
)
from p2pdiloco.daemon.wire import (
    MAX_OTHERS,
    AdmissionQuery,
    AdmissionShown,
    GiveNotice,
    JoinAnswer,
    MayJoin,
    NoticeAnswer,
    NoticeQuery,
    ShowAdmission,
    ShowPass,
)
from p2pdiloco.errors import ConfigError, RemoteError, StorageError, TransportError, UserError, clean
from p2pdiloco.identity import Identity, verify
from p2pdiloco.ports import Transport
from p2pdiloco.util import BoundedDict, read_note

logger = logging.getLogger(__name__)

MAX_ADMITTED = 4096


class Charter(Struct, frozen=True):
    """Terms of a run on its members: whose it is, and who may be one."""

    run: str
    owners: tuple[str, ...]
    """Keys by which the owner's papers are judged (`core.api.papers.owner_of`)."""
    mode: Literal["open", "invite", "list"] = "open"


class Change(Enum):
    """Changes of the register."""

    ADMITTED = "admitted"
    NOTICE = "notice"


class NotAdmitted(RemoteError):
    """Refusal of a peer that the run has not admitted."""

    def __init__(self, why: Unheard) -> None:
        super().__init__(why.value)


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
        on_news: Callable[[], None] = lambda: None,
        proof_of: Callable[[str], Evidence | None] = lambda _peer: None,
        has_seat: Callable[[str], bool] = lambda _peer: False,
        proven: Callable[[str, Evidence], None] = lambda _peer, _proof: None,
    ) -> None:
        """`worked`, `settled`, `proof_of`, `has_seat`: see `Register`. `on_news` is called when there is a
        newer notice, or somebody else was admitted; `proven` when a peer shows why it excludes us.

        Raises: StorageError, UserError (this node has no invite where one is needed).
        """
        self._folder = run_folder(data_dir, run.id)
        self._news = asyncio.Event()
        self.one_at_a_time = asyncio.Lock()
        """Lock of whoever writes the notice's file."""
        self._saving: asyncio.Task[None] | None = None
        """Saving of the newest notice."""
        self._notice_is_new = self._register_is_new = False
        self._me, self._name = transport.peer_id, run.name
        self._on_news = on_news
        charter = Charter(run.id, run.owners, run.manifest.admission.mode)
        self.register = Register(charter, worked, settled, proof_of=proof_of, has_seat=has_seat)
        notice = load_notice(self._folder, run.id, charter.owners)
        if notice is not None:
            self.register.hold(notice)
        for shown in self._load():
            self.register.take(shown.peer, shown, vouched=True)
        ours = own_admission(data_dir, run, transport.peer_id)
        if ours is None and run.manifest.admission.mode == "invite":
            raise UserError(
                f"run {run.name} takes members by invite, and this node has none",
                "ask the run's owner for one, who makes it with `p2pdiloco invite`: p2pdiloco node INVITE",
            )
        self._grant = ours.grant if ours is not None else None
        if charter.mode == "open" and self._grant is not None and self._grant.key not in run.owners:
            logger.info("run %s is open: it asks for no invite, and this node's gives it no seat", run.name)
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
        else:
            self._register_is_new = True
        self._on_news()
        self._news.set()

    def _say_notice(self) -> None:
        notice = self.register.notice
        assert notice is not None
        figures = {"number": notice.sequence, **notice_figures(notice)}
        logger.info("the run's owner has a new notice, number %(number)d: " + NOTICE_WORDS, figures)

    async def _save_notice(self) -> None:
        """Save the newest notice, after those before it."""
        async with self.one_at_a_time:
            notice = self.register.notice
            assert notice is not None
            try:
                await asyncio.to_thread(save_notice, self._folder, notice)
            except (StorageError, UserError) as error:
                logger.warning("%s", error)
        fault = self.register.would_take(self._me, self._grant)  # the chain knows of ended seats by now
        if fault is not None:
            logger.error("%s: nobody of run %s takes anything from this node", fault, self._name)

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


class Register:
    """Register of a run's members, as one node has it: whom it has admitted, and what the owner's notice
    says.

    Everything is judged by signatures. A clock is asked only where a peer is seen for the first time: a peer
    that has been admitted once stays so after the invite's end, and so does one that has a mark in the chain.
    A newcomer has no chain yet, and everybody whom it meets may have been there for long: it takes expired
    admissions for the time being. When it is a member itself, a peer without a mark has to be vouched for by
    another. `uses` are counted by what this node has seen or was told; two nodes that cannot hear each other
    may together admit more.
    """

    def __init__(
        self,
        charter: Charter,
        worked: Callable[[str], bool] = lambda _peer: False,
        settled: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
        proof_of: Callable[[str], Evidence | None] = lambda _peer: None,
        has_seat: Callable[[str], bool] = lambda _peer: False,
    ) -> None:
        """`worked`: tells whether our chain has a mark of the peer; `settled`: whether we have a chain that
        others confirm. `clock`: Unix time. `proof_of`: finds the proof for which a peer is excluded.
        `has_seat`: tells whether our chain, and the words that count, give a peer a seat: until that ends no
        ban or revocation puts it out, or a thief of the owner's key would put out all at once."""
        self.charter = charter
        self.notice: Notice | None = None
        self._worked = worked
        self._settled = settled
        self._provisional: set[str] = set()
        """Peers whose invite had expired when we saw them first, as newcomers."""
        self._clock = clock
        self.proof_of, self._has_seat = proof_of, has_seat
        self._by_peer: dict[str, Admission] = {}
        self._users: dict[str, set[str]] = {}
        """Peers that were admitted by each grant's key, as far as we know."""
        self._banned: frozenset[str] = frozenset()
        self._revoked: frozenset[str] = frozenset()
        self._closed_keys: frozenset[str] = frozenset()
        self._listed: frozenset[str] = frozenset()

    @property
    def sequence(self) -> int:
        """Sequence of the notice; 0: there is none."""
        return self.notice.sequence if self.notice is not None else 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that sign grants: once the recovery key has spoken, it alone."""
        owners = self.charter.owners
        return owners if self.sequence < RECOVERY_FROM else owners[1:]

    @property
    def admissions(self) -> list[Admission]:
        """Admissions that were taken for good, in the order in which they came."""
        return [
            shown for peer, shown in self._by_peer.items() if self._is_in(peer) and not self._in_doubt(peer)
        ]

    def _keeps_seat(self, peer: str) -> bool:
        """Tell whether a peer has a seat by a chain that others confirm: version 0 has all that began."""
        return self._settled() and self._has_seat(peer)

    def _is_in(self, peer: str) -> bool:
        shown = self._by_peer.get(peer)
        return shown is not None and (shown.grant.key not in self._revoked or self._keeps_seat(peer))

    def _in_doubt(self, peer: str) -> bool:
        return peer in self._provisional and not self._worked(peer)

    def vouches(self, peer: str) -> bool:
        """Tell whether the peer's word on others counts: it is admitted, and for good."""
        return self.fault(peer) is None and not self._in_doubt(peer)

    def fault(self, peer: str) -> AdmissionFault | None:
        """Say why a peer is not admitted; None: it is."""
        if self.proof_of(peer) is not None:
            return AdmissionFault.EXCLUDED
        if peer in self._banned and not self._keeps_seat(peer):
            return AdmissionFault.BANNED
        if self.charter.mode == "open":
            return None
        if self._is_in(peer) and not (self._in_doubt(peer) and self._settled()):
            return None
        if self.charter.mode == "list":
            return None if peer in self._listed else AdmissionFault.NOT_LISTED
        return AdmissionFault.NOT_SHOWN

    def is_banned(self, peer: str) -> bool:
        """Tell whether the owner has banned the peer, or a proof excludes it."""
        return self.shut_out(peer) is not None

    def shut_out(self, peer: str) -> AdmissionFault | None:
        """Say why nothing of that peer is wanted, whatever it shows; None: it may show something."""
        fault = self.fault(peer)
        return fault if fault in (AdmissionFault.BANNED, AdmissionFault.EXCLUDED) else None

    def take(self, peer: str, shown: Admission | None, vouched: bool = False) -> AdmissionFault | None:
        """Take an admission that a peer shows; say why the peer is not admitted all the same.

        `vouched`: a member has it from an earlier time, so that its end does not matter.
        """
        standing = self.fault(peer)
        if shown is None or self.is_banned(peer) or not self._matters(shown):
            return standing
        if self._by_peer.get(peer) == shown and not self._in_doubt(peer):
            return standing
        fault = admission_fault(shown, peer, self.charter.run, self.keys, verify)
        fault = fault or self._closed(shown.grant, peer, vouched)
        if fault is not None:
            return fault if standing is not None else None
        before = self._by_peer.pop(peer, None)
        if before is not None:
            self._users[before.grant.key].discard(peer)
        self._by_peer[peer] = shown
        self._provisional.discard(peer)
        if self._over(shown.grant) is not None and not vouched:
            self._provisional.add(peer)
        self._users.setdefault(shown.grant.key, set()).add(peer)
        return None

    def would_take(self, peer: str, grant: Grant | None) -> AdmissionFault | None:
        """Say why a peer would not be admitted with a grant; None: it would be."""
        standing = self.fault(peer)
        if standing is None or self.is_banned(peer) or grant is None:
            return standing
        fault = grant_fault(grant, self.charter.run, self.keys, verify)
        if fault is None and self.charter.mode == "list":
            return standing
        return fault or self._closed(grant, peer, False)

    def read_fault(self, shown: ShowPass) -> AdmissionFault | None:
        """Say why whoever shows this signed pass may not read (any more); None: it may. A used-up invite
        lets read on."""
        if shown.grant is None or self.charter.mode != "invite":
            return None if shown.by in self.keys else self.fault(shown.by)
        return grant_fault(shown.grant, self.charter.run, self.keys, verify) or self._over(shown.grant)

    def _matters(self, shown: Admission) -> bool:
        """Tell whether the run's mode asks for it: of a list, only the owner's own nodes have admissions."""
        mode = self.charter.mode
        return mode == "invite" or (mode == "list" and shown.grant.key in self.keys)

    def _closed(self, grant: Grant, peer: str, vouched: bool) -> AdmissionFault | None:
        """Say why a sound grant lets this peer in no more."""
        if grant.key in self._revoked:
            return AdmissionFault.REVOKED
        if len(self._by_peer) >= MAX_ADMITTED and peer not in self._by_peer:
            return AdmissionFault.FULL
        users = self._users.get(grant.key, set())
        known = peer in users and peer not in self._provisional
        if grant.key in self.keys or known or self._worked(peer):
            return None
        over = self._over(grant)
        if over is not None and not vouched and self._settled():
            return over
        return AdmissionFault.USED_UP if len(users - {peer}) >= grant.uses else None

    def _over(self, grant: Grant) -> AdmissionFault | None:
        """Say why a grant lets nobody new in; None: it may."""
        if grant.key in self._revoked | self._closed_keys:
            return AdmissionFault.REVOKED
        return AdmissionFault.EXPIRED if 0 < grant.expires < self._clock() else None

    def take_notice(self, notice: Notice) -> bool:
        """Take the owner's notice if it is newer than ours; tell whether it was.

        Numbers end: a thief of the owner's key would else say the last one, and the owner nothing any more.

        Raises: RemoteError ("notice-leap", "notice-signature", "notice-change").
        """
        if notice.sequence <= self.sequence:
            return False
        numbers = notice.sequence, *(word.number for word in notice.seats)
        if not all(is_timely(number, self._clock()) for number in numbers):
            raise RemoteError("notice-leap", f"number {notice.sequence}")
        if not is_true_notice(notice, self.charter.run, self.charter.owners, verify):
            raise RemoteError("notice-signature", "not made by this run's owner")
        if self.notice is not None and not may_follow(notice, self.notice):
            raise RemoteError("notice-change", "it changes the learning rate by more than it may")
        self.hold(notice)
        return True

    def hold(self, notice: Notice) -> None:
        """Go by a notice that was taken, in this life or before."""
        self.notice = notice
        self._banned, self._listed = frozenset(notice.banned), frozenset(notice.members)
        self._revoked = frozenset(notice.revoked).difference(self.charter.owners)
        self._closed_keys = frozenset(word.peer for word in notice.seats if not word.seated)

    def newest(self, most: int, without: Iterable[str] = ()) -> tuple[Admission, ...]:
        """List the newest admissions, for another member to know."""
        left = [a for a in self.admissions if not self.is_banned(a.peer) and a.peer not in without]
        return tuple(left[-most:])


NOBODY, NEWS, NEWS_S = "", 16.0, 56.0
"""Newer notices that are taken at once from whoever gives them, and time in which as many are again, at the
pace of their numbers."""
QUERIES, QUERIES_S = 32.0, 60.0
"""Queries with something to check that a peer has answered at once, if it is not admitted, and time in which
it may have as many again."""


_UNHEARD = {AdmissionFault.BANNED: Unheard.BANNED, AdmissionFault.EXCLUDED: Unheard.EXCLUDED}


class Gate:
    """Gate of one run: says who may say, push and pull what at our front door, before anything of it is
    decoded."""

    def __init__(
        self,
        register: Register,
        ours: Admission | None,
        changed: Callable[[Change], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ours`: what we show those who ask. `changed` is told when the register has something new."""
        self._register = register
        self._ours = ours
        self._changed = changed
        self._checks = Budget(Enough.ADMISSIONS, QUERIES, QUERIES_S, now)
        self._notices = Budget(Enough.LISTINGS, LISTING_BYTES, LISTING_S, now)
        self._news = Budget(Enough.LISTINGS, NEWS, NEWS_S, now)
        self._readers: BoundedDict[str, ShowPass] = BoundedDict(MAX_PEERS)

    def check_not_banned(self, peer: str) -> None:
        """Check that the owner has not banned the peer, and no proof excludes it. Raises: NotAdmitted."""
        fault = self._register.shut_out(peer)
        if fault is not None:
            raise NotAdmitted(_UNHEARD[fault])

    def check(self, peer: str) -> None:
        """Check that a peer is admitted. Raises: NotAdmitted."""
        fault = self._register.fault(peer)
        if fault is not None:
            raise NotAdmitted(_UNHEARD.get(fault, Unheard.NOT_ADMITTED))

    def admits(self, peer: str) -> bool:
        """Tell whether a peer is admitted."""
        return self._register.fault(peer) is None

    def may_read(self, peer: str) -> bool:
        """Tell whether a peer that is not admitted has shown a pass that still holds."""
        shown = self._readers.get(peer)
        return shown is not None and self._register.read_fault(shown) is None

    def has_papers(self, peer: str) -> bool:
        """Tell whether the owner's word admits a peer. In an open run nobody has it."""
        return self._register.charter.mode != "open" and self.admits(peer)

    def answer(self, sender: str, query: AdmissionQuery) -> AdmissionShown | JoinAnswer | NoticeAnswer:
        """Answer a query about admission. Raises: RemoteError (another run's; false; or it had enough)."""
        run = query.notice.run if isinstance(query, GiveNotice) else query.run
        if run != self._register.charter.run:
            raise RemoteError("not-a-member")
        if not self.admits(sender):
            self._checks.check(sender)
            self._checks.take(sender, 1.0)
        match query:
            case ShowAdmission():
                return self._shown(sender, query)
            case MayJoin():
                return JoinAnswer(self._register.would_take(query.peer, query.grant))
            case ShowPass():
                return JoinAnswer(self._let_read(sender, query))
            case NoticeQuery():
                return self._notice(sender, query.above)
            case GiveNotice():
                if self._register.sequence < query.notice.sequence < RECOVERY_FROM:
                    self._news.check(NOBODY)  # of all together: a thief of the owner's key has many ids
                if self._register.take_notice(query.notice):
                    self._news.take(NOBODY, 1.0)
                    self._changed(Change.NOTICE)
                return self._notice(sender, query.notice.sequence)

    def _shown(self, sender: str, query: ShowAdmission) -> AdmissionShown:
        before = len(self._register.admissions)
        fault = self._register.take(sender, query.admission)
        if len(self._register.admissions) != before:
            self._changed(Change.ADMITTED)
        others = self._register.newest(MAX_OTHERS, (sender,)) if fault is None else ()
        proof = self._register.proof_of(sender)
        return AdmissionShown(fault, self._ours, self._register.sequence, others, proof)

    def _let_read(self, sender: str, shown: ShowPass) -> AdmissionFault | None:
        """Remember a visitor's pass; say why it may not read all the same."""
        if shown.peer != sender:
            return AdmissionFault.OTHER_PEER
        is_keys = shown.grant is None or shown.grant.key == shown.by
        if not is_keys or not verify(shown.by, paper_bytes(shown), shown.signature):
            return AdmissionFault.ADMISSION_SIGNATURE
        fault = self._register.read_fault(shown)
        if fault is None:
            self._readers[sender] = shown
        return fault

    def _notice(self, sender: str, above: int) -> NoticeAnswer:
        notice = self._register.notice
        if notice is None or notice.sequence <= above:
            return NoticeAnswer(None)
        if not self.admits(sender):
            self._notices.check(sender)
            self._notices.take(sender, len(encode_notice(notice)))
        return NoticeAnswer(notice)


SHOW_TIMEOUT_S = 3.0
AGAIN_S = 5.0
"""Time after which a peer that refuses us is shown our admission again."""
ROUND_S = 60.0
"""Interval at which members compare what they know."""
MAX_TOLD, MAX_COMPARED = 64, 4
"""Members that are given a new notice at once, and those that we compare with in one round."""
MAX_PEERS = 4096
T = TypeVar("T")


class Introductions:
    """Introductions to the peers of one run: what this node shows at their doors, and what it learns
    there."""

    def __init__(
        self,
        transport: Transport,
        register: Register,
        ours: Admission | None,
        changed: Callable[[Change], None],
        proven: Callable[[str, Evidence], None] = lambda _peer, _proof: None,
    ) -> None:
        """`changed` is told when the register has something new; `proven`, when a peer shows why it excludes
        us."""
        self._transport = transport
        self._register = register
        self._ours = ours
        self._changed = changed
        self._proven = proven
        self._under_way: set[str] = set()
        self._shown_s: BoundedDict[str, float] = BoundedDict(MAX_PEERS)
        """Time at which each peer was shown our admission last."""
        self._said: set[AdmissionFault] = set()

    def admits(self, peer: str) -> bool:
        """Tell whether a peer is admitted to the run, as far as we know."""
        return self._register.fault(peer) is None

    def is_banned(self, peer: str) -> bool:
        """Tell whether the run's owner has banned the peer, or a proof excludes it."""
        return self._register.is_banned(peer)

    async def again(self, peer: str) -> bool:
        """Introduce ourselves to a peer that has just refused us; tell whether it admits us now."""
        now = asyncio.get_running_loop().time()
        if peer in self._under_way or now < self._shown_s.get(peer, -AGAIN_S) + AGAIN_S:
            return False
        shown = await self.meet(peer)
        return shown is not None and shown.fault is None

    async def meet(self, peer: str) -> AdmissionShown | None:
        """Show a peer our admission, look at its own, and bring both to the newer notice; return its answer.

        None: it does not answer.
        """
        if peer in self._under_way:
            return None
        self._under_way.add(peer)
        try:
            self._shown_s[peer] = asyncio.get_running_loop().time()
            shown = await self._show(peer)
            older = self._register.sequence > shown.notice
            if older and await self._give(peer) and shown.fault is not None:
                shown = await self._show(peer)
            if shown.proof is not None:
                self._proven(peer, shown.proof)
            await self._learn(peer, shown)
            self._say(peer, shown.fault)
            return shown
        except (TransportError, RemoteError) as error:
            logger.debug("not introduced to %s: %s", peer, error)
            return None
        finally:
            self._under_way.discard(peer)

    async def members_of(self, peers: Iterable[str], timeout_s: float) -> tuple[str, ...]:
        """Find out which of these peers are members of the run, and bring both sides to the newer notice.
        Who does not answer in time is none."""
        asked = {peer: asyncio.ensure_future(self.meet(peer)) for peer in dict.fromkeys(peers)}
        if asked:
            _, late = await asyncio.wait(asked.values(), timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        answers = ((peer, task) for peer, task in asked.items() if not task.cancelled())
        return tuple(peer for peer, task in answers if task.result() is not None)

    async def _show(self, peer: str) -> AdmissionShown:
        query = ShowAdmission(self._register.charter.run, self._ours, self._register.sequence)
        return await self._ask(peer, query, AdmissionShown)

    async def _learn(self, peer: str, shown: AdmissionShown) -> None:
        if shown.notice > self._register.sequence:
            query = NoticeQuery(self._register.charter.run, self._register.sequence)
            answer = await self._ask(peer, query, NoticeAnswer)
            if answer.notice is not None and self._register.take_notice(answer.notice):
                self._changed(Change.NOTICE)
        before = len(self._register.admissions)
        self._register.take(peer, shown.admission)
        if self.admits(peer):
            vouched = self._register.vouches(peer)
            for other in shown.others:
                self._register.take(other.peer, other, vouched)
        if len(self._register.admissions) != before:
            self._changed(Change.ADMITTED)

    def _say(self, peer: str, fault: AdmissionFault | None) -> None:
        if fault is not None and fault not in self._said:
            self._said.add(fault)
            grant = self._ours.grant if self._ours is not None else None
            logger.warning("…%s does not admit this node: %s", peer[-6:], fault_words(fault, grant))

    async def _give(self, peer: str) -> bool:
        """Give a peer our notice; tell whether it took it."""
        notice = self._register.notice
        if notice is None:
            return False
        try:
            await self._ask(peer, GiveNotice(notice), NoticeAnswer)
        except (TransportError, RemoteError) as error:
            logger.debug("%s does not take the notice: %s", peer, error)
            return False
        return True

    async def _ask(self, peer: str, query: Wire, answer: type[T]) -> T:
        reply = await self._transport.send(peer, wire.QUERY + wire.encode(query), SHOW_TIMEOUT_S)
        return wire.decode(reply, answer)

    async def pass_on(self) -> None:
        """Give the notice to members that we are connected to, and to whom it concerns."""
        banned = [peer for peer in self._transport.connected() if self.is_banned(peer)]
        await asyncio.gather(*map(self._give, [*self._some_members(MAX_TOLD), *banned[:MAX_TOLD]]))

    async def compare(self) -> None:
        """Compare what we know with a few members that we are connected to."""
        await asyncio.gather(*map(self.meet, self._some_members(MAX_COMPARED)))

    def _some_members(self, most: int) -> Iterable[str]:
        members = [peer for peer in self._transport.connected() if self.admits(peer)]
        return random.sample(members, min(most, len(members)))


def fault_words(fault: AdmissionFault, grant: Grant | None) -> str:
    """Word for people why a grant does not let them in."""
    if fault is AdmissionFault.USED_UP and grant is not None:
        places = "1 place is" if grant.uses == 1 else f"{grant.uses} places are"
        return f"this link's {places} taken; ask the owner for another"
    return str(fault)


def passes(run: str, visitor: str, invite: Invite | None, folders: Iterable[Path]) -> list[ShowPass]:
    """Make what may let a visitor of this peer id read: by an invite, and by the keys of these folders, each
    of an owner or a member."""
    keys = [(invite.key, invite.grant)] if invite is not None else []
    paths = [folder / name for folder in folders for name in ("owner.key", "identity.key")]
    own = [(Identity.load_or_create(path), None) for path in paths if path.exists()]
    return [signed(ShowPass(run, visitor, key.peer_id, grant), key) for key, grant in [*keys, *own]]


def with_invite(settings: NodeSettings) -> NodeSettings:
    """Fill in what an invite or a run link says: the run, and the peers to join through.

    It is the given one, among the addresses to join too, or, where nothing else says where to go, that of an
    earlier start.

    Raises: ConfigError.
    """
    way, ways = way_of(settings.join, settings.run, settings.invite), WaysIn.load(settings.data_dir)
    _refuse_expired(expanded(settings.data_dir), way)
    link = way.link
    if link is None and not (settings.join or settings.run_file or ways.met):
        link = ways.run_link
        if link is None or not link.means(settings.run):
            return settings
        way = Way(link.addresses, link.run)
    return msgspec.structs.replace(settings, join=way.join, run=way.run, invite=way.text)


def with_link(settings: BootstrapSettings) -> BootstrapSettings:
    """Fill in what a link or an invite among the addresses to join says. Raises: ConfigError."""
    way = way_of(settings.join)
    if way.link is None:
        return settings
    run = settings.run or (Path(way.run),)
    return msgspec.structs.replace(settings, join=way.join, run=run)


def joined_through_before(settings: NodeSettings) -> tuple[str, ...]:
    """List what this folder's node joined through before, where nothing is given now: the addresses given
    last, else those of the link or invite that was."""
    if settings.join or settings.run_file is not None:
        return ()
    ways = WaysIn.load(settings.data_dir)
    link = ways.run_link
    return ways.join or (link.addresses if link and link.means(settings.run) else ())


def _refuse_expired(data_dir: Path, way: Way) -> None:
    """Refuse an invite that lets nobody in any more. Who was let in by it stays in. Raises: ConfigError."""
    invite = way.link.invite if way.link is not None else None
    if invite is None or not 0 < invite.grant.expires < time.time():
        return
    if not (run_folder(data_dir, invite.run) / "admission").exists():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(invite.grant.expires))
        raise ConfigError(
            f"the invite has expired, at {when} by this machine's clock", "ask the run's owner for another"
        )


def check_owner(settings: NodeSettings, run: PublishedRun) -> None:
    """Check that a run is of the owner that the link to it names, the given one or the saved one.

    Raises: UserError.
    """
    link = read_link(settings.invite) if settings.invite else WaysIn.load(settings.data_dir).run_link
    if link is not None and link.run == run.id and link.owner not in ("", run.signed.owner):
        raise UserError(
            f"run {run.name} is of owner {clean(run.signed.owner)}, and the link says {link.owner}",
            "do not use this link; ask the run's owner for the true one",
        )


def owns(data_dir: Path, owner: str) -> bool:
    """Tell whether this folder has the key of that owner."""
    path = data_dir / "owner.key"
    return path.exists() and Identity.load_or_create(path).peer_id == owner


def own_admission(data_dir: Path, run: PublishedRun, me: str) -> Admission | None:
    """Make or find what this node shows the run's peers, and keep it; None: it has nothing to show.

    The owner's key comes first, then the invite that was given last, then what was kept.

    Raises: StorageError.
    """
    path = run_folder(data_dir, run.id) / "admission"
    shown = _by_owner(data_dir, run, me) or _by_invite(data_dir, run, me)
    if shown is None:
        kept = read_note(path, _decode, logger.warning)
        sound = kept is not None and admission_fault(kept, me, run.id, run.owners, verify) is None
        return kept if sound else None
    Files().make_folder(path.parent)
    Files().save(path, [msgspec.msgpack.encode(shown)], durable=True)
    return shown


def _decode(content: bytes) -> Admission:
    return msgspec.msgpack.decode(content, type=Admission)


def _by_owner(data_dir: Path, run: PublishedRun, me: str) -> Admission | None:
    path = data_dir / "owner.key"
    if not path.exists():
        return None
    owner = Identity.load_or_create(path)
    if owner.peer_id not in run.owners:
        return None
    return admission(grant(run.id, owner.peer_id, 0, MAX_USES, owner), me, owner)


def _by_invite(data_dir: Path, run: PublishedRun, me: str) -> Admission | None:
    link = WaysIn.load(data_dir).run_link
    invite = link and link.invite
    return invite.admit(me) if invite and invite.run == run.id else None
