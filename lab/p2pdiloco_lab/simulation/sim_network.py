"""The network: latency, loss, duplication, reordering, cuts, and shared uplinks for bulk transfers.

`Network` delivers messages. `Bulk` has the streams between nodes: contributions pushed, updates and states
pulled. Any of them can break.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec import Struct

from p2pdiloco.core.api.events import (
    ContributionSent,
    FetchFailed,
    FetchState,
    FetchUpdate,
    Offer,
    OfferAnswered,
    Offered,
    PayloadBroken,
    PayloadReceived,
    Undone,
    UpdateFetched,
)
from p2pdiloco.core.api.messages import Message, decode, encode
from p2pdiloco.core.api.reasons import FetchFailure, Verdict
from p2pdiloco.core.api.types import Head, SignedContribution, Watermark, Wire
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco_lab.simulation.lineage import Clock, Displacement, FragmentLineage, OuterUpdate, PartialSum
from p2pdiloco_lab.simulation.seed_plan import Mix
from p2pdiloco_lab.simulation.sim_liars import Withholder

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.scale import ScaleWorld
    from p2pdiloco_lab.simulation.sim_host import Host
    from p2pdiloco_lab.simulation.sim_liars import Liar

Answer = Callable[[Struct | None], None]
"""Way to tell a core what came of an effect that it asked for."""
UNDELIVERED = Undone("not delivered")
SEND_TIMEOUT_S = 3.0
"""After so long the sender of a message that was not acknowledged is told that it failed."""


class SimulatedEndpoint(Protocol):
    """A running node, as the network knows it."""

    peer: str
    up: bool

    def receive(self, sender: str, message: Message) -> None:
        """A decoded control message is here."""

    def send_failed(self, peer: str) -> None:
        """A control message to that peer was not delivered."""


class Network:
    """Links between named peers. Every draw comes from one seeded stream."""

    def __init__(self, clock: Clock, rng: random.Random, mix: Mix, run: str) -> None:
        self.clock = clock
        self.endpoints: dict[str, SimulatedEndpoint] = {}
        self.messages = 0
        self.loss = mix.loss
        self.duplicate = mix.duplicate
        self.reorder = mix.reorder
        self.spike = mix.spike
        self.corrupt = mix.corrupt
        self._rng = rng
        self._mix = mix
        self._run = run
        self._latency: dict[tuple[str, str], float] = {}
        self._slow: dict[tuple[str, str], float] = {}
        self._blocked: dict[tuple[str, str], int] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._uplink_free_s: dict[str, float] = {}
        self._sending: dict[str, deque[tuple[float, float, int]]] = {}
        """Bulk of each source that is under way or waits: from when to when, how many bytes."""
        self._sent_bytes: dict[str, int] = {}
        """Bytes of bulk that each source has sent completely."""
        self._last: tuple[Message, Message, int] | None = None
        self.meter: ScaleWorld | None = None
        """Hears of everything that is sent; for measurements."""
        self.hidden: frozenset[str] = frozenset()
        """Behind routers that let nothing in but what belongs to connections from inside."""
        self._opened: set[tuple[str, str]] = set()
        """Connections that a hidden peer made: (it, the other)."""

    # --- links ---------------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Let nothing pass from source to target until `unblock`; transfers under way between them break."""
        link = (source, target)
        self._blocked[link] = self._blocked.get(link, 0) + 1
        self._opened -= {link, (target, source)}
        self._cuts[link] = self._cuts.get(link, 0) + 1

    @property
    def was_cut(self) -> bool:
        """Tell whether any link was ever closed."""
        return bool(self._cuts)

    def unblock(self, source: str, target: str) -> None:
        """Undo one `block`."""
        link = (source, target)
        self._blocked[link] = self._blocked.get(link, 0) - 1
        if self._blocked[link] <= 0:
            del self._blocked[link]

    def slow_down(self, source: str, target: str, factor: float) -> None:
        """Multiply latency and divide bandwidth between two peers."""
        self._slow[(source, target)] = factor

    def heal(self) -> None:
        """Lose, double, cut or slow nothing any more beyond its distribution."""
        self.loss = self.duplicate = self.reorder = self.corrupt = 0.0
        self._blocked.clear()
        self._slow.clear()

    def passes(self, source: str, target: str) -> bool:
        """Tell whether the link from source to target is open."""
        return (source, target) not in self._blocked and (not self.hidden or self._linked(source, target))

    def _linked(self, a: str, b: str) -> bool:
        if a in self.hidden and b in self.hidden:
            return False
        return not self.hidden.intersection((a, b)) or (a, b) in self._opened or (b, a) in self._opened

    def dial(self, source: str, target: str) -> None:
        """A hidden source makes a connection if it can; all others have theirs without asking."""
        if source not in self.hidden or target in self.hidden:
            return
        if (source, target) not in self._blocked and (target, source) not in self._blocked:
            self._opened.add((source, target))

    def forget(self, peer: str) -> None:
        """Close the connections of a peer that died."""
        self._opened = {pair for pair in self._opened if peer not in pair}

    def both_ways(self, a: str, b: str) -> bool:
        """Tell whether a connection between two peers can be held."""
        return self.passes(a, b) and self.passes(b, a)

    def epoch(self, a: str, b: str) -> int:
        """Changes when the connection between two peers is cut."""
        return self._cuts.get((a, b), 0) + self._cuts.get((b, a), 0)

    def latency_s(self, source: str, target: str) -> float:
        """One draw of the one-way delay."""
        link = (source, target)
        base = self._latency.get(link)
        if base is None:
            base = self._rng.uniform(*self._mix.latency_s)
            self._latency[link] = self._latency[(target, source)] = base
        if self._slow:
            base *= self._slow.get(link, 1.0)
        if self.spike and self._rng.random() < self.spike:
            base *= self._rng.uniform(2.0, 10.0)
        return base * (1.0 + self._mix.jitter * self._rng.random())

    def transfer_s(
        self, source: str, target: str, size_bytes: int, up_bytes_s: float, down_bytes_s: float
    ) -> tuple[float, float]:
        """Start a bulk transfer: (seconds until it is complete, seconds of these while nothing else moves).

        The last byte is under way in the second. A transfer fills the source's uplink for as long as the
        uplink needs; a slower target takes longer, and meanwhile the source sends to others.
        """
        now = self.clock.now
        start = max(now, self._uplink_free_s.get(source, 0.0))
        out_s = size_bytes / up_bytes_s
        slow = self._slow.get((source, target), 1.0)
        self._uplink_free_s[source] = start + out_s
        self._sending.setdefault(source, deque()).append((start, start + out_s, size_bytes))
        latency_s = self.latency_s(source, target)
        took_s = size_bytes / min(up_bytes_s, down_bytes_s) * slow
        return start + took_s - now + latency_s, latency_s

    def sent_bytes(self, source: str) -> float:
        """Bytes of bulk that the source has sent by now."""
        now, sending = self.clock.now, self._sending.get(source, deque())
        while sending and sending[0][1] <= now:
            self._sent_bytes[source] = self._sent_bytes.get(source, 0) + sending.popleft()[2]
        under_way = 0.0
        if sending and sending[0][0] < now:
            start, end, size = sending[0]
            under_way = size * (now - start) / (end - start)
        return self._sent_bytes.get(source, 0) + under_way

    def why_unusable(self) -> Verdict | None:
        """Draw what is wrong with a bulk payload that has just arrived; mostly nothing."""
        if not self.corrupt or self._rng.random() >= self.corrupt:
            return None
        return Verdict.NON_FINITE if self._rng.random() < 0.3 else Verdict.WRONG_DIGEST

    # --- control -------------------------------------------------------------------------------------

    def send(self, source: SimulatedEndpoint, target: str, message: Message) -> None:
        """Carry one control message, or not; then `send_failed` at the source, or silence."""
        self.messages += 1
        rng, clock = self._rng, self.clock
        delay_s = self.latency_s(source.peer, target)
        self.dial(source.peer, target)
        if not self.passes(source.peer, target):
            clock.after(SEND_TIMEOUT_S, self._fail, source, target)
            return
        there = self.endpoints.get(target)
        if there is None or not there.up:
            clock.after(2 * delay_s, self._fail, source, target)
            return
        decoded = self._through_wire(message)
        if self.meter is not None and self._last is not None:
            self.meter.control(source.peer, target, self._last[2], message)
        if self.loss and rng.random() < self.loss:
            if rng.random() < 0.5:
                clock.after(SEND_TIMEOUT_S, self._fail, source, target)
            return
        if self.reorder and rng.random() < self.reorder:
            delay_s += rng.uniform(0.0, 1.0)
        clock.after(delay_s, self._arrive, source.peer, target, decoded)
        if self.duplicate and rng.random() < self.duplicate:
            clock.after(delay_s + rng.uniform(0.0, 2.0), self._arrive, source.peer, target, decoded)
        if not self.passes(target, source.peer):
            clock.after(SEND_TIMEOUT_S, self._fail, source, target)

    def _through_wire(self, message: Message) -> Message:
        last = self._last
        if last is not None and last[0] is message:
            return last[1]
        data = encode(self._run, message)
        decoded = decode(self._run, data)
        self._last = (message, decoded, len(data))
        return decoded

    def _arrive(self, sender: str, target: str, message: Message) -> None:
        there = self.endpoints.get(target)
        if there is not None and there.up and self.passes(sender, target):
            there.receive(sender, message)

    def _fail(self, source: SimulatedEndpoint, target: str) -> None:
        if source.up:
            source.send_failed(target)


# Bulk streams.

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
    answer: Answer
    epoch: int
    opened_s: float
    accepted: bool = False
    done: bool = False
    """The sender has its answer, or gave up."""


class GivenState(NamedTuple):
    """Whole fragment of a donor."""

    version: SignedVersion
    state: FragmentLineage
    watermarks: tuple[Watermark, ...]


@dataclass(slots=True)
class Pull:
    """Update or state on its way to the node that asked for it."""

    asker: Host
    holder: Host
    effect: FetchUpdate | FetchState
    answer: Callable[[Any], None]
    epoch: int

    def failed(self, failure: FetchFailure, delay_s: float) -> None:
        """Let the asker hear of a failure after that time."""
        self.asker.later(delay_s, self.answer, FetchFailed(failure))


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

    def offer(self, sender: Host, effect: Offer, content: Displacement | PartialSum, answer: Answer) -> None:
        """Send the header; the receiver's core decides about the payload."""
        receiver = self._hosts.get(effect.peer)
        if receiver is None or not self._reachable(sender, receiver):
            sender.later(DIAL_TIMEOUT_S, answer, UNDELIVERED)
            return
        self._numbers += 1
        epoch = self._network.epoch(sender.peer, receiver.peer)
        transfer = Transfer(self._numbers, sender, receiver, effect, content, answer, epoch, self._clock.now)
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
        transfer.sender.later(DIAL_TIMEOUT_S, transfer.answer, UNDELIVERED)

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
        answer = OfferAnswered(verdict, head)
        delay_s = self._network.latency_s(transfer.receiver.peer, transfer.sender.peer)
        self._clock.after(delay_s, self._answered, transfer, answer)

    def _answered(self, transfer: Transfer, answer: OfferAnswered) -> None:
        if transfer.done:
            return
        if not self._whole(transfer):
            self._undelivered(transfer)
            return
        transfer.done = True
        transfer.sender.run_when_awake(transfer.answer, answer)

    def host_down(self, host: Host) -> None:
        """A node died: what it was sending or receiving is broken for the other side."""
        for transfer in [t for t in self.open.values() if host in (t.sender, t.receiver)]:
            if host is transfer.receiver:
                del self.open[transfer.number]
                self._undelivered(transfer)
            elif not transfer.accepted:
                transfer.done = True

    # --- pulls ---------------------------------------------------------------------------------------

    def fetch(self, asker: Host, effect: FetchUpdate | FetchState, answer: Callable[[Any], None]) -> None:
        """Pull an update, or a fragment's newest state. `answer` gets an `UpdateFetched`, a `GivenState`, or
        a `FetchFailed`."""
        holder = self._hosts.get(effect.peer)
        if effect.peer in self.boasters:
            back_s = 2 * self._network.latency_s(asker.peer, effect.peer)
            asker.later(back_s, answer, FetchFailed(FetchFailure.BUSY))
        elif holder is None or not self._reachable(asker, holder):
            asker.later(DIAL_TIMEOUT_S, answer, FetchFailed(FetchFailure.UNREACHABLE))
        else:
            pull = Pull(asker, holder, effect, answer, self._network.epoch(asker.peer, holder.peer))
            delay_s = self._network.latency_s(asker.peer, holder.peer)
            if delay_s > IDLE_S:
                pull.failed(FetchFailure.UNREACHABLE, IDLE_S)
            else:
                self._clock.after(delay_s, self._serve, pull)

    def _serve(self, pull: Pull) -> None:
        network, asker, holder, effect = self._network, pull.asker, pull.holder, pull.effect
        if not self._connected(pull) or holder.frozen:
            pull.failed(FetchFailure.UNREACHABLE, (5 if holder.frozen else 1) * DIAL_TIMEOUT_S)
            return
        back_s = network.latency_s(holder.peer, asker.peer)
        if isinstance(holder.liar, Withholder) and holder.liar.withholds(self._clock.now):
            pull.failed(FetchFailure.BUSY, back_s)
            return
        if not holder.core.may_serve:
            pull.failed(FetchFailure.NOT_READY, back_s)
            return
        store = holder.stores[effect.fragment]
        if isinstance(effect, FetchUpdate):
            found = store.log.get(effect.number)
            if found is None or (holder.liar is not None and holder.liar.hides(found)):
                pull.failed(FetchFailure.GONE, back_s)
                return
            found = found if holder.liar is None else holder.liar.gives(asker.peer, found)
            size = found[0].header.update_bytes
            self._metered(holder, asker, found[0].header, size)
            time_s = self._carried_s(pull, size)
            if time_s is not None:
                holder.uplink.given.begin()
                self._clock.after(time_s, self._update_here, pull, found)
            return
        given = GivenState(store.version, store.state, store.watermarks)
        if holder.liar is not None:
            given = holder.liar.gives_state(asker.peer, given)
        if given.version.header.number < effect.number:
            pull.failed(FetchFailure.GONE, back_s)
            return
        size = asker.max_payload_bytes(effect.fragment) * STATE_PER_UPDATE_BYTES
        time_s = self._carried_s(pull, size)
        if time_s is not None:
            self._clock.after(time_s, self._here, pull, lambda: given)

    def _connected(self, pull: Pull) -> bool:
        return pull.holder.up and pull.epoch == self._network.epoch(pull.asker.peer, pull.holder.peer)

    def _carried_s(self, pull: Pull, size_bytes: int) -> float | None:
        """Time that the payload takes, in seconds. None: it stands still for so long that the asker gives it
        up."""
        asker, holder = pull.asker, pull.holder
        rates = holder.spec.bandwidth_bytes_s, asker.spec.bandwidth_bytes_s
        time_s, still_s = self._network.transfer_s(holder.peer, asker.peer, size_bytes, *rates)
        if still_s <= IDLE_S:
            return time_s
        pull.failed(FetchFailure.UNREACHABLE, time_s - still_s + IDLE_S)
        return None

    def _update_here(self, pull: Pull, found: tuple[SignedVersion, OuterUpdate]) -> None:
        pull.holder.uplink.given.end()
        self._here(pull, lambda: UpdateFetched(found[0], pull.asker.tickets.new(found[1])))

    def _here(self, pull: Pull, given: Callable[[], UpdateFetched | GivenState]) -> None:
        if not self._connected(pull):
            pull.failed(FetchFailure.UNREACHABLE, DIAL_TIMEOUT_S)
            return

        def hand_over() -> None:
            sound = self._network.why_unusable() is None
            pull.answer(given() if sound else FetchFailed(FetchFailure.FALSE))

        pull.asker.run_when_awake(hand_over)
