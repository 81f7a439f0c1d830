"""The network: latency, loss, duplication, reordering, cuts, and shared uplinks for bulk transfers."""

from __future__ import annotations

import random
from collections import deque
from typing import Protocol

from p2pdiloco.core.api.messages import Message, decode, encode
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Wire
from p2pdiloco_lab.simulation.world.clock import Clock
from p2pdiloco_lab.simulation.world.plan import Mix

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


class TrafficMeter(Protocol):
    """Hears of everything that is sent; for measurements."""

    def control(self, source: str, target: str, size_bytes: int, message: Message) -> None:
        """A control message leaves."""

    def streamed(self, source: str, target: str, label: Wire | None, payload_bytes: int) -> None:
        """The label or the payload of a stream leaves."""


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
        self.meter: TrafficMeter | None = None
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
