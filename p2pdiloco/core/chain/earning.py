"""Earning: what of a version's contributions counts, for the schedule and for credits, before any limit.

Nothing does of whom its round did not trust, and of copies: whoever sends again what it, or anybody, sent
before has trained nothing. A copy is known by the first bytes of its payload's digest, which the table of
watermarks has of every learner's newest contribution. Where several in one version have the same payload,
they count together as one: nobody can tell who copied whom, and no honest learner is to be robbed.

Rules: docs/protocol/weights.md, section 9.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from p2pdiloco.core.api.plausible import LEAST_TRUST
from p2pdiloco.core.api.types import Contributor

LAST_BYTES = 8
"""Bytes of a payload's digest by which a copy of it is known."""
NOT_KNOWN = bytes(32)
"""Digest of a contributor that names no payload."""


def mark_of(payload_digest: bytes) -> bytes:
    """Find the bytes by which a copy of that payload is known; empty: it is not named."""
    return b"" if payload_digest == NOT_KNOWN else payload_digest[:LAST_BYTES]


def alone(parts: Sequence[Contributor]) -> list[bool]:
    """Tell of each contribution whether no other of the version has the same payload: only such work earns a
    vote. One payload in many names would else earn one for each."""
    alike = Counter(filter(None, (mark_of(part.payload_digest) for part in parts)))
    return [alike[mark_of(part.payload_digest)] <= 1 for part in parts]


def earned(parts: Sequence[Contributor], lasts: Container[bytes]) -> list[int]:
    """Compute the tokens of each contribution that count. `lasts`: marks of everybody's newest one in the
    parent's chain."""
    marks = [mark_of(part.payload_digest) for part in parts]
    alike = Counter(filter(None, marks))
    return [
        0 if part.trust == LEAST_TRUST or mark in lasts else part.tokens // max(1, alike[mark])
        for part, mark in zip(parts, marks, strict=True)
    ]
