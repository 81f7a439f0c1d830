"""Wishes of the machine's owner, carried out on a node: what its learner, link and life make of them.

One for the life of the process, also while the node is away from its run: before it has joined, and after it
left because the month's transfer was used up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from msgspec.structs import asdict, replace

from p2pdiloco.config.settings import NodeSettings, limits_of
from p2pdiloco.daemon import service
from p2pdiloco.daemon.apart import apart
from p2pdiloco.daemon.control.controls import AWAY, ControlState
from p2pdiloco.daemon.display.own_rows import RestRow, TransferRow
from p2pdiloco.daemon.links.link import Link
from p2pdiloco.daemon.rest.keeper import WishKeeper
from p2pdiloco.daemon.rest.reasons import Rest, RestReason, clock_text
from p2pdiloco.daemon.rest.sources import OwnersMachine
from p2pdiloco.errors import UserError
from p2pdiloco.learner import channel as ch

T = TypeVar("T")
logger = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
HAND_OVER_AT_MOST_S = 120.0
"""Time for which a node that is to leave waits for its work to be merged. What is not is saved, and taken up
again at the next start."""


class Reins(Protocol):
    """Membership of a run, as far as this is concerned (`daemon.member`)."""

    def names(self) -> tuple[str, str, str]:
        """Name the peer, the node and the run."""

    def state(self) -> str:
        """Say in one word what the node does (`NodeState`)."""

    def recent(self) -> tuple[str, ...]:
        """List the latest lines of the log."""

    def has_handed_over(self) -> bool:
        """Tell whether the learner rests with all merged, or there is none."""

    def follow(self, wish: ch.SpareMachine) -> None:
        """Let the learner leave so much of the machine to others."""

    def permit(self, link: Link) -> None:
        """Go by these rates of the link from now on."""

    def carried_bytes(self) -> tuple[int, int]:
        """Count what went over the link, (out, in)."""

    def hand_over_bytes(self) -> int:
        """Count the bytes that handing over takes, about."""

    def note(self, words: str, reason: str) -> None:
        """Write into the diary that the learner rests, or goes on."""


async def _carried_through(wish: Coroutine[Any, Any, T]) -> T:
    """Carry a wish through: who asked may be gone before the disk has it, and it holds all the same."""
    return await asyncio.shield(asyncio.ensure_future(wish))


class NodeControls:
    """Controls of one node (`OwnerControls`)."""

    def __init__(
        self,
        settings: NodeSettings,
        stop: asyncio.Event,
        machine: OwnersMachine | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`stop`: set when the node is to leave for good.

        Raises:
            ConfigError: this machine does not tell what a limit is about.
        """
        self._given, self._stop, self._wall = settings, stop, wall
        self._now = asyncio.get_running_loop().time
        self._keeper = WishKeeper(settings.data_dir, limits_of(settings), machine or OwnersMachine(), wall)
        self._member: Reins | None = None
        self._rest: Rest | None = None
        self._told: ch.SpareMachine | None = None
        self._permitted: Link | None = None
        self._leaves_by_s: float | None = None
        self._changed = asyncio.Event()
        self.away = asyncio.Event()
        """Event that is set while the node is to be away from its run."""

    def settings(self) -> NodeSettings:
        """Return the settings that hold: those of the start, with what is kept of before."""
        return replace(self._given, **asdict(self._keeper.limits))

    # --- what the owner asks -------------------------------------------------------------------------

    async def pause(self) -> str:
        """See `OwnerControls.pause`."""
        if since := self._keeper.paused_since:
            return f"paused since {clock_text(since, self._wall())} already; `p2pdiloco resume` goes on"
        await _carried_through(self._keeper.pause(True))
        self.look()
        return "paused: what was made is handed over, then the learner rests; `p2pdiloco resume` goes on"

    async def resume(self) -> str:
        """See `OwnerControls.resume`."""
        if self._stop.is_set():
            raise UserError("the node leaves already", "start it again: p2pdiloco node")
        if not (self._keeper.paused_since or self._keeper.finishing_since):
            return (
                f"not paused; {self._rest.line()}" if self._rest is not None else "not paused: nothing to do"
            )
        if self._keeper.paused_since:
            await _carried_through(self._keeper.pause(False))
        self._keeper.finish(False)
        self.look()
        return (
            f"resumed, but {self._rest.line()}" if self._rest is not None else "resumed: the learner goes on"
        )

    def finish(self) -> str:
        """See `OwnerControls.finish`."""
        if not self._keeper.finishing_since:
            self._keeper.finish(True)
            self.look()
        if self._stop.is_set():
            return "finishing: nothing is to be handed over; leaving now"
        return f"finishing: handing over what was made, then leaving, within {HAND_OVER_AT_MOST_S:g} s"

    async def limits(self, changes: dict[str, str]) -> str:
        """See `OwnerControls.limits`."""
        if not changes:
            return "nothing to change"
        said = await _carried_through(self._keeper.change(changes))
        self.look()
        return "; ".join(said)

    def state(self) -> ControlState:
        """See `OwnerControls.state`."""
        member = self._member
        peer, name, run_name = member.names() if member is not None else ("", self._given.name, "")
        elsewhere = AWAY if self.away.is_set() else "joining"
        return ControlState(
            peer=peer,
            name=name,
            run_name=run_name,
            state=member.state() if member is not None else elsewhere,
            paused=self._keeper.paused_since > 0,
            finishing=self._keeper.finishing_since > 0,
            rest=self.rest_row(),
            transfer=self.transfer_row(),
            limits=tuple(self._keeper.listed()),
            recent=member.recent() if member is not None else (),
        )

    # --- rows ----------------------------------------------------------------------------------------

    def rest_row(self) -> RestRow | None:
        """Make the row of why the learner rests; None: it does not."""
        rest = self._rest
        if rest is None:
            return None
        return RestRow(
            reason=rest.reason,
            since=rest.since,
            words=rest.line()[:240],
            ends=rest.ends[:240],
            handed_over=rest.handed_over,
        )

    def transfer_row(self) -> TransferRow:
        """Make the row of this month's bytes."""
        return self._keeper.transfer_row()

    # --- what follows --------------------------------------------------------------------------------

    def attach(self, member: Reins) -> None:
        """Hold a membership's reins from now on: before its learner starts."""
        self._member, self._told, self._permitted = member, None, None
        self._keeper.reserve(member.hand_over_bytes())
        self._keeper.book.begin()
        self.look()

    def detach(self) -> None:
        """Let go of a membership that has ended."""
        if self._member is not None:
            self._count(self._member)
        self._member, self._leaves_by_s = None, None

    async def watch(self) -> None:
        """Look every second, for ever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def may_join(self) -> bool:
        """Wait until the node may be a member: the month's transfer is not used up. Returns True.

        Raises:
            UserError: it is used up, and a program waits for the node.
        """
        while self._keeper.is_used_up(self._wall()):
            if self._given.learner_socket is not None and not self._stop.is_set():
                hint = "raise it (--max-transfer, or p2pdiloco limits), or wait for the next month"
                raise UserError("this month's transfer is used up", hint)
            self.away.set()
            service.tell_ready()
            if self._rest is not None:
                service.tell_status(self._rest.line())
            self._changed.clear()
            await self._changed.wait()
        self.away.clear()
        return True

    async def close(self) -> None:
        """Write what was counted: the node ends."""
        self.detach()
        await apart(self._keeper.book.close)

    def look(self) -> None:
        """Look what is to be, and let it be so."""
        if self._member is not None:
            self._count(self._member)
        before, now = self._rest, self._now()
        rest = self._keeper.look(now, self._wall())
        if rest is not None and self._member is not None:
            rest = replace(rest, handed_over=self._member.has_handed_over())
        self._rest = rest
        self._say(before, rest)
        self._changed.set()
        if self._member is not None:
            self._carry_out(self._member, rest)
        self._leave_if(rest, now)

    def _count(self, member: Reins) -> None:
        self._keeper.book.look(member.carried_bytes(), self._now(), self._wall())

    def _carry_out(self, member: Reins, rest: Rest | None) -> None:
        bounds = self._keeper.bounds
        wish = ch.SpareMachine(rest is not None, bounds.min_step_s)
        if wish != self._told:
            self._told = wish
            member.follow(wish)
        link = Link(bounds.upload_bits_per_s or math.inf, bounds.download_bits_per_s or math.inf)
        if link != self._permitted:
            self._permitted = link
            member.permit(link)

    def _leave_if(self, rest: Rest | None, now: float) -> None:
        """Leave, for good or for now, once all is handed over or was waited for."""
        if rest is None or not rest.reason.leaves:
            self._leaves_by_s = None
            return
        if self._leaves_by_s is None:
            self._leaves_by_s = now + HAND_OVER_AT_MOST_S
        if self._member is not None and not rest.handed_over and now < self._leaves_by_s:
            return
        if rest.reason is RestReason.FINISHING or self._given.learner_socket is not None:
            self._stop.set()  # a program's session ends with its node
        else:
            self.away.set()

    def _say(self, before: Rest | None, rest: Rest | None) -> None:
        was, now = (r.reason.value if r is not None else "" for r in (before, rest))
        if was == now:
            return
        words = rest.line() if rest is not None else "the owner's wishes let the learner go on"
        if self._member is not None:
            self._member.note(words, now or "no")
        else:
            logger.info("%s", words)
