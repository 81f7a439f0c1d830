"""Log of our votes: an append-only text file, one checksummed line for every vote.

A line is `<16 hex digits of SHA-256 of the JSON> <JSON of VoteRecord>\\n`; without a group it is of the whole
run. A vote counts once `save` has returned; forgetting one could let a node vote twice in a term, so sound
lines outlive damage around them. Groups rotate: of every fragment the votes in the `KEPT_GROUPS` groups
voted in last are kept, which reaches many epochs back, and that of the whole run always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.core.api.effects import VoteRecord
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.errors import invariant
from p2pdiloco.util import set_aside

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


class VotesLog:
    """Log of the newest votes. `report` is told about damage that was found and contained."""

    def __init__(self, path: Path, files: Files, report: Callable[[str], None]) -> None:
        """Raises: StorageError: the file cannot be read, or not be mended."""
        self._path = path
        self._files = files
        self._report = report
        self._newest: Votes = {}
        self._bytes = 0
        self._compact_above = COMPACT_ABOVE_BYTES
        self._rewrite = True
        """True: the next vote replaces the file with the newest votes instead of appending to it."""
        if path.is_dir():
            report(f"{path} is a folder: {set_aside(path)}; the votes that were there are forgotten")
        elif path.exists():
            self._load(files.read(path))

    def newest(self) -> Votes:
        """See `Votes`."""
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
    """Put a vote last, where it is the newest of its group, and let go of the oldest beyond the bound."""
    key = (record.fragment, record.group)
    known = votes.pop(key, None)
    votes[key] = record if known is None or record.term > known.term else known
    groups = [k for k in votes if k[0] == record.fragment and k[1] != WHOLE_RUN]
    for old in groups[: max(0, len(groups) - KEPT_GROUPS)]:
        del votes[old]
