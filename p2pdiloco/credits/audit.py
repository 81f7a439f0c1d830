"""Audit of a run's history: a head's line of versions, counted, and its signatures checked.

A head's digest names the whole past: of a line that leads to it nobody can change, leave out or add a
version. That the learners named there did the work is what their own signatures say.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from p2pdiloco.core.api.types import Head, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits.ledger import Doubt, FragmentLedger
from p2pdiloco.credits.store import HistoryStore

Verify = Callable[[str, bytes, bytes], bool]
"""Function that tells whether (peer) signed (message) with (signature)."""


class Tip(Struct, frozen=True):
    """Version of a fragment from which its line is followed back."""

    number: int
    digest: bytes

    @classmethod
    def of(cls, head: Head) -> Tip:
        """Make the tip of a chain's head."""
        return cls(head.number, head.digest)


class Signatures:
    """Checker of all signatures of versions and labels."""

    def __init__(self, run: str, fragment: int, verify: Verify) -> None:
        self._run, self._fragment, self._verify = run, fragment, verify
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


def count(
    history: HistoryStore,
    run: str,
    fragment: int,
    tip: Tip,
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
    line = history.line(fragment, tip.number, tip.digest)
    for record in history.along(fragment, line):
        false: frozenset[int] = frozenset()
        if signatures is not None:
            if not signatures.is_signed(record.version):
                ledger.doubt(Doubt.FALSE_VERSION)
            false = signatures.false_labels(record.version)
        ledger.add(record, false)
    return ledger
