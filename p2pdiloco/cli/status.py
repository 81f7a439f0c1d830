"""`p2pdiloco status`: asks one live member of a run how the run is doing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

from msgspec import structs
from rich.console import Console

from p2pdiloco.adapters.data_dir import is_in_use
from p2pdiloco.adapters.hivemind_net import DIALLED_BEFORE, why_unreached
from p2pdiloco.cli.status_view import render_status, status_json
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.config.settings import StatusSettings
from p2pdiloco.daemon.display.snapshot import SETTLED, StatusReport
from p2pdiloco.daemon.network.discovery import ask_status, listed_members
from p2pdiloco.daemon.owner.control import away_words, state_here
from p2pdiloco.daemon.run_files.known_runs import (
    ListedRun,
    RunSearch,
    load_own_addresses,
    peers_of,
    usual_folders,
)
from p2pdiloco.errors import NobodyReached, RemoteError, TransportError, UserError
from p2pdiloco.ports import Transport

MAX_ASKED = 16
"""Members that are asked in one round before the list is looked up again."""
MAX_TOLD = 4
"""Silent members that are told of."""
PAUSE_S = 0.5
PIPE_CELLS = 1000
"""Columns where there is no terminal whose width would bound them; nothing is padded to it."""
SAY_AFTER_S = 4.0
"""Whoever waits longer than this wants to know what for."""
logger = logging.getLogger(__name__)


def run(settings: StatusSettings) -> int:
    """Print the status of a run. Returns the exit status.

    Raises:
        Unreachable: no peer can be reached.
        NoNodes: peers are reached, but no member of the run answers in time.
        UserError: no such run.
    """
    is_local = not settings.join
    if is_local:
        settings = structs.replace(settings, join=local_addresses(settings.data_dir))
    logging.getLogger().setLevel(logging.ERROR)  # what a peer did wrong here is not worth a line
    report = visit(_report(settings))
    if is_local:
        report = with_owners_rows(report, settings.data_dir)
    if settings.json:
        print(status_json(report))
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


def local_addresses(folder: Path | None) -> tuple[str, ...]:
    """List the addresses of the node or bootstrap that runs here with this folder, by default the usual ones.

    Raises:
        Unreachable: none runs.
        NoNodes: it is away from its run for now, by its owner's wish.
        StorageError: the folder cannot be read.
    """
    usual = usual_folders(folder)
    folders = [path for path in usual if folder is not None or path.is_dir()]
    for path in folders:
        if is_in_use(path) and (found := load_own_addresses(path)):
            if words := away_words(path):
                raise NoNodes(
                    f"the node here has left its run for now; {words}", "ask another: --join ADDRESS"
                )
            return tuple(found)
    where = " or ".join(map(str, folders or usual))
    raise Unreachable(
        f"no node and no bootstrap runs here with the data folder {where}",
        "name its folder with --data-dir, or ask another peer: --join ADDRESS",
    )


def with_owners_rows(report: StatusReport, folder: Path | None) -> StatusReport:
    """Fill in what a node tells its machine's owner only, if the one that runs here with this folder, by
    default a usual one, gave the report."""
    for path in usual_folders(folder):
        state = state_here(path)
        if state is not None and state.peer == report.answered_by:
            recent = state.recent or report.recent
            return structs.replace(report, rest=state.rest, transfer=state.transfer, recent=recent)
    return report


async def _report(settings: StatusSettings) -> StatusReport:
    search = Search(settings.run, peers_of(settings.join))
    async with visiting(settings.join, search, settings.timeout_s) as (_, report):
        return report


@contextlib.asynccontextmanager
async def visiting(
    join: tuple[str, ...], search: Search, timeout_s: float
) -> AsyncIterator[tuple[Transport, StatusReport]]:
    """Visit a run: the transport, and the first good answer, which is waited for so long at most.

    Raises: as `run`.
    """
    is_joined = False
    try:
        async with asyncio.timeout(timeout_s) as limit, visitor(join) as transport:
            is_joined = True
            report = await search.report(transport)
            limit.reschedule(None)
            yield transport, report
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

    async def report(self, transport: Transport) -> StatusReport:
        """The first good answer.

        Raises:
            UserError: several runs fit.
        """
        return (await self.reports(transport, enough=1))[0]

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
                answers = await self._ask_members(transport, chosen.run, enough)
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

    async def _ask_members(self, transport: Transport, run: str, enough: int) -> list[StatusReport]:
        """Answers, until so many are of settled members; those come first."""
        settled: list[StatusReport] = []
        others: list[StatusReport] = []
        addresses = await self.members(transport, run)
        for peer in [*self.joined, *(peer for peer in addresses if peer not in self.joined)][:MAX_ASKED]:
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
