"""Bytes of a month, over lives, kills and clocks that are set."""

import datetime
import json
from concurrent.futures import Future

import pytest
from daemon_kit import at_once

from p2pdiloco.daemon.owner.wishes import (
    AHEAD_BYTES,
    BOOK_FILE,
    MONTHS,
    Counts,
    TransferBook,
    month_ends,
    month_of,
)

NOV, DEC = (datetime.datetime(2026, month, 28, 12).timestamp() for month in (11, 12))


def test_bytes_are_counted_over_lives(tmp_path):
    for life in (1, 2):
        book = TransferBook(tmp_path, at_once)
        book.begin()
        for look in range(1, 4):
            book.look((look * 1000, look * 100), float(look), NOV + look)
        assert book.month(NOV) == Counts(life * 3000, life * 300)
        book.close()
    again = TransferBook(tmp_path, at_once)
    again.begin()  # another transport counts from nothing
    again.look((5, 5), 1.0, NOV)
    assert again.month(NOV).total == 6610 and again.month(DEC).total == 0


@pytest.mark.parametrize("rate", [10_000, 5_000_000, 300_000_000])
def test_a_kill_costs_the_owner_some_bytes_and_never_gives_any(tmp_path, rate):
    book, moved = TransferBook(tmp_path, at_once), 0
    book.begin()
    for look in range(1, 50):
        moved = look * rate
        book.look((moved // 50, moved - moved // 50), float(look), NOV + look)
        kept = TransferBook(tmp_path, at_once).month(NOV).total  # as after SIGKILL
        assert moved <= kept <= moved + max(AHEAD_BYTES, 5 * rate)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_disk_is_written_seldom(tmp_path):
    book = TransferBook(tmp_path, at_once)
    book.begin()
    book.look((1000, 1000), 1.0, NOV)
    before = (tmp_path / BOOK_FILE).stat().st_mtime_ns
    for look in range(2, 1000):
        book.look((look * 1000, look * 1000), float(look), NOV)
    assert (tmp_path / BOOK_FILE).stat().st_mtime_ns == before


def test_a_new_month_begins_with_nothing(tmp_path):
    book = TransferBook(tmp_path, at_once)
    book.begin()
    book.look((1000, 0), 1.0, NOV)
    book.look((1500, 0), 1.0 + DEC - NOV, DEC)
    assert (book.month(NOV).sent, book.month(DEC).sent) == (1500, 500)
    assert (month_of(NOV), month_ends(NOV), month_ends(DEC)) == (
        "2026-11",
        "2026-12-01 00:00",
        "2027-01-01 00:00",
    )


def test_years_of_months_are_kept_and_no_more(tmp_path):
    book = TransferBook(tmp_path, at_once)
    for month in range(MONTHS + 5):
        wall = NOV + month * 31 * 86400
        book.look((month + 1, 0), wall, wall)
    kept = json.loads((tmp_path / BOOK_FILE).read_text())["months"]
    assert len(kept) == MONTHS and month_of(wall) in kept and month_of(NOV) not in kept


def test_a_clock_that_is_set_back_gives_no_second_budget(tmp_path):
    book = TransferBook(tmp_path, at_once)
    book.begin()
    book.look((1000, 0), 1.0, DEC)
    book.look((1200, 0), 2.0, NOV)
    assert book.month(NOV).total >= 1200
    book.close()
    assert TransferBook(tmp_path, at_once).month(NOV).total >= 1200


def test_a_clock_that_was_wrong_at_first_takes_its_bytes_along(tmp_path):
    book = TransferBook(tmp_path, at_once)
    book.begin()
    book.look((1000, 0), 1.0, 0.0)  # 1970, before it knows the time
    book.look((1100, 0), 2.0, NOV)
    assert book.month(NOV).total == 1100


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"months":{"2026-11":{"sent":-1}}}', b"\xff" * 100])
def test_a_damaged_book_is_set_aside(tmp_path, content):
    if content is None:
        (tmp_path / BOOK_FILE).mkdir()
    else:
        (tmp_path / BOOK_FILE).write_bytes(content)
    book = TransferBook(tmp_path, at_once)
    book.begin()
    book.look((10, 10), 1.0, NOV)
    assert book.month(NOV).total == 20
    assert json.loads((tmp_path / BOOK_FILE).read_text())["months"]


def test_while_a_slow_disk_writes_bytes_are_counted_and_nothing_else_is_written(tmp_path):
    begun = []

    def begin(work):
        begun.append((work, Future()))
        return begun[-1][1]

    book = TransferBook(tmp_path, begin)
    book.begin()
    for look in range(1, 30):
        book.look((look * 20_000_000, 0), float(look), NOV + look)
    assert len(begun) == 1 and book.month(NOV).sent == 29 * 20_000_000
    work, done = begun[0]
    done.set_result(work())
    book.look((600_000_000, 0), 30.0, NOV + 30)
    assert len(begun) == 2, "what came meanwhile is written next"
    begun[1][1].set_result(begun[1][0]())
    book.close()
    assert TransferBook(tmp_path, begin).month(NOV).sent == 600_000_000
