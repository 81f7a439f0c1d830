"""Attacks on elections: offices for a stranger, and voters that never vote."""

from __future__ import annotations

import asyncio

from attacks.heads import above
from attacks.stranger import HEARTBEAT_S, Attack, Work
from p2pdiloco.core.api.messages import Elected, VoteRequest
from p2pdiloco.core.api.types import WHOLE_RUN, Certificate, Head, Vote, VoteBody, signed_bytes

ASK_S = 0.25


class AllOffices(Attack):
    """Heartbeats only, with heads that it does not have, and a request for every vote."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._terms: dict[int, int] = {}
        self._held: dict[int, int] = {}

    async def attack(self) -> None:
        """See `Attack`."""
        stranger = self._stranger
        await stranger.look()
        await stranger.be_listed()
        began = asyncio.get_running_loop().time()
        while True:
            heads = {fragment: above(head, 0) for fragment, head in stranger.heads.items()}
            offices = tuple((WHOLE_RUN, fragment, term) for fragment, term in sorted(self._held.items()))
            await stranger.beat(heads, offices=offices)
            for fragment, head in heads.items():
                if fragment not in self._held:
                    await self._stand(fragment, head)
            await asyncio.sleep(ASK_S)
            self._count()
            for fragment in sorted(set(heads) - set(self._held)):
                await self._take(fragment, heads[fragment], began)

    async def _stand(self, fragment: int, head: Head) -> None:
        term = self._terms.setdefault(fragment, self._stranger.heads[fragment].term + 1)
        await self._stranger.say(VoteRequest(WHOLE_RUN, fragment, term, head, "attack"), "vote request")

    def _count(self) -> None:
        """Take in how far terms are."""
        for refused in self._stranger.refusals:
            term = max(self._terms.get(refused.fragment, 0), refused.known_term + 1)
            self._terms[refused.fragment] = term
            self._stranger.done[f"vote refused: {refused.reason}"] += 1
        self._stranger.refusals.clear()

    async def _take(self, fragment: int, head: Head, began: float) -> None:
        """Take the office, if a majority voted for us."""
        stranger = self._stranger
        term = self._terms[fragment]
        votes = {
            granted.vote.body.voter: granted.vote
            for granted in stranger.granted
            if (granted.vote.body.fragment, granted.vote.body.term) == (fragment, term)
        }
        run, me = stranger.work.run, stranger.id
        mine = VoteBody(run, WHOLE_RUN, fragment, term, me, me, head.number, head.digest)
        votes[stranger.id] = Vote(mine, stranger.identity.sign(signed_bytes("vote", mine)))
        if 2 * len(votes) <= len(stranger.work.members) + 1:
            return
        certificate = Certificate(
            WHOLE_RUN,
            fragment,
            term,
            stranger.id,
            tuple(votes[voter] for voter in sorted(votes)),
        )
        await stranger.say(Elected(certificate), "elected")
        self._held[fragment] = term
        stranger.done["offices won"] += 1
        stranger.done["honest votes"] += len(votes) - 1


class SilentVoters(Attack):
    """Confirmed members, as many as honest ones and of one process, that answer to nothing."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, len(work.members))

    async def attack(self) -> None:
        """See `Attack`."""
        await self.strangers[0].look()
        heads = self.strangers[0].heads
        for stranger in self.strangers:
            stranger.take(heads.items())
            await stranger.be_listed()
        while True:
            for stranger in self.strangers:
                await stranger.beat(stranger.heads, learning=False, stands=False)
            await asyncio.sleep(HEARTBEAT_S)
