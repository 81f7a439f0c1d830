"""A rider: a stranger that trains nothing, and sends the newest update with a little noise as its work.

Such work agrees with everybody's, so it is merged. `Followed` is what a crowd of riders
knows of one fragment; `attacks.crowd` says what they do together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import torch
from msgspec.structs import replace
from torch import Tensor

from attacks.heads import Forged
from attacks.stranger import SEND_S, Stranger, Work
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api.messages import Progress, VoteGranted, VoteRequest, decode
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.types import (
    NEVER,
    ContributionHeader,
    Head,
    SignedContribution,
    Stamp,
    Vote,
    VoteBody,
    Watermark,
    signed_bytes,
)
from p2pdiloco.core.api.versions import Plan, SignedVersion, VersionHeader, group_name
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.notice import decode_invite
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.hashing import content_digest
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tensors.codecs import bytes_of, codec, norm

NOISE = 0.3
"""Length of the noise, as a share of the update's."""
PUSH_S = 5.0
TRIES, AGAIN_S = 4, 0.25
"""Attempts to hand one contribution over, and the pause between them: the office may change."""
STEP_S = 0.15
"""Time that riders say they take for an inner step: as long as honest nodes of these swarms."""


class CrowdWork(Work, frozen=True, kw_only=True):
    """Task of a crowd's process."""

    riders: int
    invite: str = ""
    """Invite that they share; empty: the run is open."""
    doors: str = "all"
    """Members to whom a rider shows its paper first: "all", "one" (another one each), or one's peer id."""


class Followed:
    """One fragment, as a crowd follows it: the newest version that it has read, and the update of that."""

    def __init__(self, index: int, numel: int) -> None:
        self.index, self.numel = index, numel
        self.versions: list[SignedVersion] = []
        """Versions that were read, oldest first."""
        self.update: Tensor | None = None

    @property
    def number(self) -> int:
        """Number of the newest version that was read."""
        return self.versions[-1].header.number if self.versions else 0


class Rider(Stranger):
    """One identity of a crowd."""

    def __init__(self, work: CrowdWork, place: int, manifest: Manifest) -> None:
        super().__init__(work, f"rider-{place}")
        self.place, self._manifest = place, manifest
        self._admission = decode_invite(work.invite).admit(self.id) if work.invite else None
        self._first_doors = first_doors(work, place)
        self.offices: dict[tuple[str, int], tuple[int, str]] = {}
        """Term and syncer by group and fragment, as members say in their heartbeats."""
        self.merged: dict[int, Stamp] = {}
        """Stamp of its newest merged contribution to each fragment."""
        self.seats_in: set[int] = set()
        """Fragments in which it has a seat, as the headers of versions say."""
        self.mute = False
        self.claims: Callable[[ContributionHeader], ContributionHeader] = lambda header: header
        self.gives = lambda _peer, pull: self._give(pull)
        self.forged: dict[int, tuple[Forged, SignedVersion, tuple[Watermark, ...]]] = {}
        """States that the whole crowd stands on, by fragment."""
        self._sequence = 0
        self._voted: set[tuple[str, int, int]] = set()

    # --- at the doors ------------------------------------------------------------------------------------

    async def show_paper(self, doors: Collection[str] = ()) -> None:
        """Show its paper to these members; to those that come first, if none are named."""
        if self._admission is None:
            return
        query = wire.QUERY + wire.encode(wire.ShowAdmission(self.work.run, self._admission, 0))
        for peer in doors or self._first_doors:
            with self.counting("paper"):
                shown = wire.decode(await self.transport.send(peer, query, SEND_S), wire.AdmissionShown)
                if shown.fault is not None:
                    raise RemoteError(shown.fault.value)

    # --- what others say and ask -------------------------------------------------------------------------

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """Take in what members say, and vote for whoever asks first."""
        answer = await super().on_message(sender, data)
        if data[:1] == wire.QUERY:
            return answer
        message = decode(self.work.run, data[1:])
        if isinstance(message, Progress):
            for group, fragment, term in message.offices:
                if term >= self.offices.get((group, fragment), (0, ""))[0]:
                    self.offices[group, fragment] = term, sender
        elif isinstance(message, VoteRequest) and not self.mute:
            await self._vote(sender, message)
        return answer

    async def _vote(self, candidate: str, request: VoteRequest) -> None:
        ballot = request.group, request.fragment, request.term
        if ballot in self._voted:
            return
        self._voted.add(ballot)
        head = request.head
        body = VoteBody(self.work.run, *ballot, candidate, self.id, head.number, head.digest)
        vote = Vote(body, self.identity.sign(signed_bytes("vote", body)))
        data = wire.message(self.work.run, VoteGranted(vote))
        with self.counting("vote"):
            await self.transport.send(candidate, data, SEND_S)

    def _give(self, pull: wire.Pull) -> PullSource | Refusal:
        if not isinstance(pull, wire.PullState) or pull.fragment not in self.forged:
            return wire.refuse(PullRefusal.GONE)
        forged, version, table = self.forged[pull.fragment]
        self.done["forged states given"] += 1
        header = wire.encode(wire.StateHeader(version, table))
        return PullSource(header, (bytes_of(forged.theta), bytes_of(forged.momentum)), lambda: None)

    # --- what it does ------------------------------------------------------------------------------------

    async def beat_once(self, heads: dict[int, Head]) -> None:
        """Send a heartbeat: of a full member that votes and stands for nothing."""
        forged = {fragment: version.header.head() for fragment, (_, version, _) in self.forged.items()}
        await self.beat(heads | forged, stands=False, learning=not self.mute, step_time_s=STEP_S)

    def take_in(self, version: SignedVersion) -> bool:
        """Look for itself in a version. Tell whether that is its first one of all."""
        first, header = not self.merged, version.header
        for part in header.contributors:
            if part.learner == self.id:
                self.merged[header.fragment] = part.stamp
                self.done["contributions merged"] += 1
                if part.votes:
                    self.seats_in.add(header.fragment)
        return first and bool(self.merged)

    async def contribute(self, at: Followed) -> None:
        """Send the update of the newest version with some noise, as the work of H inner steps upon it."""
        version, update = at.versions[-1].header, at.update
        if self.mute or update is None:
            return
        noise = torch.randn_like(update)
        work = update + noise * (NOISE * norm(update) / max(norm(noise), 1e-9))
        work *= (version.reach or norm(update)) / max(norm(work), 1e-9)
        payload = codec(self._manifest.codec.contribution).encode(work)
        self._sequence += 1
        steps = self._manifest.sync.inner_steps
        honest = ContributionHeader(
            run=self.work.run,
            group=self._group(version),
            fragment=at.index,
            learner=self.id,
            stamp=Stamp(1, self._sequence),
            after=self.merged.get(at.index, NEVER),
            base_number=version.number,
            base_digest=version.digest(),
            tokens=steps * self._manifest.inner.tokens_per_step,
            inner_steps=steps,
            payload_digest=content_digest(payload),
            payload_bytes=len(payload),
            codec=self._manifest.codec.contribution,
            due=False,
        )
        header = self.claims(honest)
        signed = SignedContribution(header, b"")
        label = signed.contributor().work(header.run, header.fragment)
        signed = replace(signed, signature=self.identity.sign(signed_bytes("work", label)))
        data = wire.encode(wire.PushContribution(signed))
        for _ in range(TRIES):
            if at.number != version.number or await self._handed_over(header, data, payload):
                return
            await asyncio.sleep(AGAIN_S)

    def _group(self, version: VersionHeader) -> str:
        """Find its group for the version after that one."""
        size = self._manifest.group.size
        plan = Plan(version.run, version.fragment, version.epoch, version.groups, size)
        return group_name(plan.epoch, plan.groups, *plan.leaf_of(self.id))

    async def _handed_over(self, header: ContributionHeader, data: bytes, payload: bytearray) -> bool:
        _, syncer = self.offices.get((header.group, header.fragment), (0, ""))
        if not syncer or syncer == self.id:
            return False
        try:
            _, answer = await self.transport.push(syncer, data, (payload,), PUSH_S)
            verdict = wire.decode(answer, wire.Answer).verdict
        except (RemoteError, TransportError) as error:
            self.done[f"work: {getattr(error, 'reason', type(error).__name__)}"[:60]] += 1
            return False
        self.done[f"work: {verdict}"] += 1
        return bool(verdict.taken)


def first_doors(work: CrowdWork, place: int) -> tuple[str, ...]:
    """Choose the members to whom a rider shows its paper before anything of it is merged."""
    members = sorted(work.members)
    if work.doors == "one":
        return (members[place % len(members)],)
    if work.doors == "all" or place == 0:
        return tuple(members)
    return (work.doors,)
