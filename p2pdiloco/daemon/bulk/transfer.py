"""Bulk of a run: pushes to syncers, and pulls of updates and states from holders.

Pushed are contributions and partial merges. `daemon.bulk.pushes.PushesIn` takes what peers push to us.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from p2pdiloco.adapters.spool import Spool
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import PullRefusal, Verdict, VersionFault
from p2pdiloco.core.api.versions import SignedPartial
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import BulkBudgets
from p2pdiloco.daemon.bulk.merge_audits import Auditing, GivingContributions, MergedPayloads, TrueUpdates
from p2pdiloco.daemon.bulk.pushes import ChainView, PushesIn, failure_of
from p2pdiloco.daemon.bulk.states import Copying, Courtesy, Donating
from p2pdiloco.daemon.bulk.updates import PAUSE_S, Fanout, Fetch, Gathering, NotAsSigned, Pulling
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Compute, Memory, Tickets
from p2pdiloco.daemon.wire import refuse
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.hashing import content_digest
from p2pdiloco.ports import Buffer, PostEvent, PullSource, Refusal, Transport
from p2pdiloco.util import Action, loop_s

logger = logging.getLogger(__name__)


_FETCH_ERRORS = (TransportError, RemoteError)


@dataclass
class Transfers:
    """Bulk streams of one run, on the daemon's side."""

    _chain: ChainView
    _transport: Transport
    _compute: Compute
    _tickets: Tickets
    _post: PostEvent
    _meters: LinkMeters
    _memory: Memory = field(default_factory=Memory)
    _spool: Spool | None = None
    """As of `PushesIn`."""

    def __post_init__(self) -> None:
        memory, spool, now = self._memory, self._spool, loop_s
        self._bytes_out = 0
        self.bytes_pushed = 0
        """Payload bytes of our own contributions and partial merges that were pushed."""
        self._checked_bytes = 0
        """Bytes of updates that have come and are being checked."""
        self.courtesy = Courtesy(self._meters, now)
        self._budgets = BulkBudgets(now)
        self.pushes_in = PushesIn(
            self._chain.head, self._compute, self._tickets, self._post, memory, spool, now
        )
        self.donating = Donating(self._compute, self.courtesy, now)
        self.copying = Copying(self._chain, self._transport, self._compute, now)
        self.fanout = Fanout(self._transport.peer_id, self._meters.uplink.given, now)
        self.pulling = Pulling(self._chain, self._transport, memory, self.pushes_in, self._meters.downlink)
        self.gathering = Gathering(self.pulling, now)
        self.merged = MergedPayloads(self._tickets)
        self.giving = GivingContributions(self._chain, self.merged, memory, self.courtesy)
        self.true_updates = TrueUpdates(self._chain)
        self.auditing = Auditing(
            self._chain, self._transport, self._compute, self.merged, self.true_updates, memory, spool
        )

    @property
    def bytes_in(self) -> int:
        """Payload bytes received so far."""
        audited = self.auditing.bytes_in
        return self.pulling.bytes_in + self.copying.bytes_in + self.pushes_in.bytes_in + audited

    @property
    def bytes_out(self) -> int:
        """Payload bytes given out or pushed so far."""
        return self._bytes_out + self.donating.bytes_out + self.giving.bytes_out

    @property
    def held_bytes(self) -> int:
        """Bytes of payloads that are arriving or were not checked yet, of what is kept of cut streams, and of
        contributions that are audited or kept for it.

        Fetches under way are not in it.
        """
        audits = self.merged.held_bytes + self.giving.held_bytes + self.auditing.held_bytes
        audits += self.true_updates.held_bytes
        return self.pushes_in.held_bytes + self.pulling.unfinished.held_bytes + self._checked_bytes + audits

    def counters(self) -> dict[str, int]:
        """Count for people: payload bytes by kind, and how updates and states were shared."""
        return {
            "pushed_bytes": self.bytes_pushed,
            "states_given_bytes": self.donating.bytes_out,
            "states_copied_bytes": self.copying.bytes_in,
            "states_copied_from_others_bytes": self.copying.from_others_bytes,
            "updates_given_bytes": self.fanout.given_bytes,
            "updates_passed_on_bytes": self.fanout.passed_on_bytes,
            "updates_sent_elsewhere": self.fanout.sent_elsewhere,
            "updates_from_others": self.gathering.from_others,
            "spooled_bytes": self.pushes_in.spooled_bytes,
            "states_pinned": self.donating.pins,
            "contributions_given_bytes": self.giving.bytes_out,
            "contributions_audited_bytes": self.auditing.bytes_in,
        }

    # --- what peers ask ------------------------------------------------------------------------------

    def is_member(self, peer: str) -> bool:
        """Tell whether the peer is a member of the run by our chain."""
        return self._chain.is_member(peer)

    async def on_pull(self, sender: str, pull: wire.Bulk) -> PullSource | Refusal:
        """Serve a peer an update, a state or a contribution. Raises: PutOff (no member, and it had
        enough)."""
        if isinstance(pull, wire.PullContribution):
            reason = self._why_not_serve(pull.run, pull.fragment)
            return refuse(reason) if reason is not None else await self.giving.serve(sender, pull)
        if isinstance(pull, wire.PullUpdate):
            return await self._serve_update(sender, pull)
        return await self._serve_state(sender, pull)

    def _why_not_serve(self, run: str, fragment: int) -> PullRefusal | None:
        if run != self._chain.run:
            return PullRefusal.OTHER_RUN
        if not 0 <= fragment < len(self._compute.vault.layouts):
            return PullRefusal.UNKNOWN_FRAGMENT
        return None if self._chain.may_serve else PullRefusal.NOT_READY

    async def _serve_update(self, sender: str, pull: wire.PullUpdate) -> PullSource | Refusal:
        reason = self._why_not_serve(pull.run, pull.fragment)
        if reason is not None:
            return refuse(reason)
        found = await self._chain.update_of(pull.fragment, pull.number)
        member = self._chain.is_member(sender)
        if not member and found is not None:
            self._budgets.check_update(sender, pull.fragment, pull.number, memoryview(found[1]).nbytes)
        answer = await self.fanout.serve(sender, pull, found)
        if not isinstance(answer, PullSource):
            return answer
        size = _size_of(answer)
        self._bytes_out += size
        if not member:
            self._budgets.update(sender, pull.fragment, pull.number, size)
        token, given = self.courtesy.begin(), answer

        def release() -> None:
            self.courtesy.end(token)
            given.release()

        return replace(answer, release=release)

    async def _serve_state(self, sender: str, pull: wire.PullState) -> PullSource | Refusal:
        reason = self._why_not_serve(pull.run, pull.fragment)
        if reason is not None:
            return refuse(reason)
        if self._chain.is_member(sender):
            return await self.donating.serve(sender, pull)
        self._budgets.check_state(sender)
        answer = await self.donating.serve(sender, pull)
        if isinstance(answer, PullSource):
            fragments = range(len(self._compute.vault.layouts))
            self._budgets.state(sender, _size_of(answer), sum(map(self._chain.state_bytes, fragments)))
        return answer

    # --- what the core asks of peers -----------------------------------------------------------------

    async def offer(self, effect: ev.Offer, payload: Buffer) -> ev.OfferAnswered | ev.Undone:
        """Stream our contribution to the syncer, or our group's partial merge to the syncer above."""
        signed = effect.signed
        if isinstance(signed, SignedPartial):
            answer = await self._push(effect.peer, wire.PushPartial(signed), payload)
        else:
            sent = ev.ContributionSent(signed.header.fragment, signed.header.stamp)
            request = wire.PushContribution(signed)
            answer = await self._push(effect.peer, request, payload, lambda: self._post(sent))
        return answer if isinstance(answer, ev.Undone) else ev.OfferAnswered(answer.verdict, answer.head)

    async def _push(
        self,
        peer: str,
        request: wire.Push,
        payload: Buffer,
        before_end: Action | None = None,
    ) -> wire.Answer | ev.Undone:
        """Push a payload; return the peer's word."""
        label, parts = wire.encode(request), (payload,)
        try:
            with self._meters.uplink.own.moving(), self.courtesy.urgent():
                delivered, raw = await self._transport.push(peer, label, parts, PAUSE_S, before_end)
            answer = wire.decode(raw, wire.Answer)
        except (TransportError, RemoteError) as error:
            header = request.signed.header
            logger.debug("payload of fragment %d not delivered to %s: %s", header.fragment, peer, error)
            return ev.Undone(str(error))
        if delivered:
            self._bytes_out += memoryview(payload).nbytes
            self.bytes_pushed += memoryview(payload).nbytes
        return answer

    async def fetch_update(self, effect: ev.FetchUpdate) -> ev.UpdateFetched | ev.FetchFailed:
        """Get one outer update, from that peer or from whom it names. It is passed on while it arrives."""
        arriving = self.fanout.arriving(effect.fragment, effect.number)
        relays = self._chain.may_serve and self._chain.dialable
        request = wire.PullUpdate(self._chain.run, effect.fragment, effect.number, relays=relays)
        complete = False

        async def check(fetch: Fetch) -> None:
            version, size = fetch.header.version, len(fetch.payload)
            if not self._chain.signed(version):
                raise NotAsSigned(VersionFault.SIGNATURE)
            self._checked_bytes += size
            try:
                await self._check(
                    effect.fragment, fetch.payload, version.header.codec, version.header.update_digest
                )
            finally:
                self._checked_bytes -= size

        try:
            fetch = await self.gathering.fetch(effect.peer, request, check, arriving)
            complete = True
        except _FETCH_ERRORS as error:
            return _fetch_failed(effect, error)
        finally:
            if not complete:
                self.fanout.failed(effect.fragment, arriving)
        over = partial(self.fanout.over, effect.fragment, arriving)
        ticket = self._tickets.put(fetch.payload, when_released=over)
        return ev.UpdateFetched(fetch.header.version, ticket)

    async def fetch_state(self, effect: ev.FetchState) -> ev.StateFetched | ev.FetchFailed:
        """Copy a whole state into the spare, from that peer and others that hold the same."""
        try:
            header = await self.copying.fetch(effect)
        except _FETCH_ERRORS as error:
            await self._compute.run(self._compute.vault.drop_spare, effect.fragment)
            return _fetch_failed(effect, error)
        self.pulling.unfinished.forget(effect.fragment)
        return ev.StateFetched(header.version, header.watermarks)

    async def _check(self, fragment: int, payload: bytearray, codec: str, digest: bytes) -> None:
        """Judge a payload in the worker thread: hashing it would hold the loop up. Raises: RemoteError."""

        def check() -> None:
            if content_digest(payload) != digest:
                raise NotAsSigned(Verdict.WRONG_DIGEST)
            self._compute.vault.check_payload(fragment, payload, codec)

        await self._compute.run(check)


def _fetch_failed(
    effect: ev.FetchUpdate | ev.FetchState, error: RemoteError | TransportError
) -> ev.FetchFailed:
    failure = failure_of(error)
    detail = error.reason[:64] if isinstance(error, RemoteError) and not failure.innocent else ""
    logger.debug("fragment %d not fetched from %s: %s", effect.fragment, effect.peer, error)
    return ev.FetchFailed(failure, detail)


def _size_of(source: PullSource) -> int:
    return sum(memoryview(part).nbytes for part in source.payload)
