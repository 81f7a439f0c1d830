"""Failure that the core hears of when something was not fetched, by the error with which that ended."""

from __future__ import annotations

from p2pdiloco.adapters.framing import RefusedByPeer
from p2pdiloco.core.api.reasons import FetchFailure
from p2pdiloco.daemon.payloads.memory import OutOfBudget
from p2pdiloco.daemon.wire import PullRefused
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError


def failure_of(error: TransportError | RemoteError) -> FetchFailure:
    """Find the failure that an error is. An error of which nothing is known is the holder's fault."""
    match error:
        case PullRefused():
            return error.why.failure
        case RefusedByPeer() if error.unheard is not None:
            return error.unheard.failure
        case OutOfBudget():
            return FetchFailure.BUSY
        case RemoteError():
            return FetchFailure.FALSE
        case PeerUnreachable():
            return FetchFailure.UNREACHABLE
        case _:
            return FetchFailure.CUT
