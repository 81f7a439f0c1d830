"""Chain of a fragment's versions as this node holds it: head, recent log, watermarks.

Rules: docs/protocol/exactly-once.md, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.api.types import Stamp, Watermark
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain.watermarks import Marks, marks_of
from p2pdiloco.errors import invariant


class Chain:
    """Versions of one fragment. It goes forward: `extend` by a child of the head, or `replace` by a heavier
    chain's state, or by one to which this node yields (`core.following.heads`)."""

    def __init__(self, log: tuple[SignedVersion, ...], watermarks: Iterable[Watermark], keep: int) -> None:
        invariant(bool(log), "a chain starts with at least one version")
        self._keep = keep
        self._log: dict[int, SignedVersion] = {}
        self._digests: dict[int, bytes] = {}
        self.signed, self.head = log[-1], log[-1].header.head()
        for version in log:
            self._remember(version, version.header.digest())
        self.marks = marks_of(watermarks)
        """Watermarks of the head: the roster of the fragment."""
        self.replaced = 0
        """Number of times that another chain's state was taken."""
        self.yielded = 0
        """Number of times that it was a lighter one."""

    def _remember(self, version: SignedVersion, digest: bytes) -> None:
        number = version.header.number
        self._log[number] = version
        self._digests[number] = digest
        for old in [n for n in self._log if n < number - self._keep]:
            del self._log[old]
            del self._digests[old]

    @property
    def header(self) -> VersionHeader:
        """Header of the head."""
        return self.signed.header

    def knows(self, number: int, digest: bytes) -> bool:
        """Tell whether that version is the head or one of its logged ancestors."""
        return self._digests.get(number) == digest

    def digest_of(self, number: int) -> bytes | None:
        """Find the digest of a logged version's header; None if it is not in the log."""
        return self._digests.get(number)

    def logged(self, number: int) -> SignedVersion | None:
        """Find a version of the log; None if it is not there."""
        return self._log.get(number)

    def find(self, digest: bytes) -> SignedVersion | None:
        """Find a version of the log by its header's digest; None if it is not there."""
        number = next((number for number, known in self._digests.items() if known == digest), None)
        return None if number is None else self._log[number]

    def repaired(self, digest: bytes) -> bool:
        """Tell whether a version of the log repairs that one."""
        return any(version.header.repairs == digest for version in self._log.values())

    def logged_all(self) -> tuple[SignedVersion, ...]:
        """List the whole log, oldest first, the head last."""
        return tuple(version for _, version in sorted(self._log.items()))

    def table(self) -> tuple[Watermark, ...]:
        """List all watermarks in canonical order."""
        return self.marks.table

    def is_child(self, header: VersionHeader) -> bool:
        """Tell whether the header continues this chain by one."""
        return header.number == self.head.number + 1 and header.parent == self.head.digest

    def watermark(self, learner: str) -> Stamp:
        """Find the stamp of that learner's newest contribution in this chain."""
        return self.marks.stamp(learner)

    def merged_at(self, learner: str) -> int:
        """Find the version that has that learner's newest merged contribution; 0 if there is none."""
        return self.marks.number(learner)

    def marks_after(self, header: VersionHeader) -> Marks:
        """Compute the watermarks once `header` extends this chain."""
        return self.marks.after(header.number, header.contributors)

    def extend(self, version: SignedVersion) -> None:
        """Append a child of the head."""
        invariant(self.is_child(version.header), "extended by something that is not a child of the head")
        self.marks = self.marks_after(version.header)
        self.signed, self.head = version, version.header.head()
        self._remember(version, self.head.digest)

    def replace(self, version: SignedVersion, watermarks: Iterable[Watermark], yields: bool = False) -> None:
        """Take another chain's state: its ancestors are unknown to us. `yields`: though it may be lighter."""
        head = version.header.head()
        invariant(yields or head.weight > self.head.weight, "replaced by a lighter chain")
        self.replaced += 1
        self.yielded += head.weight <= self.head.weight
        self._log.clear()
        self._digests.clear()
        self.signed, self.head = version, head
        self._remember(version, head.digest)
        self.marks = marks_of(watermarks)
