"""Introductions: what this node shows at others' doors, and what it learns there."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import TypeVar

from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.types import Wire
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission.gate import Change
from p2pdiloco.daemon.admission.papers import Admission, AdmissionFault
from p2pdiloco.daemon.admission.queries import (
    AdmissionShown,
    GiveNotice,
    NoticeAnswer,
    NoticeQuery,
    ShowAdmission,
)
from p2pdiloco.daemon.admission.register import Register
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.util import BoundedDict

logger = logging.getLogger(__name__)
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
    """Introductions of this node to the peers of one run."""

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
            logger.warning("…%s does not admit this node: %s", peer[-6:], fault)

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
