"""Merges and outer steps that the core asks for, in the tensors thread; each ends in an event."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco.hashing import content_digest
from p2pdiloco.ports import Buffer
from p2pdiloco.tensors.codecs import Unsound, UnusableInputs
from p2pdiloco.tensors.merge import Findings, Input, Payload, digest_of
from p2pdiloco.tensors.outer_update import Correction, steps_as_everywhere
from p2pdiloco.tensors.vault import MergeResult, PartialMerge

logger = logging.getLogger(__name__)
SEED_BYTES = 16
"""Size of the seed of a sample that nobody else draws."""
Named = tuple[bytes, int, Payload]
"""Digest, ticket, and a payload itself."""
Work = Coroutine[Any, Any, None]
"""Work to be run in the background. Payloads are held from the call on: the core may release the tickets
before the work begins."""


class Merging:
    """Merging: carries out `Merge`, `MergePartial`, `ApplyUpdate` and `DropSpare`."""

    def __init__(
        self,
        compute: Compute,
        tickets: Tickets,
        post: Callable[[ev.Event], None],
        keep: Callable[[int, list[Named]], None] = lambda _fragment, _merged: None,
        repair: Callable[[SignedVersion], Awaitable[Correction | None]] | None = None,
    ) -> None:
        """`keep`: keeps what was merged, and partial merges, for audits. `repair`: finds what
        makes a false version good; None: nothing is."""
        self._repair = repair
        self._compute = compute
        self._keep = keep
        self._tickets = tickets
        self._post = post

    async def examine(self) -> None:
        """See whether this machine makes the merges and outer steps that all others make: else its versions
        would be false, and cost it its place."""
        if not await self._compute.run(steps_as_everywhere):
            logger.error(
                "this machine does not calculate as all others do: it trains, and stands for no office"
            )
            self._post(ev.Miscalculates())

    def _inputs(self, effect: ef.Merge | ef.MergePartial) -> tuple[list[Input], list[Payload]]:
        tickets = self._tickets
        return (
            [_input(given, tickets.payload(given.ticket)) for given in effect.inputs],
            [tickets.payload(part.ticket) for part in effect.partials],
        )

    def merge(self, effect: ef.Merge) -> Work:
        """Merge into the spare, as a new version."""
        return self._merge(effect, *self._inputs(effect))

    async def _merge(self, effect: ef.Merge, inputs: list[Input], partials: list[Payload]) -> None:
        key = (effect.fragment, effect.term, effect.number)
        vault, correction, named = self._compute.vault, None, _named(effect, inputs, partials)
        if effect.repairs is not None and self._repair is not None:
            correction = await self._repair(effect.repairs)

        def make() -> MergeResult:
            job = effect.fragment, effect.number, inputs, partials, effect.longest_steps
            done = vault.merge(*job, effect.limits, effect.seed, correction)
            _check_whole(named)
            if correction is not None and not correction.is_whole():
                raise StorageError("what a repair consists of was damaged here")
            if not vault.is_whole(effect.fragment):  # we would sign a false state
                raise StorageError("the state of this fragment was damaged in memory")
            return done

        try:
            if correction is not None and not await self._compute.run(correction.is_whole):
                correction = None
            done = await self._compute.run(make)
        except (UnusableInputs, StorageError) as error:
            self._post(ev.MergeFailed(*key, str(error)[:160], _unusable(effect, error)))
            return
        if vault.maker.repeatable:
            self._keep(effect.fragment, named)
        ticket = self._tickets.put(done.update)
        self._post(
            ev.Merged(
                *(*key, ticket, done.update_digest, len(done.update), done.state_digest, done.norm),
                _learners(effect, done.found.cut),
                _measured(done.found),
                correction is not None,
            )
        )

    def merge_partial(self, effect: ef.MergePartial) -> Work:
        """Add up what a group contributed."""
        return self._merge_partial(effect, *self._inputs(effect))

    async def _merge_partial(
        self, effect: ef.MergePartial, inputs: list[Input], partials: list[Payload]
    ) -> None:
        key = (effect.fragment, effect.group, effect.attempt)
        vault, named = self._compute.vault, _named(effect, inputs, partials)

        def make() -> PartialMerge:
            done = vault.merge_partial(effect.fragment, inputs, partials, effect.limits, effect.seed)
            _check_whole(named)
            return done

        try:
            done = await self._compute.run(make)
        except (UnusableInputs, StorageError) as error:
            self._post(ev.PartialFailed(*key, str(error)[:160], _unusable(effect, error)))
            return
        ticket = self._tickets.put(done.payload)
        if vault.maker.repeatable:
            made = done.digest, ticket, done.payload
            self._keep(effect.fragment, [*named, made])
        learners, measured = _learners(effect, done.found.cut), _measured(done.found)
        self._post(ev.PartialMerged(*key, ticket, done.digest, len(done.payload), learners, measured))

    def apply(self, effect: ef.ApplyUpdate) -> Work:
        """Make the outer step of somebody else's update into the spare."""
        own = None if effect.own is None else self._tickets.in_memory(effect.own)
        return self._apply(effect, self._tickets.get(effect.ticket), own)

    async def _apply(self, effect: ef.ApplyUpdate, update: Buffer, own: Buffer | None) -> None:
        vault, unsound, cosine, certain = self._compute.vault, False, None, False
        job = effect.fragment, effect.number, update, effect.longest_steps, effect.norm

        def apply() -> tuple[bytes, bool, float | None]:
            made, certain = vault.apply(*job), False
            if effect.stated and made != effect.stated:
                first, made = made, vault.apply(*job)
                certain = made == first and self._is_sound(effect, update)
            return made, certain, None if own is None else self._cosine(effect.fragment, own, update)

        try:
            digest, certain, cosine = await self._compute.run(apply)
        except RemoteError as error:
            logger.warning(
                "fragment %(fragment)d: update %(number)d cannot be applied: %(error)s",
                {"fragment": effect.fragment, "number": effect.number, "error": str(error)},
            )
            digest, unsound = b"", True
        key = effect.fragment, effect.number, effect.ticket
        self._post(ev.UpdateApplied(*key, digest, unsound, cosine, certain))

    def _is_sound(self, effect: ef.ApplyUpdate, update: Buffer) -> bool:
        """Tell whether that an outer step has another result than its syncer states is no fault of ours."""
        whole = (
            self._compute.vault.is_whole(effect.fragment) and content_digest(update) == effect.update_digest
        )
        if not (sound := whole and steps_as_everywhere()):
            logger.error(
                "fragment %(fragment)d: version %(number)d has another state here, which may be a fault of "
                "ours: %(fault)s",
                {
                    "fragment": effect.fragment,
                    "number": effect.number,
                    "fault": "it calculates otherwise than others" if whole else "its memory was damaged",
                },
            )
        return sound

    def _cosine(self, fragment: int, own: Buffer, update: Buffer) -> float | None:
        """Compare our contribution with an update. None: it cannot be told, or read back: one that waits on
        the disk is not."""
        try:
            return self._compute.vault.maker.cosine(fragment, own, update, secrets.token_bytes(SEED_BYTES))
        except Unsound:
            return None

    def drop_spare(self, effect: ef.DropSpare) -> Work:
        """Give up what is in the spare."""
        return self._compute.run(self._compute.vault.drop_spare, effect.fragment)


def _input(given: ef.MergeInput, payload: Payload) -> Input:
    part = given.contributor
    return Input(payload, part.tokens, part.inner_steps, mean=given.mean, votes=part.votes)


def _named(effect: ef.Merge | ef.MergePartial, inputs: list[Input], partials: list[Payload]) -> list[Named]:
    own = [(part.contributor.payload_digest, part.ticket) for part in effect.inputs]
    below = [(part.payload_digest, part.ticket) for part in effect.partials]
    payloads = [*(each.payload for each in inputs), *partials]
    return [(*name, payload) for name, payload in zip([*own, *below], payloads, strict=True)]


def _check_whole(named: list[Named]) -> None:
    """Check that what was merged is still what came: under our signature a damage of our memory or disk
    would be a false merge. Raises: UnusableInputs, StorageError."""
    whole = [digest_of(payload) == digest for digest, _ticket, payload in named]
    if not all(whole):
        logger.error(
            "%(damaged)d payloads were damaged here since they came", {"damaged": whole.count(False)}
        )
        raise UnusableInputs(
            {n: Unsound(Verdict.DAMAGED) for n, is_whole in enumerate(whole) if not is_whole}
        )


def _measured(found: Findings) -> tuple[ev.Measured, ...]:
    return tuple(map(ev.Measured, found.lengths, found.scores))


def _learners(effect: ef.Merge | ef.MergePartial, inputs: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(effect.inputs[index].contributor.learner for index in inputs)


def _unusable(
    effect: ef.Merge | ef.MergePartial, error: UnusableInputs | StorageError
) -> tuple[tuple[Ticket, Verdict], ...]:
    """List the inputs of a merge that are at fault, by ticket; none, if it is our disk."""
    if isinstance(error, StorageError):
        return ()
    tickets = [*(part.ticket for part in effect.inputs), *(part.ticket for part in effect.partials)]
    return tuple((tickets[index], fault.verdict) for index, fault in error.faults.items())
