"""`p2pdiloco status`: asks one live member of a run how the run is doing.

`Search` looks for the run, then for a member that answers. `render_status` words the report for people;
scripts get it as JSON with the fields of `StatusReport`, where numbers that are not finite are null.
`visitor` is the transport of somebody who only asks: a new identity in a temporary folder, a client of the
DHT that stores nothing and is gone at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import (
    AsyncIterator,
    Callable,
    Container,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, Literal, TypeVar

import uvloop
from msgspec import structs
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2pdiloco.adapters.data_dir import is_in_use
from p2pdiloco.adapters.hivemind_net import DIALLED_BEFORE, HivemindTransport, why_unreached
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.cli.interrupt import orderly
from p2pdiloco.config.settings import StatusSettings, WatchSettings
from p2pdiloco.config.values import Addresses
from p2pdiloco.core.api.types import Seat
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import (
    SETTLED,
    FragmentRow,
    PeerRow,
    StatusReport,
    count,
    counted,
    duration,
    few_seats_text,
    loss_text,
    owner_text,
    progress_text,
    proposed_text,
    short_peer,
    transfer_text,
)
from p2pdiloco.daemon.display.terminal import (
    activity_text,
    age_text,
    data_text,
    groups_text,
    peer_names,
    refusals_text,
    role_text,
    seat_text,
    versions_text,
)
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.discovery import ask, ask_status, listed_members
from p2pdiloco.daemon.owner.control import away_words, state_here
from p2pdiloco.daemon.run_files.known_runs import (
    ListedRun,
    PublishedRun,
    RunSearch,
    WaysIn,
    peers_of,
    pull_run,
    usual_folders,
)
from p2pdiloco.daemon.run_files.ownership import Ownership
from p2pdiloco.errors import NobodyReached, RemoteError, TransportError, UserError, clean, json_line
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Transport

MAX_ASKED = 16
"""Members that are asked in one round before the list is looked up again."""
MAX_TOLD = 4
"""Silent members that are told of."""
PAUSE_S = 0.5
PIPE_CELLS = 1000
"""Columns where there is no terminal whose width would bound them; nothing is padded to it."""
SAY_AFTER_S = 4.0
"""A person who waits longer than this is told what for."""
W = TypeVar("W", bound=WatchSettings)


def run(settings: StatusSettings) -> int:
    """Print the status of a run. Returns the exit status.

    Raises:
        Unreachable: no peer can be reached.
        NoNodes: peers are reached, but no member of the run answers in time.
        UserError: no such run.
    """
    report = visit(_report(at_home(settings)))
    if not settings.join:
        report = with_owners_rows(report, settings.data_dir)
    if settings.json:
        print(json_line(report))
    else:
        # Rich would take a pipe for a terminal of 80 columns, and cut what a reader may want whole.
        cut = sys.stdout.isatty() or "COLUMNS" in os.environ
        Console(width=None if cut else PIPE_CELLS).print(render_status(report))
    return 0


class NoNodes(UserError):
    """Error: whoever was asked answers, but no node of the run does."""

    exit_status = 3


class Unreachable(UserError):
    """Error: nobody who was asked answers."""

    exit_status = 4


def local_addresses(folder: Path | None) -> Addresses:
    """List the addresses of the node or bootstrap that runs here with this folder, by default the usual ones.

    Raises:
        Unreachable: none runs.
        NoNodes: it is away from its run for now, by its owner's wish.
        StorageError: the folder cannot be read.
    """
    usual = usual_folders(folder)
    folders = [path for path in usual if folder is not None or path.is_dir()]
    for path in folders:
        if is_in_use(path) and (found := WaysIn.load(path).own):
            if words := away_words(path):
                raise NoNodes(
                    f"the node here has left its run for now; {words}", "ask another: --join ADDRESS"
                )
            return found
    where = " or ".join(map(str, folders or usual))
    raise Unreachable(
        f"no node and no bootstrap runs here with the data folder {where}",
        "name its folder with --data-dir, or ask another peer: --join ADDRESS",
    )


def at_home(settings: W) -> W:
    """Ask whom a person named, else the node or bootstrap that runs here. Raises: as `local_addresses`."""
    if settings.join:
        return settings
    return structs.replace(settings, join=local_addresses(settings.data_dir))


def with_owners_rows(report: StatusReport, folder: Path | None) -> StatusReport:
    """Fill in what a node tells its machine's owner only, if the one that runs here with this folder, by
    default a usual one, gave the report."""
    for path in usual_folders(folder):
        state = state_here(path)
        if state is not None and state.peer == report.answered_by:
            recent = state.recent or report.recent
            report = structs.replace(report, rest=state.rest, transfer=state.transfer, recent=recent)
            return structs.replace(report, proposed=state.proposed)
    return report


async def _report(settings: StatusSettings) -> StatusReport:
    async with visiting(settings.join, settings.run, settings.timeout_s) as (_, _, report):
        return report


@contextlib.asynccontextmanager
async def visiting(
    join: Addresses, run: str, timeout_s: float
) -> AsyncIterator[tuple[Transport, Search, StatusReport]]:
    """Visit a run: the transport, the search for it, and the first good answer, which is waited for so long
    at most.

    Raises: as `run`.
    """
    is_joined, search = False, Search(run, peers_of(join))
    try:
        async with asyncio.timeout(timeout_s) as limit, visitor(join) as transport:
            is_joined = True
            (report, *_) = await search.reports(transport, enough=1)
            limit.reschedule(None)
            yield transport, search, report
    except TimeoutError:
        if not is_joined:
            raise Unreachable(
                f"none of the peers could be reached within {timeout_s:g} s",
                "check the addresses, or raise --timeout-s",
            ) from None
        raise search.failure(timeout_s) from None
    except NobodyReached as error:
        raise Unreachable(str(error), error.hint) from error


class Search:
    """Looks for the run, then for a member that answers, again and again until it is stopped from outside."""

    def __init__(self, wanted: str, joined: Iterable[str]) -> None:
        """wanted: name, id, beginning of an id, or empty; joined: peers that we are connected to."""
        self._wanted = wanted
        self.joined = list(dict.fromkeys(joined))
        """Peers that a person named to join through."""
        self._run: ListedRun | None = None
        self._listed = ""
        self._refusals: dict[str, str] = {}

    async def reports(self, transport: Transport, enough: int = MAX_ASKED) -> list[StatusReport]:
        """Answers of so many members, or of all that can be asked; at least one. Settled ones come first.

        Raises:
            UserError: several runs fit.
        """
        search = RunSearch(transport, self._wanted, self.joined)
        while True:
            chosen = await search.look()
            self._listed = search.known
            if chosen is not None:
                self._run = chosen if chosen.peers else None
                answers = await self.ask_members(transport, chosen.run, enough)
                if answers:
                    return answers
            await asyncio.sleep(PAUSE_S)

    @contextlib.contextmanager
    def said(self, timeout_s: float, say: Callable[[str], None]) -> Iterator[None]:
        """Tell who waits long, once, what is waited for."""
        telling = asyncio.get_running_loop().call_later(SAY_AFTER_S, lambda: say(self.waiting(timeout_s)))
        try:
            yield
        finally:
            telling.cancel()

    def waiting(self, timeout_s: float) -> str:
        """Say what is not there yet, as far as it is known."""
        if self._run is not None:
            what = f"no member of run {self._run.name} answers yet"
        elif self._listed:
            what = f'no run "{self._wanted}" is listed by these peers yet, but {self._listed}'
        else:
            what = "no run is listed by these peers yet"
        return f"{what}: waiting, for at most {timeout_s:g} s"

    def failure(self, waited_s: float) -> UserError:
        """Say why there is no answer after so long, in the words of what was found last."""
        waited = f"within {waited_s:g} s"
        if self._run is not None:
            told = list(self._refusals.items())[:MAX_TOLD]
            return NoNodes(
                f"no member of run {self._run.name} answered {waited}",
                "is a node of it running? `p2pdiloco node --join ...` starts one; or raise --timeout-s",
                [f"…{peer[-6:]}: {why}" for peer, why in told],
            )
        if self._listed:
            return UserError(f'the peers know no run "{self._wanted}"', f"they know: {self._listed}")
        return NoNodes(
            f"these peers listed no run {waited}",
            "a bootstrap serves one with --run run.toml; a slow network needs a larger --timeout-s",
        )

    async def ask_members(
        self, transport: Transport, run: str, enough: int = MAX_ASKED, of: Container[str] | None = None
    ) -> list[StatusReport]:
        """Answers, until so many are of settled members; those come first. `of`: only of these peers."""
        settled: list[StatusReport] = []
        others: list[StatusReport] = []
        addresses = await self.members(transport, run)
        known = [*self.joined, *(peer for peer in addresses if peer not in self.joined)]
        for peer in [peer for peer in known if of is None or peer in of][:MAX_ASKED]:
            try:
                if peer in addresses and peer not in self.joined:
                    await transport.connect(peer, addresses[peer])
                answer, _ = await ask_status(transport, peer, run)
            except TransportError as error:
                why = why_unreached([error], ())
                if why != DIALLED_BEFORE or peer not in self._refusals:
                    self._refusals[peer] = why
                continue
            except RemoteError as error:
                self._refusals[peer] = str(error)
                continue
            (settled if answer.state in SETTLED else others).append(answer)
            if len(settled) == enough:
                break
        return settled + others

    async def members(self, transport: Transport, run: str) -> dict[str, tuple[str, ...]]:
        """Peer id -> addresses, of those with a presence record that we understand; newest start first."""
        return await listed_members(transport, run, self._refusals.__setitem__)


async def run_of(transport: Transport, report: StatusReport, hosts: Iterable[str]) -> PublishedRun:
    """Get the run that a member told about, from whoever has its true manifest.

    Raises: UserError (nobody gives it, or it is not valid).
    """
    asked = [report.answered_by, *(peer for peer in hosts if peer != report.answered_by)]
    try:
        run = await pull_run(transport, ListedRun(report.run_id, [report.run_name]), asked)
    except RemoteError as error:
        raise UserError(f"the manifest of {clean(report.run_name)} is not valid: {error}") from error
    if run is None:
        raise UserError(
            f"nobody gives the manifest of {clean(report.run_name)}",
            "try again, or join through another peer",
        )
    return run


def list_members(run: str, join: Addresses, data_dir: Path | None) -> None:
    """Print whose seats stand in a run, and which other members there are, as one member says.

    Raises: as `run`.
    """
    report, stands = visit(_standing(run, join or local_addresses(data_dir)))
    invites: dict[str, str] = {}
    with contextlib.suppress(UserError):
        invites = Ownership.find(report.run_id, data_dir).names
    print(f"seats ({len(stands.seats)}):")
    for line in stands.seats:
        print(_line(line.name, line.peer, line.silent_s, _paper_text(line.seat, invites)))
    seated = {line.peer for line in stands.seats}
    others = [row for row in report.members if row.peer not in seated]
    hidden = report.members_total - len(report.members)
    print(f"without a seat ({len(others)}{f' and {hidden} more' if hidden > 0 else ''}):")
    for row in others:
        print(_line(row.name, row.peer, row.last_seen_s))


async def _standing(run: str, join: Addresses) -> tuple[StatusReport, wire.Stands]:
    async with visiting(join, run, StatusSettings().timeout_s) as (transport, _, report):
        told = await ask(transport, report.answered_by, wire.StandsQuery(report.run_id), wire.Stands)
        if told is None:
            raise UserError(
                f"…{short_peer(report.answered_by)} does not know yet who has a seat",
                "try again, or ask another: --join ADDRESS",
            )
        return report, told


def _line(name: str, peer: str, silent_s: float | None, paper: str = "") -> str:
    seen = "not seen by the node asked" if silent_s is None else f"seen {duration(silent_s)} ago"
    return f"{clean(name) or '-':<12} {peer}  {paper}{seen}"


def _paper_text(seat: Seat, invites: Mapping[str, str]) -> str:
    """Word since when a seat stands, and what gave it."""
    word = "a word of seats" if seat.turn else "the owner's word" if seat.word else ""
    giver = f"invite {clean(invites.get(seat.key, '')) or short_peer(seat.key)}" if seat.key else ""
    papers = " and ".join(filter(None, (giver, word))) or "the run file"
    return f"since version {seat.since}, by {papers}, "


# Views.


def render_status(report: StatusReport) -> RenderableType:
    """Summary, members, fragments, latest reasons, from top to bottom; any width from 80 columns on."""
    names = {**peer_names("", "-", report.members), "": "-"}
    parts: list[RenderableType] = [
        _summary(report, names),
        Text(),
        _members(report),
        Text(),
        _fragments(report.fragments, names),
    ]
    if report.recent:
        parts += [Text(), Text("latest", style="dim"), *(Text(clean(line)) for line in report.recent)]
    return Group(*parts)


def _summary(report: StatusReport, names: dict[str, str]) -> Text:
    answered_by = names.get(report.answered_by) or clean(report.answered_by)
    run = report.run_name
    text = Text.assemble("run ", (clean(run), "bold"), f" {clean(report.run_id[:16])}\n")
    members = counted(report.members_total, "member")
    text.append(f"{members}, {len(report.fragments)} fragments, ")
    text.append(f"versions {versions_text(report.fragments)}{groups_text(report.fragments)}")
    final = min((row.final for row in report.fragments), default=0)
    text.append(f", final up to {final}\n" if final else "\n")
    text.append(f"{count(report.run_tokens)} tokens merged in {count(report.run_versions)} versions, ")
    text.append(f"{count(sum(member.tokens_per_s for member in report.members))} tokens/s\n")
    if report.course.schedule_tokens:
        text.append(f"{progress_text(report.course)}\n", "bold")
    if owner := owner_text(report.course):
        text.append(f"{owner}\n", "yellow")
    for words in (few_seats_text(report.course, run), proposed_text(report.proposed, run)):
        text.append(f"{words}\n" if words else "", "yellow")
    text.append(f"loss {loss_text(report.loss, 3)} (training, mean of members)")
    if report.heldout_loss is not None:
        by = names.get(report.heldout_by) or f"…{short_peer(report.heldout_by)}"
        text.append(
            f", {loss_text(report.heldout_loss, 3)} (held-out{f', by {by}' if report.heldout_by else ''})"
            f"{age_text(report.heldout_age_s)}"
        )
    if report.data is not None:
        text.append(f"\ndata: {data_text(report.data)} begun; ")
        text.append(f"{answered_by} trained on {count(report.data.tokens)} tokens")
    if report.refusals:
        text.append(f"\nrefused {refusals_text(report.refusals)}", "yellow")
    if report.rest is not None:
        text.append(f"\n{answered_by} is {clean(report.rest.words)}", "yellow")
    if report.transfer is not None:
        text.append(f"\n{answered_by}: {transfer_text(report.transfer)}")
    for liar in report.excluded:
        text.append(
            f"\n{clean(liar.name) or f'…{short_peer(liar.peer)}'} is excluded: {clean(liar.reason)}", "red"
        )
    for line in filter(None, (report.doubt, report.link)):
        text.append(f"\n{clean(line)}", "yellow")
    if report.start is not None:
        text.append(f"\n{answered_by} {clean(report.start.words())}")
    return text.append(f"\nas seen by {answered_by} ({report.state})", "dim")


def _table(title: str, columns: list[tuple[str, int]]) -> Table:
    """Columns are (heading, width), of numbers if above 0. Width 0: the rest of the line, wrapped."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name, width in columns:
        align: Literal["right", "left"] = "right" if width > 0 else "left"
        table.add_column(
            name, justify=align, width=abs(width) or None, no_wrap=width != 0, overflow="ellipsis"
        )
    return table


def _members(report: StatusReport) -> Table:
    hidden = report.members_total - len(report.members)
    more = f", {len(report.members)} shown" if hidden > 0 else ""
    columns = [("name", -12), ("peer", -7), ("step", 7), ("tokens/s", 8)]
    columns += [("loss", 5), ("seen", 7), ("reach", -8), ("", 0)]
    table = _table(f"members ({report.members_total}{more})", columns)
    for row in report.members:
        table.add_row(*map(Text, _member_cells(row, row.peer == report.answered_by)))
    return table


def _member_cells(row: PeerRow, answered: bool) -> list[str]:
    seen = "never" if row.last_seen_s is None else duration(row.last_seen_s)
    return [
        clean(row.name) or "-",
        f"…{short_peer(row.peer)}",
        str(row.inner_step),
        count(row.tokens_per_s),
        loss_text(row.loss, 3),
        "answers" if answered else seen,
        clean(row.reach).partition(" ")[0] or "-",
        role_text(row),
    ]


def _fragments(rows: tuple[FragmentRow, ...], names: dict[str, str]) -> Table:
    """Make the table of fragments. Columns of groups take the room of terms and tokens: the JSON has all."""
    grouped = any(row.groups > 1 for row in rows)
    columns = [("fragment", 8), ("version", 7), ("digest", -8)]
    if grouped:
        columns += [("leaf syncer", -12), ("group", -8), ("root", -8), ("state", 0)]
    else:
        columns += [("term", 6), ("syncer", -14), ("tokens", 6), ("state", 0)]
    table = _table(f"fragments ({len(rows)})", columns)
    for row in rows:
        syncer = names.get(row.syncer) or f"…{short_peer(row.syncer)}"
        root = names.get(row.root) or f"…{short_peer(row.root)}"
        cells = [str(row.index), str(row.number), clean(row.digest[:8])]
        cells += [syncer, seat_text(row), root] if grouped else [str(row.term), syncer, count(row.tokens)]
        table.add_row(*map(Text, [*cells, activity_text(row)]))
    return table


# Visitor.

T = TypeVar("T")
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
ASKS_ONLY = P2PDOptions(listen=False, relay=False)
STOPS = (signal.SIGTERM, signal.SIGHUP)
SIGNALLED = 128
"""A shell's exit status of a program that a signal ended is this and the signal's number."""


def visit(body: Coroutine[Any, Any, T]) -> T:
    """Run it in an event loop of its own, without lines about what peers do wrong. Told to stop (`timeout 30
    p2pdiloco status`, a closed terminal), it ends as at Ctrl-C: p2pd and the temporary folder are gone before
    we are.

    Raises:
        SystemExit: a signal came, with the status that says which.
        KeyboardInterrupt: Ctrl-C.
    """
    logging.getLogger().setLevel(logging.ERROR)
    seen: list[int] = []

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if not seen:  # a second one must not cut the clearing up short
                task.cancel()
            seen.append(number)

        def complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # At the end hivemind's tasks complain of connections that are closed under them.
            if not task.done() and not task.cancelling():
                loop.default_exception_handler(context)

        loop.set_exception_handler(complain)
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                loop.add_signal_handler(number, stop, number)
        return await body

    try:
        with orderly():
            return uvloop.run(main())
    except asyncio.CancelledError:
        if not seen:
            raise
        raise SystemExit(SIGNALLED + seen[0]) from None


@contextlib.asynccontextmanager
async def visitor(
    join: Addresses, listen: Sequence[str] = LISTEN, options: P2PDOptions = ASKS_ONLY
) -> AsyncIterator[HivemindTransport]:
    """A transport of an identity that exists only here. Without peers to join it is alone at first.

    Raises:
        UserError: none of these peers can be reached.
    """
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-visit-") as folder:
        path = Path(folder) / "identity.key"
        identity = Identity.load_or_create(path)
        transport = HivemindTransport(identity, path, Path(folder), listen, join, options)
        await transport.start(FrontDoor(), may_be_alone=not join)
        try:
            yield transport
        finally:
            await transport.close()
