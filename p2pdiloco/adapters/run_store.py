"""Store of one run on a node's disk, under `<data_dir>/runs/<first 16 of the run id>/`.

    votes.log                                    `VotesLog`
    proofs                                       msgpack of the proofs against members
    fragments/<fff>/checkpoint-<n>.safetensors   Theta, outer momentum and version; the newest two
    updates/<fff>/<n>.update                     the log of outer updates
    manifest.signed, learner.safetensors         others write these

Synchronous: to be called from one I/O thread of the process that holds the data folder's lock. Whatever
is found damaged is set aside (`*.corrupt`), told in `take_problems`, and then as if it had never been saved:
the node catches up from its peers instead. Every byte that matters is under a checksum. Nothing is unpickled;
`CorruptFile` is the only thing that decoding raises. `KeptFiles` is scratch for payloads that may be sent
again.

Listed in docs/reference/disk.md, section 2.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import safetensors
from msgspec import Meta, msgpack
from numpy.typing import NDArray

from p2pdiloco.adapters.data_dir import TEMP_SUFFIX, Files
from p2pdiloco.core.api.events import MILESTONES, VoteRecord
from p2pdiloco.core.api.evidence import MAX_PROOFS, Evidence
from p2pdiloco.core.api.types import WHOLE_RUN, Watermark
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.errors import StorageError, invariant
from p2pdiloco.hashing import DIGEST_BYTES, content_digest
from p2pdiloco.ports import Buffer
from p2pdiloco.util import DAMAGE, Action, Frozen, Say, T, Values, clear_folder_at, read_note, set_aside

__all__ = ["RunStore", "SavedFragment", "run_folder", "signed_file", "signed_files"]

SIGNED = "manifest.signed"
KEPT_MILESTONES = 2
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
        """Votes of ours: (fragment, group) -> the one of the highest term; bounded, see `VotesLog`."""
        return self._votes.newest()

    # --- proofs ------------------------------------------------------------------------------------

    def save_proofs(self, proofs: tuple[Evidence, ...]) -> None:
        """Keep these proofs, and no others. Raises: StorageError: those before are intact."""
        path = self.folder / PROOFS_FILE
        clear_folder_at(path)
        self._files.save(path, [_encoder.encode(proofs)], durable=True)

    def proofs(self) -> tuple[Evidence, ...]:
        """Proofs that were saved; whether they hold is not looked at. Each holds by its signatures or not at
        all, so the file has no checksum; a damaged one is set aside."""
        return read_note(self.folder / PROOFS_FILE, _proofs_decoder.decode, self._problems.append) or ()

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
        chain = []
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
        keep = {header.number, *older[len(older) - (KEPT_MILESTONES - 1) :]}
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


UPDATE_MAGIC = b"p2pdiloco-update-2\n"
CHECKPOINT_FORMAT = "p2pdiloco-checkpoint-1"
_SHA256_BYTES = 32
PROOFS_FILE = "proofs"
_encoder = msgpack.Encoder()
_proofs_decoder = msgpack.Decoder(Annotated[tuple[Evidence, ...], Meta(max_length=MAX_PROOFS)])


class CorruptFile(Exception):
    """Error: the bytes are not what was saved."""


class SavedFragment(Frozen):
    """Fragment as it was saved. Theta and outer momentum are fp32 vectors of shape (numel,), read-only."""

    version: SignedVersion
    watermarks: tuple[Watermark, ...]
    theta: NDArray[np.float32]
    momentum: NDArray[np.float32]


class _Metadata(Frozen):
    format: Literal["p2pdiloco-checkpoint-1"]
    version: str
    watermarks: str
    sha256: str


class _Header(Frozen):
    metadata: _Metadata = msgspec.field(name="__metadata__")


def _checksum(version: bytes, watermarks: bytes, theta: Buffer, momentum: Buffer) -> str:
    digest = hashlib.sha256(CHECKPOINT_FORMAT.encode())
    for part in (version, watermarks, memoryview(theta).cast("B"), memoryview(momentum).cast("B")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def encode_checkpoint(
    version: SignedVersion, watermarks: tuple[Watermark, ...], theta: Buffer, momentum: Buffer
) -> list[Buffer]:
    """Encode a checkpoint as chunks of a file; theta and momentum (fp32, equal sizes) are not copied.

    A safetensors file with the fp32 vectors `theta` and `momentum`. Its metadata holds the signed version and
    the watermarks (base64 of their msgpack) and the checksum. It is read with the safetensors library, but
    written here: the format is a length, a JSON header, and data. The library builds the whole file in memory
    with the interpreter lock held (measured: 0.4 s for 240 MB, in which the daemon would be mute).
    """
    theta, momentum = memoryview(theta).cast("B"), memoryview(momentum).cast("B")
    size = theta.nbytes
    invariant(size == momentum.nbytes and size % 4 == 0, "theta and momentum must be fp32 of one size")
    version_bytes, watermark_bytes = _encoder.encode(version), _encoder.encode(watermarks)
    header = msgspec.json.encode(
        {
            "__metadata__": {
                "format": CHECKPOINT_FORMAT,
                "version": base64.b64encode(version_bytes).decode(),
                "watermarks": base64.b64encode(watermark_bytes).decode(),
                "sha256": _checksum(version_bytes, watermark_bytes, theta, momentum),
            },
            "theta": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]},
            "momentum": {"dtype": "F32", "shape": [size // 4], "data_offsets": [size, 2 * size]},
        }
    )
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little") + header, theta, momentum]


def decode_checkpoint(data: bytes) -> SavedFragment:
    """Decode a checkpoint file. Raises: CorruptFile."""
    try:
        tensors: Values = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
        header_bytes = int.from_bytes(data[:8], "little")
        metadata = msgspec.json.decode(data[8 : 8 + header_bytes], type=_Header).metadata
        version_bytes = base64.b64decode(metadata.version, validate=True)
        watermark_bytes = base64.b64decode(metadata.watermarks, validate=True)
    except (safetensors.SafetensorError, msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise CorruptFile(f"not a checkpoint ({error})") from error
    if set(tensors) != {"theta", "momentum"}:
        raise CorruptFile("theta or momentum is missing")
    theta, momentum = tensors["theta"], tensors["momentum"]
    if any(tensor["dtype"] not in ("F32", "float32") for tensor in (theta, momentum)):
        raise CorruptFile("theta or momentum is not fp32")
    if theta["shape"] != momentum["shape"] or len(theta["shape"]) != 1:
        raise CorruptFile("theta and momentum differ in shape")
    if _checksum(version_bytes, watermark_bytes, theta["data"], momentum["data"]) != metadata.sha256:
        raise CorruptFile("the checksum does not match")
    return SavedFragment(
        _decoded(version_bytes, SignedVersion),
        _decoded(watermark_bytes, tuple[Watermark, ...]),
        np.frombuffer(theta["data"], dtype="<f4"),
        np.frombuffer(momentum["data"], dtype="<f4"),
    )


def encode_update(version: SignedVersion, payload: Buffer) -> list[Buffer]:
    """Encode an update as chunks of a file; the payload is not copied.

    Magic, length of the signed version (4 bytes, little endian), its msgpack, the SHA-256 of all that, and
    the payload. The payload's digest is in the version, and was compared before it came here.
    """
    version_bytes = _encoder.encode(version)
    head = UPDATE_MAGIC + len(version_bytes).to_bytes(4, "little") + version_bytes
    return [head, hashlib.sha256(head).digest(), payload]


def decode_update(data: bytes) -> tuple[SignedVersion, bytes]:
    """Decode an update file. Raises: CorruptFile."""
    start = len(UPDATE_MAGIC) + 4
    if len(data) < start + _SHA256_BYTES or not data.startswith(UPDATE_MAGIC):
        raise CorruptFile("not an update")
    view = memoryview(data)
    version_end = start + int.from_bytes(data[start - 4 : start], "little")
    payload_start = version_end + _SHA256_BYTES
    if hashlib.sha256(view[:version_end]).digest() != view[version_end:payload_start]:
        raise CorruptFile("the checksum does not match")
    version, payload = _decoded(data[start:version_end], SignedVersion), data[payload_start:]
    if content_digest(payload) != version.header.update_digest:
        raise CorruptFile("the update is not the one that its version names")
    return version, payload


def _decoded(data: bytes, kind: type[T]) -> T:
    """Decode what is within a file. Raises: CorruptFile."""
    try:
        return msgpack.decode(data, type=kind)
    except DAMAGE as error:
        raise CorruptFile(f"not what it should be ({error})") from error


COMPACT_ABOVE_BYTES = 64 * 1024
KEPT_GROUPS = 32
"""Groups of one fragment whose votes are kept. A member votes in one group a level and epoch, of at most five
levels."""
MAX_SET_ASIDE = 5


Votes = dict[tuple[int, str], VoteRecord]
"""Votes by (fragment, group): the one of the highest term, in the order in which they were given."""


def _line(record: VoteRecord) -> bytes:
    text = msgspec.json.encode(record)
    return hashlib.sha256(text).hexdigest()[:16].encode() + b" " + text + b"\n"


def _parse(line: bytes) -> VoteRecord | None:
    checksum, _, text = line.partition(b" ")
    if hashlib.sha256(text).hexdigest()[:16].encode() != checksum:
        return None
    try:
        return msgspec.json.decode(text, type=VoteRecord)
    except msgspec.DecodeError:
        return None


@dataclass
class VotesLog:
    """Log of our newest votes: an append-only text file, one checksummed line for every vote.

    A line is `<16 hex digits of SHA-256 of the JSON> <JSON of VoteRecord>` and a newline; without a group it
    is of the whole run. A vote counts once `save` has returned; forgetting one could let a node vote twice in
    a term, so sound lines outlive damage around them. Groups rotate: of every fragment the votes in the
    `KEPT_GROUPS` groups voted in last are kept, which reaches many epochs back, and that of the whole run,
    and what we attested, always.

    Raises:
        StorageError: the file cannot be read, or not be mended.
    """

    _path: Path
    _files: Files
    _report: Say
    """What is told about damage that was found and contained."""

    def __post_init__(self) -> None:
        self._newest: Votes = {}
        self._bytes = 0
        self._compact_above = COMPACT_ABOVE_BYTES
        self._rewrite = True
        """True: the next vote replaces the file with the newest votes instead of appending to it."""
        if self._path.is_dir():
            aside = set_aside(self._path)
            self._report(f"{self._path} is a folder: {aside}; the votes that were there are forgotten")
        elif self._path.exists():
            self._load(self._files.read(self._path))

    def newest(self) -> Votes:
        """The newest vote of each fragment and group."""
        return dict(self._newest)

    def save(self, record: VoteRecord) -> None:
        """Append durably.

        Raises:
            StorageError: the vote is not saved and must not be sent.
            InvariantViolation: another candidate has our vote in this term.
        """
        known = self._newest.get((record.fragment, record.group))
        invariant(
            known is None or known.term != record.term or known.candidate == record.candidate,
            f"two votes in one term: {known} and {record}",
        )
        votes = dict(self._newest)
        _note(votes, record)
        if self._rewrite:
            self._write(votes)
        else:
            line = _line(record)
            # If this fails, the file may end in half a line, or in a vote that was not sent: then the next
            # vote rewrites the file instead of standing behind that.
            self._rewrite = True
            self._files.append(self._path, line)
            self._rewrite = False
            self._bytes += len(line)
        self._newest = votes
        if self._bytes > self._compact_above:
            self._rewrite = True

    def _load(self, content: bytes) -> None:
        *lines, tail = content.split(b"\n")
        bad = 0
        for line in lines:
            record = _parse(line)
            if record is None:
                bad += 1
            else:
                _note(self._newest, record)
        unfinished = _parse(tail) if tail else None
        if unfinished is not None:  # only its newline is missing: the vote may have been sent
            _note(self._newest, unfinished)
        self._bytes = len(content)
        if bad:
            aside = self._copy_aside(content)
            self._report(f"{self._path} had {bad} damaged lines: kept as {aside.name}, sound votes kept")
        elif tail and unfinished is None:
            self._report(f"{self._path} ended in an unfinished line, which was dropped")
        self._rewrite = False
        if bad or tail:
            self._write(self._newest)

    def _copy_aside(self, content: bytes) -> Path:
        """Keep the damaged bytes for people to look at. A copy, not a rename: a crash between a rename and
        the rewriting would forget every vote."""
        prefix = self._path.name + ".corrupt-"
        taken = [path for path in self._files.list_folder(self._path.parent) if path.name.startswith(prefix)]
        numbers = sorted(int(p.name.removeprefix(prefix)) for p in taken if p.name[len(prefix) :].isdecimal())
        aside = self._path.with_name(f"{prefix}{numbers[-1] + 1 if numbers else 1}")
        self._files.save(aside, [content], durable=True)
        for number in numbers[: max(0, len(numbers) + 1 - MAX_SET_ASIDE)]:
            self._files.delete(self._path.with_name(f"{prefix}{number}"))
        return aside

    def _write(self, votes: Votes) -> None:
        lines = [_line(record) for record in votes.values()]
        self._rewrite = True
        self._files.save(self._path, lines, durable=True)
        self._rewrite = False
        self._bytes = sum(map(len, lines))
        self._compact_above = max(COMPACT_ABOVE_BYTES, 2 * self._bytes)


def _note(votes: Votes, record: VoteRecord) -> None:
    """A vote comes last where it is the newest of its group; the oldest beyond the bound go."""
    key = (record.fragment, record.group)
    known = votes.pop(key, None)
    votes[key] = record if known is None or record.term > known.term else known
    groups = [k for k in votes if k[0] == record.fragment and k[1] not in (WHOLE_RUN, MILESTONES)]
    for old in groups[: max(0, len(groups) - KEPT_GROUPS)]:
        del votes[old]


@dataclass
class UnsyncedUpdates:
    """Numbers of the updates of each fragment that a power cut may still take: written, but not synced, or
    not written at all. No more than the log has.
    """

    _files: Files
    _folder_of: Callable[[int], Path]
    """Function that names the folder with a fragment's updates."""

    def __post_init__(self) -> None:
        self._written: defaultdict[int, set[int]] = defaultdict(set)
        self._failed: defaultdict[int, set[int]] = defaultdict(set)

    def save(self, fragment: int, number: int, write: Action) -> None:
        """Write an update without a sync. Raises: StorageError, as `write` does."""
        try:
            write()
        except StorageError:
            self._failed[fragment].add(number)
            raise
        self._failed[fragment].discard(number)
        self._written[fragment].add(number)

    def fragments(self) -> list[int]:
        """List the fragments of which something is written and not synced."""
        return [fragment for fragment, numbers in self._written.items() if numbers]

    def sync(self, fragment: int) -> int:
        """Sync what is written of a fragment. Returns the number of updates.

        Raises:
            StorageError: none of it counts as durable, also when a later sync succeeds: the kernel reports
                a write that failed once, and drops it.
        """
        numbers, folder = self._written.pop(fragment, set()), self._folder_of(fragment)
        try:
            for number in sorted(numbers):
                self._files.make_durable(folder / f"{number}.update")
            if numbers:
                self._files.make_names_durable(folder)
        except StorageError:
            self._failed[fragment] |= numbers
            raise
        return len(numbers)

    def forget_below(self, fragment: int, number: int) -> None:
        """Forget those below `number`: they are deleted, or a durable checkpoint has them."""
        for known in (self._written, self._failed):
            known[fragment] = {n for n in known[fragment] if n >= number}

    def first(self, fragment: int) -> int | None:
        """Find the lowest number that is not durable: a power cut may take that and all after it."""
        return min(self._written[fragment] | self._failed[fragment], default=None)


class KeptFiles:
    """A folder of payloads, by ticket: merged contributions that wait in case they must be sent again.

    Scratch: of use to the running process only, so written without a sync and cleared at every start. Each
    file begins with the digest of the rest. `load` may come from another thread than the I/O thread.
    """

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        """Open an empty folder: what an earlier process left in it goes.

        Raises:
            StorageError: it cannot be created or cleared.
        """
        self._folder = folder
        self._files = files or Files()
        self._files.make_folder(folder)
        self.clear()

    def _path(self, ticket: int) -> Path:
        return self._folder / f"{ticket}.payload"

    def save(self, ticket: int, payload: Buffer) -> None:
        """Write a payload. Raises: StorageError."""
        self._files.save(self._path(ticket), (content_digest(payload), payload), durable=False)

    def load(self, ticket: int) -> bytearray:
        """Read a payload back. Raises: StorageError, also when it is damaged."""
        content = memoryview(self._files.read(self._path(ticket)))
        if content_digest(content[DIGEST_BYTES:]) != content[:DIGEST_BYTES]:
            raise StorageError(f"{self._path(ticket)} is damaged")
        return bytearray(content[DIGEST_BYTES:])

    def remove(self, ticket: int) -> None:
        """Forget a payload; absent is fine. Raises: StorageError."""
        self._files.delete(self._path(ticket))

    def clear(self) -> None:
        """Forget all. Raises: StorageError."""
        for path in self._files.list_folder(self._folder):
            self._files.delete(path)
