"""Weights of a swarm in virtual time: what production cuts of contributions, by the chain they go into."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.types import Contributor, MergeLimits, SignedVersion, Stamp
from p2pdiloco.core.chain import scale
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.chain.scale import FIRST_REACH
from p2pdiloco.lab.simulation.world.plan import genesis_version

LOG_VERSIONS = 16


class Part(Struct, frozen=True):
    """Learner's part in a merge."""

    learner: str
    tokens: int
    inner_steps: int


class Weights:
    """Chains of all fragments, which are nothing but headers. `lengths`: of the fragments of version 0."""

    def __init__(self, manifest: Manifest, largest_share: float, lengths: Sequence[float]) -> None:
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
            largest_share=largest_share,
            most_units=manifest.weight.most_units,
        )
        self._chains = [Chain((version,), (), LOG_VERSIONS) for version in signed]

    def limits(self, fragment: int) -> MergeLimits:
        """Limits of what is merged into this fragment's next version."""
        return scale.limits_after(self._chains[fragment], self._config)

    def merged(self, fragment: int, parts: Sequence[Part], norm: float) -> None:
        """Take in the version that was made of these."""
        chain = self._chains[fragment]
        head, number = chain.header, chain.head.number + 1
        by = tuple(Contributor(p.learner, Stamp(1, number), p.tokens, p.inner_steps) for p in parts)
        usual = scale.after(chain, by, norm, self._config)
        header = structs.replace(
            head,
            number=number,
            parent=chain.head.digest,
            contributors=by,
            norm=norm,
            tokens=usual.tokens,
            unit=usual.unit,
            reach=usual.reach,
        )
        chain.extend(SignedVersion(header, b""))
