"""Held-out data, chosen by content alone.

Of equal files, no node trains on what another measures. (Files that are only alike may fall otherwise:
regions are counted from a file's begin.)

Names, folders and neighbours of a file differ between nodes that have the same text, and so they do in the
run that trained the model before. None of that is in the hash. Only data that comes with the task, and is the
same in every node, goes by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

ANY_NAME = "surrogatepass"
"""Error handler with which text is encoded that may be a file's name: not all of those are UTF-8."""
REGION_BYTES = 1 << 18
"""Bytes of the regions of a file; one part is cut out of each."""
SHORTEST_CUT_BYTES = 256
"""Least bytes of a part that is cut out. Where it would be less, all of the region is held out, or
nothing."""


class DocumentPiece(NamedTuple):
    """A part of a document."""

    heldout: bool
    """True: nobody trains on this part."""
    text: bytes
    ends: bool = True
    """True: the document ends with this part."""
    begins: bool = True
    """True: it begins with this part."""


def hash64(text: str) -> int:
    """First 64 bits of the text's SHA-256."""
    return _hash64(text.encode(errors=ANY_NAME))


def is_heldout(name: str, percent: int) -> bool:
    """Tell whether data of this name, or this text, is never trained on."""
    return hash64(f"heldout/{name}") % 100 < percent


def pieces(text: bytes, percent: int) -> Iterator[DocumentPiece]:
    """Cut a file into pieces: every region gives up `percent` per cent, one part at a place that its hash
    says. So a few files, or a single one, have held-out text too. A small file, or the rest of one, is held
    out whole or not at all."""
    given = at = 0
    while at < len(text):
        stop = cut(text, at, at + REGION_BYTES)
        first, end = (at + place for place in _heldout_part(text[at:stop], percent))
        if first < end:
            if given < first:
                yield DocumentPiece(False, text[given:first], False, given == 0)
            yield DocumentPiece(True, text[first:end], end == len(text), first == 0)
            given = end
        at = stop
    if given < len(text):
        yield DocumentPiece(False, text[given:], True, given == 0)


def cut(text: bytes, start: int, most: int) -> int:
    """Find the end of a piece: behind the last line that ends from `start` to `most`, or else between two
    characters."""
    if most >= len(text):
        return len(text)
    line = text.rfind(b"\n", start, most) + 1
    if line:
        return line
    # UTF-8: bytes 10xxxxxx go on with a character, which has four at most.
    return next((cut for cut in range(most, most - 4, -1) if text[cut] & 0xC0 != 0x80), most)


def _heldout_part(region: bytes, percent: int) -> tuple[int, int]:
    """Begin and end of the part that nobody trains on; equal where all of the region is trained on."""
    size = len(region) * percent // 100
    value = _hash64(region)
    if size < SHORTEST_CUT_BYTES:
        return 0, len(region) if value % 100 < percent else 0
    first = value % (len(region) - size + 1)
    slack = size // 4
    return _back(region, first, slack), _back(region, first + size, slack)


def _back(region: bytes, at: int, most: int) -> int:
    """Go back to the begin of a line at most so many bytes before, or else of a character."""
    return cut(region, max(0, at - most), at) if at else 0


def _hash64(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
