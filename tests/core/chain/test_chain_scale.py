"""What is usual in a chain, and what is cut or refused by it (`core.chain`)."""

from __future__ import annotations

import math

import msgspec
import pytest
from kit import Solo, branch, child, config, contribution, genesis, sign
from msgspec.structs import replace
from scenes import syncer

from p2pdiloco.core import chain as scale
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict, VersionFault
from p2pdiloco.core.api.types import FULL_TRUST, LEAST_TRUST, NEVER, UNMEASURED, Contributor, Stamp, Watermark
from p2pdiloco.core.api.versions import ALL_AT, SignedVersion, VersionHeader
from p2pdiloco.core.chain import Chain, Marks

UNIT = 40
"""Tokens of H inner steps here."""
LENGTH = 8.0
"""Length of version 0."""


def start(**fields: object) -> Chain:
    """A chain of version 0, whose length is known."""
    fields = {"norm": LENGTH, "reach": LENGTH / 4} | fields
    header = msgspec.structs.replace(genesis(0).header, **fields)
    return Chain((SignedVersion(header, b""),), (), 8)


def run() -> object:
    return config(genesis_versions=(start().signed,))


def work(*tokens: int) -> tuple[Contributor, ...]:
    return tuple(Contributor(f"p{i}", Stamp(1, 1), each, max(1, each // 10)) for i, each in enumerate(tokens))


def extended(chain: Chain, parts: tuple[Contributor, ...], norm: float = 1.0) -> Chain:
    found = scale.scale_after(chain, parts, run())
    header = child(
        chain.header, contributors=parts, norm=norm, tokens=found.tokens, unit=found.unit, reach=found.reach
    )
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


def test_strangers_move_no_unit_and_no_reach_where_three_vote() -> None:
    voters = tuple(replace(part, votes=True, length=LENGTH / 4) for part in work(UNIT, UNIT, UNIT))
    crowd = tuple(replace(part, learner=f"s{n}", length=1e-3) for n, part in enumerate(work(*[1] * 9)))
    found = scale.scale_after(start(), (*voters, *crowd), run())
    assert (found.unit, found.reach) == (UNIT, LENGTH / 4)
    two = (*voters[:2], *crowd)
    assert scale.scale_after(start(), two, run()).unit < UNIT, "of two none says what is usual"
    only_crowd = scale.scale_after(
        start(), tuple(replace(part, votes=False) for part in (*voters, *crowd)), run()
    )
    assert only_crowd.unit < UNIT and only_crowd.reach < LENGTH / 4


def test_who_votes_is_said_rightly() -> None:
    table = tuple(
        Watermark(name, NEVER, 0, voter=since) for name, since in (("new", 90), ("old", 1), ("s", 0))
    )
    for groups, allowed in ((1, {"new": {True}, "old": {True}}), (4, {"new": {True, False}, "old": {True}})):
        header = msgspec.structs.replace(genesis(0).header, number=100, groups=groups)
        chain = Chain((SignedVersion(header, b""),), table, 8)
        for name in ("new", "old", "s", "unknown"):
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
        extended(chain, (Contributor("other", Stamp(1, number), 40, 4),))
    found = scale.scale_after(chain, (Contributor("p0", Stamp(1, 9), 1 << 60, 4),), run())
    assert found.tokens == 160 + 8 * UNIT * 4, "three versions without it"
    assert scale.scale_after(chain, (Contributor("new", Stamp(1, 9), 1 << 60, 4),), run()).tokens == 160 + 320
    # What is usual is asked for each version, too.
    assert scale.scale_after(chain, (Contributor("p0", Stamp(1, 9), 160, 16),), run()).unit == UNIT


def long(*lengths: float, steps: int = 4, trust: int = FULL_TRUST) -> tuple[Contributor, ...]:
    """Contributions of these lengths, H inner steps each unless it is said."""
    return tuple(
        Contributor(f"p{i}", Stamp(1, 1), 10 * steps, steps, length=length, trust=trust)
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
    others = (Contributor("q", Stamp(1, 1), 40, 4, length=2.0),)
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
        marks = [Watermark(f"p{i}", NEVER, number, 1, merges, 1, agreement) for i in range(of)]
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
    marks = [Watermark(f"p{i}", NEVER, 9 if i else 40, 1, 9, voter=1, agreement=ALL_AT) for i in range(10)]
    later = Chain(start(number=42).logged_all(), marks, 8)
    assert scale.limits_after(later, run(), ["p0"]).longest == 3 * later.header.reach, "the others are gone"
    assert scale.limits_after(later, run()).longest == 3 * later.header.reach, "of a part nothing is known"


def test_who_states_the_limits_of_many_for_a_version_of_few_is_refused() -> None:
    marks = tuple(Watermark(f"p{i}", NEVER, 9, merges=9, voter=1, agreement=ALL_AT) for i in range(10))
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
    chain, parts = start(), work(*[40] * 50)
    asked: list[str] = []
    usual = Marks.number
    monkeypatch.setattr(Marks, "number", lambda self, who: asked.append(who) or usual(self, who))
    assert {scale.scale_after(chain, parts, run()).tokens for _ in range(3)} == {2000}
    assert len(asked) == 50


def test_who_only_says_that_it_trains_is_no_crowd() -> None:
    marks = tuple(Watermark(f"p{i}", Stamp(1, 1), 10 * i) for i in range(10))
    assert scale.most_learners(100, marks) == 2 * 3 + 4, "those of versions 70, 80 and 90"
    early = tuple(Watermark(f"p{i}", Stamp(1, 1), 1) for i in range(3))
    assert scale.most_learners(2, early) == 2 * 3 + 4, "also in the first versions"
    assert scale.most_learners(2, early, expected=60) == 60, "of a run that is to begin with so many"
    assert scale.most_learners(33, early, expected=60) == 10


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
    answers = [e.verdict for e in effects if isinstance(e, ef.AnswerTransfer)]
    assert answers == ([] if verdict is None else [verdict])
    assert bool([e for e in effects if isinstance(e, ef.Record) and e.kind == "refusal"]) == bool(verdict)


def test_steps_of_more_than_years_are_refused() -> None:
    solo = syncer(quorum=2, peers=("p1", "p2"))
    for periods, refused in ((1 << 20, False), ((1 << 20) + 1, True)):
        signed = contribution("p1", solo.head, inner_steps=4 * periods)
        effects = solo.feed(ev.Offered(periods, "p1", signed))
        answers = [e.verdict for e in effects if isinstance(e, ef.AnswerTransfer)]
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
    for pull in [e for e in solo.greeting if isinstance(e, ef.FetchState)]:
        version = SignedVersion(header, sign(header.syncer, "version", header))
        solo.feed(ev.StateFetched(0, pull.peer, version, marks))
    assert solo.head.number == 0
