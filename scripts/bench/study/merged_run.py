"""Merges of a run as its syncers make them: each by the limits of its chain, which it extends."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core import chain as scale
from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.types import FULL_TRUST, NO_LIMITS, Contributor, MergeLimits, Stamp
from p2pdiloco.core.api.versions import Mean, SignedVersion, VersionHeader
from p2pdiloco.core.chain import FIRST_REACH, Chain
from p2pdiloco.errors import invariant
from p2pdiloco.tensors.codecs import UnusableInputs
from p2pdiloco.tensors.merge import Input, digest_of
from p2pdiloco.tensors.vault import MergeResult, Vault
from p2pdiloco_lab.simulation.seed_plan import genesis_version

LOG_VERSIONS = 16


class Part(Struct, frozen=True):
    """Learner's part in a merge."""

    learner: str
    content: Input


class Merged(Struct, frozen=True):
    """Version that was committed."""

    made: MergeResult
    cut: tuple[str, ...]
    """Learners whose contributions were cut: too long."""
    refused: tuple[str, ...]
    """Learners in whose contributions the merge found a fault, or which are copies; the others' were merged
    without them."""
    trust: dict[str, int]
    """Trust weights of those that were merged."""


class MergedRun:
    """Global state of a run and the chains of its fragments, which are nothing but headers.

    All that production's syncers and followers decide about a merge is asked of production here: so what is
    changed there is changed here. `largest_share`: of a merge, that one learner has; 0: nothing is cut.
    `seats`: learners that have one from version 0 on.
    """

    def __init__(self, manifest: Manifest, vault: Vault, largest_share: float, seats: Sequence[str]) -> None:
        self._vault, self._cuts = vault, largest_share > 0
        lengths = [vault.first_length(layout.index) for layout in vault.layouts]
        headers = [
            structs.replace(genesis_version(fragment).header, norm=length, reach=length * FIRST_REACH)
            for fragment, length in enumerate(lengths)
        ]
        signed = tuple(SignedVersion(header, b"") for header in headers)
        sync, group = manifest.sync, manifest.group
        self._config = CoreConfig(
            run="study",
            inner_steps=sync.inner_steps,
            delay_steps=sync.delay_steps,
            quorum=sync.quorum,
            grace_fraction=sync.grace_fraction,
            grace_cap_s=sync.grace_cap_s,
            group_size=group.size,
            term_versions=group.term_versions,
            log_versions=group.log_versions,
            max_base_age_versions=group.max_base_age_versions,
            tokens_per_step=manifest.inner.tokens_per_step,
            update_codec=manifest.codec.update,
            contribution_codec=manifest.codec.contribution,
            genesis_versions=signed,
            max_payload_bytes=(0,) * len(signed),
            largest_share=largest_share or 1.0,
            open_share=manifest.weight.open_share,
            most_units=manifest.weight.most_units,
            seats=tuple(seats),
        )
        self._chains = [Chain((version,), (), LOG_VERSIONS, seats) for version in signed]

    def limits(self, fragment: int, learners: Sequence[str] | None = None) -> MergeLimits:
        """Limits of what is merged into this fragment's next version: work of these learners; None: of
        enough of them."""
        chain = self._chains[fragment]
        return scale.limits_after(chain, self._config, learners) if self._cuts else NO_LIMITS

    def header(self, fragment: int) -> VersionHeader:
        """Header of a fragment's newest version."""
        return self._chains[fragment].header

    def merge(self, fragment: int, parts: Sequence[Part]) -> Merged | None:
        """Merge them, who come in this order, into the fragment's next version, and commit it; None: none of
        them can be merged."""
        chain = self._chains[fragment]
        number = chain.head.number + 1
        seed = b"".join(part.learner.encode() for part in parts) + number.to_bytes(8, "big")
        refused = self._copies(chain, parts)
        sound = [part for part in parts if part.learner not in refused]
        while sound:
            try:
                inputs = [self._input(chain, part) for part in sound]
                limits = self.limits(fragment, [part.learner for part in sound])
                made = self._vault.merge(fragment, number, inputs, limits=limits, seed=seed)
            except UnusableInputs as error:
                refused += [sound[index].learner for index in error.faults]
                sound = [part for index, part in enumerate(sound) if index not in error.faults]
                continue
            self._extend(fragment, sound, made)
            self._vault.commit(fragment, number, made.state_digest)
            cut = tuple(sound[index].learner for index in made.found.cut)
            trust = {part.learner: part.trust for part in chain.header.contributors}
            return Merged(made, cut, tuple(refused), trust)
        return None

    def _input(self, chain: Chain, part: Part) -> Input:
        votes = part.learner in chain.marks.seats
        return Input(*part.content[:3], mean=self._mean(chain, part.learner), votes=votes)

    def _copies(self, chain: Chain, parts: Sequence[Part]) -> list[str]:
        """Find whose work a syncer refuses at its door, as it came before."""
        came: set[bytes] = set()
        found = []
        for part in parts if self._cuts else ():
            digest = digest_of(part.content[0])
            found += [part.learner] if digest in came or chain.marks.is_copy(digest) else []
            came.add(digest)
        return found

    def _mean(self, chain: Chain, learner: str) -> Mean | None:
        return chain.marks.mean(learner) if self._cuts else None

    def _extend(self, fragment: int, parts: Sequence[Part], made: MergeResult) -> None:
        """Take in the version that was made of these."""
        chain = self._chains[fragment]
        number = chain.head.number + 1
        by = tuple(
            Contributor(
                p.learner,
                Stamp(1, number),
                *p.content[1:3],
                after=chain.marks.stamp(p.learner),
                payload_digest=digest_of(p.content[0]),
                trust=mean.trust(score) if (mean := self._mean(chain, p.learner)) else FULL_TRUST,
                length=length,
                score=score,
                votes=p.learner in chain.marks.seats,
            )
            for p, length, score in zip(parts, made.found.lengths, made.found.scores, strict=True)
        )
        usual = scale.scale_after(chain, by, self._config)
        header = structs.replace(
            chain.header,
            number=number,
            parent=chain.head.digest,
            contributors=by,
            norm=made.norm,
            tokens=usual.tokens,
            unit=usual.unit,
            reach=usual.reach,
            limits=scale.limits_after(chain, self._config, [part.learner for part in parts]),
        )
        fault = scale.version_fault(chain, header, self._config) if self._cuts else None
        invariant(fault is None, f"followers refuse the version: {fault}")
        chain.extend(SignedVersion(header, b""))
