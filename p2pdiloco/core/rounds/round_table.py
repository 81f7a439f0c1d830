"""States of a syncer's round, and their transitions (`core.rounds.round`).

- IDLE: nothing usable in the inbox
- COLLECTING: offers are in or on their way, quorum is not
- CLOSING: quorum is complete, or the group above called: the grace window runs
- MERGING: the tensors thread has the inputs
- PUBLISHING: the version is being made durable, or the partial is with the syncer above
"""

from __future__ import annotations

from enum import Enum, auto

from p2pdiloco.util import direct_members


@direct_members
class RoundState(Enum):
    """States of a round."""

    IDLE = auto()
    COLLECTING = auto()
    CLOSING = auto()
    MERGING = auto()
    PUBLISHING = auto()


@direct_members
class RoundSignal(Enum):
    """Causes for a round's state to change."""

    CONTRIBUTION = auto()
    QUORUM = auto()
    CALLED = auto()
    CLOSE = auto()
    EMPTY = auto()
    MERGED = auto()
    FAILED = auto()
    PUBLISHED = auto()
    ABANDON = auto()


_R, _S = RoundState, RoundSignal
MAKING = (_R.CLOSING, _R.MERGING, _R.PUBLISHING)
"""States in which a version is in the making."""
ROUND_TABLE = {
    (_R.IDLE, _S.CONTRIBUTION): _R.COLLECTING,
    (_R.IDLE, _S.CALLED): _R.CLOSING,
    (_R.COLLECTING, _S.CONTRIBUTION): _R.COLLECTING,
    (_R.COLLECTING, _S.QUORUM): _R.CLOSING,
    (_R.COLLECTING, _S.CALLED): _R.CLOSING,
    (_R.CLOSING, _S.CONTRIBUTION): _R.CLOSING,
    (_R.CLOSING, _S.CLOSE): _R.MERGING,
    (_R.CLOSING, _S.EMPTY): _R.IDLE,
    (_R.MERGING, _S.CONTRIBUTION): _R.MERGING,
    (_R.MERGING, _S.MERGED): _R.PUBLISHING,
    (_R.MERGING, _S.FAILED): _R.IDLE,
    (_R.PUBLISHING, _S.CONTRIBUTION): _R.PUBLISHING,
    (_R.PUBLISHING, _S.PUBLISHED): _R.IDLE,
    (_R.PUBLISHING, _S.FAILED): _R.IDLE,
    (_R.IDLE, _S.ABANDON): _R.IDLE,
    (_R.COLLECTING, _S.ABANDON): _R.IDLE,
    (_R.CLOSING, _S.ABANDON): _R.IDLE,
    (_R.MERGING, _S.ABANDON): _R.IDLE,
}
