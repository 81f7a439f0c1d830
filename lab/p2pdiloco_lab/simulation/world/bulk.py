"""Bulk streams between nodes: contributions pushed, updates and states pulled. Any of them can break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pdiloco.core.api.effects import FetchState, FetchUpdate, Offer
from p2pdiloco.core.api.events import (
    ContributionSent,
    Event,
    FetchFailed,
    OfferAnswered,
    Offered,
    OfferUndelivered,
    PayloadBroken,
    PayloadReceived,
    UpdateFetched,
)
from p2pdiloco.core.api.reasons import FetchFailure, Verdict
from p2pdiloco.core.api.types import Head, SignedContribution, Watermark, Wire
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco_lab.simulation.node.lineage import Displacement, FragmentLineage, OuterUpdate, PartialSum

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.node.host import Host
    from p2pdiloco_lab.simulation.world.clock import Clock
    from p2pdiloco_lab.simulation.world.liar import Liar
from p2pdiloco_lab.simulation.world.network import Network
from p2pdiloco_lab.simulation.world.withholder import Withholder

OFFER_TIMEOUT_S = 12.0
"""A sender that has no last word so long after its payload should be there gives the transfer up."""
DIAL_TIMEOUT_S = 2.0
IDLE_S = 20.0
"""A stream on which nothing moves for so long is given up."""
STATE_PER_UPDATE_BYTES = 8
"""A fragment's state (Theta and momentum) is so many times as large as its update."""


@dataclass(slots=True)
class Transfer:
    """One pushed contribution, or partial merge of a group."""

    number: int
    sender: Host
    receiver: Host
    offer: Offer
    content: Displacement | PartialSum
    epoch: int
    opened_s: float
    accepted: bool = False
    done: bool = False
    """The sender has its answer, or gave up."""


class Bulk:
    """Streams of the whole world."""

    def __init__(self, clock: Clock, network: Network, hosts: dict[str, Host]) -> None:
        self._clock = clock
        self._network = network
        self._hosts = hosts
        self._numbers = 0
        self.boasters: set[str] = set()
        """Peers that answer whatever is asked of them with `busy`."""
        self.liars: dict[str, Liar] = {}
        """Members that put false labels on their contributions."""
        self.open: dict[int, Transfer] = {}
        """Transfers whose receiver still owes the last word."""

    def _reachable(self, source: Host, target: Host | None) -> bool:
        if target is None or not target.up:
            return False
        self._network.dial(source.peer, target.peer)
        return self._network.both_ways(source.peer, target.peer)

    # --- contributions -------------------------------------------------------------------------------

    def offer(self, sender: Host, effect: Offer, content: Displacement | PartialSum) -> None:
        """Send the header; the receiver's core decides about the payload."""
        receiver = self._hosts.get(effect.peer)
        if receiver is None or not self._reachable(sender, receiver):
            sender.later(DIAL_TIMEOUT_S, sender.feed, OfferUndelivered(effect))
            return
        self._numbers += 1
        epoch = self._network.epoch(sender.peer, receiver.peer)
        transfer = Transfer(self._numbers, sender, receiver, effect, content, epoch, self._clock.now)
        self._clock.after(self._network.latency_s(sender.peer, receiver.peer), self._arrive, transfer)

    def _metered(self, source: Host, target: Host, label: Wire | None, payload_bytes: int) -> None:
        if self._network.meter is not None:
            self._network.meter.streamed(source.peer, target.peer, label, payload_bytes)

    def _arrive(self, transfer: Transfer) -> None:
        if not self._whole(transfer):
            self._undelivered(transfer)
            return
        self.open[transfer.number] = transfer
        header = transfer.offer.signed.header
        self._metered(transfer.sender, transfer.receiver, header, 0)
        rate = transfer.sender.spec.bandwidth_bytes_s
        patience_s = OFFER_TIMEOUT_S + header.payload_bytes / rate * 4
        transfer.sender.later(patience_s, self._undelivered, transfer)
        signed, liar = transfer.offer.signed, self.liars.get(transfer.sender.peer)
        signed = signed if liar is None else liar.tell(signed)
        offered = Offered(transfer.number, transfer.sender.peer, signed)
        transfer.receiver.run_when_awake(transfer.receiver.feed, offered)

    def _whole(self, transfer: Transfer) -> bool:
        a, b = transfer.sender, transfer.receiver
        return a.up and b.up and transfer.epoch == self._network.epoch(a.peer, b.peer)

    def _undelivered(self, transfer: Transfer) -> None:
        if transfer.done:
            return
        transfer.done = True
        transfer.sender.later(DIAL_TIMEOUT_S, transfer.sender.feed, OfferUndelivered(transfer.offer))

    def accept(self, number: int) -> None:
        """The receiver wants the payload."""
        transfer = self.open.get(number)
        if transfer is None:
            return
        transfer.accepted = True
        sender, receiver = transfer.sender, transfer.receiver
        rates = sender.spec.bandwidth_bytes_s, receiver.spec.bandwidth_bytes_s
        size = transfer.offer.signed.header.payload_bytes
        self._metered(sender, receiver, None, size)
        time_s, still_s = self._network.transfer_s(sender.peer, receiver.peer, size, *rates)
        if still_s > IDLE_S:
            self._clock.after(time_s - still_s + IDLE_S, self._cut, transfer)
        else:
            self._clock.after(time_s, self._payload, transfer)

    def _payload(self, transfer: Transfer) -> None:
        if not self._whole(transfer) or transfer.done:
            self._cut(transfer)
        else:
            if isinstance(transfer.offer.signed, SignedContribution):
                header = transfer.offer.signed.header
                transfer.sender.run_when_awake(
                    transfer.sender.feed, ContributionSent(header.fragment, header.stamp)
                )
            transfer.receiver.run_when_awake(self._hand_over, transfer)

    def _cut(self, transfer: Transfer) -> None:
        receiver = transfer.receiver
        self.open.pop(transfer.number, None)
        self._undelivered(transfer)
        receiver.run_when_awake(receiver.feed, PayloadBroken(transfer.number, Verdict.CUT))

    def _hand_over(self, transfer: Transfer) -> None:
        liar = transfer.receiver.liar
        if isinstance(liar, Withholder) and liar.swallows(transfer.sender.peer, self._clock.now):
            self.answer(transfer.number, Verdict.IN_ROUND, None)
            transfer.receiver.feed(PayloadBroken(transfer.number, Verdict.CUT))
            return
        verdict = self._network.why_unusable()
        if verdict is not None:
            header = transfer.offer.signed.header
            head = transfer.receiver.stores[header.fragment].version.header.head()
            self.answer(transfer.number, verdict, head)
            transfer.receiver.feed(PayloadBroken(transfer.number, verdict))
            return
        ticket = transfer.receiver.tickets.new(transfer.content)
        transfer.receiver.feed(PayloadReceived(transfer.number, ticket))

    def answer(self, number: int, verdict: Verdict, head: Head | None) -> None:
        """The receiver's last word (also: it does not want the payload)."""
        transfer = self.open.pop(number, None)
        if transfer is None or transfer.done:
            return
        if not self._whole(transfer):
            self._undelivered(transfer)
            return
        event = OfferAnswered(transfer.offer, verdict, head)
        delay_s = self._network.latency_s(transfer.receiver.peer, transfer.sender.peer)
        self._clock.after(delay_s, self._answered, transfer, event)

    def _answered(self, transfer: Transfer, event: Event) -> None:
        if transfer.done:
            return
        if not self._whole(transfer):
            self._undelivered(transfer)
            return
        transfer.done = True
        transfer.sender.run_when_awake(transfer.sender.feed, event)

    def host_down(self, host: Host) -> None:
        """A node died: what it was sending or receiving is broken for the other side."""
        for transfer in [t for t in self.open.values() if host in (t.sender, t.receiver)]:
            if host is transfer.receiver:
                del self.open[transfer.number]
                self._undelivered(transfer)
            elif not transfer.accepted:
                transfer.done = True

    # --- pulls ---------------------------------------------------------------------------------------

    def fetch_update(self, asker: Host, effect: FetchUpdate) -> None:
        """Pull one update from a holder's log."""
        self._dial(asker, effect)

    def fetch_state(self, asker: Host, effect: FetchState, generation: int) -> None:
        """Pull a fragment's newest state into the asker's spare copy."""
        self._dial(asker, effect, generation)

    def _dial(self, asker: Host, effect: FetchUpdate | FetchState, generation: int = 0) -> None:
        if effect.peer in self.boasters:
            back_s = 2 * self._network.latency_s(asker.peer, effect.peer)
            self._failed(asker, effect, FetchFailure.BUSY, back_s, generation)
            return
        holder = self._hosts.get(effect.peer)
        if holder is None or not self._reachable(asker, holder):
            self._failed(asker, effect, FetchFailure.UNREACHABLE, DIAL_TIMEOUT_S, generation)
            return
        epoch = self._network.epoch(asker.peer, holder.peer)
        delay_s = self._network.latency_s(asker.peer, holder.peer)
        if delay_s > IDLE_S:
            self._failed(asker, effect, FetchFailure.UNREACHABLE, IDLE_S, generation)
            return
        self._clock.after(delay_s, self._serve, asker, holder, effect, epoch, generation)

    def _serve(
        self, asker: Host, holder: Host, effect: FetchUpdate | FetchState, epoch: int, generation: int
    ) -> None:
        network = self._network
        if not holder.up or holder.frozen or epoch != network.epoch(asker.peer, holder.peer):
            self._failed(
                asker,
                effect,
                FetchFailure.UNREACHABLE,
                (5 if holder.frozen else 1) * DIAL_TIMEOUT_S,
                generation,
            )
            return
        back_s = network.latency_s(holder.peer, asker.peer)
        if isinstance(holder.liar, Withholder) and holder.liar.withholds(self._clock.now):
            self._failed(asker, effect, FetchFailure.BUSY, back_s, generation)
            return
        if not holder.core.may_serve:
            self._failed(asker, effect, FetchFailure.NOT_READY, back_s, generation)
            return
        store = holder.stores[effect.fragment]
        if isinstance(effect, FetchUpdate):
            found = store.log.get(effect.number)
            if found is None or (holder.liar is not None and holder.liar.hides(found)):
                self._failed(asker, effect, FetchFailure.GONE, back_s, generation)
                return
            found = found if holder.liar is None else holder.liar.gives(asker.peer, found)
            size = found[0].header.update_bytes
            self._metered(holder, asker, found[0].header, size)
            time_s = self._carried_s(asker, holder, effect, size, 0)
            if time_s is not None:
                holder.uplink.given.begin()
                self._clock.after(time_s, self._update_here, asker, holder, effect, epoch, found)
            return
        if store.version.header.number < effect.number:
            self._failed(asker, effect, FetchFailure.GONE, back_s, generation)
            return
        size = asker.max_payload_bytes(effect.fragment) * STATE_PER_UPDATE_BYTES
        version, state = store.version, store.state
        if holder.liar is not None:
            version, state = holder.liar.gives_state(asker.peer, version, state)
        given = (version, state, store.watermarks)
        time_s = self._carried_s(asker, holder, effect, size, generation)
        if time_s is not None:
            self._clock.after(time_s, self._state_here, asker, holder, effect, epoch, generation, given)

    def _carried_s(
        self, asker: Host, holder: Host, effect: FetchUpdate | FetchState, size_bytes: int, generation: int
    ) -> float | None:
        """Time that the payload takes, in seconds. None: it stands still for so long that the asker gives it
        up."""
        rates = holder.spec.bandwidth_bytes_s, asker.spec.bandwidth_bytes_s
        time_s, still_s = self._network.transfer_s(holder.peer, asker.peer, size_bytes, *rates)
        if still_s <= IDLE_S:
            return time_s
        self._failed(asker, effect, FetchFailure.UNREACHABLE, time_s - still_s + IDLE_S, generation)
        return None

    def _update_here(
        self,
        asker: Host,
        holder: Host,
        effect: FetchUpdate,
        epoch: int,
        found: tuple[SignedVersion, OuterUpdate],
    ) -> None:
        holder.uplink.given.end()
        if not holder.up or epoch != self._network.epoch(asker.peer, holder.peer):
            self._failed(asker, effect, FetchFailure.UNREACHABLE, DIAL_TIMEOUT_S)
            return
        asker.run_when_awake(self._hand_update, asker, effect, found)

    def _hand_update(
        self, asker: Host, effect: FetchUpdate, found: tuple[SignedVersion, OuterUpdate]
    ) -> None:
        if self._network.why_unusable() is not None:
            self._fetch_failed(asker, effect, FetchFailure.FALSE, 0)
            return
        version, update = found
        ticket = asker.tickets.new(update)
        asker.feed(UpdateFetched(effect.fragment, effect.peer, version, ticket))

    def _state_here(
        self,
        asker: Host,
        holder: Host,
        effect: FetchState,
        epoch: int,
        generation: int,
        given: tuple[SignedVersion, FragmentLineage, tuple[Watermark, ...]],
    ) -> None:
        if not holder.up or epoch != self._network.epoch(asker.peer, holder.peer):
            self._failed(asker, effect, FetchFailure.UNREACHABLE, DIAL_TIMEOUT_S, generation)
            return
        if self._network.why_unusable() is not None:
            asker.run_when_awake(self._fetch_failed, asker, effect, FetchFailure.FALSE, generation)
            return
        asker.run_when_awake(asker.worker.state_arrived, effect, generation, *given)

    def _failed(
        self,
        asker: Host,
        effect: FetchUpdate | FetchState,
        failure: FetchFailure,
        delay_s: float,
        generation: int = 0,
    ) -> None:
        asker.later(delay_s, self._fetch_failed, asker, effect, failure, generation)

    def _fetch_failed(
        self, asker: Host, effect: FetchUpdate | FetchState, failure: FetchFailure, generation: int
    ) -> None:
        if isinstance(effect, FetchState):
            asker.worker.state_failed(effect, generation)
        asker.feed(FetchFailed(effect.fragment, effect.number, effect.peer, failure))
