"""View of the chain for the bulk of a run: the only way from streams to the core's state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.types import Head, Reach
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.node import Core
from p2pdiloco.daemon.payloads.kept_payloads import KeptPayloads
from p2pdiloco.daemon.payloads.memory import most_update_bytes
from p2pdiloco.daemon.payloads.update_log import UpdateLog
from p2pdiloco.errors import StorageError
from p2pdiloco.ports import Buffer
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.merge import Payload

logger = logging.getLogger(__name__)


class Versions(Protocol):
    """Versions of a run as whoever copies states knows them: from its core, or from members' reports."""

    @property
    def run(self) -> str:
        """Run id."""

    def signed(self, version: SignedVersion) -> bool:
        """Tell whether its syncer signed a version.

        The core looks at that too, but it knows only whom it asked, not which of those that were named gave
        it.
        """

    def holders(self, fragment: int, digest: bytes) -> Sequence[str]:
        """List peers that hold the fragment's version with this digest."""

    def state_bytes(self, fragment: int) -> int:
        """Return the size of a fragment's whole state in bytes."""


class ChainView(Versions, Protocol):
    """Chain of a member, as far as its streams need to know it."""

    @property
    def may_serve(self) -> bool:
        """True: our chain is one that others may get."""

    @property
    def dialable(self) -> bool:
        """True: others can dial us; else nobody is sent to us."""

    def is_member(self, peer: str) -> bool:
        """Tell whether the peer is a member of the run."""

    def head(self, fragment: int) -> Head:
        """Return the newest version."""

    def most_update_bytes(self, fragment: int) -> int:
        """Return a bound of the size of this fragment's updates."""

    async def update_of(self, fragment: int, number: int) -> tuple[SignedVersion, Buffer] | None:
        """Get an outer update of our chain; None: it is not, or no longer, to be had."""

    async def contribution_of(self, fragment: int, digest: bytes) -> Payload | None:
        """Get a contribution of ours by its payload's digest; None: it is not, or no longer, to be had."""


class OwnChain:
    """View of a member's own chain: its core, and the updates that it keeps in memory and on the disk."""

    def __init__(
        self,
        core: Core,
        layouts: Sequence[FragmentLayout],
        updates: UpdateLog,
        store: RunStore,
        io: Executor,
        kept: KeptPayloads,
    ) -> None:
        """`io`: the thread for the disk; `kept`: payloads of our own contributions."""
        self.run = core.shared.config.run
        self._core = core
        self._layouts = layouts
        self._updates = updates
        self._store = store
        self._io = io
        self._kept = kept

    @property
    def may_serve(self) -> bool:
        """See `ChainView`."""
        return self._core.may_serve

    @property
    def dialable(self) -> bool:
        """See `ChainView`."""
        return self._core.shared.reach is Reach.DIRECT

    def is_member(self, peer: str) -> bool:
        """See `ChainView`."""
        return self._core.is_member(peer, asyncio.get_running_loop().time())

    def signed(self, version: SignedVersion) -> bool:
        """See `Versions`."""
        header = version.header
        return self._core.shared.signed_by(header.syncer, "version", header, version.signature)

    def holders(self, fragment: int, digest: bytes) -> Sequence[str]:
        """See `Versions`."""
        return self._core.fragments[fragment].follower.heads.holders(digest)

    def head(self, fragment: int) -> Head:
        """See `ChainView`."""
        return self._core.fragments[fragment].chain.head

    def state_bytes(self, fragment: int) -> int:
        """See `Versions`: parameters and momentum, four bytes each."""
        return 8 * self._layouts[fragment].numel

    def most_update_bytes(self, fragment: int) -> int:
        """See `ChainView`."""
        return most_update_bytes(self._layouts[fragment])

    async def update_of(self, fragment: int, number: int) -> tuple[SignedVersion, Buffer] | None:
        """See `ChainView`: from memory, or from the disk if it is older."""
        found = self._updates.get(fragment, number)
        wanted = self._core.fragments[fragment].chain.logged(number)
        if found is not None or wanted is None:
            return found
        loop = asyncio.get_running_loop()
        try:
            saved = await loop.run_in_executor(self._io, self._store.load_update, fragment, number)
        except StorageError as error:
            logger.error("%s", error)
            return None
        return saved if saved is not None and saved[0] == wanted else None

    async def contribution_of(self, fragment: int, digest: bytes) -> Payload | None:
        """See `ChainView`: merged ones are kept until no fork can lack them."""
        ticket = self._core.fragments[fragment].own.find(digest)
        return None if ticket is None else await self._kept.read(ticket)
