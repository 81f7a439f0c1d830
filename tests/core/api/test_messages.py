"""The wire: every message survives the trip, and nothing but a `RemoteError` comes of anything else."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_strategies import MESSAGES, messages

from p2pdiloco import WIRE_VERSION
from p2pdiloco.core.api import messages as msg
from p2pdiloco.errors import RemoteError

RUN = "run"


def refusal(data: bytes) -> str:
    with pytest.raises(RemoteError) as caught:
        msg.decode(RUN, data)
    return caught.value.reason


def packed(*parts: object) -> bytes:
    return msgspec.msgpack.encode(list(parts))


def test_every_message_has_a_strategy() -> None:
    assert set(get_args(msg.AnyMessage)) == set(MESSAGES)


@settings(max_examples=200, deadline=None)
@given(messages())
def test_round_trip(message: msg.Message) -> None:
    data = msg.encode(RUN, message)
    assert msg.decode(RUN, data) == message
    assert msg.encode(RUN, msg.decode(RUN, data)) == data


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
def test_garbage_is_refused(data: bytes) -> None:
    assert refusal(data) in ("garbage", "wire-version")


@pytest.mark.parametrize(
    "nest",
    [
        b"\x91" * 100_000,
        packed(WIRE_VERSION, RUN)[1:].join([b"\x93", b"\x91" * 100_000]),
        packed(WIRE_VERSION, RUN)[1:].join([b"\x93", b"\x81" * 100_000]),
    ],
)
def test_deep_nesting_is_garbage(nest: bytes) -> None:
    assert refusal(nest) == "garbage"


@settings(max_examples=60, deadline=None)
@given(messages(), st.data())
def test_truncated_is_garbage(message: msg.Message, data: st.DataObject) -> None:
    whole = msg.encode(RUN, message)
    assert refusal(whole[: data.draw(st.integers(0, len(whole) - 1))]) == "garbage"


@settings(max_examples=100, deadline=None)
@given(messages(), st.data())
def test_damage_never_raises_anything_else(message: msg.Message, data: st.DataObject) -> None:
    whole = bytearray(msg.encode(RUN, message))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        msg.decode(RUN, bytes(whole))
    except RemoteError as error:
        assert error.reason in ("garbage", "wire-version", "other-run")


def test_oversized_is_refused_unread() -> None:
    assert refusal(bytes(msg.MAX_MESSAGE_BYTES + 1)) == "oversized"
    assert refusal(bytes(msg.MAX_MESSAGE_BYTES)) == "garbage"


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (packed(WIRE_VERSION + 1, RUN, ["Leaving", 1]), "wire-version"),
        (packed(WIRE_VERSION + 1, "another envelope altogether", 3), "wire-version"),
        (packed(WIRE_VERSION, "other", ["Leaving", 1]), "other-run"),
        (packed(WIRE_VERSION, RUN, ["Teleport", 1]), "garbage"),
        (packed(WIRE_VERSION, RUN, ["Leaving", -1]), "garbage"),
        (packed(WIRE_VERSION, RUN, ["Leaving", 1 << 63]), "garbage"),
        (packed(WIRE_VERSION, RUN, ["Leaving", "1"]), "garbage"),
        (packed(WIRE_VERSION, RUN, ["Leaving", 1, "more"]), "garbage"),
        (packed(WIRE_VERSION, RUN, ["Leaving", 1], "more"), "garbage"),
        (packed(WIRE_VERSION, RUN, ["Pass", "all", 0, 1, 1, "x" * 201]), "garbage"),
        (packed(WIRE_VERSION, RUN, ["Pass", "", 0, 1, 1, "x"]), "garbage"),
    ],
)
def test_refusal_names_what_is_wrong(wire: bytes, reason: str) -> None:
    assert refusal(wire) == reason


def test_the_wire_format_is_what_the_version_number_says() -> None:
    # If this fails, peers of two builds no longer understand each other: raise WIRE_VERSION with it.
    message = msg.Closing("all", 3, 5, 8, 0.25)
    assert WIRE_VERSION == 28
    assert msg.encode(RUN, message).hex() == (
        "931ca372756e96a7436c6f73696e67a3616c6c030508cb3fd0000000000000"
    )
