"""Credits: who trained how much of a run, from the labels that learners signed, kept for the whole run.

`FragmentLedger` counts the versions of one head's line, each contribution once, and `credits_of` sums up.
`HistoryStore` keeps the records of a run's history on a disk: one signed version each. `count_line` audits a
history: a head's digest names the whole past, so of a line that leads to it nobody can change, leave out or
add a version; and that the learners named there did the work is what their own signatures say. A certificate
is a signed sentence that a peer did so much of a run. `NamesFile` keeps the names of learners that have left.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field, msgpack
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import Files, storage_errors
from p2pdiloco.core.api.types import NEVER, Contributor, Head, Stamp, Wire, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import MOST_GAP, WATERMARK_VERSIONS, copy_mark, earned
from p2pdiloco.errors import RemoteError, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.util import DAMAGE, Frozen, clear_folder_at, read_note

# Ledger.

MOST = 1 << 62
"""Limit of figures that follow from claims alone: sums of absurd ones must not be what nobody can encode."""


class Doubt(Enum):
    """Reasons for which a part of a version is not credited, or a version is not what it should be."""

    FALSE_LABEL = "a label is not signed by its learner"
    FALSE_VERSION = "a version is not signed by its syncer"
    TWICE = "a contribution is there twice"
    OUT_OF_ORDER = "a contribution does not come after the one that it names"
    OTHER_RUN = "a version is of another run or fragment"
    FEWER_TOKENS = "a version has fewer tokens than its parent"


class Entry(Struct):
    """Work of one learner in one fragment, or in one stretch of time."""

    tokens: int = 0
    """Tokens as its versions counted them."""
    claimed: int = 0
    """Tokens as its labels say."""
    inner_steps: int = 0
    contributions: int = 0
    first_s: int = 0
    last_s: int = 0
    """Times at which a keeper took the versions that have its first and last contribution; 0: not known."""

    def join(self, other: Entry) -> None:
        """Add what is in another entry."""
        self.tokens += other.tokens
        self.claimed += other.claimed
        self.inner_steps += other.inner_steps
        self.contributions += other.contributions
        self.first_s = min(filter(None, (self.first_s, other.first_s)), default=0)
        self.last_s = max(self.last_s, other.last_s)


class MergedMark(Frozen):
    """Newest contribution of a learner that a ledger has."""

    stamp: Stamp
    number: int
    last: bytes
    """Bytes by which a copy of it is known."""


@dataclass
class FragmentLedger:
    """Ledger of one fragment's line of versions, oldest first.

    What a version counts is the difference of its tokens to its parent's (`chain.Scale`). Mostly that is the
    sum of its labels. Where labels claim more than may count, one limit for all of them is found that gives
    the same sum, times the versions since the learner's last one, as members count. Learners without
    a seat share what the seats leave. So the credits of a fragment always add up to its tokens.
    """

    _run: str
    _fragment: int
    _bucket_s: int = 0
    """Length of the stretches of time that are told apart; 0: none are."""

    def __post_init__(self) -> None:
        self.entries: dict[tuple[str, int], Entry] = {}
        """Entries by learner and beginning of the stretch of time."""
        self.doubts: dict[Doubt, int] = {}
        self.first = self.number = 0
        """Numbers of its oldest and newest version; 0: it has none."""
        self.digest = b""
        self.tokens = self.before_tokens = self.uncredited_tokens = 0
        """Tokens of its newest version, of what came before its first one, and of what nobody is credited
        with."""
        self._marks: dict[str, MergedMark] = {}

    def doubt(self, doubt: Doubt) -> None:
        """Count something that is not as it should be."""
        self.doubts[doubt] = self.doubts.get(doubt, 0) + 1

    def add(self, record: HistoryRecord, false: frozenset[int] = frozenset()) -> None:
        """Count the next version of the line. `false`: places of labels that their learners did not sign."""
        header = record.version.header
        digest = header.digest()
        if (header.run, header.fragment) != (self._run, self._fragment):
            self.doubt(Doubt.OTHER_RUN)
        if not self.number:
            self.first = header.number
            if header.number > 1:  # its parent is not here: all that it has is taken to count
                counts = earned(header.contributors, frozenset())
                self.before_tokens = max(0, header.tokens - sum(counts))
                self.tokens = self.before_tokens
        if header.tokens < self.tokens:
            self.doubt(Doubt.FEWER_TOKENS)
        counted = max(0, header.tokens - self.tokens)
        shares = self._shares(counted, header.contributors, header.number)
        self.uncredited_tokens += counted
        for place, (part, tokens) in enumerate(zip(header.contributors, shares, strict=True)):
            if place in false:
                self.doubt(Doubt.FALSE_LABEL)
            elif self._is_next(part, header.number):
                work = Entry(tokens, part.tokens, part.inner_steps, 1, record.at_s, record.at_s)
                self._entry(part.learner, record.at_s).join(work)
                self.uncredited_tokens -= tokens
        self.tokens += counted
        self.number, self.digest = header.number, digest

    def _shares(self, counted: int, parts: Sequence[Contributor], number: int) -> list[int]:
        """Divide what a version counts: seats have what they claim, all others what is left."""
        weights = list(zip(parts, self._weights(parts, number), strict=True))
        first = shares_of(counted, [(tokens * part.votes, gap) for part, (tokens, gap) in weights])
        others = [(tokens * (not part.votes), gap) for part, (tokens, gap) in weights]
        return [a + b for a, b in zip(first, shares_of(counted - sum(first), others), strict=True)]

    def _weights(self, parts: Sequence[Contributor], number: int) -> list[tuple[int, int]]:
        """List (tokens claimed that may count, versions that it may make up for) of every part."""
        gaps = (1 + min(MOST_GAP, self._gap(part.learner, number) or 0) for part in parts)
        return list(zip(earned(parts, self._lasts(number)), gaps, strict=True))

    def _lasts(self, number: int) -> frozenset[bytes]:
        """Find the marks of everybody's newest contribution before that version."""
        floor = number - 1 - WATERMARK_VERSIONS
        return frozenset(mark.last for mark in self._marks.values() if mark.last and mark.number >= floor)

    def _gap(self, learner: str, number: int) -> int | None:
        """Count the versions between a learner's last one and that number; None: the chain has no watermark
        of it, or none any more."""
        mark = self._marks.get(learner)
        gap = number - 1 - mark.number if mark is not None else None
        return None if gap is None or gap > WATERMARK_VERSIONS else gap

    def _is_next(self, part: Contributor, number: int) -> bool:
        """Tell whether a contribution was not counted before, and note it."""
        mark = self._marks.get(part.learner)
        if mark is not None:
            if part.stamp <= mark.stamp:
                self.doubt(Doubt.TWICE)
                return False
            forgotten = part.after == NEVER and self._gap(part.learner, number) is None
            if part.after != mark.stamp and not forgotten:
                self.doubt(Doubt.OUT_OF_ORDER)
        elif self.first == 1 and part.after != NEVER:
            self.doubt(Doubt.OUT_OF_ORDER)
        self._marks[part.learner] = MergedMark(part.stamp, number, copy_mark(part.payload_digest))
        return True

    def _entry(self, learner: str, at_s: int) -> Entry:
        bucket = at_s - at_s % self._bucket_s if self._bucket_s else 0
        return self.entries.setdefault((learner, bucket), Entry())


def shares_of(counted: int, weights: list[tuple[int, int]]) -> list[int]:
    """Divide what a version counts among (tokens claimed, versions made up for): everybody what it claims,
    up to one limit for each version."""
    claims = [tokens for tokens, _ in weights]
    if sum(claims) <= counted:
        return claims
    low, high = 0, max(claims)  # the least limit that reaches the sum
    while low < high:
        middle = (low + high) // 2
        if sum(min(tokens, middle * share) for tokens, share in weights) >= counted:
            high = middle
        else:
            low = middle + 1
    shares = [min(tokens, high * share) for tokens, share in weights]
    over = sum(shares) - counted
    for place, (tokens, share) in enumerate(weights):  # what rounding up gave too much
        back = min(over, shares[place] - min(tokens, (high - 1) * share)) if high else 0
        shares[place] -= back
        over -= back
    return shares


class CreditRow(Frozen):
    """Work of one learner in a run: the mean over fragments, as the run's own tokens are."""

    peer: str
    fragment_tokens: int
    """Tokens, the sum over fragments: of these the rows add up exactly."""
    tokens: int
    claimed_tokens: int
    inner_steps: int
    contributions: int
    """Contributions of all fragments."""
    first_s: int
    last_s: int
    begins_s: int = 0
    """Beginning of the stretch of time; 0: it is the whole run."""


class Credits(Frozen):
    """Credits of a run, as far as its history is known."""

    rows: tuple[CreditRow, ...]
    """Rows, the most tokens first; of stretches of time, the oldest stretch first."""
    fragments: int
    fragment_tokens: int
    """Tokens of all heads together."""
    before_fragment_tokens: int
    """Tokens of versions that nobody keeps any more."""
    uncredited_fragment_tokens: int
    """Tokens that the heads have and no learner is credited with, for the doubts."""
    missing: dict[int, int] = field(default_factory=dict)
    """Fragments whose history begins later, and the first version that is known."""
    doubts: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the run: the mean over fragments."""
        return self.fragment_tokens // max(1, self.fragments)


def credits_of(ledgers: Iterable[FragmentLedger]) -> Credits:
    """Sum up the ledgers of all of a run's fragments."""
    ledgers = list(ledgers)
    found: dict[tuple[str, int], Entry] = {}
    doubts: dict[str, int] = {}
    for ledger in ledgers:
        for key, entry in ledger.entries.items():
            found.setdefault(key, Entry()).join(entry)
        for doubt, times in ledger.doubts.items():
            doubts[doubt.value] = doubts.get(doubt.value, 0) + times
    number = max(1, len(ledgers))
    rows = [_row(peer, begins_s, entry, number) for (peer, begins_s), entry in found.items()]
    rows.sort(key=lambda row: (row.begins_s, -row.fragment_tokens, row.peer))
    return Credits(
        rows=tuple(rows),
        fragments=len(ledgers),
        fragment_tokens=sum(ledger.tokens for ledger in ledgers),
        before_fragment_tokens=sum(ledger.before_tokens for ledger in ledgers),
        uncredited_fragment_tokens=sum(ledger.uncredited_tokens for ledger in ledgers),
        missing={n: ledger.first for n, ledger in enumerate(ledgers) if ledger.first > 1},
        doubts=doubts,
    )


def _row(peer: str, begins_s: int, entry: Entry, fragments: int) -> CreditRow:
    return CreditRow(
        peer=peer,
        fragment_tokens=entry.tokens,
        tokens=entry.tokens // fragments,
        claimed_tokens=min(entry.claimed // fragments, MOST),
        inner_steps=min(entry.inner_steps // fragments, MOST),
        contributions=entry.contributions,
        first_s=entry.first_s,
        last_s=entry.last_s,
        begins_s=begins_s,
    )


# Records.

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Limit of one record: a header that names 16384 contributors has about 3 MiB."""
PAGE_BYTES = 1024 * 1024
"""Bytes of records after which a page ends; one record is in it at least."""
LATEST_S = 1 << 40
_FRAME = struct.Struct(">II")
"""Length of what follows, and its CRC-32."""


class HistoryRecord(Wire, frozen=True):
    """Record of one version.

    The signed header is kept as it is, since its digest names it and its whole past. The time at which a
    member took the version is the word of the keeper: no header has one.
    """

    at_s: Annotated[int, Meta(ge=0, le=LATEST_S)]
    """Seconds since 1970 at which a keeper took the version, by its own clock; 0: nobody knows."""
    version: SignedVersion


_encoder = msgpack.Encoder()
_decoder = msgpack.Decoder(HistoryRecord)


def frame_record(record: HistoryRecord) -> bytes:
    """Encode a record with its length and checksum before it."""
    body = _encoder.encode(record)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def read_frames(content: bytes) -> Iterator[tuple[int, HistoryRecord]]:
    """Read the sound records at the beginning of a file, each with the offset at which it ends."""
    offset = 0
    while offset + _FRAME.size <= len(content):
        length, checksum = _FRAME.unpack_from(content, offset)
        start, end = offset + _FRAME.size, offset + _FRAME.size + length
        if length > MAX_RECORD_BYTES or end > len(content):
            return
        body = content[start:end]
        if zlib.crc32(body) != checksum:
            return
        try:
            record = _decoder.decode(body)
        except DAMAGE:
            return
        yield end, record
        offset = end


def page_of(records: Iterable[HistoryRecord]) -> bytes:
    """Encode records for a peer that asks, as many as a page has."""
    page = bytearray()
    for record in records:
        page += frame_record(record)
        if len(page) >= PAGE_BYTES:
            break
    return bytes(page)


def decode_page(content: bytes) -> list[HistoryRecord]:
    """Read the records that a peer sent. Raises: RemoteError ("garbage")."""
    frames = list(read_frames(content))
    if max((end for end, _ in frames), default=0) != len(content):
        raise RemoteError("garbage", "a damaged record of history")
    return [record for _, record in frames]


# Audit.

Verify = Callable[[str, bytes, bytes], bool]
"""Function that tells whether (peer) signed (message) with (signature)."""


class HeadRef(Frozen):
    """Version of a fragment from which its line is followed back."""

    number: int
    digest: bytes

    @classmethod
    def of(cls, head: Head) -> HeadRef:
        """Make the tip of a chain's head."""
        return cls(head.number, head.digest)


@dataclass
class Signatures:
    """Checker of all signatures of versions and labels."""

    _run: str
    _fragment: int
    _verify: Verify

    def __post_init__(self) -> None:
        self.checked = 0
        """Number of signatures that were checked."""

    def false_labels(self, version: SignedVersion) -> frozenset[int]:
        """Find the places of the labels that their learners did not sign."""
        parts = version.header.contributors
        self.checked += len(parts)
        return frozenset(
            place
            for place, part in enumerate(parts)
            if not self._verify(
                part.learner, signed_bytes("work", part.work(self._run, self._fragment)), part.signature
            )
        )

    def is_signed(self, version: SignedVersion) -> bool:
        """Tell whether the syncer signed the version."""
        self.checked += 1
        message = signed_bytes("version", version.header)
        return self._verify(version.header.syncer, message, version.signature)


def count_line(
    history: HistoryStore,
    run: str,
    fragment: int,
    tip: HeadRef,
    *,
    bucket_s: int = 0,
    signatures: Signatures | None = None,
) -> FragmentLedger:
    """Count the line of versions that ends in `tip`, as far as it is here. Without `signatures` none is
    checked.

    Raises:
        StorageError: the history cannot be read.
    """
    ledger = FragmentLedger(run, fragment, bucket_s)
    for record in history.along(fragment, history.line(fragment, tip)):
        false: frozenset[int] = frozenset()
        if signatures is not None:
            if not signatures.is_signed(record.version):
                ledger.doubt(Doubt.FALSE_VERSION)
            false = signatures.false_labels(record.version)
        ledger.add(record, false)
    return ledger


# Certificates.

MAX_CERTIFICATE_BYTES = 2 * 1024 * 1024
_SIGNED, _PROVEN = b"p2pdiloco/1/credits\0", b"p2pdiloco/1/credits-proof\0"
Text = Annotated[str, Meta(max_length=80)]
Natural = Annotated[int, Meta(ge=0, le=1 << 62)]
Hex = Annotated[str, Meta(max_length=256, pattern="^([0-9a-f]{2})*\\Z")]
ManifestHex = Annotated[str, Meta(max_length=1024 * 1024, pattern="^([0-9a-f]{2})*\\Z")]
Role = Literal["owner", "keeper"]


class CertifiedHead(Frozen, forbid_unknown_fields=True):
    """Version of a fragment up to which was counted."""

    number: Natural
    digest: Hex


class CreditCertificate(Frozen, kw_only=True, forbid_unknown_fields=True):
    """Certificate of one peer's work in one run, and the peer's proof that it is meant. Field order is what
    the signature covers.

    The signer has counted the history itself. The owner's signature goes with the run's manifest, whose
    digest is the run id: so whoever has the file can tell that it is the owner's.
    """

    format: Literal["p2pdiloco-credits-1"] = "p2pdiloco-credits-1"
    run: Text
    run_name: Text
    peer: Text
    """Peer that did the work: whoever has its key can prove to be it."""
    name: Text
    """Name that it had chosen; no proof of anything."""
    tokens: Natural
    """Tokens merged into the run, the mean over fragments."""
    inner_steps: Natural
    contributions: Natural
    run_tokens: Natural
    """Tokens of the whole run by then."""
    from_version: Natural
    """Version from which on was counted; 1: the whole run."""
    heads: Annotated[tuple[CertifiedHead, ...], Meta(max_length=1024)]
    """Versions up to which was counted, by fragment."""
    issued_s: Natural
    signer: Text
    role: Role
    manifest: ManifestHex = ""
    """The run's signed manifest, of an owner's certificate."""
    signature: Hex = ""


def _covered(certificate: CreditCertificate) -> bytes:
    return _SIGNED + msgspec.json.encode(replace(certificate, signature=""))


def signed_certificate(certificate: CreditCertificate, key: Identity) -> CreditCertificate:
    """Sign a certificate."""
    unsigned = replace(certificate, signer=key.peer_id)
    return replace(unsigned, signature=key.sign(_covered(unsigned)).hex())


def text_of(certificate: CreditCertificate) -> str:
    """Write a certificate down as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(certificate), indent=2).decode() + "\n"


def read_certificate(content: bytes) -> CreditCertificate:
    """Read a certificate. Raises: UserError (it is none)."""
    try:
        return msgspec.json.decode(content[:MAX_CERTIFICATE_BYTES], type=CreditCertificate)
    except DAMAGE as error:
        raise UserError(f"it is no certificate of credits: {str(error)[:120]}") from error


def is_signed(certificate: CreditCertificate, verify: Verify) -> bool:
    """Tell whether its signer signed it as it is."""
    return verify(certificate.signer, _covered(certificate), bytes.fromhex(certificate.signature))


def _proof_of(certificate: CreditCertificate, word: str) -> bytes:
    digest = hashlib.sha256(_covered(certificate)).digest()
    return _PROVEN + digest + word.encode()


def prove(certificate: CreditCertificate, word: str, key: Identity) -> str:
    """Sign a word that somebody chose, as the peer that the certificate is of. Raises: UserError."""
    if key.peer_id != certificate.peer:
        raise UserError(
            f"the certificate is of peer {certificate.peer}, and the key in this folder is {key.peer_id}'s",
            "name the data folder of the node that did the work: --data-dir DIR",
        )
    return key.sign(_proof_of(certificate, word)).hex()


def is_proven(certificate: CreditCertificate, word: str, proof: str, verify: Verify) -> bool:
    """Tell whether the peer that the certificate is of has signed the word."""
    try:
        signature = bytes.fromhex(proof)
    except ValueError:
        return False
    return verify(certificate.peer, _proof_of(certificate, word), signature)


# Store.

MAX_OLD_BYTES = 64 * 1024 * 1024
"""Limit of what a file of an earlier release unfolds to."""


class VersionLine(Frozen):
    """Unbroken line of versions that ends in a head."""

    digests: tuple[bytes, ...]
    """Digests of its versions, oldest first."""
    first: int
    """Number of the oldest one; 1: it is whole."""
    wanted: bytes
    """Digest of the version before that, which is not here; of a whole one, that of version 0."""

    @property
    def is_whole(self) -> bool:
        """True: nothing is missing before it."""
        return self.first == 1


class HistoryStore:
    """Store of the history of one run: `<data_dir>/runs/<run id, 16>/history/history.db`, of SQLite.

    All branches that were taken are there. Which versions count follows from a head: its parent, that one's
    parent, and so on (`line`). What is damaged is set aside, and comes from others again.
    Synchronous, and to be called from one thread at a time, which is not the event loop's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "history.db"
        self._opened: sqlite3.Connection | None = None

    @contextmanager
    def _database(self, action: str) -> Iterator[sqlite3.Connection]:
        """Context with the database, in which its errors become a StorageError."""
        try:
            with storage_errors(action, self._path):
                yield self._opened or self._open()
        except sqlite3.Error as error:
            if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.OperationalError):
                raise StorageError(f"cannot {action} {self._path}: {error}") from error
            self.close()
            with storage_errors("set aside", self._path):
                self._path.replace(self._path.with_suffix(".db.corrupt"))
            raise StorageError(f"{self._path} is damaged, and was set aside: {error}") from error

    def _open(self) -> sqlite3.Connection:
        self._folder.mkdir(parents=True, exist_ok=True)
        opened = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        # Nobody else uses it: without shared memory a log can be kept on any file system.
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
            opened.execute(f"PRAGMA {pragma}").fetchall()
        if not opened.execute("SELECT 1 FROM sqlite_master").fetchone():
            opened.execute("BEGIN")
            opened.execute("CREATE TABLE versions (digest BLOB PRIMARY KEY, record BLOB NOT NULL)")
            for path in sorted(self._folder.glob("[0-9]*/*.[lz]*")):  # as earlier releases kept it
                for _, record in read_frames(_decompressed(path.read_bytes())):
                    opened.execute(INSERT, _row_of(record))
            opened.execute("COMMIT")
        self._opened = opened
        return opened

    def close(self) -> None:
        """Close the database; the next call opens it."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def append(self, record: HistoryRecord) -> None:
        """Add a record, once. It survives the process; a power cut may take the newest ones.

        Raises:
            StorageError: it is not saved; what was there is as it was.
        """
        with self._database("save") as database:
            database.execute(INSERT, _row_of(record))

    def find(self, fragment: int, tip: HeadRef) -> HistoryRecord | None:
        """Find the record of that very version; a damaged one is none. Raises: StorageError."""
        with self._database("read") as database:
            row = database.execute("SELECT record FROM versions WHERE digest = ?", (tip.digest,)).fetchone()
        try:
            record = _decoder.decode(zlib.decompress(row[0])) if row is not None else None
        except (zlib.error, *DAMAGE):
            return None
        header = record.version.header if record is not None else None
        return record if header and (header.fragment, header.number) == (fragment, tip.number) else None

    def down(self, fragment: int, tip: HeadRef) -> Iterator[HistoryRecord]:
        """Read that version, its parent, and so on, as far as they are here; version 0 is never among them.

        Raises: StorageError.
        """
        while tip.number > 0 and (record := self.find(fragment, tip)) is not None:
            yield record
            tip = HeadRef(tip.number - 1, record.version.header.parent)

    def line(self, fragment: int, tip: HeadRef) -> VersionLine:
        """Find what is here of the chain with that head. Raises: StorageError."""
        digests = [tip.digest, *(record.version.header.parent for record in self.down(fragment, tip))]
        wanted = digests.pop()
        return VersionLine(tuple(reversed(digests)), tip.number - len(digests) + 1, wanted)

    def along(self, fragment: int, line: VersionLine) -> Iterator[HistoryRecord]:
        """Read the records of a line, oldest first. Raises: StorageError."""
        for number, digest in enumerate(line.digests, line.first):
            record = self.find(fragment, HeadRef(number, digest))
            if record is None:
                return  # it was deleted meanwhile
            yield record


INSERT = "INSERT OR REPLACE INTO versions VALUES (?, ?)"


def _row_of(record: HistoryRecord) -> tuple[bytes, bytes]:
    return record.version.header.digest(), zlib.compress(_encoder.encode(record))


def _decompressed(content: bytes) -> bytes:
    """Decompress a file of an earlier release, as far as it is sound."""
    try:
        return zlib.decompressobj().decompress(content, MAX_OLD_BYTES)
    except zlib.error:
        return content  # one that was not compressed yet


# Names.

logger = logging.getLogger(__name__)
MAX_NAMES = 16384
MAX_FILE_BYTES = MAX_NAMES * 512
"""Limit of the file, whatever the names are: JSON writes a character in six bytes at most."""
_names_decoder = msgspec.json.Decoder(dict[str, str])


class NamesFile:
    """File of names by peer id."""

    def __init__(self, path: Path, known: Mapping[str, str]) -> None:
        """`known`: names of those that are here, as they were seen last."""
        self._path, self._known = path, known
        self._names = read_note(path, _names_decoder.decode, logger.warning, MAX_FILE_BYTES) or {}

    def get(self, peer: str) -> str:
        """Find a name; empty: none is known."""
        return self._known.get(peer) or self._names.get(peer, "")

    def save(self, peers: Iterable[str]) -> None:
        """Remember what these are called now. Raises: StorageError."""
        names = {peer: name for peer in list(peers)[:MAX_NAMES] if (name := self.get(peer))}
        if names != self._names:
            Files().make_folder(self._path.parent)
            clear_folder_at(self._path)
            Files().save(self._path, [msgspec.json.encode(names)], durable=False)
            self._names = names
