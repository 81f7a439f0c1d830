"""Signing the runs that a bootstrap is told to serve, in a process of its own: it has torch and, for the
moment in which version 0 is computed, the whole model in memory, and ends. What was signed before is not
computed again.

    python -m p2pdiloco.daemon.signing SOCKET LOG DATA-DIR RUN.TOML...
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from p2pdiloco.config.loader import canonical_bytes
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.models import BYTES
from p2pdiloco.config.outer import doubts
from p2pdiloco.config.signing import load_signed, run_id
from p2pdiloco.daemon.initial_file import kept
from p2pdiloco.daemon.logs import Style, configure_logging
from p2pdiloco.daemon.tokenizers import kept_tokenizer
from p2pdiloco.errors import ConfigError, InvariantViolation, StorageError, UserError
from p2pdiloco.identity import Identity, verify
from p2pdiloco.learner.lifeline import end_with, ignore_signals, yield_memory

logger = logging.getLogger("p2pdiloco")
ERRORS = (UserError, ConfigError, StorageError)


class Word(msgspec.Struct, frozen=True):
    """What the process says at its end."""

    error: str = ""
    """Class of what a person has to mend; empty: everything is signed."""
    message: str = ""
    hint: str = ""


async def sign_apart(data_dir: Path, files: Sequence[Path], log: Style) -> None:
    """Sign these run.toml as the owner whose key is in the data folder, and keep there what is served.

    Raises:
        UserError, ConfigError, StorageError: as `sign_all`; or there is too little memory.
    """
    if not files:
        return
    if "torch" in sys.modules:  # nothing would be saved by it
        sign_all(data_dir, files)
        return
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "p2pdiloco.daemon.signing"),
                *(str(theirs.fileno()), log, str(data_dir), *map(str, files)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            said = await reader.read()
            code = await process.wait()
            writer.close()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    _heed(said, code)


def _heed(said: bytes, code: int) -> None:
    if not said and code < 0:
        raise UserError(
            f"the process that computes version 0 was ended by signal {-code}, probably for lack of memory",
            "sign the run on a machine with more memory, with this data folder, and copy the folder here",
        )
    if not said:
        raise InvariantViolation(f"the process that signs runs ended with status {code}")
    word = msgspec.json.decode(said, type=Word)
    for error in ERRORS:
        if error.__name__ == word.error:
            raise error(word.message, word.hint)


def sign_all(data_dir: Path, files: Sequence[Path]) -> None:
    """The same in this process.

    Raises:
        ConfigError, StorageError: a file is wrong, or cannot be read or kept.
        UserError: its task is not installed, or its model does not fit into this machine's memory.
    """
    # Here, so that who has it done by another process has no torch.
    from p2pdiloco.daemon.runs import save_run, sign_run
    from p2pdiloco.tasks.manifests import load_manifest
    from p2pdiloco.tasks.registry import task_of

    owner = Identity.load_or_create(data_dir / "owner.key")
    for path in files:
        manifest = load_manifest(path)
        if not signed_before(data_dir, manifest, owner.peer_id):
            run, vault = sign_run(path, owner)
            save_run(data_dir, run, vault)
        for doubt in doubts(manifest, sum(spec.numel for spec in task_of(manifest).specs())):
            logger.warning("%s: %s", path, doubt)


def signed_before(data_dir: Path, manifest: Manifest, owner: str) -> bool:
    """Whether that owner has signed just this manifest, and all that belongs to it is still here.

    Raises:
        StorageError: a manifest there is damaged.
    """
    for path in sorted((data_dir / "runs").glob("*/manifest.signed")):
        signed, _ = load_signed(path, verify)
        if signed.owner == owner and signed.manifest == canonical_bytes(manifest):
            here = run_id(signed)
            given = not manifest.run.initial or kept(data_dir, here).exists()
            return given and (manifest.data.tokenizer == BYTES or kept_tokenizer(data_dir, here).exists())
    return False


def main(fd: str, log: Style, data_dir: str, *files: str) -> None:
    """The process."""
    ignore_signals()
    yield_memory()
    configure_logging(log)
    with socket.socket(fileno=int(fd)) as starter:
        end_with(starter)
        try:
            sign_all(Path(data_dir), [Path(file) for file in files])
            word = Word()
        except ERRORS as error:
            word = Word(type(error).__name__, str(error), error.hint)
        starter.sendall(msgspec.json.encode(word))


if __name__ == "__main__":
    main(sys.argv[1], cast(Style, sys.argv[2]), *sys.argv[3:])
