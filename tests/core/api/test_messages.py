"""The wire: every message survives the trip, and nothing but a `RemoteError` comes of anything else."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import child, genesis, word
from msgspec.structs import replace
from wire_strategies import MESSAGES, messages

from p2pdiloco import WIRE_VERSION
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api import types
from p2pdiloco.core.api.types import (
    FULL_TRUST,
    LEAST_SCORE,
    LEAST_TRUST,
    MOST_SCORE,
    NEVER,
    UNCLEAR,
    UNMEASURED,
    USUAL_SCORE,
    WHOLE_RUN,
    Contributor,
    Finality,
    MergeLimits,
    Milestone,
    Stamp,
    signed_bytes,
)
from p2pdiloco.core.api.versions import (
    ALL_AT,
    BEGINS,
    Mean,
    MemberList,
    MergedPartial,
    Plan,
    ShortHeader,
    VersionHeader,
    group_name,
    leaf_index,
    next_plan,
    parse_group,
    plausible_score,
    trust_of,
)
from p2pdiloco.core.chain import marks_of
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
    assert WIRE_VERSION == 33
    assert msg.encode(RUN, message).hex() == (
        "9321a372756e96a7436c6f73696e67a3616c6c030508cb3fd0000000000000"
    )


# Rotating groups: everybody works out the same ones, whatever list of members he has.


@given(groups=st.integers(1, 5000), size=st.integers(2, 64))
def test_every_group_has_one_parent_and_no_parent_more_children_than_it_can_hear(
    groups: int, size: int
) -> None:
    plan = Plan("run", 0, 0, groups, size)
    sizes = plan.sizes
    assert sizes[0] == groups and sizes[-1] == 1
    assert 2 not in sizes[1:] or size == 2 or groups == 2 or groups == 3, "of two one is no minority"
    for level in range(1, len(sizes)):
        parents = Counter(plan.above((level - 1, index), level) for index in range(sizes[level - 1]))
        assert parents.keys() == {(level, index) for index in range(sizes[level])}
        assert max(parents.values()) <= size
    assert {plan.above((0, leaf), len(sizes) - 1) for leaf in range(groups)} == {(len(sizes) - 1, 0)}


def test_names_say_epoch_level_and_index_and_nothing_else_is_one() -> None:
    assert parse_group(group_name(7, 5, 1, 2)) == (7, 1, 2)
    assert group_name(0, 1, 0, 0) == WHOLE_RUN
    for name in (WHOLE_RUN, "", "1/2", "1/2/3/4", "a/1/2", "-1/0/0", "1//2", "²/0/0", "9" * 19 + "/0/0"):
        assert parse_group(name) is None


def test_groups_rotate_with_epoch_and_fragment_and_are_about_equally_large() -> None:
    roster = MemberList(tuple((f"peer{i}", 1) for i in range(1600)))
    first, again, other = (roster.leaves(Plan("run", *key, 100, 8)) for key in ((0, 1), (0, 2), (1, 1)))
    assert first != again and first != other
    for lists in (first, again, other):
        assert sorted(p for peers in lists for p in peers) == sorted(p for p, _ in roster.members)
        assert max(len(peers) for peers in lists) <= 40


def test_a_peer_without_the_list_knows_its_group() -> None:
    roster = MemberList((("a", 1), ("b", 1), ("c", 3)))
    lists = roster.leaves(Plan("run", 0, 4, 2, 8))
    for peer in "abc":
        assert peer in lists[leaf_index("run", 0, 4, 2, peer)]


@pytest.mark.parametrize(
    ("plan", "number", "members", "expected"),
    [
        ((0, 1), 8, 4, (0, 1)),  # fits into one group: nothing rotates
        ((0, 1), 7, 32, (0, 1)),  # not at the end of an epoch
        ((0, 1), 7, 33, (1, 3)),  # but for groups that are twice too large
        ((0, 1), 8, 17, (1, 3)),  # never two: of two groups' syncers one is no minority
        ((4, 2), 9, 64, (4, 2)),
        ((4, 2), 9, 65, (5, 5)),
        ((0, 1), 8, 99, (1, 7)),
        ((1, 7), 16, 99, (2, 7)),
        ((1, 7), 16, 16, (2, 1)),  # shrank
    ],
)
def test_the_plan_changes_at_the_end_of_an_epoch_only(
    plan: tuple[int, int], number: int, members: int, expected: tuple[int, int]
) -> None:
    assert next_plan(*plan, number, members, group_size=16, epoch_versions=8) == expected


# Trust weights: slow, never nothing, and the same for everybody who has the parent.


def rounds(*scores: int, begins: int = BEGINS) -> list[int]:
    """Trust weights in these rounds, of a newcomer unless it begins with more."""
    mean, found = Mean(begins, 0 if begins == BEGINS else 100), []
    for score in scores:
        found.append(mean.trust(score))
        mean = Mean(mean.after(score), mean.merges + 1)
    return found


def test_a_newcomer_begins_with_half_and_has_all_soon() -> None:
    assert trust_of(BEGINS) == FULL_TRUST // 2
    assert rounds(USUAL_SCORE) == [FULL_TRUST]


@pytest.mark.parametrize(("score", "within"), [(-USUAL_SCORE, 1), (0, 24)])
def test_who_goes_elsewhere_has_next_to_nothing_soon(score: int, within: int) -> None:
    assert rounds(*[score] * within)[-1] == LEAST_TRUST
    saved = Mean()
    for merges in range(100):
        saved = Mean(saved.after(MOST_SCORE), merges)
    assert rounds(*[score] * (within + 22), begins=saved.agreement)[-1] == LEAST_TRUST


def test_noise_weighs_little_from_its_first_round_on() -> None:
    assert all(weight < FULL_TRUST / 3 for weight in rounds(0, 0, 0, 0))


def test_one_odd_contribution_costs_an_honest_learner_nothing() -> None:
    usual = [USUAL_SCORE] * 20
    assert set(rounds(*usual, 0, *usual)[10:]) == {FULL_TRUST}
    against = rounds(*usual, LEAST_SCORE, *usual)
    assert against[20] < FULL_TRUST / 2 and set(against[22:]) == {FULL_TRUST}, "it has all again soon"


def test_an_honest_learner_that_goes_a_little_against_the_others_now_and_then_keeps_its_weight() -> None:
    found = rounds(*[16, 30, 2, -10, 24, 12, 20] * 20)
    assert sum(found) > 0.9 * FULL_TRUST * len(found), found


def test_who_turns_has_next_to_nothing_from_the_second_round_on() -> None:
    for reversed_by in (USUAL_SCORE, USUAL_SCORE * 3 // 4):
        found = rounds(*[MOST_SCORE] * 100, *[-reversed_by] * 5)[100:]
        assert found[0] < 0.6 * FULL_TRUST and set(found[1:]) == {LEAST_TRUST}, found


def test_who_reverses_three_of_ten_has_little_weight_in_those() -> None:
    in_a_row, spread = (1, 1, 1, 1, 1, 1, 1, -1, -1, -1), (1, 1, -1, 1, 1, -1, 1, 1, -1, 1)
    for ten in (in_a_row, spread):
        weights = rounds(*[USUAL_SCORE * sign for sign in ten] * 20)[100:]
        lies = [weight for weight, sign in zip(weights, ten * 10, strict=True) if sign < 0]
        assert sum(lies) < 0.1 * FULL_TRUST * len(lies), lies


def test_rounds_that_are_too_small_to_be_measured_forgive_slowly_and_up_to_all_only() -> None:
    found = rounds(*[UNMEASURED] * 200, begins=-USUAL_SCORE)
    assert found[5] == LEAST_TRUST and found[-1] == FULL_TRUST and found == sorted(found)
    assert Mean(300, 9).after(UNMEASURED) == 300
    assert Mean(-700, 9).after(UNCLEAR) == -700, "a liar that keeps rounds from being measured gains nothing"
    assert Mean().after(UNCLEAR) == Mean().after(UNMEASURED) > BEGINS, "a newcomer is not kept down"


def test_the_mean_stays_within_what_a_table_can_say() -> None:
    low, high = BEGINS, BEGINS
    for merges in range(1000):
        low, high = Mean(low, merges).after(LEAST_SCORE), Mean(high, merges).after(MOST_SCORE)
    assert -3100 < low < 0 < high <= 2 * ALL_AT
    assert [
        plausible_score(s) for s in (UNMEASURED, LEAST_SCORE - 1, LEAST_SCORE, MOST_SCORE, MOST_SCORE + 1)
    ] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_the_table_keeps_it_and_it_counts_for_the_next_version() -> None:
    marks = marks_of(())
    assert marks.mean("p1") == Mean()
    for number in range(1, 9):
        parts = tuple(
            Contributor(who, Stamp(1, number), 40, 4, NEVER, score=score)
            for who, score in (("liar", -USUAL_SCORE), ("p1", USUAL_SCORE))
        )
        marks = marks.after(number, parts)
    weights = [marks.mean(who).trust(UNMEASURED) for who in ("p1", "liar")]
    assert weights == [FULL_TRUST, LEAST_TRUST] and marks.mean("liar").merges == 8
    assert marks.digest != marks_of(m for m in marks.table if m.learner == "p1").digest


# Version headers: what names them, and evidence about one of their contributors.


def test_a_version_is_named_and_signed_by_its_short_header() -> None:
    header = child(genesis(0).header, by="p2").header
    short = header.short()
    assert (*ShortHeader.__struct_fields__, "papers", "elected") == VersionHeader.__struct_fields__
    assert header.contributors and short.digest() == header.digest() == header.head().digest
    assert signed_bytes("version", short) == signed_bytes("version", header)


@pytest.mark.parametrize("field", [f for f in ShortHeader.__struct_fields__ if f != "contributors"])
def test_no_field_changes_without_the_name(field: str) -> None:
    header = child(genesis(0).header, by="p2").header
    value = getattr(header, field)
    others = {str: "other", int: 77, float: 0.77, bytes: b"\7" * 32, MergeLimits: MergeLimits(77, 7.0)}
    others[type(None)] = b"\7" * 32
    others[tuple] = (MergedPartial("1/0/0", "p1", bytes(32), b""),)
    others[Finality] = Finality(Milestone(8, b"\7" * 32))
    other = others[type(value)]
    assert replace(header, **{field: other}).digest() != header.digest()


def test_papers_change_the_name_by_the_table_that_follows_from_them() -> None:
    parent = genesis(0).header
    plain, named = child(parent).header, child(parent, papers=(word("s1"),)).header
    assert plain.digest() != named.digest() == replace(named, papers=()).digest()
    assert replace(named, table=plain.table, papers=()).digest() == plain.digest()


def test_no_contributor_changes_without_the_name() -> None:
    header = child(genesis(0).header, by="p2").header
    part = header.contributors[0]
    for other in (replace(part, tokens=part.tokens + 1), replace(part, signature=b"other")):
        assert replace(header, contributors=(other, *header.contributors[1:])).digest() != header.digest()
    assert replace(header, contributors=()).digest() != header.digest()


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=33), st.data())
def test_a_path_leads_from_its_own_entry_to_the_root_and_from_no_other(
    entries: list[bytes], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(entries) - 1))
    way, root = types.merkle_path(entries, index), types.merkle_root(entries)
    assert types.merkle_root_of(entries[index], way) == root
    assert types.merkle_root_of(entries[index] + b"x", way) != root
    if way:
        (on_left, sibling), *rest = way
        assert types.merkle_root_of(
            entries[index], ((on_left, bytes(32)), *rest)
        ) != root or sibling == bytes(32)


def test_an_inner_node_does_not_pass_for_an_entry() -> None:
    entries = [b"a", b"b", b"c"]
    (_, left), *_ = types.merkle_path(entries, 1)
    inner = left + types.merkle_path(entries, 0)[0][1]
    assert types.merkle_root([inner, b"c"]) != types.merkle_root(entries)


def test_order_and_number_of_entries_count() -> None:
    roots = {
        types.merkle_root(e) for e in ([], [b""], [b"", b""], [b"a", b"b"], [b"b", b"a"], [b"a", b"b", b"b"])
    }
    assert len(roots) == 6
