"""Signing the runs that a bootstrap is told to serve, in a process of its own.

The process has torch and, for the moment in which version 0 is computed, the whole model in memory, and ends.
A bootstrap that only serves what was signed before starts none.

    python -m p2pdiloco.daemon.run_files.signing SOCKET LOG DATA-DIR RUN.TOML...
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from msgspec import Struct, field

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import run_folder, signed_files
from p2pdiloco.config.manifest import BYTES, Manifest, canonical_bytes, load_signed, run_id
from p2pdiloco.config.values import parse_toml, read_settings
from p2pdiloco.daemon.display import outlet
from p2pdiloco.daemon.display.logs import Style, configure_logging
from p2pdiloco.daemon.run_files.edits import words_of_edits
from p2pdiloco.daemon.run_files.initial_file import is_kept, kept_initial
from p2pdiloco.daemon.run_files.listing import SHORT, PublishedRun, saved_runs
from p2pdiloco.daemon.run_files.tokenizers import kept_tokenizer, tokenizer_on_disk
from p2pdiloco.errors import ConfigError, InvariantViolation, StorageError, UserError, clean, without_torch
from p2pdiloco.identity import Identity, verify
from p2pdiloco.learner.lifeline import end_with, ignore_signals, yield_memory

logger = logging.getLogger("p2pdiloco")
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
        run = PublishedRun(id=run_id(signed), signed=signed, manifest=manifest)
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
    for run, (listed, signed) in saved_runs(data_dir).items():
        if name in listed.names or kept_run_toml(data_dir, run).exists():
            raise UserError(
                f"{file} cannot be signed: the key of the owner of {listed.name} ({run[:SHORT]}), "
                f"{clean(signed.owner)}, is not in {data_dir / OWNER_KEY}",
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
                *(sys.executable, "-P", "-m", "p2pdiloco.daemon.run_files.signing"),
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
        from p2pdiloco.daemon.run_files.runs import save_run, sign_run
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
            Files().move(file, file.with_name(file.name + ".corrupt"))
        save_run(data_dir, run, vault)
    Files().save(kept_run_toml(data_dir, identifier), [content], durable=True)
    _warn(path, manifest)


def _warn(path: Path, manifest: Manifest) -> None:
    from p2pdiloco.config.presets import doubts
    from p2pdiloco.tasks.registry import task_of

    for doubt in doubts(manifest, sum(spec.numel for spec in task_of(manifest).specs())):
        logger.warning("%s: %s", path, doubt)


def main(fd: str, log: Style, data_dir: str, *files: str) -> None:
    """Run as the process that signs; its last word to the starter is the error, or nothing."""
    ignore_signals()
    yield_memory()
    outlet.install()
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
