"""The address book is bounded, and who was met stays longer than who was only heard of; whom to reach."""

from unittest.mock import AsyncMock, Mock

import pytest

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.hivemind_net import Meeting
from p2pdiloco.adapters.multiaddrs import AddressBook
from p2pdiloco.errors import NobodyReached
from p2pdiloco.identity import Identity


def test_the_book_keeps_whom_we_met_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiaddrs, "MAX_PEERS", 3)
    book = AddressBook()
    book.met("met", ["m"])
    book.heard_of("heard", ["h"])
    book.heard_of("heard", ["h2"])
    book.met("again", ["a"])
    assert book.addresses_of("heard") == ["h2"] and book.addresses_of("nobody") == []
    book.heard_of("too many", ["t"])
    assert book.addresses_of("too many") == []
    book.met("fourth", ["f"])
    assert book.addresses_of("heard") == []
    assert list(book.latest(2)) == [("again", ["a"]), ("fourth", ["f"])]


async def test_peers_that_do_not_answer_yet_are_no_error_to_who_may_be_alone() -> None:
    peer = Identity.generate().peer_id
    attachment, records = Mock(connect=AsyncMock(return_value=None)), Mock(join=AsyncMock(return_value=[]))
    meeting = Meeting("me", [f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"], [])
    with pytest.raises(NobodyReached, match="none of them answers"):
        await meeting.join_initial(attachment, records)
    await meeting.join_initial(attachment, records, may_be_alone=True)
    assert meeting.connected == {peer}, "it is pinged every few seconds from now on"
