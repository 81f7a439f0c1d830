"""Control of a node: what the owner of its machine may ask of it while it runs, and the socket for it.

`NodeControls` carries wishes out: what learner, link and life make of them. `ControlServer` listens at
`<data_dir>/control.sock`, for this user alone; `ask` is its client. A request and its reply are each one JSON
object and a newline, then the end.

A caller of `OwnerControls` has shown to be the owner: at the control socket by the file's rights, on the web
page by its token. All answers are one line for people; a wish that cannot be is a `UserError` with a sentence
and a hint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from p2pdiloco.adapters.endpoint import report_end
from p2pdiloco.adapters.p2pd import MAX_SOCKET_PATH_BYTES, socket_folder
from p2pdiloco.config.settings import NodeSettings, limits_of
from p2pdiloco.daemon.budgets import LinkCapacity, apart
from p2pdiloco.daemon.display.snapshot import (
    PauseReason,
    PauseRow,
    Proposed,
    TransferRow,
    clock_text,
)
from p2pdiloco.daemon.owner.pauses import OwnersMachine
from p2pdiloco.daemon.owner.wishes import LimitRow, WishKeeper
from p2pdiloco.errors import UserError, encoded
from p2pdiloco.learner import channel as ch
from p2pdiloco.util import DAMAGE, Frozen, T, listening_socket

logger = logging.getLogger(__name__)


AWAY = "away"
"""State of a node that has left its run for now, and comes back by itself."""


class ControlState(Frozen, kw_only=True):
    """State of a node, for its owner."""

    peer: str = ""
    name: str = ""
    run_name: str = ""
    state: str = "joining"
    """Word of the node's state (`NodeState`), or "away": it has left for now, and comes back by itself."""
    paused: bool = False
    finishing: bool = False
    rest: PauseRow | None = None
    """Reason why the learner rests by the owner's wish; None: it does not."""
    transfer: TransferRow | None = None
    limits: tuple[LimitRow, ...] = ()
    recent: tuple[str, ...] = ()
    """Latest lines of its log, newest last."""
    proposed: Proposed = ()
    """Seats that wait for the word of the run's owner, where its key is here."""


MAX_LINE_BYTES = 64 * 1024
SOCKET = "control.sock"
Verb = Literal["state", "pause", "resume", "finish", "limits", "say"]


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """Wish of the owner."""

    do: Verb
    changes: Annotated[dict[Annotated[str, Meta(max_length=64)], str], Meta(max_length=32)] = {}
    """Limits to change, for "limits"; what `OwnMember.say` takes, for "say"."""


class Reply(Frozen):
    """Answer: one line for people, and how things stand afterwards."""

    ok: bool
    said: str = ""
    hint: str = ""
    state: ControlState | None = None


class OwnerControls(Protocol):
    """Controls, for who serves them to the owner (control socket, web page). On the event loop only."""

    async def pause(self) -> str:
        """Let the learner rest until `resume`, also over restarts."""

    async def resume(self) -> str:
        """End a pause, or take `finish` back while it can be. Schedules and bounds go on holding."""

    def finish(self) -> str:
        """Hand over what was made, then leave and end."""

    async def limits(self, changes: dict[str, str]) -> str:
        """Change limits by name, all or none; an empty value takes one away. They are kept for later starts.

        Raises: UserError (an unknown name, a value that cannot be, nothing to read it by)."""

    async def seat(self, peer: str) -> str:
        """Give a seat of the run to a member that is proposed, by the word of the run's owner.

        Raises: UserError (it is not proposed; the key is gone; the notice is full), StorageError."""

    def say(self, word: dict[str, str]) -> str:
        """Say of a seat what its own node, or a deputy, may say of it.

        Raises: UserError (as `OwnMember.say`)."""

    def state(self) -> ControlState:
        """Describe the node."""


LOOK_EVERY_S = 1.0
HAND_OVER_AT_MOST_S = 120.0
"""Time for which a node that is to leave waits for its work to be merged. What is not is saved, and taken up
again at the next start."""


class MemberHandle(Protocol):
    """Handle of a running member, as far as controls need one (`daemon.owner.own_member.OwnMember`)."""

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

    def permit(self, link: LinkCapacity) -> None:
        """Go by these rates of the link from now on."""

    def carried_bytes(self) -> tuple[int, int]:
        """Count what went over the link, (out, in)."""

    def hand_over_bytes(self) -> int:
        """Count the bytes that handing over takes, about."""

    def note(self, words: str, reason: str) -> None:
        """Write into the diary that the learner rests, or goes on."""

    def proposed(self) -> Proposed:
        """List the members that wait for a seat by the word of the run's owner, where its key is here."""

    async def give(self, peer: str) -> str:
        """Give one of them a seat (`OwnerControls.seat`)."""

    def say(self, run: str, peer: str, seated: str, replaces: str) -> str:
        """Say of a seat what its own node, or a deputy, may say of it (`OwnerControls.say`)."""


class NodeControls:
    """Controls of one node: carries the wishes of its machine's owner out.

    There is one for the life of the process, also while the node is away from its run: before it has joined,
    and after it left because the month's transfer was used up.
    """

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
        self._member: MemberHandle | None = None
        self._rest: PauseRow | None = None
        self._told: ch.SpareMachine | None = None
        self._permitted: LinkCapacity | None = None
        self._leaves_by_s: float | None = None
        self._changed = asyncio.Event()
        self.away = asyncio.Event()
        """Event that is set while the node is to be away from its run."""

    def settings(self) -> NodeSettings:
        """Return the settings that hold: those of the start, with what is kept of before."""
        return replace(self._given, **asdict(self._keeper.limits))

    # --- what the owner asks -------------------------------------------------------------------------

    async def pause(self) -> str:
        if since := self._keeper.paused_since:
            return f"paused since {clock_text(since, self._wall())} already; `p2pdiloco resume` goes on"
        await _carried_through(self._keeper.pause(True))
        self.look()
        return "paused: what was made is handed over, then the learner rests; `p2pdiloco resume` goes on"

    async def resume(self) -> str:
        if self._stop.is_set():
            raise UserError("the node leaves already", "start it again: p2pdiloco node")
        if not (self._keeper.paused_since or self._keeper.finishing_since):
            return (
                f"not paused; {self._rest.words}" if self._rest is not None else "not paused: nothing to do"
            )
        if self._keeper.paused_since:
            await _carried_through(self._keeper.pause(False))
        self._keeper.finish(False)
        self.look()
        return (
            f"resumed, but {self._rest.words}" if self._rest is not None else "resumed: the learner goes on"
        )

    def finish(self) -> str:
        if not self._keeper.finishing_since:
            self._keeper.finish(True)
            self.look()
        if self._stop.is_set():
            return "finishing: nothing is to be handed over; leaving now"
        return f"finishing: handing over what was made, then leaving, within {HAND_OVER_AT_MOST_S:g} s"

    async def limits(self, changes: dict[str, str]) -> str:
        if not changes:
            return "nothing to change"
        said = await _carried_through(self._keeper.change(changes))
        self.look()
        return "; ".join(said)

    async def seat(self, peer: str) -> str:
        if self._member is None:
            raise UserError("this node is in no run now", "try again when it trains")
        return await _carried_through(self._member.give(peer))

    def say(self, word: dict[str, str]) -> str:
        if self._member is None:
            raise UserError("this node is in no run now", "try again when it trains")
        return self._member.say(*(word.get(name, "") for name in ("run", "peer", "seated", "replaces")))

    def state(self) -> ControlState:
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
            rest=self.pause_row(),
            transfer=self.transfer_row(),
            limits=tuple(self._keeper.listed()),
            recent=member.recent() if member is not None else (),
            proposed=member.proposed() if member is not None else (),
        )

    # --- rows ----------------------------------------------------------------------------------------

    def pause_row(self) -> PauseRow | None:
        """Make the row of why the learner rests; None: it does not."""
        return self._rest

    def transfer_row(self) -> TransferRow:
        """Make the row of this month's bytes."""
        return self._keeper.transfer_row()

    # --- what follows --------------------------------------------------------------------------------

    def attach(self, member: MemberHandle) -> None:
        """Control this member from now on: before its learner starts."""
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
        from p2pdiloco.daemon import program  # with hivemind, which the commands do without

        while self._keeper.is_used_up(self._wall()):
            if self._given.learner_socket is not None and not self._stop.is_set():
                hint = "raise it (--max-transfer, or p2pdiloco limits), or wait for the next month"
                raise UserError("this month's transfer is used up", hint)
            self.away.set()
            program.tell_ready()
            if self._rest is not None:
                program.tell_status(self._rest.words)
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

    def _count(self, member: MemberHandle) -> None:
        self._keeper.book.look(member.carried_bytes(), self._now(), self._wall())

    def _carry_out(self, member: MemberHandle, rest: PauseRow | None) -> None:
        bounds = self._keeper.bounds
        wish = ch.SpareMachine(rest is not None, bounds.min_step_s)
        if wish != self._told:
            self._told = wish
            member.follow(wish)
        link = LinkCapacity(bounds.upload_bits_per_s or math.inf, bounds.download_bits_per_s or math.inf)
        if link != self._permitted:
            self._permitted = link
            member.permit(link)

    def _leave_if(self, rest: PauseRow | None, now: float) -> None:
        if rest is None or not rest.reason.leaves:
            self._leaves_by_s = None
            return
        if self._leaves_by_s is None:
            self._leaves_by_s = now + HAND_OVER_AT_MOST_S
        if self._member is not None and not rest.handed_over and now < self._leaves_by_s:
            return
        if rest.reason is PauseReason.FINISHING or self._given.learner_socket is not None:
            self._stop.set()  # a program's session ends with its node
        else:
            self.away.set()

    def _say(self, before: PauseRow | None, rest: PauseRow | None) -> None:
        was, now = (r.reason.value if r is not None else "" for r in (before, rest))
        if was == now:
            return
        words = rest.words if rest is not None else "the owner's wishes let the learner go on"
        if self._member is not None:
            self._member.note(words, now or "no")
        else:
            logger.info("%s", words)


async def _carried_through(wish: Coroutine[Any, Any, T]) -> T:
    """Carry a wish through: who asked may be gone before the disk has it, and it holds all the same."""
    return await asyncio.shield(asyncio.ensure_future(wish))


PATIENCE_S = 5.0
"""Time for a request to come, and for its answer to be taken."""
MAX_CLIENTS = 8
_UCRED = "3i"


class ControlServer:
    """Server of the control socket of one node."""

    def __init__(self, data_dir: Path, controls: OwnerControls) -> None:
        self._path = socket_path(data_dir)
        self._controls = controls
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, for this user only. The data folder is ours, so a socket that is there is nobody's any
        more.

        Where it cannot be made the node runs without: that is said.
        """
        try:
            _clear(self._path)
            listener = listening_socket(self._path)
            self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_LINE_BYTES)
        except OSError as error:
            why = error.strerror or str(error)
            logger.warning(
                "no control socket at %s (%s): pause, resume, finish and limits do not reach this node",
                self._path,
                why,
            )

    async def close(self) -> None:
        """Listen no longer; whoever is being answered is answered."""
        if self._server is None:
            return
        self._server.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        if self._clients:
            await asyncio.wait(self._clients, timeout=PATIENCE_S)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        too_slow_gone_or_no_line = TimeoutError, OSError, EOFError, asyncio.LimitOverrunError
        with contextlib.closing(writer), contextlib.suppress(*too_slow_gone_or_no_line):
            async with asyncio.timeout(PATIENCE_S):
                writer.write(encode(await self._reply(reader, writer)))
                await writer.drain()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply:
        line = await reader.readuntil(b"\n")  # also of who is refused, who would else not hear why
        if len(self._clients) > MAX_CLIENTS:
            return Reply(False, "too many ask this node at once", "try again")
        if not is_owner(writer.get_extra_info("socket")):
            return Reply(False, "this node belongs to another user")
        try:
            request = msgspec.json.decode(line, type=Request)
        except DAMAGE:
            return Reply(False, "not a request that this node knows", "is it of the same version?")
        try:
            return Reply(True, await self._do(request), state=self._controls.state())
        except UserError as error:
            return Reply(False, str(error), error.hint, self._controls.state())

    async def _do(self, request: Request) -> str:
        controls = self._controls
        match request.do:
            case "state":
                return ""
            case "pause":
                return await controls.pause()
            case "resume":
                return await controls.resume()
            case "finish":
                return controls.finish()
            case "limits":
                return await controls.limits(request.changes)
            case "say":
                return controls.say(request.changes)


def _clear(path: Path) -> None:
    """Remove a socket that a killed node left. Raises: OSError (something else is there)."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError("something else is there")
    path.unlink(missing_ok=True)


def is_owner(connection: socket.socket) -> bool:
    """Tell whether the process at the other end is of this user (or root), where the system says; elsewhere
    the file's rights have to do."""
    if sys.platform != "linux":
        return True
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_UCRED))
    except OSError:
        return False
    _, uid, _ = struct.unpack(_UCRED, raw)
    return uid in (os.geteuid(), 0)


@asynccontextmanager
async def owned(settings: NodeSettings, stop: asyncio.Event) -> AsyncIterator[NodeControls]:
    """Context of a node that listens to its machine's owner, from the start of its process to its end.

    Raises:
        ConfigError: this machine does not tell what a limit is about.
    """
    controls = NodeControls(settings, stop)
    server = ControlServer(settings.data_dir, controls)
    await server.start()
    watching = asyncio.create_task(controls.watch())
    watching.add_done_callback(partial(report_end, "owner's wishes"))
    try:
        yield controls
    finally:
        watching.cancel()
        await server.close()
        await controls.close()


TIMEOUT_S, STATE_TIMEOUT_S = 10.0, 2.0


class NodeSilent(UserError):
    """Error: the node that runs here does not answer."""

    exit_status = 3


def ask(data_dir: Path, request: Request, timeout_s: float = TIMEOUT_S) -> Reply:
    """Ask the node with this data folder.

    Raises:
        NodeSilent: it does not listen, or does not answer in time.
        UserError: its socket is another user's.
    """
    path = socket_path(data_dir)
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            if os.geteuid() != 0 and not is_owner(connection):  # root may talk to a service's node
                raise UserError(f"{path} belongs to another user")
            connection.sendall(encode(request))
            return decode_reply(_line(connection))
    except (OSError, EOFError) as error:
        hint = "is it starting? a bootstrap, and a node of an earlier version, have no such controls"
        why = (isinstance(error, OSError) and error.strerror) or error
        raise NodeSilent(
            f"the node with the data folder {data_dir} does not answer at {path}: {why}", hint
        ) from error
    except DAMAGE as error:
        raise NodeSilent(f"the node at {path} answers in words of another version") from error


def away_words(data_dir: Path) -> str:
    """Say why the node that runs here is away from its run for now, with no connection to anybody; empty: it
    is not, or does not say."""
    state = state_here(data_dir)
    if state is None or state.state != AWAY:
        return ""
    return state.rest.words if state.rest is not None else "away"


def state_here(data_dir: Path) -> ControlState | None:
    """Ask the node that runs here how it stands, for its owner; None: none runs, or it does not say."""
    with contextlib.suppress(UserError):
        return ask(data_dir, Request("state"), STATE_TIMEOUT_S).state
    return None


def _line(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        part = connection.recv(MAX_LINE_BYTES)
        if not part or len(found) > MAX_LINE_BYTES:
            raise EOFError("it hung up")
        found += part
    return found


def socket_path(data_dir: Path) -> Path:
    """Find the path of a data folder's control socket: in it, or, when that path is too long for a socket,
    beside the folder for the network's sockets."""
    path = data_dir.absolute() / SOCKET
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    folder = socket_folder(data_dir)
    return folder.with_name(f"{folder.name}-{SOCKET}")


_encoder = msgspec.json.Encoder()


def encode(message: Request | Reply) -> bytes:
    """Encode one line."""
    return encoded(message, _encoder) + b"\n"


def decode_reply(line: bytes) -> Reply:
    """Decode a reply. Raises: msgspec.MsgspecError, ValueError (it is none)."""
    return msgspec.json.decode(line, type=Reply)
