"""The address book is bounded, and who was met stays longer than who was only heard of."""

import pytest

from p2pdiloco.adapters.net import address_book
from p2pdiloco.adapters.net.address_book import AddressBook


def test_the_book_keeps_whom_we_met_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_book, "MAX_PEERS", 3)
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
