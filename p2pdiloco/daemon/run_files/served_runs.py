"""Runs that a bootstrap serves: fetched from the peers of its join line (`Mirror`), or signed here.

What is fetched is kept on the disk as what is signed here is kept, so that the next start needs nobody. The
bootstrap needs neither a model nor torch. `sign_apart` has runs signed in a process of its own (`main`),
which has torch and, for the moment in which version 0 is computed, the whole model in memory, and ends. A
bootstrap that only serves what was signed before starts none.

    python -m p2pdiloco.daemon.run_files.served_runs SOCKET LOG DATA-DIR RUN.TOML...
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct, field

from p2pdiloco.adapters.data_dir import Files, storage_error
from p2pdiloco.adapters.run_store import run_folder, signed_file, signed_files
from p2pdiloco.config.manifest import (
    BYTES,
    Manifest,
    canonical_bytes,
    load_signed,
    save_signed,
)
from p2pdiloco.config.values import parse_toml, read_settings
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import free_disk_bytes
from p2pdiloco.daemon.display import logs
from p2pdiloco.daemon.display.logs import Style, configure_logging
from p2pdiloco.daemon.run_files.known_runs import (
    SHORT,
    ListedRun,
    PublishedRun,
    is_beginning,
    is_whole_id,
    pull_run,
    run_names,
    runs_of,
    saved_runs,
)
from p2pdiloco.daemon.run_files.shared_files import (
    PAUSE_S,
    check_given,
    fetched_tokenizer,
    first_that_gives,
    is_kept,
    kept_initial,
    kept_tokenizer,
    size_bounds,
    tokenizer_on_disk,
)
from p2pdiloco.daemon.wire import PullRefused
from p2pdiloco.errors import (
    ConfigError,
    InvariantViolation,
    RemoteError,
    StorageError,
    TransportError,
    UserError,
    clean,
    without_torch,
)
from p2pdiloco.identity import Identity, verify
from p2pdiloco.learner.lifeline import ignore_signals
from p2pdiloco.ports import Transport
from p2pdiloco.util import Now, Rests, end_with, set_aside, yield_memory

logger = logging.getLogger("p2pdiloco")
LOOK_S = 1.0
PATIENCE_S = 15.0
"""Time for which the peers are asked again for a run that they do not list before that is an error."""
PART = ".part"
DISK_MARGIN_BYTES = 1 << 30
"""Disk that others' files leave free, in bytes."""
WRONG_S, MAX_WRONG_S = 30.0, 3600.0
"""Pause before a peer is asked again for a run of which it gave a wrong file: it doubles up to the second."""


@dataclass
class Mirror:
    """Fetcher of the runs that these peers serve."""

    _transport: Transport
    _data_dir: Path
    _hosts: Sequence[str]
    _wanted: Sequence[str]
    """Ids of the runs that are fetched, or their beginnings; none: all that the peers serve."""
    _now: Now = time.monotonic

    def __post_init__(self) -> None:
        self._rests: Rests[tuple[str, str]] = Rests(WRONG_S, MAX_WRONG_S, self._now)
        """Rests of peers that gave wrong files of a run: what is wrong now is wrong in a moment too."""
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
        hosts = [host for host in self._hosts if not self._rests.rests((listed.run, host))]
        if not hosts:
            return None
        run = await pull_run(self._transport, listed, hosts)
        if run is None:
            return None
        signed, manifest = run.signed, run.manifest
        await asyncio.to_thread(Files().make_folder, run_folder(self._data_dir, run.id))
        await fetched_tokenizer(
            self._transport,
            self._data_dir,
            run.id,
            manifest,
            hosts,
            lambda peer: self._rests.lengthen((run.id, peer)),
        )
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
                self._rests.lengthen((run, peer))
                raise RemoteError("wrong-digest")


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


ERRORS = {error.__name__: error for error in (ConfigError, StorageError)}
MAX_WORD_BYTES = 1 << 14
OWNER_KEY = "owner.key"


class SavedRuns(Struct):
    """Content of a bootstrap's folder, as far as runs go."""

    runs: list[PublishedRun] = field(default_factory=list)
    """Runs of which everything that newcomers ask for is here and sound."""
    lacking: list[Path] = field(default_factory=list)
    """Paths of the manifests of runs whose tokenizer or given version 0 is lacking."""
    damaged: list[StorageError] = field(default_factory=list)
    """Errors about other manifests."""


def look_at_saved(data_dir: Path) -> SavedRuns:
    """Look through the folder for runs. A damaged version 0 is set aside."""
    saved = SavedRuns()
    for path in signed_files(data_dir):
        try:
            signed, manifest = load_signed(path, verify)
        except StorageError as error:
            saved.damaged.append(error)
            continue
        run = PublishedRun.of(signed)
        tokenizer = kept_tokenizer(data_dir, run.id)
        has_tokenizer = manifest.data.tokenizer == BYTES or tokenizer_on_disk(tokenizer, manifest) is not None
        if has_tokenizer and is_kept(data_dir, run.id, manifest):
            saved.runs.append(run)
        else:
            saved.lacking.append(path)
    return saved


def kept_run_toml(data_dir: Path, run: str) -> Path:
    """Path of the kept run.toml from which a run was signed."""
    return run_folder(data_dir, run) / "run.toml"


def owner_here(data_dir: Path) -> str:
    """Peer id of the folder's owner; empty: the folder has no owner.key. Raises: StorageError."""
    path = data_dir / OWNER_KEY
    return Identity.load_or_create(path).peer_id if os.path.lexists(path) else ""


def signed_from(file: Path, runs: Iterable[PublishedRun], data_dir: Path, owner: str) -> str:
    """Find the id of the one of these runs that this owner signed from just this run.toml; empty: there is
    none.

    `owner`: empty: any. A run whose key is on a safer machine is served as before.
    """
    same = (
        run.id for run in runs if owner in ("", run.signed.owner) and is_kept_run_toml(file, data_dir, run.id)
    )
    return next(same, "")


def is_kept_run_toml(file: Path, data_dir: Path, run: str) -> bool:
    """Tell whether the run was signed here from just this run.toml."""
    content = _bytes_of(file)
    return content is not None and _bytes_of(kept_run_toml(data_dir, run)) == content


def check_key_is_here(file: Path, name: str, data_dir: Path) -> None:
    """Check that a folder without owner.key has no run beside which this run.toml would be a second owner's.

    That is one which was signed here, or has the same name. `name`: of the run in the file.

    Raises: UserError.
    """
    for run in saved_runs(data_dir).values():
        if name == run.name or kept_run_toml(data_dir, run.id).exists():
            raise UserError(
                f"{file} cannot be signed: the key of the owner of {run.title}, "
                f"{clean(run.signed.owner)}, is not in {data_dir / OWNER_KEY}",
                "put that key back; without --run what was signed is served without it; a new owner needs a "
                "folder of its own: --data-dir DIR",
            )


def _bytes_of(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError as error:
        logger.debug("%s", error)  # who signs it says what is wrong
        return None


async def sign_apart(data_dir: Path, files: Sequence[Path], log: Style) -> None:
    """Sign these run.toml in a process of its own, and keep in the data folder what is served.

    The owner is the one whose key is in the data folder.

    Raises:
        UserError, ConfigError, StorageError: as `sign_all`; or the process was ended by a signal.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "p2pdiloco.daemon.run_files.served_runs"),
                *(str(theirs.fileno()), log, str(data_dir), *map(str, files)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
            )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        ours.setblocking(False)
        try:
            said = ours.recv(MAX_WORD_BYTES)
        except OSError:  # it said nothing
            said = b""
    _heed(said, code)


def _heed(said: bytes, code: int) -> None:
    if said:
        kind, message, hint = json.loads(said)
        if kind:
            raise ERRORS.get(kind, UserError)(message, hint)
    elif code == -signal.SIGKILL:
        raise UserError(
            "the process that computes version 0 was killed, probably for lack of memory",
            "sign the run on a machine with more memory, with this data folder, and copy the folder here",
        )
    elif code < 0:
        raise UserError(f"the process that computes version 0 was ended by signal {-code}", "try again")
    else:
        raise InvariantViolation(f"the process that signs runs ended with status {code}")


def sign_all(data_dir: Path, files: Sequence[Path]) -> None:
    """Sign these run.toml in this process, and keep in the data folder what is served.

    Raises:
        ConfigError, StorageError: a file is wrong, or cannot be read or kept.
        UserError: its task is not installed, or its model does not fit into this machine's memory.
    """
    owner = Identity.load_or_create(data_dir / OWNER_KEY)
    for path in files:
        _sign(data_dir, path, owner)


def _sign(data_dir: Path, path: Path, owner: Identity) -> None:
    # Here, so that who has it done by another process has no torch.
    try:
        from p2pdiloco.daemon.run_files.run import save_run, sign_run
        from p2pdiloco.tasks.registry import manifest_from_table
    except ModuleNotFoundError as error:
        missing = without_torch(error)
        if missing is None:
            raise
        raise UserError(
            f"{path} cannot be signed here: {missing}",
            "sign it where PyTorch is, with this data folder, and copy that; or serve another's: --join",
        ) from error

    content = read_settings(path)  # once: computing version 0 takes minutes, in which somebody may edit it
    manifest = manifest_from_table(parse_toml(path, content), str(path))
    wanted, runs = (owner.peer_id, canonical_bytes(manifest)), look_at_saved(data_dir).runs
    # It may have been written otherwise.
    identifier = next((r.id for r in runs if (r.signed.owner, r.signed.manifest) == wanted), "")
    if not identifier:
        if edits := words_of_edits(manifest, data_dir, owner.peer_id):
            logger.warning("%s: %s", path, edits)
        run, vault = sign_run(path, owner, manifest)
        identifier = run.id
        file = kept_initial(data_dir, identifier)
        if not is_kept(data_dir, identifier, manifest) and file.exists():  # it cannot be read
            logger.warning("%s: %s", file, set_aside(file))
        save_run(data_dir, run, vault)
    Files().save(kept_run_toml(data_dir, identifier), [content], durable=True)
    _warn(path, manifest)


def _warn(path: Path, manifest: Manifest) -> None:
    if not manifest.admission.seats:
        hint = f"p2pdiloco seat {manifest.run.name} PEER"
        logger.warning(
            "%s: no peer has a seat, so nobody makes a version until its owner says: %s", path, hint
        )
    from p2pdiloco.config.presets import warnings_about
    from p2pdiloco.tasks.registry import numel_of

    for doubt in warnings_about(manifest, numel_of(manifest)):
        logger.warning("%s: %s", path, doubt)


MOST_KEYS = 8


def words_of_edits(manifest: Manifest, data_dir: Path, owner: str) -> str:
    """Say in what a manifest differs from the run of its name that this owner has signed, which it is not; of
    several, from the nearest one. Empty: it is that run, or there is none."""
    named: dict[str, list[str]] = {}
    for each in saved_runs(data_dir).values():
        if each.signed.owner != owner:
            continue
        if each.signed.manifest == canonical_bytes(manifest):
            return ""
        if each.name == manifest.run.name:
            named[each.id] = changed_keys(each.manifest, manifest)
    if not named:
        return ""
    run, keys = min(named.items(), key=lambda item: len(item[1]))
    more = f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
    return (
        f"this is another run than {manifest.run.name} {run[:12]}, which this folder's owner signed before: "
        f"{', '.join(keys[:MOST_KEYS])}{more} differ. The members of that one stay there. "
        f"To change the length or the learning rate of a run that goes on: p2pdiloco run amend {run[:12]}"
    )


def changed_keys(before: Manifest, after: Manifest) -> list[str]:
    """List the keys of run.toml, as "inner.schedule_tokens", in which two manifests differ."""
    old, new = (_flat(msgspec.to_builtins(manifest)) for manifest in (before, after))
    return [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]


def _flat(tables: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def main(fd: str, log: Style, data_dir: str, *files: str) -> None:
    """Run as the process that signs; its last word to the starter is the error, or nothing."""
    ignore_signals()
    yield_memory()
    logs.install()
    configure_logging(log)
    with socket.socket(fileno=int(fd)) as starter:
        end_with(starter)
        word = ("", "", "")
        try:
            sign_all(Path(data_dir), [Path(file) for file in files])
        except UserError as error:
            word = (type(error).__name__, str(error)[: MAX_WORD_BYTES // 16], error.hint)
        starter.sendall(json.dumps(word).encode())


if __name__ == "__main__":
    main(sys.argv[1], cast(Style, sys.argv[2]), *sys.argv[3:])
