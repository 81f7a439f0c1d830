"""Members that hold states, or copy them, without the rest of a node."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from chain_kit import PaperChain
from daemon_kit import version

from p2pdiloco.adapters.endpoint import Endpoint
from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Compute, Tickets
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.vault import Vault

torch.set_num_threads(1)
LAYOUTS = plan_fragments([TensorSpec("a", (256, 512)), TensorSpec("b", (256, 512))], 2)
NUMEL = LAYOUTS[0].numel
SIZE = 8 * NUMEL


class Peer:
    """The transfer layer of one member with a vault of its own."""

    def __init__(self, transport: Endpoint, seed: int | None) -> None:
        """`seed`: of the version that it holds."""
        self.name = transport.peer_id
        self.transport = transport
        self.vault = Vault(LAYOUTS, OuterSection(), 24, "int8", "int8")
        self.compute = Compute(self.vault, None)  # type: ignore[arg-type]
        self.asked: list[tuple[str, wire.PullState]] = []
        self.answers: Callable[[wire.PullState], PullSource | Refusal | None] = lambda _: None
        if seed is not None:
            self.hold(seed)
        self.chain = PaperChain(state_bytes=SIZE)
        parts = self.chain, transport, self.compute, Tickets(), lambda _event: None, LinkMeters(transport)
        self.transfers = Transfers(*parts)

    def hold(self, seed: int) -> None:
        """Version `seed` of both fragments."""
        random, found = torch.Generator().manual_seed(seed), {}
        for layout in LAYOUTS:
            theta, momentum = (torch.randn(NUMEL, generator=random) for _ in range(2))
            loan = self.vault.lend_spare(layout.index)
            for target, values in zip(loan.buffers, (theta, momentum), strict=True):
                target[:] = values.view(torch.uint8).numpy().data
            digest = self.vault.take_loan(layout.index, seed, loan)
            self.vault.commit(layout.index, seed, digest)
            made = version(seed, bytes(32))
            header = msgspec.structs.replace(made.header, fragment=layout.index, state_digest=digest)
            found[layout.index] = (msgspec.structs.replace(made, header=header), ())
        self.compute._committed = found

    def is_member(self, sender: str) -> None:
        return None

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        pull = wire.decode(request, wire.PullState)
        self.asked.append((sender, pull))
        return self.answers(pull) or await self.transfers.on_pull(sender, pull)

    async def copy(self, named: str, fragment: int = 0) -> ev.StateFetched | ev.FetchFailed:
        return await self.transfers.fetch_state(ev.FetchState(fragment, 1, named))

    def has_state_of(self, donor: Peer, fragment: int = 0) -> bool:
        spare, state = self.vault._spares[fragment], donor.vault._states[fragment]
        return torch.equal(spare.theta, state.theta) and torch.equal(spare.momentum, state.momentum)

    @property
    def gave(self) -> int:
        return self.transfers.donating.bytes_out
