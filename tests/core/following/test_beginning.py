"""Whom a newcomer with nothing believes: the owner's vouch, a peer of the join line, most members."""

from __future__ import annotations

import math
from typing import Any

import pytest
from kit import OWNER, Solo, branch, child, config, found, reasons, restored_nothing, saved, table, word

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.reasons import Basis, FetchFailure
from p2pdiloco.core.api.types import Head, Vouch
from p2pdiloco.core.api.versions import MemberList, SignedVersion
from p2pdiloco.core.distrust import Cause, backoff_s
from p2pdiloco.core.follower import FORGIVEN, WASTED_S, WASTED_TIMES, Doubts
from p2pdiloco.core.fork_choice import Grounds

HONEST, LIARS = ("a", "b", "c"), ("l1", "l2", "l3")
SEATS = ("me", *HONEST, *LIARS)
TRUE = branch(9, learners=HONEST, seats=SEATS)
FALSE = branch(12, syncer="l1", learners=LIARS, seats=SEATS)
"""It is heavier: whoever goes by weight takes it."""
ALONE_S = config().timing.resume_alone_s


def head(chain: list[SignedVersion], number: int) -> Head:
    return chain[number].header.head()


def vouch(chain: list[SignedVersion], number: int, *members: str) -> ev.Guided:
    return ev.Guided((), (Vouch(0, number, head(chain, number).digest, members),))


class Newcomer(Solo):
    """We have nothing. Of these peers some stand on the true chain, some on the forged one."""

    seats, true, false = SEATS, TRUE, FALSE

    def __init__(self, *peers: str, told: ev.Guided | None = None, **odd: Any) -> None:
        super().__init__(config(seats=self.seats, owner=OWNER), peers=(), **odd)
        self.chains: dict[str, list[SignedVersion]] = {}
        self.does_not_give: set[str] = set()
        self.hold: set[str] = set()
        """Peers of which it does not come, and does not fail."""
        self.asked: list[str] = []
        if told is not None:
            self.run(self.feed(told))
        self.meet(*peers)

    def meet(self, *peers: str) -> None:
        """These are listed, and heard."""
        self.peers = (*self.peers, *peers)
        for peer in peers:
            chain = self.false if peer in LIARS else self.true
            self.chains[peer] = chain
            self.says[peer] = {"heads": (chain[-1].header.head(),)}
        self.run(self.feed(ev.PresenceSeen(MemberList(tuple((p, 1) for p in (*self.peers, "me"))))))
        for peer in peers:
            self.run(self.hear(peer))

    def run(self, effects: list[ev.Effect]) -> None:
        """Everybody gives what it is asked for, but for those who do not."""
        while effects:
            asked, effects = effects, []
            for pull in (*found(asked, ev.FetchState), *found(asked, ev.FetchUpdate)):
                self.asked.append(pull.peer)
                if pull.peer in self.hold:
                    continue
                if pull.peer in self.does_not_give:
                    effects += self.answer(pull, ev.FetchFailed(FetchFailure.UNREACHABLE))
                    continue
                version = self.chains[pull.peer][-1]
                if isinstance(pull, ev.FetchState):  # updates are slow: none comes
                    effects += self.answer(pull, ev.StateFetched(version, table(version)))

    def live(self, seconds: float) -> None:
        """Time passes, in which everybody gives."""
        end = self.now + seconds
        while self.now < end:
            self.run(self.wait(0.5))

    @property
    def grounds(self) -> Grounds | None:
        return self.fragment.follower.heads.grounds

    @property
    def basis(self) -> Basis | None:
        return self.grounds.basis if self.grounds else None


# --- what most stand on ---------------------------------------------------------------------------------


def test_without_any_word_what_most_members_stand_on_is_taken() -> None:
    solo = Newcomer("l1", "a", "b")
    assert solo.core.confirmed and solo.head == head(TRUE, 9)
    assert solo.grounds == Grounds(Basis.MOST, 2, 3)
    assert solo.asked[0] != "l1", "its chain is the heaviest, and is not asked for first"


def test_who_comes_first_is_not_believed_before_the_others_had_the_time_to_speak() -> None:
    solo = Solo(peers=())
    roster = MemberList(tuple((p, 1) for p in ("l1", "a", "b", "me")))
    solo.feed(ev.PresenceSeen(roster))
    effects = solo.hear("l1", heads=(head(FALSE, 12),))
    assert not found(effects, ev.FetchState)
    wait_s = solo.config.timing.genesis_wait_s
    solo.peers, solo.says = ("l1",), {"l1": {"heads": (head(FALSE, 12),)}}
    assert not found(solo.wait(wait_s - 0.1), ev.FetchState)
    assert found(solo.wait(0.7), ev.FetchState), "but nobody waits for ever"


def test_members_some_versions_apart_stand_on_one_chain() -> None:
    solo = Newcomer()
    solo.peers = ("a", "b", "l1")
    solo.feed(ev.PresenceSeen(MemberList((("a", 1), ("b", 1), ("l1", 1)))))
    solo.chains = {"a": TRUE, "b": TRUE, "l1": FALSE}
    solo.run(solo.hear("l1", heads=(head(FALSE, 12),)))
    solo.run(solo.hear("a", heads=(head(TRUE, 7),)))
    solo.run(solo.hear("a", heads=(head(TRUE, 9),)))
    solo.run(solo.hear("b", heads=(head(TRUE, 8),)))
    assert not solo.asked, "no two say the same: the heaviest would win"
    solo.run(solo.hear("b", heads=(head(TRUE, 7),)))
    assert solo.asked == ["b"], "a was there, too"


def test_what_our_chain_contains_is_not_fetched_however_long_nobody_comes_to_stand_on_its_head() -> None:
    solo = Newcomer()
    for version in TRUE[1:]:
        solo.fragment.chain.extend(version)
    solo.fragment.follower.heads.moved(False, solo.now)
    solo.run(solo.hear("a", heads=(head(TRUE, 7),)))
    solo.live(2 * ALONE_S)
    assert solo.core.confirmed and not solo.asked


def test_where_nobody_agrees_the_heaviest_is_taken_at_last() -> None:
    solo = Newcomer("l1", "a")
    solo.live(ALONE_S - 1.0)
    assert not solo.asked
    solo.live(2.0)
    assert solo.head == head(FALSE, 12) and solo.grounds == Grounds(Basis.MOST, 1, 2)


def test_the_name_of_a_true_head_gets_a_forged_one_no_voice() -> None:
    """A liar names what the others hold, then its own."""
    solo = Newcomer()
    solo.feed(ev.PresenceSeen(MemberList((("a", 1), ("b", 1), ("l1", 1)))))
    solo.chains = {"a": TRUE, "b": TRUE, "l1": FALSE}
    solo.hear("l1", heads=(head(TRUE, 9),))
    solo.hear("l1", heads=(head(FALSE, 12),))
    solo.hear("a", heads=(head(TRUE, 9),))
    solo.run(solo.hear("b", heads=(head(TRUE, 9),)))
    assert solo.head == head(TRUE, 9)


def test_who_stands_on_the_true_head_and_gives_a_forged_state_wins_a_moment_only() -> None:
    solo = Newcomer()
    solo.peers = ("a", "b", "l1")
    solo.does_not_give = {"a", "b"}
    for peer in solo.peers:
        solo.says[peer] = {"heads": (head(TRUE, 9),)}
    solo.chains = {"a": TRUE, "b": TRUE, "l1": FALSE}
    solo.feed(ev.PresenceSeen(MemberList(tuple((p, 1) for p in solo.peers))))
    for peer in solo.peers:
        solo.run(solo.hear(peer))
    solo.live(3.0)
    assert solo.head == head(FALSE, 12) and not solo.core.confirmed, "nobody stands on it"
    solo.does_not_give = set()
    later = child(TRUE[9].header, learners=HONEST)
    solo.chains |= {"a": [*TRUE, later], "b": [*TRUE, later]}
    for peer in ("a", "b"):
        solo.says[peer] = {"heads": (later.header.head(),)}
    solo.live(Timing().settle_s + 2.0)
    assert solo.core.confirmed and solo.head == later.header.head(), "though it is lighter"


def test_at_version_0_who_says_that_it_is_there_confirms_nobody() -> None:
    solo = Newcomer()
    solo.feed(ev.PresenceSeen(MemberList((("a", 1), ("b", 1), ("l1", 1)))))
    solo.hear("l1", heads=(head(TRUE, 0),))
    assert not solo.core.confirmed, "else it would follow anybody from here on"
    solo.hear("a", heads=(head(TRUE, 9),))
    effects = solo.hear("b", heads=(head(TRUE, 9),))
    assert not solo.core.confirmed and found(effects, ev.FetchState)


# --- what a peer of the join line stands on -------------------------------------------------------------


def test_a_peer_of_the_join_line_goes_before_most_members() -> None:
    solo = Newcomer("l1", "l2", "l3", "a", told=ev.Guided(("a",)))
    assert solo.core.confirmed and solo.head == head(TRUE, 9)
    assert solo.grounds == Grounds(Basis.JOINED, 1, 1, "a") and solo.asked[0] == "a"


def test_it_is_greeted_and_waited_for() -> None:
    solo = Newcomer()
    greeted = [send.peer for send in found(solo.feed(ev.Guided(("a",))), ev.Send)]
    assert greeted == ["a"], "it may be listed much later"
    solo.meet("l1", "l2")
    solo.live(ALONE_S - 2.0)
    assert not solo.asked
    solo.meet("a")
    assert solo.head == head(TRUE, 9) and solo.basis is Basis.JOINED


@pytest.mark.parametrize("gone", [True, False])
def test_one_that_is_gone_or_gives_nothing_keeps_nobody_for_ever(gone: bool) -> None:
    solo = Newcomer(told=ev.Guided(("b",)))
    solo.does_not_give = {"b"}
    solo.meet("a", "c", *(() if gone else ("b",)))
    solo.does_not_give = {"a", "b", "c"}
    solo.live(5.0)
    solo.does_not_give = {"b"}
    solo.live(ALONE_S)
    assert solo.core.confirmed and solo.head == head(TRUE, 9)


def test_one_that_gives_slowly_is_not_given_up() -> None:
    solo = Newcomer(told=ev.Guided(("a",)))
    solo.hold = {"a"}
    solo.meet("a", "l1", "l2", "l3")
    solo.live(2 * ALONE_S)
    assert solo.asked == ["a"] and not solo.core.confirmed
    solo.answer(ev.FetchState, ev.StateFetched(TRUE[-1], table(TRUE[-1])))
    assert solo.core.confirmed and solo.head == head(TRUE, 9) and solo.basis is Basis.JOINED


def test_a_joined_peer_that_is_new_itself_is_not_waited_for() -> None:
    solo = Newcomer(told=ev.Guided(("x",)))
    solo.hear("x", confirmed=False)
    solo.meet("a", "b")
    assert solo.head == head(TRUE, 9) and solo.basis is Basis.MOST


# --- what the owner vouched for -------------------------------------------------------------------------


def test_who_the_owner_vouched_for_goes_before_all_others() -> None:
    solo = Newcomer("l1", "l2", "l3", "a", told=vouch(TRUE, 4, "a", "b"))
    assert solo.core.confirmed and solo.head == head(TRUE, 9)
    assert solo.grounds == Grounds(Basis.VOUCHED, 1, 1)
    solo = Newcomer("l1", "a", told=ev.Guided(("l1",), vouch(TRUE, 4, "a").vouches))
    assert solo.head == head(TRUE, 9), "also before a peer of the join line"


def test_of_vouched_members_most_decide() -> None:
    solo = Newcomer("l1", "a", "b", told=vouch(TRUE, 4, "l1", "a", "b"))
    assert solo.head == head(TRUE, 9) and solo.grounds == Grounds(Basis.VOUCHED, 2, 3)


LATER = tuple(word(peer) for peer in ("b", "c", "d"))


class OfFourFounders(Newcomer):
    """Three of the four seats that founded the run tell another history, of which a version is final. Three
    more had their seats from the owner since."""

    seats = ("a", *LIARS)
    true = branch(9, syncer="a", learners=("a",), seats=seats, papers=LATER)
    false = branch(17, syncer="l1", learners=LIARS, seats=seats, attest=LIARS)


@pytest.mark.parametrize(
    ("told", "believed"),
    [
        pytest.param(vouch(OfFourFounders.true, 8, "a"), OfFourFounders.true, id="vouched"),
        pytest.param(ev.Guided(("a",), ()), OfFourFounders.true, id="joined-through-the-fourth"),
        pytest.param(ev.Guided(papers=LATER), OfFourFounders.true, id="has-the-owner's-notice"),
        pytest.param(None, OfFourFounders.false, id="told-nothing"),
    ],
)
def test_most_founding_seats_mislead_a_newcomer_only_where_it_was_told_nothing(
    told: ev.Guided | None, believed: list[SignedVersion]
) -> None:
    assert OfFourFounders.false[-1].header.finality.final.number == 8
    solo = OfFourFounders(*LIARS, "a", "b", "c", "d", told=told)
    assert solo.core.confirmed and solo.head == believed[-1].header.head()


def test_with_none_of_them_here_a_newcomer_waits_and_says_so() -> None:
    solo = Newcomer("l1", "l2", "l3", told=vouch(TRUE, 4, "a", "b"))
    solo.live(5 * ALONE_S)
    assert not solo.asked and not solo.core.confirmed
    assert "the run's owner vouched for" in solo.core.waits_for(solo.now)
    solo.meet("a")
    assert solo.head == head(TRUE, 9) and solo.core.confirmed


@pytest.mark.parametrize("number", [9, 20])
def test_a_member_that_stands_on_something_else_than_was_vouched_for_is_not_followed(number: int) -> None:
    vouched = branch(20, learners=("b",), seats=SEATS)
    solo = Newcomer("a", told=vouch(vouched, number, "a", "b"))
    solo.live(2 * ALONE_S)
    assert not solo.asked and not solo.core.confirmed


def test_nobody_starts_a_run_anew_for_which_its_owner_has_vouched() -> None:
    solo = Solo(peers=("x",), genesis=True, confirmed=False)
    solo.feed(vouch(TRUE, 4, "a"))
    solo.wait(2 * ALONE_S)
    assert not solo.core.confirmed
    solo.feed(ev.Guided())
    solo.wait(2 * ALONE_S)
    assert solo.core.confirmed, "the owner has taken it back"


def test_a_vouch_that_is_heard_while_something_is_under_way_refuses_that() -> None:
    solo = Newcomer()
    solo.hold = {"l1", "l2"}
    solo.meet("l1", "l2")
    solo.run(solo.feed(vouch(TRUE, 4, "a", "b")))
    effects = solo.answer(ev.FetchState, ev.StateFetched(FALSE[-1], table(FALSE[-1])))
    assert solo.head.number == 0 and reasons(effects, "catchup") == ["not taken: unsupported"]


def test_a_vouch_that_is_heard_later_is_looked_at_again() -> None:
    solo = Newcomer("l1", "l2")
    assert solo.core.confirmed and solo.head == head(FALSE, 12) and solo.basis is Basis.MOST
    solo.run(solo.feed(vouch(TRUE, 4, "a", "b")))
    solo.live(2.0)
    assert solo.head == head(FALSE, 12), "there is nothing else yet"
    solo.meet("a", "b")
    solo.live(Timing().settle_s + 2.0)
    assert solo.head == head(TRUE, 9) and solo.basis is Basis.VOUCHED, "though it is lighter"


def test_a_later_vouch_for_what_we_hold_changes_nothing_but_the_grounds() -> None:
    solo = Newcomer("a", "b")
    asked = list(solo.asked)
    solo.run(solo.feed(vouch(TRUE, 9, "a", "b")))
    solo.live(2.0)
    assert solo.asked == asked and solo.basis is Basis.VOUCHED


def test_of_several_fragments_the_weakest_grounds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    solo = Solo(config(3))
    for fragment, basis in zip(solo.core.fragments, (Basis.VOUCHED, Basis.MOST, Basis.JOINED), strict=True):
        monkeypatch.setattr(fragment.follower.heads, "grounds", Grounds(basis, 1, 1))
    assert solo.core.grounds == Grounds(Basis.MOST, 1, 1)


def test_who_comes_with_a_state_goes_by_its_own_chain() -> None:
    solo = Solo(
        peers=("a",), restored=saved(branch(4, learners=("me", "a"), seats=SEATS)), heads=(head(TRUE, 9),)
    )
    solo.feed(vouch(FALSE, 4, "l1"))
    assert solo.fragment.follower.heads.grounds is None
    assert set(solo.fragment.follower.heads.look(solo.now)) == {"a"}
    assert restored_nothing(solo.config).saved is False


# Holders that failed: left alone, but not where only they have what is wanted.


FIRST_S = Cause.GAVE_NOTHING.value[1]


def failing(times: int, waited_s: float = 0.0) -> tuple[Doubts, float]:
    """Our doubts about a holder that failed so many times, and when it is asked again."""
    doubts, now = Doubts(), 0.0
    for _ in range(times):
        doubts.add("a", 0.3, now, waited_s)
        now = doubts.first_s(["a"]) or 0.0
    return doubts, now


def test_a_doubted_holder_comes_after_those_that_did_not_fail() -> None:
    """Its pause was as long as the one before anybody was asked, so it was asked every time."""
    doubts, _ = failing(1)
    assert doubts.open(["a", "b"], 1e6) == {"b"}, "as long as somebody else has it"
    assert doubts.first_s(["a", "b"]) == -math.inf, "and those do not wait for it"


def test_one_damaged_payload_of_the_only_holder_costs_seconds() -> None:
    """Storm seed 13360: nobody else had it, and it was not asked for half a minute."""
    doubts, first_s = failing(1)
    assert first_s < 5.0
    assert doubts.open(["a"], first_s - 0.1) == set()
    assert doubts.open(["a"], first_s) == {"a"}
    doubts.drop("a")
    assert doubts.open(["a"], 0.0) == {"a"}


def test_who_goes_on_failing_is_asked_ever_more_rarely() -> None:
    doubts, last_s = failing(9)
    assert failing(10)[1] - last_s == 16 * FIRST_S
    assert sum(failing(count)[1] < 600.0 for count in range(1, 40)) < 25, "and yet again and again"
    assert doubts.open(["a"], last_s - 1.0) == set()


def test_who_let_us_wait_for_nothing_waits_in_turn() -> None:
    patient_s = failing(FORGIVEN)[1]
    assert failing(FORGIVEN, waited_s=15.0)[1] == patient_s < 20.0
    assert failing(FORGIVEN + 1, waited_s=15.0)[1] == patient_s + WASTED_TIMES * 15.0
    assert failing(FORGIVEN + 1, waited_s=math.inf)[1] == patient_s + WASTED_S, "whatever it gave"


def test_many_that_fail_are_not_asked_one_after_the_other() -> None:
    doubts = Doubts()
    for i in range(20):
        doubts.add(f"liar {i}", 0.3, now=100.0)
    assert doubts.open(["liar 0"], 101.0 + FIRST_S) == set(), "its own pause is over"
    assert doubts.first_s(["liar 0"]) == 100.0 + 16 * 0.3
    assert doubts.open(["liar 0", "honest"], 101.0) == {"honest"}


def test_damage_on_the_way_after_other_failures_costs_no_more_than_those() -> None:
    doubts = Doubts()
    for _ in range(FORGIVEN):
        doubts.add("a", 0.3, now=100.0)
    doubts.add("a", 0.3, now=100.0, waited_s=math.inf)
    assert doubts.first_s(["a"]) == 100.0 + backoff_s(FIRST_S, FORGIVEN + 1)


def slow(*others: str) -> tuple[Solo, str, list[ev.Effect]]:
    """One of these gives nothing of an update for unusually long; who was asked, and what came then."""
    solo, update = Solo(peers=("p1", "p2", "p3")), branch(1)[1]
    for peer in ("p1", *others):
        solo.says[peer] = {"heads": (update.header.head(),)}
    asked = found(solo.hear("p1"), ev.FetchUpdate)[0].peer
    assert solo.fragment.context.spare.busy
    solo.wait(ALONE_S - 1.0)
    return solo, asked, solo.wait(2.0)


def test_a_slow_holder_is_left_alone_where_another_has_it_too() -> None:
    solo, asked, effects = slow("p2")
    (cut,) = found(effects, ev.CutShort)
    assert cut.token == next(ask.token for ask in solo.unanswered if isinstance(ask.effect, ev.FetchUpdate))
    effects = solo.answer(ev.FetchUpdate, ev.FetchFailed(FetchFailure.SLOW)) + solo.wait(1.0)
    assert asked == "p1" and [effect.peer for effect in found(effects, ev.FetchUpdate)] == ["p2"]


def test_nothing_waits_for_a_slow_holder_that_is_the_only_one() -> None:
    solo, _, effects = slow()
    assert not found(effects, ev.CutShort) and not solo.fragment.context.spare.busy, "rounds may be merged"
    solo.says["p2"] = {"heads": (branch(1)[1].header.head(),)}
    assert found(solo.hear("p2") + solo.wait(1.0), ev.CutShort)


def test_what_came_before_it_was_cut_short_counts() -> None:
    solo, _, _ = slow("p2")
    effects = solo.answer(ev.FetchUpdate, ev.UpdateFetched(branch(1)[1], 900))
    assert found(effects, ev.ApplyUpdate)


def test_slow_is_what_takes_several_times_as_long_as_usual() -> None:
    solo = Solo(peers=("p1", "p2"))
    for number, update in enumerate(branch(4)[1:4]):
        for peer in ("p1", "p2"):
            solo.says[peer] = {"heads": (update.header.head(),)}
        solo.hear("p1")
        solo.hear("p2")
        solo.wait(2.0, silent=("p1", "p2"))
        if number < 2:
            solo.answer(ev.FetchUpdate, ev.UpdateFetched(update, 900 + number))
            solo.answer(ev.ApplyUpdate, ev.UpdateApplied(update.header.state_digest))
    assert not found(solo.wait(5.5, silent=("p1", "p2")), ev.CutShort)
    assert found(solo.wait(1.5, silent=("p1", "p2")), ev.CutShort), "4 times 2 s"
