"""Every word with which a peer gives nothing: how it crosses the wire, and what the core hears of it."""

from __future__ import annotations

import msgspec
import pytest

from p2pdiloco.adapters.framing import encode_refusal, refused_by_peer
from p2pdiloco.core.api.reasons import FetchFailure, PullRefusal, Unheard, Verdict, VersionFault
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.pushes import failure_of
from p2pdiloco.daemon.bulk.updates import NotAsSigned
from p2pdiloco.daemon.payloads import OutOfBudget
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError

PULLS = {
    PullRefusal.NOT_READY: FetchFailure.NOT_READY,
    PullRefusal.BUSY: FetchFailure.BUSY,
    PullRefusal.GONE: FetchFailure.GONE,
    PullRefusal.BEHIND: FetchFailure.BEHIND,
    PullRefusal.LATER: FetchFailure.LATER,
    PullRefusal.OTHER_RUN: FetchFailure.FALSE,
    PullRefusal.UNKNOWN_RUN: FetchFailure.FALSE,
    PullRefusal.UNKNOWN_FRAGMENT: FetchFailure.FALSE,
    PullRefusal.NOT_HERE: FetchFailure.FALSE,
    PullRefusal.BEYOND_THE_END: FetchFailure.FALSE,
    PullRefusal.NOT_A_MEMBER: FetchFailure.FALSE,
}
UNHEARD = {
    Unheard.BUSY: FetchFailure.BUSY,
    Unheard.NOT_READY: FetchFailure.NOT_READY,
    Unheard.NOT_ADMITTED: FetchFailure.NOT_READY,
    Unheard.BANNED: FetchFailure.NOT_READY,
    Unheard.EXCLUDED: FetchFailure.NOT_READY,
}


@pytest.mark.parametrize("why", PullRefusal)
def test_what_a_refused_pull_is_to_the_core(why: PullRefusal) -> None:
    error = wire.refused(wire.refuse(why))
    assert error.why is why and str(error) == str(why)
    assert failure_of(error) is PULLS[why]


@pytest.mark.parametrize("why", Unheard)
def test_what_it_is_to_the_core_that_a_peer_looks_at_nothing(why: Unheard) -> None:
    error = refused_by_peer(encode_refusal(RemoteError(why.value, "too many")))
    assert error.unheard is why and failure_of(error) is UNHEARD[why]


def test_a_code_of_another_build_is_garbage_and_a_fault_is_the_holders() -> None:
    unknown = msgspec.msgpack.encode(["Refused", "no-mood"])
    with pytest.raises(RemoteError, match="garbage"):
        wire.decode(unknown, wire.Refused)
    for fault in ("garbage", "unreachable", "gone", "later"):
        error = refused_by_peer(encode_refusal(RemoteError(fault)))
        assert error.unheard is None and failure_of(error) is FetchFailure.FALSE
    for found in (
        RemoteError("garbage"),
        NotAsSigned(Verdict.WRONG_DIGEST),
        NotAsSigned(VersionFault.SIGNATURE),
    ):
        assert failure_of(found) is FetchFailure.FALSE


def test_what_the_world_does_and_our_own_lack_of_room_are_nobodys_fault() -> None:
    assert failure_of(OutOfBudget("busy")) is FetchFailure.BUSY
    assert failure_of(PeerUnreachable("gone")) is FetchFailure.UNREACHABLE
    assert failure_of(TransportError("cut")) is FetchFailure.CUT
