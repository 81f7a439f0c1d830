"""What tests of elections share."""

from __future__ import annotations

from kit import (
    Solo,
    sent,
)

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.api.types import Head


def request(solo: Solo, candidate: str, term: int = 1, head: Head | None = None) -> list[ev.Effect]:
    return solo.message(candidate, msg.VoteRequest("all", 0, term, head or solo.head, "open"))


def refusal(effects: list[ev.Effect]) -> VoteRefusal:
    assert not sent(effects, msg.VoteGranted)
    return sent(effects, msg.VoteRefused)[0].reason
