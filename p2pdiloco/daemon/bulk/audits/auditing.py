"""Audits: what a syncer merged is fetched, and merged again.

Each contribution is asked of its learner, and then of its group's syncer; each partial merge of who made it,
and then of who added it up (`asking.py`). Digest and content are judged before it counts. What finds no
place in a small share of memory lies in scratch on the disk, as what peers push.

Rules: docs/protocol/audits.md, section 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator

from p2pdiloco.adapters.data_dir import Spool
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.types import WHOLE_RUN, Contributor
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.bulk.audits.asking import Asking
from p2pdiloco.daemon.bulk.audits.merged import MergedPayloads
from p2pdiloco.daemon.bulk.audits.subject import Subject, Wanted
from p2pdiloco.daemon.bulk.audits.true_updates import TrueUpdates
from p2pdiloco.daemon.bulk.chain_view import ChainView
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.payloads.memory import Memory
from p2pdiloco.errors import StorageError
from p2pdiloco.ports import Transport
from p2pdiloco.tensors.codecs import Unsound, UnusableInputs
from p2pdiloco.tensors.merge import Payload, digest_of, memory_bytes
from p2pdiloco.tensors.outer_update import Remade, merges_as_everywhere

logger = logging.getLogger(__name__)
AUDIT_S = 60.0
"""Time that an audit has to get the contributions, from when the core asks for it."""
STREAMS = 3
"""Number of contributions that are on their way here at one time."""
MAX_WAITING = 4
"""Number of audits that wait for the one under way."""
SHARE_BYTES = 128 << 20
"""Bytes of contributions that stay in memory until they are merged; the others go to the disk."""


class _Fetched:
    """Contributions and partial merges of one audit that are here."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.payloads: dict[bytes, Payload] = {}
        """Payloads by digest."""
        self.memory_bytes = 0
        """Bytes of memory that they take, with those that are arriving."""
        self.withheld = False
        """True: the syncer, which is connected, had time to give what it merged, and did not."""
        self.outcome: AuditOutcome | None = None
        """Outcome, if there is no need to merge."""
        self.true_update: tuple[bytearray, bytes] | None = None
        """Update as it should have been, with its digest, if the version has another one."""
        wanted = subject.wanted()
        if subject.givers:
            random.shuffle(wanted)  # all members ask for them now
        self._wanted = iter(wanted)

    def wanted(self) -> Iterator[Wanted]:
        """Go through those that nobody fetches yet, as long as all others came."""
        for each in self._wanted:
            if self.outcome is not None:
                return
            yield each


class Auditing:
    """Auditing: carries out `Audit`, one after the other."""

    def __init__(
        self,
        chain: ChainView,
        transport: Transport,
        compute: Compute,
        merged: MergedPayloads,
        true_updates: TrueUpdates,
        memory: Memory,
        spool: Spool | None,
        post: Callable[[ev.Event], None],
    ) -> None:
        """`spool`: place for what finds none in memory; None: an audit of so much does without."""
        self._chain, self._transport, self._compute = chain, transport, compute
        self._merged, self._memory, self._spool = merged, memory, spool
        self._true_updates = true_updates
        self._post = post
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._complained = False
        self._held_bytes = 0
        self._asking = Asking(chain, transport, memory, self._is_sound)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of contributions that are being audited."""
        return self._held_bytes + self._asking.held_bytes

    @property
    def bytes_in(self) -> int:
        """Payload bytes received so far."""
        return self._asking.bytes_in

    async def audit(self, effect: ef.Audit) -> None:
        """Make a merge again, and tell the core how that compares."""
        header, subject = effect.version.header, Subject(effect)
        outcome, fetched = AuditOutcome.MISSING, _Fetched(subject)
        if self._waiting <= MAX_WAITING:
            self._waiting += 1
            try:
                outcome = await self._in_turn(fetched, asyncio.get_running_loop().time() + AUDIT_S)
            finally:
                self._waiting -= 1
        digest, group = header.digest(), subject.group
        remade = outcome is AuditOutcome.DIFFERENT and group == WHOLE_RUN and self._true_updates.has(digest)
        key = effect.fragment, header.number, digest
        self._post(ev.Audited(*key, outcome, remade, group, fetched.withheld))

    async def _in_turn(self, fetched: _Fetched, until_s: float) -> AuditOutcome:
        subject = fetched.subject
        try:
            async with asyncio.timeout_at(until_s):
                await self._turn.acquire()
        except TimeoutError:
            return AuditOutcome.MISSING
        try:
            if not await self._able():
                return AuditOutcome.UNABLE
            async with asyncio.timeout_at(until_s), asyncio.TaskGroup() as group:
                for _ in range(STREAMS):
                    group.create_task(self._fetch_all(fetched))
            outcome = fetched.outcome or await self._merge(fetched)
            if outcome is AuditOutcome.DIFFERENT:
                # Others are to find the same, and may get it nowhere else.
                self._merged.keep_audited(subject.fragment, fetched.payloads)
                if fetched.true_update is not None:
                    self._true_updates.keep(subject.digest, *fetched.true_update)
            return outcome
        except TimeoutError:
            return fetched.outcome or AuditOutcome.MISSING
        finally:
            self._give_back(fetched, fetched.memory_bytes)
            self._turn.release()

    async def _able(self) -> bool:
        """Tell whether merges of ours have the bits that all others' have; say so, once, if not."""
        able = await self._compute.run(merges_as_everywhere)
        if not able and not self._complained:
            self._complained = True
            logger.error("this machine does not calculate as all others do: it finds no merge false")
        return able

    @contextlib.asynccontextmanager
    async def contribution(self, version: SignedVersion, part: Contributor) -> AsyncIterator[Payload | None]:
        """Get one contribution that a version names, beside the audit whose turn it is: that is not to wait
        for whoever gives slowly. None: it is not to be had in time, or there is no room. It is kept until the
        end of the context."""
        fetched, payload = _Fetched(Subject(ef.Audit(version.header.fragment, version))), None
        try:
            with contextlib.suppress(TimeoutError, Unsound):
                async with asyncio.timeout(AUDIT_S):
                    payload = await self._fetch(fetched, Wanted(part.payload_digest, [part.learner]))
            yield payload
        finally:
            self._give_back(fetched, fetched.memory_bytes)

    async def _merge(self, fetched: _Fetched) -> AuditOutcome:
        subject, payloads = fetched.subject, fetched.payloads
        if not subject.can_be_merged():
            return AuditOutcome.DIFFERENT
        correction = None
        if subject.repairs_something:
            correction = await self._true_updates.correction(subject.repairs)
            if correction is None:
                return AuditOutcome.MISSING
        maker = self._compute.vault.maker

        def make() -> Remade | None:
            try:
                return subject.make(maker, payloads, correction)
            except UnusableInputs:
                return None

        def compare() -> AuditOutcome:
            made = make()
            if made is not None and subject.is_stated(made):
                return AuditOutcome.SAME
            # It is about to cost somebody its place: not for a damaged disk or memory of ours.
            intact = all(digest_of(payload) == digest for digest, payload in payloads.items())
            whole = correction is None or correction.is_whole()
            if not intact or not whole or make() != made:
                return AuditOutcome.MISSING
            if made is not None:
                fetched.true_update = subject.true_update(made)
            return AuditOutcome.DIFFERENT

        try:
            return await self._compute.run(compare)
        except StorageError as error:
            logger.warning("%s", error)
            return AuditOutcome.MISSING

    # --- getting what was merged -----------------------------------------------------------------------

    async def _fetch_all(self, fetched: _Fetched) -> None:
        for wanted in fetched.wanted():
            try:
                payload = await self._fetch(fetched, wanted)
            except Unsound:
                # It is what the header names: no honest syncer merges that.
                fetched.outcome = AuditOutcome.DIFFERENT
                return
            if payload is None:
                fetched.outcome = fetched.outcome or AuditOutcome.MISSING
                return
            fetched.payloads[wanted.digest] = payload

    async def _fetch(self, fetched: _Fetched, wanted: Wanted) -> Payload | None:
        """Get what was merged: from here, or from whoever has it. None: nobody gives it, or there is no room.

        Raises: Unsound.
        """
        subject, digest, fragment = fetched.subject, wanted.digest, fetched.subject.fragment
        here = self._merged.get(fragment, digest) or await self._chain.contribution_of(fragment, digest)
        if here is not None and await self._is_sound(subject, wanted, here):
            return here
        maker = self._compute.vault.maker
        size = maker.partial_bytes(fragment) if wanted.partial else maker.contribution_bytes(fragment)
        if not self._memory.fits_push(size):
            self._memory.refuse()
            return None
        fetched.memory_bytes += size
        self._held_bytes += size
        began_s, payload, asked = asyncio.get_running_loop().time(), None, False
        try:
            payload, asked = await self._asking.get(subject, wanted, size), True
        finally:
            waited_s = asyncio.get_running_loop().time() - began_s
            if payload is None and (asked or waited_s >= AUDIT_S / 2):
                fetched.withheld |= subject.syncer in self._transport.connected()
        return None if payload is None else await self._place(fetched, payload, size)

    async def _is_sound(self, subject: Subject, wanted: Wanted, payload: Payload) -> bool:
        """Judge a payload in the tensors thread. False: it is another one, or cannot be read. Raises: Unsound
        (it is the one, and can be none)."""
        vault = self._compute.vault

        def judge() -> bool:
            if digest_of(payload) != wanted.digest:
                return False
            try:
                subject.check(vault, wanted, payload)
            except Unsound:
                if digest_of(payload) != wanted.digest:
                    return False  # damaged here, just now
                raise
            return True

        try:
            return await self._compute.run(judge)
        except StorageError as error:
            logger.warning("%s", error)
            return False

    async def _place(self, fetched: _Fetched, payload: Payload, size: int) -> Payload | None:
        """Leave a payload in memory, or move it to the disk. None: there is no room."""
        if fetched.memory_bytes <= SHARE_BYTES or not memory_bytes(payload):
            return payload
        if self._spool is None or not self._spool.fits(size):
            return None
        assert isinstance(payload, bytearray)
        scratch = self._spool.take(len(payload))
        try:
            await scratch.write(0, memoryview(payload))
        except StorageError as error:
            logger.warning("%s", error)
            return None
        self._give_back(fetched, size)
        return scratch

    def _give_back(self, fetched: _Fetched, size: int) -> None:
        fetched.memory_bytes -= size
        self._held_bytes -= size
