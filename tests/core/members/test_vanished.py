"""Who is not heard any more, in runs of thousands: an answer is kept until something changes."""

from __future__ import annotations

from p2pdiloco.core.api.versions import Roster
from p2pdiloco.core.members import Vanished

ROSTER = Roster((("beside", 1), ("elsewhere", 1)))
NEIGHBOURS = {"beside"}


def gone(*peers: str) -> Vanished:
    vanished = Vanished(4)
    for since_s, peer in enumerate(peers):
        vanished.add(peer, float(since_s))
    return vanished


def test_who_is_listed_elsewhere_does_not_count() -> None:
    assert gone("elsewhere", "unlisted", "beside").counting(ROSTER, NEIGHBOURS) == ["unlisted", "beside"]


def test_an_answer_is_kept_until_something_changes() -> None:
    vanished = gone("elsewhere", "unlisted", "beside")
    first = vanished.counting(ROSTER, NEIGHBOURS)
    assert vanished.counting(ROSTER, set(NEIGHBOURS)) is first
    assert vanished.counting(ROSTER, {"elsewhere"}) == ["elsewhere", "unlisted"]
    assert vanished.counting(Roster(()), set()) == ["elsewhere", "unlisted", "beside"]
    vanished.heard("unlisted")
    assert vanished.counting(ROSTER, NEIGHBOURS) == ["beside"]
    vanished.put("stranger", 9.0)
    assert vanished.counting(ROSTER, NEIGHBOURS) == ["beside", "stranger"]
    vanished.expire(5.0)
    assert vanished.counting(ROSTER, NEIGHBOURS) == ["stranger"]


def test_who_is_silent_for_too_long_is_forgotten() -> None:
    vanished = gone("a", "b", "c")
    vanished.put("a", 7.0)
    vanished.add("b", 9.0)
    vanished.expire(1.0)
    assert list(vanished) == ["a", "b", "c"], "whom we already missed was silent before"
    vanished.expire(2.0)
    assert list(vanished) == ["a", "c"]
    vanished.expire(100.0)
    assert not len(vanished)


def test_the_first_are_forgotten_beyond_the_bound() -> None:
    vanished = gone("a", "b", "c", "d", "e")
    assert vanished.full
    assert len(vanished.counting(Roster(()), set())) == 5
    vanished.shrink()
    assert list(vanished) == vanished.counting(Roster(()), set()) == ["b", "c", "d", "e"]
