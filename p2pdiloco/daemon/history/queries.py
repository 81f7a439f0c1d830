"""Queries about a run's history and credits between peers; anybody may ask."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2pdiloco.core.api.types import MAX_FRAGMENTS, Count, Digest, PeerId, RunId, Wire
from p2pdiloco.credits import LATEST_S

KEEPS_NONE = "keeps-no-history"
"""Reason of whoever is asked for credits, and keeps no history."""
MAX_ROWS = 500
"""Rows of one answer: with the longest names about 180 KiB."""
Time = Annotated[int, Meta(ge=0, le=LATEST_S)]


class PullHistory(Wire, frozen=True, tag=True):
    """Request for that very version's record, its parent's, and so on: as many as a page has.

    The answer is the records alone (`credits.records`), the newest first.
    """

    run: RunId
    fragment: Count
    number: Count
    digest: Digest


class CreditsQuery(Wire, frozen=True, tag=True):
    """Question who did how much of a run, of whoever keeps its history."""

    run: RunId
    offset: Count = 0
    """Rows to leave out: the answer has `MAX_ROWS` at most."""


class CreditLine(Wire, frozen=True):
    """Work of one learner, as a keeper has added it up."""

    peer: PeerId
    name: Annotated[str, Meta(max_length=63)]
    """Name by which it called itself last, for all that the keeper knows."""
    fragment_tokens: Count
    """Tokens, the sum over fragments."""
    claimed_tokens: Count
    """Tokens by its labels, the mean over fragments."""
    inner_steps: Count
    """Inner steps, the mean over fragments."""
    contributions: Count
    first_s: Time
    last_s: Time


class CreditsAnswer(Wire, frozen=True, tag=True):
    """Answer to `CreditsQuery`."""

    fragments: Annotated[int, Meta(ge=1, le=MAX_FRAGMENTS)]
    fragment_tokens: Count
    before_fragment_tokens: Count
    uncredited_fragment_tokens: Count
    learners: Count
    missing: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_FRAGMENTS)]
    """Fragments whose history begins later, and the first version that is known."""
    doubts: Annotated[tuple[tuple[Annotated[str, Meta(max_length=80)], Count], ...], Meta(max_length=16)]
    tips: Digest
    """Digest of all heads together: equal ones have equal answers."""
    rows: Annotated[tuple[CreditLine, ...], Meta(max_length=MAX_ROWS)]
