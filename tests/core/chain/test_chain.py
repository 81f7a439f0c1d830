"""One fragment's chain: forwards only, a bounded log, watermarks that everybody computes alike."""

from __future__ import annotations

import math
from weakref import ref

import msgspec
import pytest
from kit import SEATS, Solo, branch, child, config, contribution, digest, found, genesis, sign
from msgspec.structs import replace
from scenes import one_round, syncer

from p2pdiloco.core import chain as scale
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import versions
from p2pdiloco.core.api.reasons import Verdict, VersionFault
from p2pdiloco.core.api.types import (
    FULL_TRUST,
    LEAST_TRUST,
    NEVER,
    NOTHING,
    UNMEASURED,
    Contributor,
    Head,
    Seat,
    Stamp,
    Watermark,
)
from p2pdiloco.core.api.versions import ALL_AT, REMEMBERED, Mean, SignedVersion, VersionHeader
from p2pdiloco.core.chain import (
    LAST_BYTES,
    WATERMARK_VERSIONS,
    Chain,
    Marks,
    copy_mark,
    earned,
    founding,
    marks_of,
)
from p2pdiloco.credits import FragmentLedger, HistoryRecord
from p2pdiloco.errors import InvariantViolation


def grown(length: int, keep: int = 3) -> Chain:
    chain = Chain((genesis(0),), (), keep, SEATS)
    for version in branch(length)[1:]:
        chain.extend(version)
    return chain


def test_extends_by_its_child_only() -> None:
    chain = grown(2)
    assert chain.head.number == 2 and chain.head.tokens == 80
    for stranger in (branch(2)[-1], branch(4)[-1], branch(3, syncer="p2")[-1], genesis(0)):
        assert not chain.is_child(stranger.header)
        with pytest.raises(InvariantViolation):
            chain.extend(stranger)


def test_a_header_says_how_long_its_longest_contribution_is() -> None:
    header = branch(2)[-1].header
    parts = tuple(Contributor(f"p{i}", Stamp(1, i), 10, steps) for i, steps in enumerate((3, 24, 7)))
    assert msgspec.structs.replace(header, contributors=parts).longest_steps() == 24
    assert genesis(0).header.longest_steps() == 0


@pytest.mark.parametrize("others", [0, 100])
def test_a_header_is_plausible_if_all_its_contributors_are(others: int) -> None:
    header = branch(2)[-1].header
    usual = tuple(Contributor(f"q{i}", Stamp(1, i), 80, 8) for i in range(others))
    wide = Contributor("p1", Stamp(1, 1), 300, 10)
    long = msgspec.structs.replace(header, contributors=(*usual, wide))
    assert long.longest_steps() == 10
    assert [long.plausible(per_step, 8) for per_step in (30, 29, 30)] == [True, False, True]
    empty = Contributor("p1", Stamp(1, 1), 0, 10)
    assert not msgspec.structs.replace(header, contributors=(*usual, empty)).plausible(30, 8)


def test_contributors_of_a_long_header_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand simulated nodes ask it of one header that names ten thousand."""
    judged: list[int] = []
    monkeypatch.setattr(versions, "plausible_work", lambda *work: judged.append(1) is None)
    parts = tuple(Contributor(f"q{i}", Stamp(1, i), 80, 8) for i in range(40))
    header = msgspec.structs.replace(branch(2)[-1].header, contributors=parts)
    assert all(header.plausible(10, 8) for _ in range(3))
    assert len(judged) == 40


def test_many_long_headers_are_told_apart() -> None:
    header = branch(2)[-1].header
    parts = tuple(Contributor(f"q{i}", Stamp(1, i), 80, 8) for i in range(40))
    headers = [msgspec.structs.replace(header, contributors=parts, number=n) for n in range(2, 202)]
    first = [one.digest() for one in headers]
    assert len(set(first)) == 200 and [one.digest() for one in headers] == first


def test_needs_a_version_to_start_with() -> None:
    with pytest.raises(InvariantViolation):
        Chain((), (), 3)


def test_keeps_the_log_that_was_asked_for() -> None:
    chain = grown(6, keep=3)
    assert [v.header.number for v in chain.logged_all()] == [3, 4, 5, 6]
    kept = branch(6)
    assert chain.knows(3, kept[3].header.digest()) and chain.logged(3) == kept[3]
    assert not chain.knows(2, kept[2].header.digest()) and chain.logged(2) is None
    assert not chain.knows(5, kept[4].header.digest())


def test_restored_from_its_log_it_is_the_same() -> None:
    chain = grown(5)
    again = Chain(chain.logged_all(), chain.marks.table, 3)
    assert (again.head, again.marks.table, again.logged_all()) == (
        chain.head,
        chain.marks.table,
        chain.logged_all(),
    )


def test_replaced_by_a_heavier_chain_only() -> None:
    chain = grown(3)
    with pytest.raises(InvariantViolation):
        chain.replace(branch(3)[-1], ())
    with pytest.raises(InvariantViolation):
        chain.replace(branch(2, syncer="p2")[-1], ())
    other = branch(2, learners=("p1", "p2", "p3"))[-1]
    marks = (Watermark("p3", Stamp(1, 2), 2),)
    chain.replace(other, marks)
    assert chain.head == other.header.head() and chain.head.number == 2
    assert chain.logged_all() == (other,), "the ancestors of another chain are unknown"
    assert chain.marks.stamp("p3") == Stamp(1, 2) and chain.marks.stamp("p1") == NEVER


def test_weight_is_tokens_then_term_then_digest() -> None:
    low, high = bytes(32), b"\1" + bytes(31)
    rising = [Head(9, high, 1, 9), Head(1, high, 2, 1), Head(1, low, 2, 2), Head(1, high, 2, 2)]
    assert sorted(rising, key=lambda h: h.weight) == rising


def test_watermarks_follow_the_contributors() -> None:
    chain = grown(1)
    header = child(chain.header, learners=("p1", "s1")).header
    marks, once = chain.marks_after(header).table, Mean().after(UNMEASURED)
    seats = [Watermark(peer, NEVER, 0, 0, 0, Seat(place)) for place, peer in enumerate(SEATS, 1)]
    first = replace(seats[1], stamp=Stamp(1, 2), number=2, first=1, merges=2, agreement=once + 8)
    newest = Watermark("s1", Stamp(1, 2), 2, 2, 1, None, once)
    assert marks == (seats[0], first, *seats[2:], newest)
    assert chain.marks.stamp("p1") == Stamp(1, 1) and chain.marks.stamp("s1") == NEVER
    chain.extend(child(chain.header, learners=("p1", "s1")))
    assert chain.marks.table == marks


def test_work_weighs_beside_that_of_a_usual_member() -> None:
    means = {"odd": 20, "usual": 90, "young": 80, "liar": -900}
    marks = marks_of(Watermark(name, Stamp(1, 1), 1, agreement=mean) for name, mean in means.items())
    assert marks.weighs("usual") == 1.0 and marks.weighs("stranger") is None
    shares = [marks.weighs(name) for name in ("young", "odd", "liar")]
    assert shares == pytest.approx([1.0, 8 / 30, 1 / 30])


def test_tables_that_nobody_needs_any_more_are_gone() -> None:
    """A node that runs for months holds the tables of its log, not every one since the empty one."""
    marks, made = marks_of(()), []
    for number in range(1, 2 * REMEMBERED):
        marks = marks.after(number, (Contributor("a", Stamp(1, number), 40, 4),))
        made.append(ref(marks))
    assert sum(each() is not None for each in made) <= REMEMBERED + 1
    again = (Contributor("a", Stamp(1, 1), 40, 4),)
    assert marks_of(()).after(1, again) is marks_of(()).after(1, again), "worked out once"
    other = marks_of((Watermark("b", Stamp(1, 1), 1),))
    assert {mark.learner for mark in other.after(1, again).table} == {"a", "b"}, "of each parent"


def test_long_absent_learners_are_forgotten_by_all_at_once() -> None:
    start = genesis(0).header
    old = Watermark("old", Stamp(1, 1), 1)
    chain = Chain((genesis(0),), (old,), 3)
    part = (Contributor("p1", Stamp(1, 1), 40, 4),)
    kept = msgspec.structs.replace(start, number=1 + WATERMARK_VERSIONS, contributors=part)
    dropped = msgspec.structs.replace(kept, number=kept.number + 1)
    assert old in chain.marks_after(kept).table
    assert old not in chain.marks_after(dropped).table


# What is usual in a chain, and what is cut or refused by it (`core.chain`).

UNIT = 40
"""Tokens of H inner steps here."""
LENGTH = 8.0
"""Length of version 0."""


EVERYBODY = (*(f"p{i}" for i in range(50)), "a", "b", "c", "q", "new", "other")
"""Those who have a seat here."""


def start(**fields: object) -> Chain:
    """A chain of one version, whose length is known; all but strangers have a seat."""
    fields = {"norm": LENGTH, "reach": LENGTH / 4} | fields
    header = msgspec.structs.replace(genesis(0).header, **fields)
    return Chain((SignedVersion(header, b""),), founding(EVERYBODY).table, 8)


def run() -> object:
    return config(genesis_versions=(start().signed,))


def work(*tokens: int) -> tuple[Contributor, ...]:
    return tuple(
        Contributor(f"p{i}", Stamp(1, 1), each, max(1, each // 10), votes=True)
        for i, each in enumerate(tokens)
    )


def extended(chain: Chain, parts: tuple[Contributor, ...], norm: float = 1.0) -> Chain:
    found = scale.scale_after(chain, parts, run())
    stated = {"tokens": found.tokens, "unit": found.unit, "reach": found.reach}
    limits = scale.limits_after(chain, run(), [part.learner for part in parts])
    norm = min(norm, limits.longest_update)
    header = child(chain.header, seats=EVERYBODY, contributors=parts, norm=norm, limits=limits, **stated)
    chain.extend(header)
    return chain


def test_the_first_unit_is_what_h_steps_take() -> None:
    assert scale.unit_of(start().header, run()) == UNIT
    assert scale.scale_after(start(), work(40, 40, 40), run()).unit == UNIT


def test_one_of_three_moves_no_unit_and_of_two_the_smaller_counts() -> None:
    assert scale.scale_after(start(), work(40, 40, 1 << 40), run()).unit == UNIT
    assert scale.scale_after(start(), work(40, 1 << 40), run()).unit == UNIT
    assert scale.scale_after(start(), work(1, 40, 40), run()).unit == UNIT
    assert scale.scale_after(start(), work(1 << 40, 1 << 40), run()).unit == UNIT + UNIT // 8
    assert scale.scale_after(start(), work(1, 1), run()).unit == UNIT - UNIT // 16


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_strangers_move_no_unit_and_no_reach_however_few_seats_there_are(seats: int) -> None:
    ours = tuple(replace(part, length=LENGTH / 4) for part in work(*[UNIT] * seats))
    found = scale.scale_after(start(), (*ours, *strangers(*[1] * 9)), run())
    assert (found.unit, found.reach) == (UNIT, LENGTH / 4)


def strangers(*tokens: int) -> tuple[Contributor, ...]:
    """Work of learners without a seat."""
    made = enumerate(work(*tokens))
    return tuple(replace(part, learner=f"s{n}", length=1e-3, votes=False) for n, part in made)


def test_all_strangers_together_count_a_quarter_of_what_the_seats_do() -> None:
    def counted(*tokens: int) -> int:
        return scale.scale_after(start(), (*work(UNIT, UNIT), *strangers(*tokens)), run()).tokens

    assert run().open_share == 0.25
    assert counted() == 2 * UNIT and counted(5) == 2 * UNIT + 5
    assert counted(UNIT) == counted(UNIT, UNIT) == counted(1 << 60) == 2 * UNIT + UNIT // 2


def test_who_votes_is_said_rightly() -> None:
    seats = {
        "ended": Seat(1, 1, ended=9),
        "ending": Seat(2, 1, ended=95),
        "new": Seat(3, 95),
        "old": Seat(4, 1),
        "s": None,
    }
    table = tuple(Watermark(name, NEVER, 0, seat=seat) for name, seat in seats.items())
    both = {True, False}
    for groups, allowed in (
        (1, {"new": {True}, "old": {True}}),
        (4, {"new": both, "ending": both, "old": {True}}),
    ):
        header = msgspec.structs.replace(genesis(0).header, number=100, groups=groups)
        chain = Chain((SignedVersion(header, b""),), table, 8)
        for name in (*seats, "unknown"):
            mean = chain.marks.mean(name)
            parts = [Contributor(name, Stamp(1, 1), 40, 4, votes=votes) for votes in (True, False)]
            right = {
                p.votes for p in parts if scale.rightly_stated(chain, replace(p, trust=mean.trust(p.score)))
            }
            assert right == allowed.get(name, {False}), (name, groups)


def test_the_unit_has_ends() -> None:
    most = start(unit=scale.MOST_GROWTH * UNIT)
    assert scale.scale_after(most, work(1 << 50), run()).unit == scale.MOST_GROWTH * UNIT
    assert scale.scale_after(start(unit=1), work(1), run()).unit == 1


def test_a_chain_counts_no_more_than_eight_units_of_a_contribution() -> None:
    assert scale.scale_after(start(), work(40, 300), run()).tokens == 340
    assert scale.scale_after(start(), work(40, 1 << 60), run()).tokens == 40 + 8 * UNIT


def test_what_a_chain_counts_of_one_is_twice_what_it_weighs_or_twice_h_steps() -> None:
    """Of four learners, one that claims anything makes the schedule run at most one and a half times as
    fast; one that is honest and much faster than the others counts in full."""
    four = extended(start(), work(*[UNIT] * 4))
    counted = scale.scale_after(four, work(1 << 60, 40, 40, 40), run()).tokens - four.header.tokens
    assert counted == 3 * UNIT + 120
    slow = extended(start(unit=10), work(10, 10, 10, 10))
    counted = scale.scale_after(slow, work(2 * UNIT, 10, 10, 10), run()).tokens - slow.header.tokens
    assert counted == 2 * UNIT + 30


def test_who_was_away_may_bring_more_by_the_versions_between() -> None:
    chain = extended(start(), work(40))
    for number in (2, 3, 4):
        extended(chain, (Contributor("other", Stamp(1, number), 40, 4, votes=True),))

    def of(learner: str, tokens: int, steps: int = 4) -> scale.Scale:
        part = Contributor(learner, Stamp(1, 9), tokens, steps, votes=True)
        return scale.scale_after(chain, (part,), run())

    found = of("p0", 1 << 60)
    assert found.tokens == 160 + 8 * UNIT * 4, "three versions without it"
    assert of("new", 1 << 60).tokens == 160 + 320
    # What is usual is asked for each version, too.
    assert of("p0", 160, 16).unit == UNIT


def long(*lengths: float, steps: int = 4, trust: int = FULL_TRUST) -> tuple[Contributor, ...]:
    """Contributions of these lengths, H inner steps each unless it is said."""
    return tuple(
        Contributor(f"p{i}", Stamp(1, 1), 10 * steps, steps, length=length, trust=trust, votes=True)
        for i, length in enumerate(lengths)
    )


def reach(parts: tuple[Contributor, ...], number: int = 100, reach: float = 2.0) -> float:
    """What is usual after a version of these, where it was 2."""
    return scale.scale_after(start(number=number, reach=reach), parts, run()).reach


def test_the_reach_follows_the_lower_median_of_lengths_by_an_eighth_at_most() -> None:
    assert reach(long(2.0)) == 2.0
    assert reach(long(2.0, 1e30)) == reach(long(2.0, 2.0, 1e30)) == 2.0, "of two the smaller counts"
    assert reach(long(1e30)) == 2.25 and reach(long(1e-9)) == 1.875
    assert reach(long(0.0, 0.0)) == 2.0, "nothing was measured"
    least = LENGTH * 2.0**-20
    assert reach(long(1e-9), reach=least) == least


def test_the_reach_finds_its_way_at_the_beginning() -> None:
    assert reach(long(0.1, 0.1), number=0) == reach(long(0.1, 0.1), number=8) == 1.5
    assert reach(long(1e30), number=8) == 3.0


def test_lengths_count_as_if_they_were_of_h_steps() -> None:
    slow = run().inner_steps // 4
    assert reach(long(1.0, 1.0, steps=slow)) == 2.0
    assert reach(long(2.0, 2.0, steps=9 * run().inner_steps)) == 2.0, "more steps are as many"


def test_who_is_not_trusted_measures_and_counts_nothing() -> None:
    liars = long(1.0, 1.0, 1.0, trust=LEAST_TRUST)
    others = (Contributor("q", Stamp(1, 1), 40, 4, length=2.0, votes=True),)
    assert reach((*liars, *others)) == 2.0
    assert scale.scale_after(start(), (*liars, *others), run()).tokens == 40
    assert scale.scale_after(start(), liars, run()).unit == UNIT


def test_a_version_of_nobody_who_is_trusted_is_heavier_than_its_parent_by_one_token() -> None:
    """Else nobody followed it, in a run whose last learners are all doubted."""
    liars = long(1.0, 1.0, 1.0, trust=LEAST_TRUST)
    assert scale.scale_after(start(tokens=100), liars, run()).tokens == 101


def test_limits_are_of_the_parent() -> None:
    limits = scale.limits_after(start(), run())
    assert (limits.most_tokens, limits.longest, limits.absurd) == (4 * UNIT, 2 * LENGTH, 1024 * LENGTH)
    later = start(number=1)
    assert scale.longest_after(later.header) == 3 * LENGTH / 4, "what is usual was measured"
    assert scale.strange_after(later.header) == 2 * LENGTH
    assert scale.longest_after(genesis(0).header) == math.inf


def test_no_learner_weighs_more_than_its_share_of_a_usual_merge() -> None:
    def most(learners: int, **changes: float) -> float:
        chain = extended(start(), work(*[UNIT] * learners))
        return scale.limits_after(chain, config(genesis_versions=(start().signed,), **changes)).most_tokens

    assert [most(n) / UNIT for n in (1, 2, 3, 4, 5, 7, 9, 20)] == [4, 4, 1, 1.5, 2, 3, 4, 4]
    assert all(most(n) / (most(n) + UNIT * (n - 1)) <= 1 / 3 for n in range(3, 40))
    assert most(3, largest_share=1.0) == 4 * UNIT, "a run without shares has units alone"
    assert most(9, largest_share=0.5) == 4 * UNIT and most(9, largest_share=0.5, most_units=16.0) == 8 * UNIT
    assert most(4, largest_share=0.01) == UNIT, "a usual contribution weighs in full"


def test_among_known_members_h_steps_weigh_in_full_within_the_units() -> None:
    def most(unit: int, **changes: object) -> int:
        chain = extended(start(unit=unit), work(*[unit] * 4))
        known = config(genesis_versions=(start().signed,), admits=True, **changes)
        return scale.limits_after(chain, known).most_tokens

    assert most(20) == UNIT == 2 * 20, "one and a half of the others' would be 30"
    assert most(5) == 4 * 5, "never more than four units"
    assert most(5, most_units=16.0) == UNIT
    assert most(UNIT) == 1.5 * UNIT, "among equals a claim is cut as in open runs"


def test_a_share_is_of_those_who_were_merged_lately() -> None:
    chain = extended(start(), work(*[UNIT] * 5))
    assert scale.limits_after(chain, run()).most_tokens == 2 * UNIT
    for number in range(2, 35):
        parts = tuple(Contributor(f"p{i}", Stamp(1, number), UNIT, 4) for i in range(3))
        extended(chain, parts)
    assert scale.limits_after(chain, run()).most_tokens == UNIT, "two have not come for 32 versions"


def test_a_version_of_few_moves_the_chain_by_little() -> None:
    """A syncer may leave all others out: nothing is measured then, and its work has all of the weight."""

    def longest(here: int, of: int, agreement: int = ALL_AT, number: int = 9, merges: int = 9) -> float:
        marks = [Watermark(f"p{i}", NEVER, number, 1, merges, Seat(i + 1), agreement) for i in range(of)]
        chain = Chain(start(number=9).logged_all(), marks, 8)
        return scale.limits_after(chain, run(), [f"p{i}" for i in range(here)]).longest / chain.header.reach

    assert [longest(here, 10) for here in (10, 5, 4, 3)] == [
        3.0,
        3.0,
        pytest.approx(1.92),
        pytest.approx(1.08),
    ]
    assert [longest(1, of) for of in (10, 100)] == [0.125, 0.125] and longest(1, 4) == pytest.approx(0.75)
    assert longest(1, 2) == longest(0, 2) == 3.0, "of two none can be told from the other"
    assert longest(5, 10, agreement=0) == 0.125, "whom nobody trusts is no company"
    assert longest(1, 10, merges=1) > 1.0, "on thin links one alone is what is usual"
    assert longest(1, 10, merges=1) == longest(1, 10, merges=3), "but a third of all count always"
    assert 0.125 < longest(1, 10, merges=5) < longest(1, 10, merges=4) < longest(1, 10, merges=3)
    marks = [Watermark(f"p{i}", NEVER, 9 if i else 40, 1, 9, Seat(i + 1), ALL_AT) for i in range(10)]
    later = Chain(start(number=42).logged_all(), marks, 8)
    assert scale.limits_after(later, run(), ["p0"]).longest == 3 * later.header.reach, "the others are gone"
    assert scale.limits_after(later, run()).longest == 3 * later.header.reach, "of a part nothing is known"


def test_who_states_the_limits_of_many_for_a_version_of_few_is_refused() -> None:
    marks = tuple(Watermark(f"p{i}", NEVER, 9, 0, 9, Seat(i + 1), ALL_AT) for i in range(10))
    chain = Chain(start(number=9).logged_all(), marks, 8)
    part = Contributor("p0", Stamp(1, 1), UNIT, 4, votes=True, trust=FULL_TRUST, score=UNMEASURED)
    found = scale.scale_after(chain, (part,), run())
    stated = {"tokens": found.tokens, "unit": found.unit, "reach": found.reach, "norm": 0.1}
    few, many = scale.limits_after(chain, run(), ["p0"]), scale.limits_after(chain, run())
    header = replace(child(chain.header, contributors=(part,), **stated).header, contributors=(part,))
    assert scale.version_fault(chain, replace(header, limits=few), run()) is None
    assert scale.version_fault(chain, replace(header, limits=many), run()) is VersionFault.FALSE_SCALE


def test_a_long_header_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand simulated nodes ask it of one header that names ten thousand."""
    chain, parts, of = start(), work(*[40] * 50), run()
    asked: list[str] = []
    usual = Marks.number
    monkeypatch.setattr(Marks, "number", lambda self, who: asked.append(who) or usual(self, who))
    assert {scale.scale_after(chain, parts, of).tokens for _ in range(3)} == {2000}
    assert len(asked) == 50


# --- the door --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stamp", "verdict"),
    [
        (Stamp(1, 1 << 16), None),
        (Stamp(1, (1 << 16) + 1), Verdict.FALSE_STAMP),
        (Stamp(1 << 43, 1), None),
        (Stamp((1 << 43) + 1, 1), Verdict.FALSE_STAMP),
        (Stamp(1 << 62, 1 << 62), Verdict.FALSE_STAMP),
    ],
)
def test_a_stamp_near_its_end_is_refused_and_counted(stamp: Stamp, verdict: Verdict | None) -> None:
    solo = syncer(quorum=2, peers=("p1", "p2"))
    signed = contribution("p1", solo.head, stamp, after=NEVER)
    effects = solo.feed(ev.Offered(7, "p1", signed))
    answers = [e.verdict for e in effects if isinstance(e, ev.AnswerTransfer)]
    assert answers == ([] if verdict is None else [verdict])
    assert bool([e for e in effects if isinstance(e, ev.Record) and e.kind == "refusal"]) == bool(verdict)


def test_steps_of_more_than_years_are_refused() -> None:
    solo = syncer(quorum=2, peers=("p1", "p2"))
    for periods, refused in ((1 << 20, False), ((1 << 20) + 1, True)):
        signed = contribution("p1", solo.head, inner_steps=4 * periods)
        effects = solo.feed(ev.Offered(periods, "p1", signed))
        answers = [e.verdict for e in effects if isinstance(e, ev.AnswerTransfer)]
        assert (Verdict.IMPLAUSIBLE_TOKENS in answers) == refused


# --- what a version states -------------------------------------------------------------------------------


def test_what_one_makes_others_take() -> None:
    chain, other = start(), start()
    for number in range(1, 40):
        tokens = [40 + 7 * i * number for i in range(number % 5 + 1)]
        parts = tuple(
            Contributor(
                f"p{i}",
                Stamp(1, number),
                each,
                each // 10,
                chain.marks.stamp(f"p{i}"),
                trust=chain.marks.mean(f"p{i}").trust(i * number % 144 - 64),
                length=float(number % 7) / 3,
                score=i * number % 144 - 64,
                votes=True,
            )
            for i, each in enumerate(tokens)
        )
        norm = float(number % 7) / 3
        extended(chain, parts, norm)
        assert scale.version_fault(other, chain.header, run()) is None
        other.extend(chain.signed)
    assert chain.header.reach != LENGTH / 4 and chain.header.unit != UNIT


# --- copies ----------------------------------------------------------------------------------------------


def state(**odd: object) -> VersionHeader:
    return msgspec.structs.replace(branch(9)[9].header, **odd)


def test_an_honest_copy_can_be() -> None:
    assert scale.numbers_can_be(state(), (Watermark("p1", Stamp(1, 9), 9),), config())


@pytest.mark.parametrize(
    ("odd", "marks"),
    [
        ({"tokens": 1 << 62}, ()),
        ({"number": 1 << 62}, ()),
        ({"term": 1 << 62}, ()),
        ({"unit": 1 << 62}, ()),
        ({"reach": 1e9}, ()),
        ({"reach": math.nan}, ()),
        ({"norm": math.inf}, ()),
        ({}, (Watermark("p1", Stamp(1 << 62, 1), 9),)),
        ({}, (Watermark("p1", Stamp(1, 1 << 62), 9),)),
    ],
)
def test_a_copy_with_numbers_that_no_chain_has_is_not_taken(
    odd: dict[str, object], marks: tuple[Watermark, ...]
) -> None:
    header = state(**odd)
    assert not scale.numbers_can_be(header, marks, config())
    solo = Solo(heads=(header.head(),))
    for pull in [e for e in solo.greeting if isinstance(e, ev.FetchState)]:
        version = SignedVersion(header, sign(header.syncer, "version", header))
        solo.answer(pull, ev.StateFetched(version, marks))
    assert solo.head.number == 0


# Free riders: what is a copy, or not trusted, counts no tokens, and no honest learner is robbed.


def part(learner: str, sequence: int, payload: object, **odd: object) -> Contributor:
    """A contribution of forty tokens."""
    made = Contributor(learner, Stamp(1, sequence), 40, 4, payload_digest=digest(payload), votes=True)
    return replace(made, **odd)


def grown_by_work(chain: Chain, *parts: Contributor) -> list[int]:
    """Tokens of the chain, version after version, as these parts are merged one after another."""
    found = []
    for number, each in enumerate(parts, 1):
        after = chain.marks.stamp(each.learner)
        each = replace(each, stamp=Stamp(1, number), after=after)
        tokens = scale.scale_after(chain, (each,), config()).tokens
        version = child(chain.header, seats=EVERYBODY, contributors=(each,), tokens=tokens)
        chain.extend(version)
        found.append(chain.header.tokens)
    return found


def chain() -> Chain:
    return Chain((genesis(0),), (), 16, EVERYBODY)


def test_a_stale_replay_and_a_copy_count_nothing() -> None:
    # 1: the version is heavier than its parent all the same
    assert grown_by_work(chain(), part("a", 1, "x"), part("a", 2, "x"), part("b", 1, "x")) == [40, 41, 42]
    assert grown_by_work(chain(), part("a", 1, "x"), part("a", 2, "y"), part("b", 1, "x")) == [40, 80, 120]


def test_what_names_no_payload_is_no_copy() -> None:
    unnamed = replace(part("a", 1, "x"), payload_digest=bytes(32))
    assert grown_by_work(chain(), unnamed, replace(unnamed, learner="b")) == [40, 80] and not copy_mark(
        bytes(32)
    )


def test_one_payload_of_several_counts_once() -> None:
    parts = (part("a", 1, "x"), part("b", 1, "x"), part("c", 1, "y"))
    assert earned(parts, frozenset()) == [20, 20, 40]
    assert earned(parts, frozenset([copy_mark(digest("x"))])) == [0, 0, 40]
    assert earned((replace(parts[2], trust=LEAST_TRUST),), frozenset()) == [0]


def test_the_table_has_a_few_bytes_of_everybodys_newest_payload() -> None:
    marks = marks_of(()).after(1, (part("a", 1, "x"), part("b", 1, "y"))).after(2, (part("a", 2, "z"),))
    assert [mark.last for mark in marks.table] == [digest("z")[:LAST_BYTES], digest("y")[:LAST_BYTES]]
    assert marks.is_copy(digest("z")) and not marks.is_copy(digest("x"))


def test_credits_are_as_the_chain_counts() -> None:
    ledger, here = FragmentLedger("run", 0), chain()
    parts = part("a", 1, "x"), part("b", 1, "x"), part("a", 2, "y"), part("b", 2, "w", score=NOTHING)
    for number, each in enumerate(parts, 1):
        each = replace(each, after=here.marks.stamp(each.learner))
        each = replace(each, trust=here.marks.mean(each.learner).trust(each.score))
        tokens = scale.scale_after(here, (each,), config()).tokens
        version = child(here.header, seats=EVERYBODY, contributors=(each,), tokens=tokens)
        here.extend(version)
        ledger.add(HistoryRecord(number, version))
    assert {learner: entry.tokens for (learner, _), entry in ledger.entries.items()} == {"a": 80, "b": 0}
    assert ledger.uncredited_tokens == 2, "of two versions of nothing else"


def test_work_merged_on_a_lost_fork_is_merged_again() -> None:
    solo = syncer()
    one_round(solo, "p1", "p2")
    lost = solo.fragment.chain.header.contributors[0]
    fresh = syncer()  # whose chain lacks that version
    signed = contribution("p1", fresh.head, payload_digest=lost.payload_digest)
    assert found(fresh.feed(ev.Offered(90, "p1", signed)), ev.AcceptTransfer)


def test_a_copy_that_was_on_its_way_beside_the_true_one_is_not_merged() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=3)
    for transfer, learner in ((1, "p1"), (2, "p2")):
        signed = contribution(learner, solo.head, payload_digest=digest("same"))
        assert found(solo.feed(ev.Offered(transfer, learner, signed)), ev.AcceptTransfer), "none is here"
    assert solo.fragment.round is not None
    first = found(solo.feed(ev.PayloadReceived(1, 101)), ev.AnswerTransfer)[0].verdict
    second = found(solo.feed(ev.PayloadReceived(2, 102)), ev.AnswerTransfer)[0].verdict
    assert first.taken and second is Verdict.CHAIN_MOVED
    again = found(solo.feed(ev.Offered(3, "p2", signed)), ev.AnswerTransfer)[0].verdict
    assert again is Verdict.COPY
