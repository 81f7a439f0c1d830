"""Papers: whatever is not just as it was signed is one refusal, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.core.api.config import MAX_AMENDMENTS, Amendment, Going
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.papers import (
    MAX_NOTICE_BYTES,
    Admission,
    AdmissionFault,
    Grant,
    Notice,
    Vouch,
    admission,
    admission_fault,
    decode_notice,
    encode_notice,
    grant,
    is_true_notice,
    signed,
)
from p2pdiloco.errors import RemoteError, UserError
from p2pdiloco.identity import Identity, verify

OWNER, KEY, PEER, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in range(4))
RUN = "ab" * 32
GRANT = grant(RUN, KEY.peer_id, 1000, 2, OWNER)
ADMISSION = admission(GRANT, PEER.peer_id, KEY)
CHANGE = Amendment(1, 1 << 40, 1 << 41, 0.5, Going.PAUSE, "a word")
NOTICE = signed(
    Notice(RUN, 3, (OTHER.peer_id,), (KEY.peer_id,), (PEER.peer_id,), (Vouch(0, 9, bytes(32)),), (CHANGE,)),
    OWNER,
)


def fault(shown: Admission, peer: Identity = PEER) -> AdmissionFault | None:
    return admission_fault(shown, peer.peer_id, RUN, OWNER.peer_id, verify)


def test_an_honest_one_is_sound() -> None:
    assert fault(ADMISSION) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"run": "cd" * 32}, AdmissionFault.OTHER_RUN),
        ({"expires": 2000}, AdmissionFault.GRANT_SIGNATURE),
        ({"uses": 1000}, AdmissionFault.GRANT_SIGNATURE),
        ({"key": OTHER.peer_id}, AdmissionFault.GRANT_SIGNATURE),
        ({"key": "no peer id"}, AdmissionFault.GRANT_SIGNATURE),
        ({"signature": b""}, AdmissionFault.GRANT_SIGNATURE),
    ],
)
def test_a_changed_grant_is_nobodys(changes: dict[str, Any], expected: AdmissionFault) -> None:
    changed = msgspec.structs.replace(GRANT, **changes)
    assert fault(admission(changed, PEER.peer_id, KEY)) is expected


def test_an_admission_is_one_peers_and_of_one_key() -> None:
    assert fault(ADMISSION, OTHER) is AdmissionFault.OTHER_PEER
    assert fault(admission(GRANT, PEER.peer_id, OTHER)) is AdmissionFault.ADMISSION_SIGNATURE
    # A signature of one kind of paper is none of another.
    as_owner = msgspec.structs.replace(ADMISSION, signature=GRANT.signature)
    assert fault(as_owner) is AdmissionFault.ADMISSION_SIGNATURE


@given(st.data())
def test_flipped_bits_are_refused_or_change_nothing(data: st.DataObject) -> None:
    encoded = bytearray(wire.encode(ADMISSION))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        shown = wire.decode(bytes(encoded), Admission)
    except RemoteError:
        return
    assert shown == ADMISSION or fault(shown) is not None


@given(st.binary(max_size=200))
def test_garbage_is_one_refusal(data: bytes) -> None:
    for kind in (Grant, Admission, Notice):
        with pytest.raises(RemoteError):
            wire.decode(data, kind)
    with pytest.raises(RemoteError):
        decode_notice(data)


@given(st.data())
def test_a_changed_notice_is_nobodys(data: st.DataObject) -> None:
    assert is_true_notice(decode_notice(encode_notice(NOTICE)), RUN, OWNER.peer_id, verify)
    encoded = bytearray(encode_notice(NOTICE))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        notice = decode_notice(bytes(encoded))
    except RemoteError:
        return
    assert notice == NOTICE or not is_true_notice(notice, RUN, OWNER.peer_id, verify)


def test_a_notice_is_bounded() -> None:
    ids = tuple(Identity.from_seed(n.to_bytes(32, "big")).peer_id for n in range(1024))
    assert len(encode_notice(signed(Notice(RUN, 1, ids, ids), OWNER))) < MAX_NOTICE_BYTES
    with pytest.raises(UserError):
        encode_notice(signed(Notice(RUN, 1, ids, ids, ids), OWNER))
    with pytest.raises(RemoteError):
        decode_notice(msgspec.msgpack.encode(Notice(RUN, 1, (*ids, OWNER.peer_id))))
    with pytest.raises(RemoteError):
        decode_notice(msgspec.msgpack.encode(Notice(RUN, 1, amendments=(CHANGE,) * (MAX_AMENDMENTS + 1))))
    with pytest.raises(RemoteError):
        decode_notice(bytes(MAX_NOTICE_BYTES + 1))
