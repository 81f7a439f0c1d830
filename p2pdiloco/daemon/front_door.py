"""Front door of a peer: answers anybody about runs it knows, and, as a member, everything else.

Anybody may ask for manifests and what belongs to them, and measure the link to us, within bounds. A bootstrap
peer has only this; a node opens it before it knows its run, and adds its membership later. From then on the
run's gate comes first: of those that it does not admit nothing else is decoded, and banned ones get nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from p2pdiloco.config.manifest import BYTES
from p2pdiloco.core.api.events import MessageReceived
from p2pdiloco.core.api.messages import decode as decode_message
from p2pdiloco.core.api.reasons import PullRefusal, Unheard, Verdict
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import LISTING_BYTES, LISTING_S, REPORT_BYTES, Budget, Enough
from p2pdiloco.daemon.display.logs import Audience
from p2pdiloco.daemon.display.snapshot import encode_status
from p2pdiloco.daemon.network.holes import Holes
from p2pdiloco.daemon.network.reach import DialBack, ProbeGate
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, encode_manifest
from p2pdiloco.daemon.run_files.shared_files import (
    Giving,
    kept_initial,
    kept_tokenizer,
    tokenizer_from,
    version_0_from,
)
from p2pdiloco.daemon.wire import KEEPS_NONE, AdmissionQuery, CreditsQuery, PullHistory, refuse
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import PullSource, PushSink, Refusal
from p2pdiloco.util import loop_s

if TYPE_CHECKING:
    from p2pdiloco.daemon.admission import Gate
    from p2pdiloco.daemon.bulk.transfer import Transfers
    from p2pdiloco.daemon.history import HistoryDoor
    from p2pdiloco.daemon.report import Report

_Asked = wire.RunsQuery | wire.StatusQuery | wire.NameQuery | wire.StandsQuery | CreditsQuery


class FrontDoor:
    """Handlers of what peers send. Implements `ports.TransportHandlers`."""

    def __init__(
        self,
        dial_back: DialBack | None = None,
        holes: Holes | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`dial_back`: answers whoever asks whether we can dial it; `holes`: whoever wants a direct line.
        None: such questions are refused."""
        self._runs: dict[str, tuple[PublishedRun, bytes]] = {}
        self._files: dict[tuple[type, str], Path] = {}
        """Files of the runs, by what asks for them and run."""
        self._giving = {kind: Giving(now) for kind in (wire.PullInitial, wire.PullTokenizer)}
        self._member: Transfers | None = None
        self._gate: Gate | None = None
        self._history: HistoryDoor | None = None
        self._reporter: Report | None = None
        self._post: Callable[[MessageReceived], None] | None = None
        self._member_run = ""
        self.probes = ProbeGate()
        self._listings = Budget(Enough.LISTINGS, LISTING_BYTES, LISTING_S, now)
        self._reports = Budget(Enough.REPORTS, REPORT_BYTES, LISTING_S, now)
        self._dials_back = dial_back
        self._holes = holes

    def enter(
        self,
        run: str,
        member: Transfers | None,
        reports: Report,
        gate: Gate | None = None,
        history: HistoryDoor | None = None,
        post: Callable[[MessageReceived], None] | None = None,
    ) -> None:
        """Become a member of a run, from now on.

        `member` takes and gives bulk, `reports` answers whoever asks for its status, `gate` says who the
        peers are; None: everybody. `history` gives the run's history, `post` takes messages for the core;
        None: they are refused.
        """
        self._member_run, self._member, self._reporter, self._gate = run, member, reports, gate
        self._history, self._post = history, post

    def leave(self) -> None:
        """Be no member any more."""
        self._member = self._reporter = self._history = self._post = None

    def add_run(self, run: PublishedRun, data_dir: Path | None = None) -> None:
        """List and serve a run's manifest, and what of it is kept there: a given version 0, a tokenizer."""
        self._runs[run.id] = (run, encode_manifest(run))
        if data_dir is not None and run.manifest.run.initial:
            self._files[wire.PullInitial, run.id] = kept_initial(data_dir, run.id)
        if data_dir is not None and run.manifest.data.tokenizer != BYTES:
            self._files[wire.PullTokenizer, run.id] = kept_tokenizer(data_dir, run.id)

    def published(self) -> list[PublishedRun]:
        """List the runs that are served, with their manifests."""
        return [run for run, _ in self._runs.values()]

    def runs(self) -> list[wire.RunSummary]:
        """List the runs that are listed here."""
        return [run.summary() for run, _ in self._runs.values()]

    def is_member(self, sender: str) -> bool | None:
        """Tell whether the peer is a member of our run; None: we are no member ourselves."""
        return None if self._member is None else self._member.is_member(sender)

    def is_stranger(self, sender: str) -> bool:
        """Tell whether the run has admitted the peer by no paper: in an open run nobody has one."""
        return self._gate is None or not self._gate.has_papers(sender)

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """Take a core message of the run that we are a member of, or answer a query."""
        if data[:1] == wire.QUERY:
            return await self._on_query(sender, data[1:])
        if data[:1] != wire.MESSAGE:
            raise RemoteError("garbage", "neither message nor query")
        if self._post is None:
            raise RemoteError(Unheard.NOT_READY.value, "no member of a run yet")
        if self._gate is not None:
            self._gate.check(sender)
        self._post(MessageReceived(sender, decode_message(self._member_run, data[1:])))
        return b""

    async def _on_query(self, sender: str, data: bytes) -> bytes:
        query = wire.decode(data, cast(Any, wire.Query))
        if isinstance(query, AdmissionQuery):  # whoever is banned hears it
            if self._gate is None:
                raise RemoteError(Unheard.NOT_READY.value)
            return wire.encode(self._gate.answer(sender, query))
        if self._gate is not None:
            self._gate.check_not_banned(sender)
        if isinstance(query, wire.ReachQuery):
            return await self._dial_back(sender, query)
        if isinstance(query, wire.Punch):
            if query.addresses and self._gate is not None:  # whoever is not admitted learns no address
                self._gate.check(query.peer)
            if self._holes is None or (query.addresses and self._gate is None):
                raise RemoteError(Unheard.NOT_READY.value)
            return wire.encode(await self._holes.answer(sender, query))
        return self._answer(sender, query)

    def _decode(self, sender: str, data: bytes, anybodys: Any, members: Any) -> Any:
        """Decode a header: of whoever is not admitted only one of `anybodys`. Raises: RemoteError."""
        if self._gate is None or self._gate.admits(sender):
            return wire.decode(data, members)
        self._gate.check_not_banned(sender)
        try:
            return wire.decode(data, anybodys)
        except RemoteError:
            self._gate.check(sender)
            raise

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        """Take a contribution, a partial merge, or bytes that measure the link."""
        request = self._decode(sender, header, wire.PushProbe, wire.Push | wire.PushProbe)
        if isinstance(request, wire.PushProbe):
            return self.probes.take(sender, request)
        if self._member is None:
            return Refusal(wire.encode(wire.Answer(Verdict.NOT_READY, None)))
        return self._member.pushes_in.on_push(sender, request)

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        """Give a manifest, version 0, a tokenizer, an update, a state, history, or bytes that measure
        the link."""
        reads = self._gate is not None and self._gate.may_read(sender)
        pull = self._decode(sender, request, wire.ReaderPull if reads else wire.OpenPull, wire.Pull)
        if isinstance(pull, wire.PullProbe):
            return self.probes.give(sender, pull)
        if isinstance(pull, wire.PullManifest):
            return self._manifest(sender, pull.run)
        if isinstance(pull, wire.PullInitial | wire.PullTokenizer):
            return self._file(sender, pull)
        if self._member is None:
            return refuse(PullRefusal.NOT_READY)
        if isinstance(pull, PullHistory):
            if self._history is None:
                return refuse(PullRefusal.NOT_HERE)
            return await self._history.serve(sender, pull, not self.is_member(sender))
        return await self._member.on_pull(sender, pull)

    def _file(self, sender: str, pull: wire.PullInitial | wire.PullTokenizer) -> PullSource | Refusal:
        file = self._files.get((type(pull), pull.run))
        if file is None:
            return refuse(PullRefusal.UNKNOWN_RUN)
        read = partial(tokenizer_from, file)
        if isinstance(pull, wire.PullInitial):
            read = partial(version_0_from, file, pull.offset, pull.whole)
        return self._giving[type(pull)].serve(sender, read, not self.is_member(sender))

    def _manifest(self, sender: str, run: str) -> PullSource | Refusal:
        found = self._runs.get(run)
        if found is None:
            return refuse(PullRefusal.UNKNOWN_RUN)
        if not self.is_member(sender):
            self._listings.check(sender)
            self._listings.take(sender, len(found[1]))
        return PullSource(found[1], (), lambda: None)

    async def _dial_back(self, sender: str, query: wire.ReachQuery) -> bytes:
        if self._dials_back is None:
            raise RemoteError(Unheard.NOT_READY.value)
        stranger = self.is_member(sender) is False and self.is_stranger(sender)
        return wire.encode(await self._dials_back.answer(sender, query, stranger))

    def _answer(self, sender: str, query: _Asked) -> bytes:
        if self.is_member(sender):
            return self._query(query, Audience.MEMBERS)
        budget = self._listings if isinstance(query, wire.RunsQuery) else self._reports
        budget.check(sender)
        reply = self._query(query, Audience.ANYBODY)
        budget.take(sender, len(reply))
        return reply

    def _query(self, query: _Asked, reader: Audience) -> bytes:
        if isinstance(query, wire.RunsQuery):
            return wire.encode(wire.RunList(tuple(self.runs()[: wire.MAX_RUNS])))
        if self._reporter is None or query.run != self._member_run:
            raise RemoteError("not-a-member")
        if isinstance(query, wire.NameQuery):
            return wire.encode(wire.NameAnswer(self._reporter.bearers(query.name)))
        if isinstance(query, CreditsQuery):
            if self._history is None:
                raise RemoteError(KEEPS_NONE)
            return wire.encode(self._history.answer(query))
        if isinstance(query, wire.StandsQuery):
            return wire.encode(self._reporter.stands())
        return encode_status(self._reporter.status(loop_s(), reader))
