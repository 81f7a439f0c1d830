"""Subject of an audit: a version, or the partial merge of one of its groups, with what it was made of.

Rules: docs/protocol/audits.md, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api.types import WHOLE_RUN, Contributor, MergeLimits
from p2pdiloco.core.api.versions import PartOfTree, sample_seed
from p2pdiloco.tensors.merge import Input, Payload
from p2pdiloco.tensors.outer_update import Correction, Remade, UpdateMaker
from p2pdiloco.tensors.vault import Vault


class Wanted(NamedTuple):
    """Contribution or partial merge that an audit needs."""

    digest: bytes
    makers: list[str]
    """Members that made it."""
    partial: PartOfTree | None = None
    """Partial merge that it is; None: it is a contribution."""


class Subject:
    """Merge that is made again: what went into it, and what its syncer states."""

    def __init__(self, effect: ef.Audit) -> None:
        header, part = effect.version.header, effect.part
        self.fragment = header.fragment
        self.digest = header.digest()
        """Digest of the version."""
        self.group = WHOLE_RUN if part is None else part.entry.group
        self.syncer = header.syncer if part is None else part.entry.syncer
        """Syncer that made it."""
        self.givers, self.repairs = effect.givers, effect.repairs
        self.repairs_something = part is None and header.repairs is not None
        self._header, self._part, self._below = header, part, effect.below
        self._limits = header.limits if part is None else part.entry.by(header.limits)
        whole = header.contributors if part is None else part.parts
        self._parts: tuple[Contributor, ...] = () if effect.below else whole
        """Contributions that were added up for it, not for a group below."""

    def wanted(self) -> list[Wanted]:
        """List what it was made of, each once."""
        learners: dict[bytes, list[str]] = {}
        for part in self._parts:
            learners.setdefault(part.payload_digest, []).append(part.learner)
        below = {each.entry.payload_digest: each for each in self._below}
        return [
            *(Wanted(digest, makers) for digest, makers in learners.items()),
            *(Wanted(digest, [each.entry.syncer], each) for digest, each in below.items()),
        ]

    def check(self, vault: Vault, wanted: Wanted, payload: Payload) -> None:
        """Judge what has the digest of something in it: no honest syncer merges what is unsound. In the
        tensors thread. Raises: Unsound, StorageError."""
        if wanted.partial is None:
            vault.check_payload(self.fragment, payload, vault.maker.codec_name)
            return
        work = [(part.tokens, part.inner_steps, part.trust) for part in wanted.partial.parts]
        limits = wanted.partial.entry.by(self._header.limits)
        vault.check_partial(self.fragment, payload, work, limits)

    def can_be_merged(self) -> bool:
        """Tell whether there is anything to merge, by limits that a merge can have: NaN is none."""
        limits = [self._limits, *(each.entry.by(self._header.limits) for each in self._below)]
        return bool(self._parts or self._below) and all(map(_sane, limits))

    def is_stated(self, made: Remade) -> bool:
        """Tell whether that is what its syncer states: its bytes, and what it says of each contribution."""
        digest = self._header.update_digest if self._part is None else self._part.entry.payload_digest
        stated = [(part.length, part.score) for part in self._parts]
        found = list(zip(made.found.lengths, made.found.scores, strict=True))
        return made.update_digest == digest and stated == found

    def true_update(self, made: Remade) -> tuple[bytearray, bytes] | None:
        """Find the update that a version should have had, and its digest; None: it has that, or is none."""
        other = self._part is None and made.update_digest != self._header.update_digest
        return (made.update, made.update_digest) if other else None

    def make(
        self, maker: UpdateMaker, payloads: Mapping[bytes, Payload], correction: Correction | None
    ) -> Remade:
        """Make it again of these payloads, by digest, in the tensors thread. `correction`: what it makes
        good, if it repairs a version. Raises: UnusableInputs, StorageError."""
        inputs = [
            Input(payloads[part.payload_digest], part.tokens, part.inner_steps, part.trust, votes=part.votes)
            for part in self._parts
        ]
        partials = [payloads[each.entry.payload_digest] for each in self._below]
        key = self.fragment, inputs, self._limits, sample_seed(self._parts)
        if self._part is None:
            return maker.remake(*key, correction, partials)
        return maker.remake_partial(*key, partials)


def _sane(limits: MergeLimits) -> bool:
    return limits.most_tokens > 0 and limits.longest > 0.0 and limits.of_median >= 0.0
