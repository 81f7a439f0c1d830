"""Votes, remembered for ever: an append-only text file, one checksummed line for every vote.

A line is `<16 hex digits of SHA-256 of the JSON> <JSON of VoteRecord>\\n`. A vote counts once `save` has
returned; forgetting one could let a node vote twice in a term, so sound lines outlive damage around them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from p2pdiloco.adapters.files import Files
from p2pdiloco.core.effects import VoteRecord
from p2pdiloco.errors import invariant

COMPACT_ABOVE_BYTES = 64 * 1024
MAX_SET_ASIDE = 5


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
    """The newest vote for every fragment. `report` is told about damage that was found and contained."""

    def __init__(self, path: Path, files: Files, report: Callable[[str], None]) -> None:
        """Raises: StorageError: the file cannot be read, or not be mended."""
        self._path = path
        self._files = files
        self._report = report
        self._newest: dict[int, VoteRecord] = {}
        self._bytes = 0
        self._compact_above = COMPACT_ABOVE_BYTES
        self._rewrite = True
        """The next vote replaces the file with the newest votes instead of appending to it."""
        if path.exists():
            self._load(files.read(path))

    def newest(self) -> dict[int, VoteRecord]:
        """Fragment -> the vote of the highest term."""
        return dict(self._newest)

    def save(self, record: VoteRecord) -> None:
        """Append durably.

        Raises:
            StorageError: the vote is not saved and must not be sent.
            InvariantViolation: another candidate has our vote in this term.
        """
        known = self._newest.get(record.fragment)
        invariant(
            known is None or known.term != record.term or known.candidate == record.candidate,
            f"two votes in one term: {known} and {record}",
        )
        if self._rewrite:
            self._write({**self._newest, record.fragment: self._later(record)})
        else:
            line = _line(record)
            # If this fails, the file may end in half a line, or in a vote that was not sent: then the next
            # vote rewrites the file instead of standing behind that.
            self._rewrite = True
            self._files.append(self._path, line)
            self._rewrite = False
            self._bytes += len(line)
        self._newest[record.fragment] = self._later(record)
        if self._bytes > self._compact_above:
            self._rewrite = True

    def _later(self, record: VoteRecord) -> VoteRecord:
        known = self._newest.get(record.fragment)
        return record if known is None or record.term > known.term else known

    def _load(self, content: bytes) -> None:
        *lines, tail = content.split(b"\n")
        bad = 0
        for line in lines:
            record = _parse(line)
            if record is None:
                bad += 1
            else:
                self._newest[record.fragment] = self._later(record)
        unfinished = _parse(tail) if tail else None
        if unfinished is not None:  # only its newline is missing: the vote may have been sent
            self._newest[unfinished.fragment] = self._later(unfinished)
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

    def _write(self, votes: dict[int, VoteRecord]) -> None:
        lines = [_line(record) for _, record in sorted(votes.items())]
        self._rewrite = True
        self._files.save(self._path, lines, durable=True)
        self._rewrite = False
        self._bytes = sum(map(len, lines))
        self._compact_above = max(COMPACT_ABOVE_BYTES, 2 * self._bytes)
