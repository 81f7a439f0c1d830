"""Tensors thread: the one that reads and writes Theta, momentum and the exchange buffers.

Jobs run strictly in the order in which they were posted, which is the order of the core's effects. So a
commit that was posted before a merge is done before it. The event loop posts a job to the thread, and gets
the result back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from p2pdiloco.core.api.effects import CommitVersion
from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.wire import StateHeader
from p2pdiloco.errors import invariant
from p2pdiloco.learner.channel import BaseRef
from p2pdiloco.tensors.layout import Exchange, FragmentLayout, scatter
from p2pdiloco.tensors.outer_update import Encoded, Pin
from p2pdiloco.tensors.vault import Vault

T = TypeVar("T")


class Compute:
    """Vault and exchange behind one thread. Methods without `async` are jobs to be run in that thread, as
    the vault's own are."""

    def __init__(self, vault: Vault, exchange: Exchange | None) -> None:
        """`exchange`: memory shared with the learner; None: there is no learner, and states are copied
        only."""
        self.vault = vault
        self._given = exchange
        self._executor = ThreadPoolExecutor(1, "tensors")
        self._committed: dict[int, tuple[SignedVersion, tuple[Watermark, ...]]] = {}

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        """Post a job; return its result, or raise its exception."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, job, *arguments)

    @property
    def _exchange(self) -> Exchange:
        invariant(self._given is not None, "there is no learner to exchange anything with")
        assert self._given is not None
        return self._given

    def close(self) -> None:
        """End the thread when its jobs are done."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    # --- jobs ----------------------------------------------------------------------------------------

    def load(self, versions: Mapping[int, tuple[SignedVersion, tuple[Watermark, ...]]]) -> None:
        """Note which versions the vault holds after start-up, with their watermarks."""
        torch.set_num_threads(1)
        self._committed = dict(versions)

    def encode(self, fragment: int, base_buffer: int) -> Encoded:
        """Encode the pseudo-gradient of what the learner copied out."""
        return self.vault.own.encode(
            fragment, self._exchange.base(fragment, base_buffer), self._exchange.sent(fragment)
        )

    def commit(self, effect: CommitVersion, own_merged: bool) -> None:
        """Make the spare the state."""
        header = effect.version.header
        self.vault.commit(header.fragment, header.number, header.state_digest)
        self._committed[header.fragment] = (effect.version, effect.watermarks)
        if own_merged:
            self.vault.own.commit_residual(header.fragment)

    def post(self, fragment: int, buffer: int) -> BaseRef:
        """Copy the committed Theta into a base buffer of the exchange; return which version it is."""
        self._exchange.base(fragment, buffer).copy_(self.vault.theta(fragment))
        header = self._committed[fragment][0].header
        return BaseRef(header.number, buffer, header.tokens)

    def copy_out(self, layout: FragmentLayout, parameters: dict[str, Tensor]) -> SignedVersion:
        """Copy a fragment's committed version, as a result, into the parameters by name; return which one
        it is."""
        scatter(self.vault.result(layout.index), layout, parameters)
        return self._committed[layout.index][0]

    def pin(self, fragment: int) -> tuple[StateHeader, Pin]:
        """Pin the committed state for a reader that takes its time."""
        version, watermarks = self._committed[fragment]
        return StateHeader(version, watermarks), self.vault.pin(fragment)
