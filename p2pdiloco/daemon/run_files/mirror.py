"""Mirror of a bootstrap: the signed runs that the peers of its join line serve, fetched to be served too.

What is fetched is kept on the disk as what is signed here is kept, so that the next start needs nobody. Needs
neither a model nor torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from p2pdiloco.adapters.data_dir import Files, storage_error
from p2pdiloco.adapters.run_store import run_folder, signed_file
from p2pdiloco.config.manifest import Manifest, run_id, save_signed
from p2pdiloco.config.values import parse_toml, read_settings
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.machine import free_disk_bytes
from p2pdiloco.daemon.run_files.giving import PAUSE_S, check_given, first_that_gives
from p2pdiloco.daemon.run_files.initial_file import is_kept, kept_initial, size_bounds
from p2pdiloco.daemon.run_files.listing import (
    SHORT,
    ListedRun,
    PublishedRun,
    is_beginning,
    is_whole_id,
    pull_manifest,
    run_names,
)
from p2pdiloco.daemon.run_files.searching import runs_of
from p2pdiloco.daemon.run_files.tokenizers import fetched_tokenizer
from p2pdiloco.daemon.wire import PullRefused
from p2pdiloco.errors import RemoteError, TransportError, UserError
from p2pdiloco.ports import Transport

logger = logging.getLogger("p2pdiloco")
LOOK_S = 1.0
PATIENCE_S = 15.0
"""Time for which the peers are asked again for a run that they do not list before that is an error."""
PART = ".part"
DISK_MARGIN_BYTES = 1 << 30
"""Disk that others' files leave free, in bytes."""
WRONG_S, MAX_WRONG_S = 30.0, 3600.0
"""Pause before a peer is asked again for a run of which it gave a wrong file: it doubles up to the second."""
MAX_WRONG = 1024
"""Number of runs and peers of which that is known."""


class Mirror:
    """Fetcher of the runs that these peers serve."""

    def __init__(
        self,
        transport: Transport,
        data_dir: Path,
        hosts: Sequence[str],
        wanted: Sequence[str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted`: ids of the runs that are fetched, or their beginnings; none: all that the peers serve."""
        self._transport, self._data_dir = transport, data_dir
        self._hosts, self._wanted = hosts, wanted
        self._rests = _Rests(now)
        self.listed: dict[str, ListedRun] = {}
        """Runs that the peers listed when they were last asked."""

    async def first_runs(self) -> list[PublishedRun]:
        """Fetch what the peers serve, and wait for what is wanted by its id.

        Raises:
            UserError: the peers know no run of a wanted id.
            StorageError: a run cannot be kept.
        """
        found: list[PublishedRun] = []
        waited_s = 0.0
        while True:
            found += await self.look([run.id for run in found])
            missing = self.missing([run.id for run in found])
            if not missing:
                return found
            if waited_s >= PATIENCE_S:
                known = run_names(self.listed.values()) or "none"
                raise UserError(f'the peers to join know no run "{missing[0]}"', f"they know: {known}")
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S

    def missing(self, here: Collection[str]) -> list[str]:
        """List what is wanted and not among these ids."""
        return [wanted for wanted in self._wanted if not any(is_beginning(wanted, run) for run in here)]

    async def look(self, served: Collection[str]) -> list[PublishedRun]:
        """Ask the peers once, and fetch and keep what is not `served` (ids). Raises: StorageError."""
        await self._ask()
        found: list[PublishedRun] = []
        folders = {run_folder(self._data_dir, run) for run in served}
        for listed in self.listed.values():
            folder = run_folder(self._data_dir, listed.run)
            # Two runs of one folder would take each other's files.
            if len(folders) >= wire.MAX_RUNS or folder in folders or not self._is_wanted(listed.run):
                continue
            try:
                run = await self._fetched(listed)
            except (TransportError, RemoteError) as error:
                logger.warning("run %s cannot be served here yet: %s", listed.name, error)
                continue
            if run is not None:
                found.append(run)
                folders.add(folder)
        return found

    async def _ask(self) -> None:
        self.listed = {run: ListedRun(run) for run in self._wanted if is_whole_id(run)}
        answers = await asyncio.gather(*(runs_of(self._transport, host) for host in self._hosts))
        for host, runs in zip(self._hosts, answers, strict=True):
            for summary in runs or ():
                self.listed.setdefault(summary.run, ListedRun(summary.run)).add(summary.name, host)

    def _is_wanted(self, run: str) -> bool:
        return not self._wanted or any(is_beginning(wanted, run) for wanted in self._wanted)

    async def _fetched(self, listed: ListedRun) -> PublishedRun | None:
        """Fetch a run, its manifest last: what has that is whole. None: nobody has the true one."""
        hosts = [host for host in self._hosts if not self._rests.rests(listed.run, host)]
        if not hosts:
            return None
        answer = await pull_manifest(self._transport, listed, hosts)
        if answer is None:
            return None
        signed, manifest = answer
        run = PublishedRun(id=run_id(signed), signed=signed, manifest=manifest)
        await asyncio.to_thread(Files().make_folder, run_folder(self._data_dir, run.id))
        wrong = partial(self._rests.lengthen, run.id)
        await fetched_tokenizer(self._transport, self._data_dir, run.id, manifest, hosts, wrong)
        if not await asyncio.to_thread(is_kept, self._data_dir, run.id, manifest):
            await first_that_gives("version 0", hosts, lambda peer: self._initial(peer, run.id, manifest))
        await asyncio.to_thread(save_signed, signed_file(self._data_dir, run.id), signed)
        fetched = {"run_name": run.name, "run": run.id, "owner": signed.owner}
        logger.info("run %(run_name)s (%(run).12s) of %(owner)s was fetched", fetched)
        return run

    async def _initial(self, peer: str, run: str, manifest: Manifest) -> None:
        """Fetch the file of a given version 0, from where an earlier attempt was cut.

        Where several gave and some of it is wrong, all of it again from this one alone.
        """
        file = kept_initial(self._data_dir, run)
        part = file.with_name(file.name + PART)
        least, most = size_bounds(manifest)
        while True:
            with _PartFile(part, most) as sink:
                alone = sink.have == 0
                request = wire.encode(wire.PullInitial(run, sink.have, True))
                answer = await self._transport.pull_into(peer, request, sink, PAUSE_S)
            try:
                check_given(answer)
            except PullRefused as error:
                # What somebody else gave may be longer than the file is.
                if alone or error.why is not PullRefusal.BEYOND_THE_END or sink.have <= least:
                    raise
                Files().delete(part)
                continue
            Files().move(part, file)
            if await asyncio.to_thread(is_kept, self._data_dir, run, manifest):
                return
            if alone:
                self._rests.lengthen(run, peer)
                raise RemoteError("wrong-digest")


class _Rests:
    """Pauses of peers that gave wrong files of a run: what is wrong now is wrong in a moment too."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[tuple[str, str], tuple[float, float]] = {}
        """End of the pause and its length, by run and peer."""

    def rests(self, run: str, peer: str) -> bool:
        return self._now() < self._until.get((run, peer), (0.0, 0.0))[0]

    def lengthen(self, run: str, peer: str) -> None:
        _, before_s = self._until.pop((run, peer), (0.0, WRONG_S / 2))
        pause_s = min(2 * before_s, MAX_WRONG_S)
        self._until[run, peer] = (self._now() + pause_s, pause_s)
        if len(self._until) > MAX_WRONG:
            del self._until[next(iter(self._until))]


class _PartFile:
    """File that grows by what arrives, up to a bound; one beyond it is begun anew."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        try:
            self._file = path.open("ab")
            if self._file.tell() > most_bytes:
                self._file.truncate(0)
                self._file.seek(0)
        except OSError as error:
            raise storage_error(error, "write", path) from error
        self.have = self._file.tell()

    def __enter__(self) -> _PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, header: bytes, payload_bytes: int) -> None:
        offset = wire.decode(header, wire.InitialHeader).offset
        room = free_disk_bytes(self._path.parent) - DISK_MARGIN_BYTES
        if offset != self.have or payload_bytes > min(room, self._most_bytes - offset):
            raise RemoteError("wrong-size", "version 0")

    def write(self, _offset: int, chunk: memoryview) -> None:
        try:
            self._file.write(chunk)
        except OSError as error:
            raise storage_error(error, "write", self._path) from error


async def refuse_to_split(transport: Transport, hosts: Sequence[str], name: str, owner: str) -> None:
    """Check that no such peer serves another owner's run of that name: who joins by it could mean both.

    Raises: UserError.
    """
    for runs in await asyncio.gather(*(runs_of(transport, host) for host in hosts)):
        for summary in runs or ():
            if summary.name == name and summary.owner != owner:
                raise UserError(
                    f"the peers to join serve another owner's run called {name} ({summary.run[:SHORT]}): two "
                    "of one name would keep everybody from joining by it",
                    "leave this run out and take theirs, or give yours another name in run.toml",
                )


def name_in(file: Path) -> str:
    """Read the name of a run.toml; empty: it has none, which whoever signs it says. Raises: ConfigError."""
    section = parse_toml(file, read_settings(file)).get("run")
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else ""
