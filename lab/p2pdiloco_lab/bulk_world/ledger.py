"""The truth of a bulk world: which versions there are, and what their bytes are."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

import msgspec
import torch
from torch import Tensor

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api.types import WHOLE_RUN, Contributor, Stamp
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import plan_fragments
from p2pdiloco.tensors.outer_update import FragmentState, Pin
from p2pdiloco.tensors.sizes import TensorSpec
from p2pdiloco.tensors.vault import Vault
from p2pdiloco_lab.bulk_world.plan import BulkPlan

RUN = "bulk"
INNER_STEPS = 8
COLUMNS = 64


class WatchedVault(Vault):
    """A vault that remembers what was ever pinned of it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pinned: list[FragmentState] = []

    def pin(self, fragment: int) -> Pin:
        """See `Vault.pin`."""
        if self._states[fragment] not in self._pinned:
            self._pinned.append(self._states[fragment])
        return super().pin(fragment)

    @property
    def pins(self) -> int:
        """Count pins that are not released, also of states that the vault has let go of."""
        return sum(state.pins for state in self._pinned)


class Ledger:
    """Versions of all fragments, each made once, and the states that they lead to."""

    def __init__(self, plan: BulkPlan) -> None:
        torch.set_num_threads(1)
        self._plan = plan
        rows = -(-plan.numel // COLUMNS)
        specs = [TensorSpec(f"t{f}", (rows, COLUMNS)) for f in range(plan.fragments)]
        self.layouts = plan_fragments(specs, plan.fragments)
        self._generator = torch.Generator().manual_seed(plan.seed)
        self.moves = [self._drawn() for _ in range(2)]
        """Parts of learners' contributions, fp32 [numel]."""
        self.versions: dict[tuple[int, int], SignedVersion] = {}
        """(fragment, number) -> the version."""
        self.states: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """Theta and momentum, by the same key."""
        self.updates: dict[tuple[int, int], bytes] = {}
        first = self.vault()
        first.load_initial({spec.name: self._drawn().view(spec.shape) for spec in specs})
        for layout in self.layouts:
            digest = first.state_digest_of(layout.index, 0)
            self.add(self.signed(layout.index, 0, RUN, digest, bytes(32), 0), b"", first)

    def _drawn(self) -> Tensor:
        return torch.rand(self.layouts[0].numel, generator=self._generator) - 0.5

    def vault(self) -> WatchedVault:
        """An empty one for a member."""
        name = self._plan.codec
        return WatchedVault(self.layouts, OuterSection(), INNER_STEPS, name, name)

    def load(self, vault: Vault, fragment: int, number: int) -> None:
        """Make a version the vault's own, as from a checkpoint."""
        vault.load_spare(fragment, number, *self.states[fragment, number])
        vault.commit(fragment, number)

    def contribution(self, fragment: int, rng: Random) -> bytearray:
        """A learner's work, encoded."""
        return codec(self._plan.codec).encode(self.moves[fragment] * (rng.random() + 0.5))

    def signed(
        self, fragment: int, number: int, syncer: str, state_digest: bytes, update_digest: bytes, size: int
    ) -> SignedVersion:
        """The next version of a fragment, signed by its syncer."""
        before = self.versions.get((fragment, number - 1))
        header = VersionHeader(
            run=RUN,
            group=WHOLE_RUN,
            fragment=fragment,
            number=number,
            parent=before.header.digest() if before else hashlib.sha256(RUN.encode()).digest(),
            term=1,
            syncer=syncer,
            tokens=number,
            state_digest=state_digest,
            update_digest=update_digest,
            update_bytes=size,
            codec=self._plan.codec,
            contributors=(Contributor(syncer, Stamp(1, number), INNER_STEPS, INNER_STEPS),) if number else (),
        )
        return SignedVersion(header, signature(header))

    def add(self, version: SignedVersion, update: bytes, vault: Vault) -> None:
        """A version was made: a vault has committed it."""
        header = version.header
        key = header.fragment, header.number
        theta, momentum = vault.state_buffers(header.fragment)
        self.versions[key], self.updates[key] = version, update
        self.states[key] = bytes(theta), bytes(momentum)


def signature(header: VersionHeader) -> bytes:
    """Sign as a version's syncer does: nobody else in a bulk world knows how."""
    return hashlib.sha256(b"syncer" + header.digest()).digest()


def sound(version: SignedVersion) -> bool:
    """Tell whether its syncer signed a version."""
    return version.signature == signature(version.header)


def forged(version: SignedVersion) -> SignedVersion:
    """Another version under the same signature."""
    header = msgspec.structs.replace(version.header, tokens=version.header.tokens + 1)
    return msgspec.structs.replace(version, header=header)
