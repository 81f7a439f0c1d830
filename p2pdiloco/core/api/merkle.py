"""Merkle tree over a list: one digest for all of it, and short evidence that one entry is in it.

As in RFC 6962: entries and inner nodes are hashed in domains of their own, so that neither can pass for the
other. An odd node at the end of a row goes up as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

Path = tuple[tuple[bool, bytes], ...]
"""Way from an entry to the root: (True if the sibling is on the left, the sibling's digest), from below."""
EMPTY_ROOT = hashlib.sha256(b"").digest()


def root(entries: Sequence[bytes]) -> bytes:
    """Compute the digest of these entries, in this order."""
    row = [_leaf(entry) for entry in entries]
    while len(row) > 1:
        row = _above(row)
    return row[0] if row else EMPTY_ROOT


def path(entries: Sequence[bytes], index: int) -> Path:
    """Find the way from entry `index` to the root."""
    row, at, found = [_leaf(entry) for entry in entries], index, []
    while len(row) > 1:
        sibling = at ^ 1
        if sibling < len(row):
            found.append((sibling < at, row[sibling]))
        row, at = _above(row), at // 2
    return tuple(found)


def root_of(entry: bytes, way: Path) -> bytes:
    """Compute the root that a tree has in which `entry` lies at the end of this way."""
    digest = _leaf(entry)
    for on_left, sibling in way:
        digest = _node(sibling, digest) if on_left else _node(digest, sibling)
    return digest


def _above(row: list[bytes]) -> list[bytes]:
    pairs = [_node(row[i], row[i + 1]) for i in range(0, len(row) - 1, 2)]
    return pairs + row[len(row) - len(row) % 2 :]


def _leaf(entry: bytes) -> bytes:
    return hashlib.sha256(b"\0" + entry).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()
