"""Which heads a heartbeat carries, and what its receivers make of it."""

from __future__ import annotations

import pytest
from kit import Solo, config, genesis, progress, reasons, sent
from msgspec.structs import replace

from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.types import Head
from p2pdiloco.core.members import View
from p2pdiloco.core.membership import ROUND_BEATS, SAID_BEATS, News, in_one

MANY = 40
SOME = 10
"""Fragments of a whole node, which takes its time for each."""


class Chain:
    """As much of one as its head."""

    def __init__(self, index: int) -> None:
        self.head = Head(0, bytes([index]) * 32, 0, 0)


def chains() -> list[Chain]:
    return [Chain(index) for index in range(MANY)]


def quiet(made: list[Chain]) -> News:
    """Of nodes whose heads have all been said."""
    news = News(made)  # type: ignore[arg-type]
    for _ in range(SAID_BEATS):
        assert len(news.beat()) == MANY
    return news


def test_a_change_is_said_several_times_and_the_rest_in_turn() -> None:
    made = chains()
    news = quiet(made)
    made[7].head = Head(1, bytes(32), 10, 1)
    beats = [news.beat() for _ in range(ROUND_BEATS)]
    assert [(7, made[7].head) in beat for beat in beats[:SAID_BEATS]] == [True] * SAID_BEATS
    assert {index for beat in beats for index, _ in beat} == set(range(MANY))
    assert max(len(beat) for beat in beats) <= 1 + -(-MANY // ROUND_BEATS)
    assert all(list(beat) == sorted(beat, key=lambda said: said[0]) for beat in beats)


@pytest.mark.parametrize("every", [2, 3, 4, 6, 8, 16])
def test_what_changed_in_beats_that_reached_nobody_is_said_again_though_some_are_missing(every: int) -> None:
    for missing in range(every):
        made = chains()
        news = quiet(made)
        for beat in range(3 * ROUND_BEATS):
            said = news.beat()
            if beat % every != missing:
                made = [chain for chain in made if (chain.head.digest[0], chain.head) not in said]
        assert not made, f"every {every}. beat, from {missing} on, is missing"


def test_whoever_is_new_is_told_everything() -> None:
    made = chains()
    news = quiet(made)
    news.all_anew()
    assert len(news.beat()) == MANY


def solo_of_many() -> Solo:
    solo = Solo(config(fragments=SOME))
    solo.wait(ROUND_BEATS * 0.5)
    return solo


def test_heartbeats_to_members_are_short_and_to_whoever_was_silent_whole() -> None:
    solo = solo_of_many()
    assert solo.core.confirmed
    beats = sent(solo.wait(4.0), msg.Progress, "p1")
    assert beats and all(len(beat.heads) <= 2 + SOME // ROUND_BEATS for beat in beats)
    solo.wait(Timing().member_ttl_s, silent=("p2",))
    again = sent(solo.wait(2 * Timing().redial_s, silent=("p2",)), msg.Progress, "p2")
    assert again and all(len(beat.heads) == SOME for beat in again), "it may have forgotten us"


def test_a_newcomer_and_one_that_was_restarted_are_answered_with_all_heads() -> None:
    solo = solo_of_many()
    for peer, incarnation in (("p9", 1), ("p1", 2)):
        effects = solo.message(peer, progress(solo.heads(), incarnation=incarnation, confirmed=False))
        assert [len(said.heads) for said in sent(effects, msg.Progress, peer)] == [SOME], peer


def test_what_a_short_heartbeat_does_not_say_is_as_last_heard() -> None:
    view, heads = View("me", Timing()), tuple(genesis(index).header.head() for index in range(3))
    view.heard("p1", progress(heads), 0.0)
    newer = Head(1, bytes(32), 10, 1)
    assert view.heard("p1", msg_of(((1, newer),)), 0.5)
    assert view.heads("p1") == [(0, heads[0]), (1, newer), (2, heads[2])]
    assert view.head("p1", 1) == newer and view.head("p2", 1) is None
    assert view.heard("p1", msg_of((), incarnation=2), 1.0)
    assert view.heads("p1") == [], "it may have come back with an older state"


def msg_of(heads: tuple[tuple[int, Head], ...], incarnation: int = 1) -> msg.Progress:
    return replace(progress((), incarnation=incarnation), heads=heads)


def test_a_heavier_head_said_once_is_followed_though_the_next_heartbeats_are_silent_about_it() -> None:
    solo = Solo(config(fragments=2))
    ahead = Head(3, b"\x07" * 32, 300, 2)
    solo.message("p1", msg_of(((1, ahead),)))
    solo.message("p1", msg_of(()))
    assert solo.core.fragments[1].follower.behind(solo.now)
    assert not solo.core.fragments[0].follower.behind(solo.now)


def test_heads_out_of_order_twice_or_of_no_fragment_are_refused() -> None:
    solo = Solo(config(fragments=2))
    head = solo.heads()[0]
    for said in (((1, head), (0, head)), ((1, head), (1, head)), ((2, head),)):
        assert reasons(solo.message("p1", msg_of(said)), "refusal") == ["wrong-heads"], said


def test_a_heartbeat_that_was_not_sent_goes_out_in_the_next() -> None:
    old, new = Head(1, bytes(32), 10, 1), Head(2, bytes(32), 20, 1)
    joined = in_one(msg_of(((1, old), (3, old))), msg_of(((0, new), (1, new))))
    assert joined.heads == ((0, new), (1, new), (3, old))
    assert in_one(msg_of(((1, old),)), msg_of((), incarnation=2)).heads == (), "of an earlier life"
