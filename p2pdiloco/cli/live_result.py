"""The global parameters of a live run, and what the link to one of its peers carries.

Somebody who only asks copies them from seats that the run's owner has named. Every fragment comes from one
that says that it holds the newest version, in pieces also from others that hold the same one, with the code
by which newcomers copy (`bulk.states`). Signatures and digests decide what is taken, and that at least half
of the others have that version, as far as they can tell: one seat alone may have made it up.
Fragments are of the versions that there are when it is their turn. `measured_link` is for `plan --join`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any

from msgspec.structs import replace

from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.cli.options import say
from p2pdiloco.cli.owner_notice import newest_notice
from p2pdiloco.cli.status_command import Search, run_of, visit, visitor
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.values import Addresses, peer_in
from p2pdiloco.core.api.events import FetchState
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.types import signed_bytes
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission import passes
from p2pdiloco.daemon.bulk.states import Copying
from p2pdiloco.daemon.display.logs import TICK_S, Tell, lasting
from p2pdiloco.daemon.display.snapshot import StatusReport
from p2pdiloco.daemon.history import pull_page
from p2pdiloco.daemon.network.discovery import ask
from p2pdiloco.daemon.network.reach import MeasuredLink, measure
from p2pdiloco.daemon.notice import Notice
from p2pdiloco.daemon.payloads import Compute
from p2pdiloco.daemon.run_files.known_runs import (
    RunSearch,
    Way,
    peers_of,
    usual_folders,
    way_of,
)
from p2pdiloco.daemon.run_files.run import (
    Run,
    constants_in,
    fresh_vault,
    given_constants,
    given_parameters,
    room_for,
)
from p2pdiloco.daemon.run_files.saved_state import RunResult, result_of
from p2pdiloco.daemon.run_files.shared_files import fetched_tokenizer
from p2pdiloco.daemon.wire import PullHistory
from p2pdiloco.errors import ConfigError, RemoteError, TransportError, UserError, clean
from p2pdiloco.identity import verify as verify_signature
from p2pdiloco.ports import Transport
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import plan_fragments
from p2pdiloco.tensors.vault import Vault

AT_ONCE = 4
"""Fragments that are copied at one time."""
ROUNDS = 3
"""Number of times that all members are asked for a fragment before it is given up."""
RETRY_S = 1.0


def result_of_run(join: Addresses, wanted: str, timeout_s: float, data_dir: Path | None = None) -> RunResult:
    """Copy the global parameters from the members of a run. Members of a run that is not open give them for
    an invite in `join`, and for what is in `data_dir`, by default in the usual folders: the owner's key, or
    a member's.

    Raises:
        ConfigError: an address or a link is malformed.
        UserError: no peer can be reached, no such run or several, nobody gives it in time.
    """
    way = way_of(join, wanted)
    return visit(_copied(way, peers_behind(way.join), timeout_s, usual_folders(data_dir)))


async def _copied(way: Way, join: Addresses, timeout_s: float, folders: list[Path]) -> RunResult:
    search = Search(way.run, peers_of(join))
    found: list[Run] = []
    try:
        async with asyncio.timeout(timeout_s), visitor(join) as transport:
            with search.said(timeout_s, lambda text: say(clean(text))):
                reports = await search.reports(transport)
            run = await _run(transport, reports[0], search.joined)
            found.append(run)
            invite = way.link.invite if way.link is not None else None
            shown = passes(run.id, transport.peer_id, invite, folders)
            reports = await _of_seats(transport, run, search, reports, shown)
            members = [report.answered_by for report in reports]
            tokenizer = await fetched_tokenizer(transport, None, run.id, run.manifest, members)
            given = None
            if any(row.number == 0 for report in reports for row in report.fragments):
                given = await given_parameters(transport, None, run.id, run.manifest, members)
                constants = constants_in(given, run.manifest)
            else:
                constants = await given_constants(transport, run.id, run.manifest, members)
            result = await _ResultCopy(run, transport, reports, given).result()
            return replace(result, tokenizer=tokenizer, constants=constants)
    except TransportError as error:
        raise UserError(f"the parameters of the run are not to be had: {error}", "try again") from error
    except TimeoutError:
        if not found:
            raise search.failure(timeout_s) from None
        raise UserError(
            f"the parameters of {found[0].name} were not all here after {timeout_s:g} s",
            "a slow link needs a larger --timeout-s",
        ) from None


async def _that_let_us_read(
    transport: Transport, run: Run, reports: Sequence[StatusReport], passes: Sequence[wire.ShowPass]
) -> list[StatusReport]:
    """List the reports of members that let us read by one of these passes. Raises: UserError (none does)."""
    found, why = {}, ""
    for report, shown in itertools.product(reports, passes):
        answer = await ask(transport, report.answered_by, shown, wire.JoinAnswer)
        if answer is not None and answer.fault is None:
            found[report.answered_by] = report
        elif answer is not None:
            why = why or f": {answer.fault}"
    if not found:
        raise UserError(
            f"the parameters of run {run.name} are for its members{why}",
            "give a link with an invite to it, --join LINK, or the folder of a member: --data-dir DIR",
        )
    return list(found.values())


async def _of_seats(
    transport: Transport,
    run: Run,
    search: Search,
    reports: list[StatusReport],
    shown: Sequence[wire.ShowPass],
) -> list[StatusReport]:
    """List the reports of seats that the run's owner has named, if any of them lets us read. Else all that
    do, as invites give seats, too; not in a run that is open to anybody. Raises: UserError (only strangers
    answer, or nobody lets us read)."""
    open_to_all = run.manifest.admission.mode == "open"
    for attempt in range(ROUNDS):
        seats = await _named_seats(transport, run, [report.answered_by for report in reports])
        if seats.isdisjoint(report.answered_by for report in reports):
            reports = [*reports, *await search.ask_members(transport, run.id, of=seats)]
        if not open_to_all:
            reports = await _that_let_us_read(transport, run, reports, shown)
        found = [report for report in reports if report.answered_by in seats]
        if found or not open_to_all:
            return found or reports
        await asyncio.sleep(RETRY_S * (attempt + 1 < ROUNDS))  # it may be busy
    raise UserError(
        f"none of the {len(seats)} seats that the owner of {run.name} has named answers, and what others "
        "give may be anything",
        "try again when one is here; or take what a node of yours has: --data-dir DIR",
    )


async def _named_seats(transport: Transport, run: Run, peers: Sequence[str]) -> set[str]:
    """List the seats that the run file names, and the newest notice of the owner that these peers have."""
    newest = await newest_notice(transport, peers, Notice(run.id, 0), run.owners)
    seats = set(run.manifest.admission.seats)
    for word in sorted(newest.seats, key=lambda word: word.number):
        seats.discard(word.replaces if word.seated else word.peer)
        seats.update({word.peer} if word.seated else ())
    return seats.difference(newest.banned)


async def _run(transport: Transport, report: StatusReport, hosts: Sequence[str]) -> Run:
    """The run, from whoever has its true manifest. Raises: UserError."""
    found = await run_of(transport, report, hosts)
    manifest = found.manifest
    try:
        layouts = plan_fragments(task_of(manifest).specs(), manifest.sync.fragments)
    except ConfigError as error:
        raise UserError(f"the manifest of {clean(found.name)} is not valid: {error}") from error
    return Run(id=found.id, signed=found.signed, manifest=manifest, layouts=layouts)


@dataclass
class _ResultCopy:
    """Copies all fragments of one run."""

    _run: Run
    _transport: Transport
    _reports: Sequence[StatusReport]
    _given: Mapping[str, Any] | None
    """Version 0 of a run that starts from given parameters, if somebody is still there."""

    def __post_init__(self) -> None:
        self._whole: set[int] = set()
        """Fragments that are here."""
        with room_for(self._run.manifest):
            self._vault = Vault.of(self._run.manifest, self._run.layouts)
        self._compute = Compute(self._vault, None)
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._silent: set[str] = set()
        self._givers: dict[int, str] = {}
        """Seats that are asked for the fragments now."""
        self._checks: dict[bytes, asyncio.Task[bool]] = {}
        """Questions to the others about versions that come, by their digests."""
        self._copying = Copying(self, self._transport, self._compute, asyncio.get_running_loop().time)

    @property
    def run(self) -> str:
        return self._run.id

    async def result(self) -> RunResult:
        """Fetch the global parameters of all fragments. Raises: UserError."""
        turns = asyncio.Semaphore(AT_ONCE)
        try:
            async with self._shown(), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fragment(f.index, turns)) for f in self._run.layouts]
        except* UserError as errors:
            raise errors.exceptions[0] from None
        finally:
            for check in self._checks.values():
                check.cancel()
            self._compute.close()
        return result_of(self._run, self._vault, [task.result() for task in tasks])

    @contextlib.asynccontextmanager
    async def _shown(self) -> AsyncIterator[None]:
        sizes = [self.state_bytes(layout.index) for layout in self._run.layouts]

        async def show(tell: Tell) -> None:
            while True:
                here = [
                    size if f in self._whole else self._copying.here_bytes(f) for f, size in enumerate(sizes)
                ]
                tell(sum(here), sum(sizes))
                await asyncio.sleep(TICK_S)

        with lasting(f"copying the parameters of run {self._run.name}") as tell:
            showing = asyncio.create_task(show(tell))
            try:
                yield
            finally:
                showing.cancel()

    async def _fragment(self, fragment: int, turns: asyncio.Semaphore) -> SignedVersion:
        why = ""
        async with turns:
            for attempt in range(ROUNDS):
                for peer in self._by_version(fragment):
                    self._givers[fragment] = peer
                    try:
                        header = await self._copying.fetch(FetchState(fragment, 0, peer))
                    except (RemoteError, TransportError) as error:
                        why = f"…{peer[-6:]}: {error}"[:160]
                        continue
                    version = header.version
                    if not await self._checks[version.header.digest()]:
                        why = f"…{peer[-6:]}: most other seats do not have its version"
                        continue
                    expected = version.header.state_digest
                    await self._compute.run(self._vault.commit, fragment, version.header.number, expected)
                    self._whole.add(fragment)
                    return version
                await asyncio.sleep(RETRY_S * (attempt + 1 < ROUNDS))
        raise UserError(f"nobody gives fragment {fragment} of {self._run.name} ({why})", "try again")

    async def _is_the_runs(self, giver: str, header: VersionHeader) -> bool:
        """Tell whether a version is no older than what most seats have said, and at least half of the other
        seats that answer have it, too."""
        others = [report.answered_by for report in self._reports if report.answered_by != giver]
        rows = [report.fragments[header.fragment : header.fragment + 1] for report in self._reports]
        usual = median_low([row[0].number for row in rows if row] or [0])
        if header.number < usual - self._run.manifest.group.log_versions:
            return False
        told = await asyncio.gather(*(self._has(peer, header) for peer in others if header.number))
        return 2 * told.count(True) >= len(told) - told.count(None)

    async def _has(self, peer: str, header: VersionHeader) -> bool | None:
        """Tell whether a seat has that version, or comes to have it in a moment. None: it does not answer."""
        asked = PullHistory(self._run.id, header.fragment, header.number, header.digest())
        async with self._asking[peer]:  # it gives one page at a time
            for _ in range(0 if peer in self._silent else ROUNDS):
                try:
                    return bool(await pull_page(self._transport, peer, asked))
                except (RemoteError, TransportError) as error:
                    if not (isinstance(error, wire.PullRefused) and error.why is PullRefusal.NOT_HERE):
                        self._silent.add(peer)
                        return None
                await asyncio.sleep(RETRY_S)
        return None if peer in self._silent else False

    def _by_version(self, fragment: int) -> list[str]:
        """Members, those with the most tokens in this fragment first; equals take turns."""

        def rank(place: int) -> tuple[int, int]:
            rows = self._reports[place].fragments
            tokens = rows[fragment].tokens if fragment < len(rows) else 0
            return -tokens, (place + fragment) % len(self._reports)

        return [self._reports[place].answered_by for place in sorted(range(len(self._reports)), key=rank)]

    def state_bytes(self, fragment: int) -> int:
        return 8 * self._run.layouts[fragment].numel

    def holders(self, fragment: int, digest: bytes) -> list[str]:
        short = digest.hex()[:8]
        return [
            report.answered_by
            for report in self._reports
            if fragment < len(report.fragments) and report.fragments[fragment].digest == short
        ]

    def signed(self, version: SignedVersion) -> bool:
        """Tell whether it is known; of version 0, whether it is the one that everybody can compute. The
        others are asked about it while it comes: later it may be too old for them to know."""
        header = version.header
        if header.run != self._run.id:
            return False
        if header.number:
            good = verify_signature(header.syncer, signed_bytes("version", header), version.signature)
        else:
            good = header.state_digest == self._version_0[header.fragment]
        if good and header.digest() not in self._checks:
            asking = self._is_the_runs(self._givers[header.fragment], header)
            self._checks[header.digest()] = asyncio.create_task(asking)
        return good

    @cached_property
    def _version_0(self) -> list[bytes]:
        """State digests of version 0, which need no signature: everybody can compute them."""
        if self._run.manifest.run.initial and self._given is None:
            return [b""] * len(self._run.layouts)
        layouts, vault = fresh_vault(self._run.manifest, self._given)
        return [vault.state_digest_of(layout.index, 0) for layout in layouts]


# `plan --join`.

TIMEOUT_S = 45.0
"""Time of the whole measurement: more than its parts take on the slowest link that can be measured."""


def measured_link(join: str, run: str, manifest: Manifest | None) -> tuple[MeasuredLink, Manifest]:
    """The link to a peer (a checked multiaddr), and that manifest, or that of the run that the peer lists.

    Raises:
        UserError: the peer is not there, refuses, is too old, lists no such run or several.
    """
    return visit(_visit(join, run, manifest))


async def _visit(join: str, run: str, manifest: Manifest | None) -> tuple[MeasuredLink, Manifest]:
    peer = peer_in(join)
    try:
        async with asyncio.timeout(TIMEOUT_S), visitor((join,)) as transport:
            manifest = manifest or await listed_manifest(transport, peer, run)
            return await measure(transport, peer), manifest
    except TimeoutError:
        raise UserError(
            f"{peer} did not answer within {TIMEOUT_S:g} s", "give the link's rate with --upload"
        ) from None


async def listed_manifest(transport: Transport, peer: str, wanted: str) -> Manifest:
    """The manifest of the run of that name or id that the peer lists; where it lists one only, of that.

    Raises:
        UserError: none fits, or several do, or the peer does not give it.
    """
    search = RunSearch(transport, wanted, [peer])
    try:
        listed = await search.look()
        found = await search.published(listed) if listed is not None else None
    except RemoteError as error:
        raise UserError(f"the manifest of the run is not valid: {error}") from error
    if found is None:
        given = f"it lists {search.known or 'none'}; or give a run.toml"
        raise UserError(f'{peer} gives no run "{wanted}"', given)
    return found.manifest
