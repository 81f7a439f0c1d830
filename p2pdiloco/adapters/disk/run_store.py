"""Store of one run on a node's disk, under `<data_dir>/runs/<first 16 of the run id>/`.

    votes.log                                    adapters.disk.votes_log
    proofs                                       adapters.disk.proofs_file
    fragments/<fff>/checkpoint-<n>.safetensors   Theta, outer momentum and version; the newest two
    updates/<fff>/<n>.update                     the log of outer updates
    manifest.signed, learner.safetensors         others write these

Synchronous: to be called from one I/O thread of the process that holds the data folder's lock. Whatever
is found damaged is set aside (`*.corrupt`), told in `take_problems`, and then as if it had never been saved:
the node catches up from its peers instead.

Listed in docs/reference/disk.md, section 2.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

from p2pdiloco.adapters.disk.containers import (
    CorruptFile,
    SavedFragment,
    decode_checkpoint,
    decode_update,
    encode_checkpoint,
    encode_update,
)
from p2pdiloco.adapters.disk.files import TEMP_SUFFIX, Files
from p2pdiloco.adapters.disk.proofs_file import load_proofs, save_proofs
from p2pdiloco.adapters.disk.unsynced import UnsyncedUpdates
from p2pdiloco.adapters.disk.votes_log import VotesLog
from p2pdiloco.core.api.effects import VoteRecord
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.errors import invariant
from p2pdiloco.ports import Buffer
from p2pdiloco.util import clear_folder_at

__all__ = ["RunStore", "SavedFragment", "run_folder", "signed_file", "signed_files"]

SIGNED = "manifest.signed"
KEPT_CHECKPOINTS = 2
KEPT_CORRUPT = 2
"""Number of damaged files kept for every folder, for people to look at."""
MAX_PROBLEMS = 100
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,18})\.safetensors")
_UPDATE = re.compile(r"(0|[1-9][0-9]{0,18})\.update")


def run_folder(data_dir: Path, run_id: str) -> Path:
    """The folder of a run; its name is the first 16 characters of the run id (hexadecimal)."""
    invariant(re.fullmatch(r"[0-9A-Za-z_-]{1,64}", run_id) is not None, f"not a run id: {run_id!r}")
    return data_dir / "runs" / run_id[:16]


def signed_file(data_dir: Path, run_id: str) -> Path:
    """Name the file of a run's signed manifest."""
    return run_folder(data_dir, run_id) / SIGNED


def signed_files(data_dir: Path) -> list[Path]:
    """List the signed manifests of all runs in this folder."""
    return sorted((data_dir / "runs").glob(f"*/{SIGNED}"))


class RunStore:
    """Votes, outer updates and fragment checkpoints of one run."""

    def __init__(self, data_dir: Path, run_id: str, files: Files | None = None) -> None:
        """Open, creating what is missing and removing what a crash left half-written.

        Raises:
            StorageError: a folder cannot be created, read or written.
        """
        self.run_id = run_id
        self.folder = run_folder(data_dir, run_id)
        self._files = files or Files()
        self._problems: deque[str] = deque(maxlen=MAX_PROBLEMS)
        for folder in (self.folder / "fragments", self.folder / "updates"):
            self._files.make_folder(folder)
        self._remove_temporary_files()
        self.unsynced = UnsyncedUpdates(self._files, self._updates)
        """Updates that are not durable."""
        self._votes = VotesLog(self.folder / "votes.log", self._files, self._problems.append)

    def take_problems(self) -> list[str]:
        """Sentences about damage found since the last call (at most `MAX_PROBLEMS`)."""
        problems = list(self._problems)
        self._problems.clear()
        return problems

    # --- votes -------------------------------------------------------------------------------------

    def save_vote(self, record: VoteRecord) -> None:
        """Remember a vote durably, before it is sent.

        Raises:
            StorageError: not saved; the vote must not be sent.
        """
        self._votes.save(record)

    def votes(self) -> dict[tuple[int, str], VoteRecord]:
        """Votes of ours: (fragment, group) -> the one of the highest term; bounded, see `votes_log`."""
        return self._votes.newest()

    # --- proofs ------------------------------------------------------------------------------------

    def save_proofs(self, proofs: tuple[Evidence, ...]) -> None:
        """Keep these proofs, and no others. Raises: StorageError: those before are intact."""
        save_proofs(self.folder, proofs, self._files)

    def proofs(self) -> tuple[Evidence, ...]:
        """Proofs that were saved; whether they hold is not looked at."""
        return load_proofs(self.folder, self._problems.append)

    # --- outer updates -----------------------------------------------------------------------------

    def save_update(self, version: SignedVersion, payload: Buffer, *, durable: bool) -> None:
        """Put an outer update into the log, over any other of the same number.

        `durable`: survives a power cut, with all before it that was written and could be synced; needed
        before our own update is announced. Others wait for a sync (`unsynced`).

        Raises:
            StorageError: not saved; the rest of the log is intact.
        """
        header = version.header
        self._check_run(header)
        folder = self._updates(header.fragment)
        self._files.make_folder(folder)
        path = folder / f"{header.number}.update"
        clear_folder_at(path)

        def write() -> None:
            self._files.save(path, encode_update(version, payload), durable=durable)

        if durable:
            self.unsynced.sync(header.fragment)
            write()
        else:
            self.unsynced.save(header.fragment, header.number, write)

    def load_updates(
        self, fragment: int, above_number: int, parent: bytes | None = None
    ) -> list[tuple[SignedVersion, bytes]]:
        """Read the logged updates above_number + 1, + 2, ... up to the first one that is absent, damaged (set
        aside) or does not name its predecessor as its parent. `parent`, if given, is the header digest
        that the first one must name.

        Raises:
            StorageError: a file cannot be read.
        """
        folder = self._updates(fragment)
        numbers = self._numbers(folder, _UPDATE)
        chain: list[tuple[SignedVersion, bytes]] = []
        number = above_number + 1
        while number in numbers:
            found = self.load_update(fragment, number)
            if found is None:
                break
            header = found[0].header
            if parent is not None and header.parent != parent:
                break  # of a branch that was left
            chain.append(found)
            parent = header.digest()
            number += 1
        return chain

    def load_update(self, fragment: int, number: int) -> tuple[SignedVersion, bytes] | None:
        """Read one logged update, of whatever branch; None if it is absent or damaged (set aside).

        Raises:
            StorageError: the file cannot be read.
        """
        path = self._updates(fragment) / f"{number}.update"
        if not path.exists():
            return None
        try:
            version, payload = decode_update(self._content(path))
            self._check_label(version.header, fragment, number)
        except CorruptFile as error:
            self._set_aside(path, error)
            return None
        return version, payload

    def prune_updates(self, fragment: int, keep_from_number: int) -> None:
        """Forget updates below `keep_from_number`. Raises: StorageError."""
        folder = self._updates(fragment)
        self.unsynced.forget_below(fragment, keep_from_number)  # first: a deleted file cannot be synced
        for number in self._numbers(folder, _UPDATE):
            if number < keep_from_number:
                self._files.delete(folder / f"{number}.update")

    # --- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(
        self, version: SignedVersion, watermarks: tuple[Watermark, ...], theta: Buffer, momentum: Buffer
    ) -> None:
        """Save a fragment's state: fp32 buffers of shape (numel,), which must not change meanwhile.

        Keeps this and the next older checkpoint. Higher numbers are of a branch that was left for a
        heavier one, and go.

        Raises:
            StorageError: not saved; earlier checkpoints are intact.
        """
        header = version.header
        self._check_run(header)
        folder = self._fragment(header.fragment)
        self._files.make_folder(folder)
        content = encode_checkpoint(version, watermarks, theta, momentum)
        path = folder / f"checkpoint-{header.number}.safetensors"
        clear_folder_at(path)
        self._files.save(path, content, durable=True)
        self.unsynced.forget_below(header.fragment, header.number + 1)
        older = sorted(number for number in self._numbers(folder, _CHECKPOINT) if number < header.number)
        keep = {header.number, *older[len(older) - (KEPT_CHECKPOINTS - 1) :]}
        for number in self._numbers(folder, _CHECKPOINT) - keep:
            self._files.delete(folder / f"checkpoint-{number}.safetensors")

    def load_checkpoint(self, fragment: int) -> SavedFragment | None:
        """Read the newest sound checkpoint; damaged ones are set aside. None: there is none.

        The checksum vouches for the bytes as they were saved; the caller still compares the state digest.

        Raises:
            StorageError: a file cannot be read.
        """
        folder = self._fragment(fragment)
        for number in sorted(self._numbers(folder, _CHECKPOINT), reverse=True):
            path = folder / f"checkpoint-{number}.safetensors"
            try:
                saved = decode_checkpoint(self._content(path))
                self._check_label(saved.version.header, fragment, number)
            except CorruptFile as error:
                self._set_aside(path, error)
                continue
            return saved
        return None

    def distrust_checkpoint(self, fragment: int, number: int, why: str) -> None:
        """Set a checkpoint aside that is as it was saved, and yet of no use."""
        self._set_aside(self._fragment(fragment) / f"checkpoint-{number}.safetensors", CorruptFile(why))

    # --- inside ------------------------------------------------------------------------------------

    def _fragment(self, fragment: int) -> Path:
        return self.folder / "fragments" / f"{fragment:03d}"

    def _updates(self, fragment: int) -> Path:
        return self.folder / "updates" / f"{fragment:03d}"

    def _numbers(self, folder: Path, pattern: re.Pattern[str]) -> set[int]:
        if not folder.exists():
            return set()
        matches = (pattern.fullmatch(path.name) for path in self._files.list_folder(folder))
        return {int(match[1]) for match in matches if match}

    def _content(self, path: Path) -> bytes:
        if path.is_dir():
            raise CorruptFile("it is a folder")
        return self._files.read(path)

    def _check_run(self, header: VersionHeader) -> None:
        invariant(header.run == self.run_id, f"a version of run {header.run} in the store of {self.run_id}")

    def _check_label(self, header: VersionHeader, fragment: int, number: int) -> None:
        if (header.run, header.fragment, header.number) != (self.run_id, fragment, number):
            raise CorruptFile(
                f"it is version {header.number} of fragment {header.fragment}, run {header.run}"
            )

    def _set_aside(self, path: Path, error: CorruptFile) -> None:
        aside = path.with_name(path.name + ".corrupt")
        self._files.move(path, aside)
        self._problems.append(f"{path} is damaged ({error}): set aside as {aside.name}")
        others = [other for other in self._files.list_folder(path.parent) if other.suffix == ".corrupt"]
        others.sort(key=lambda other: other.stat().st_ctime_ns)
        for other in others[:-KEPT_CORRUPT]:
            self._files.delete(other)

    def _remove_temporary_files(self) -> None:
        folders = [self.folder]
        for parent in (self.folder / "fragments", self.folder / "updates"):
            folders += [path for path in self._files.list_folder(parent) if path.is_dir()]
        for folder in folders:
            for path in self._files.list_folder(folder):
                if path.name.endswith(TEMP_SUFFIX):
                    self._files.delete(path)
