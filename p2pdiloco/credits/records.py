"""Records of a run's history: one signed version each, with the time at which a member took it.

The signed header is kept as it is, since its digest names it and its whole past. The time is the word of
whoever kept it: no header has one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.core.api.types import Wire
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.errors import RemoteError

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Limit of one record: a header that names 16384 contributors has about 3 MiB."""
PAGE_BYTES = 1024 * 1024
"""Bytes of records after which a page ends; one record is in it at least."""
LATEST_S = 1 << 40
_FRAME = struct.Struct(">II")
"""Length of what follows, and its CRC-32."""


class HistoryRecord(Wire, frozen=True):
    """Record of one version."""

    at_s: Annotated[int, Meta(ge=0, le=LATEST_S)]
    """Seconds since 1970 at which a keeper took the version, by its own clock; 0: nobody knows."""
    version: SignedVersion


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(HistoryRecord)


def framed(record: HistoryRecord) -> bytes:
    """Encode a record with its length and checksum before it."""
    body = _encoder.encode(record)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def frames(content: bytes) -> Iterator[tuple[int, HistoryRecord]]:
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
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        yield end, record
        offset = end


def page_of(records: Iterable[HistoryRecord]) -> bytes:
    """Encode records for a peer that asks, as many as a page has."""
    page = bytearray()
    for record in records:
        page += framed(record)
        if len(page) >= PAGE_BYTES:
            break
    return bytes(page)


def received(content: bytes) -> list[HistoryRecord]:
    """Read the records that a peer sent. Raises: RemoteError ("garbage")."""
    records, read = [], 0
    for end, record in frames(content):
        records.append(record)
        read = end
    if read != len(content):
        raise RemoteError("garbage", "a damaged record of history")
    return records
