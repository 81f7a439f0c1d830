"""The ledger: every contribution once, sums that are the run's tokens, doubts that are said."""

from __future__ import annotations

from pathlib import Path

import pytest
from credits_kit import DAY_S, START_S, chain, history_of, ledger_of, record, tip
from hypothesis import given
from hypothesis import strategies as st
from kit import RUN, child, genesis, signed_part
from msgspec.structs import replace

from p2pdiloco.core.api.types import NEVER, Contributor, Stamp
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import MOST_GAP, WATERMARK_VERSIONS, marks_of
from p2pdiloco.credits import (
    Doubt,
    FragmentLedger,
    HistoryRecord,
    Signatures,
    count_line,
    credits_of,
    shares_of,
)
from p2pdiloco_lab.simulation.lineage import HashCrypto

VERIFY = HashCrypto("asker").verify


def test_the_credits_of_a_run_are_the_mean_over_fragments(tmp_path: Path) -> None:
    ledgers = []
    for fragment, learners in enumerate([("p1", "p2"), ("p1",), ("p1", "p2", "p3")]):
        versions = chain(5, learners, fragment)
        ledgers.append(ledger_of(history_of(tmp_path, versions), versions[-1]))
        assert ledgers[-1].tokens == versions[-1].header.tokens
    found = credits_of(ledgers)
    rows = {row.peer: row for row in found.rows}
    assert [row.peer for row in found.rows] == ["p1", "p2", "p3"]
    assert rows["p1"].fragment_tokens == 600 and rows["p1"].tokens == 200 and rows["p3"].tokens == 66
    assert rows["p1"].inner_steps == 20 and rows["p1"].contributions == 15
    assert sum(row.fragment_tokens for row in found.rows) == found.fragment_tokens == 1200
    assert found.tokens == 400 and not found.doubts and not found.missing
    assert (found.before_fragment_tokens, found.uncredited_fragment_tokens) == (0, 0)


def test_a_displaced_branch_does_not_count_and_its_work_counts_once_elsewhere(tmp_path: Path) -> None:
    versions = chain(8, ("p1", "p2"))
    lost = versions[5:]  # versions 6 to 8, in which p1 and p2 had three contributions each
    other = child(versions[4].header, syncer="p3", learners=("p3",))
    # What p1 had in the three is merged again as one, with their sums and the last one's stamp.
    sums = Contributor("p1", Stamp(1, 8), 120, 12)
    other = child(other.header, syncer="p3", contributors=(sums,), tokens=other.header.tokens + 120)
    ledger = ledger_of(history_of(tmp_path, [*versions, other]), other)
    assert not ledger.first or ledger.first > 1, "the version between is not here"
    history = history_of(tmp_path / "b", [*versions, child(versions[4].header, "p3", ("p3",)), other])
    ledger = ledger_of(history, other)
    assert not ledger.doubts and ledger.first == 1
    tokens = {peer: entry.tokens for (peer, _), entry in ledger.entries.items()}
    assert tokens == {"p1": 5 * 40 + 120, "p2": 5 * 40, "p3": 40}
    assert sum(tokens.values()) == other.header.tokens == ledger.tokens
    assert ledger_of(history, lost[-1]).entries["p2", 0].tokens == 8 * 40


def test_the_same_work_twice_is_credited_once_and_said(tmp_path: Path) -> None:
    versions = chain(3, ("p1",))
    again = signed_part(Contributor("p1", Stamp(1, 3), 40, 4, Stamp(1, 2)))
    head = versions[-1].header
    header = replace(
        head, number=4, parent=head.digest(), tokens=head.tokens + 40, contributors=(again,), table=bytes(32)
    )
    ledger = ledger_of(
        history_of(tmp_path, [*versions, SignedVersion(header, b"")]), SignedVersion(header, b"")
    )
    assert ledger.doubts == {Doubt.TWICE: 1}
    assert ledger.entries["p1", 0].tokens == 120 and ledger.uncredited_tokens == 40
    assert ledger.tokens == header.tokens


def test_a_stamp_out_of_order_is_said(tmp_path: Path) -> None:
    versions = chain(2, ("p1",))
    odd = signed_part(Contributor("p1", Stamp(1, 9), 40, 4, Stamp(1, 7)))
    head = versions[-1].header
    header = replace(head, number=3, parent=head.digest(), tokens=head.tokens + 40, contributors=(odd,))
    version = SignedVersion(header, b"")
    assert ledger_of(history_of(tmp_path, [*versions, version]), version).doubts == {Doubt.OUT_OF_ORDER: 1}


def test_a_learner_that_the_chain_forgot_begins_anew(tmp_path: Path) -> None:
    ledger = FragmentLedger(RUN, 0)
    first = chain(1, ("p1", "p2"))[0].header
    parts = {
        1: first.contributors,
        2000: (signed_part(Contributor("p1", Stamp(2, 1), 40, 4, NEVER)),),
        2001: (signed_part(Contributor("p2", Stamp(1, 1), 40, 4, NEVER)),),
    }
    for number, merged in parts.items():
        tokens = ledger.tokens + sum(p.tokens for p in merged)
        header = replace(first, number=number, contributors=merged, tokens=tokens)
        ledger.add(HistoryRecord(START_S, SignedVersion(header, b"")))
    assert ledger.doubts == {Doubt.TWICE: 1}, "a replay of what the watermarks have forgotten"
    assert ledger.entries["p1", 0].contributions == 2 and ledger.entries["p2", 0].contributions == 1


def test_a_first_label_that_names_another_before_it_is_said() -> None:
    odd = signed_part(Contributor("p1", Stamp(1, 2), 40, 4, Stamp(1, 1)))
    header = replace(chain(1, ("p1",))[0].header, contributors=(odd,))
    for number, doubts in ((1, {Doubt.OUT_OF_ORDER: 1}), (7, {})):  # what was before the seventh nobody knows
        ledger = FragmentLedger(RUN, 0)
        ledger.add(HistoryRecord(START_S, SignedVersion(replace(header, number=number), b"")))
        assert ledger.doubts == doubts


def test_a_version_with_fewer_tokens_than_its_parent_is_said() -> None:
    ledger, (first, second) = FragmentLedger(RUN, 0), chain(2, ("p1",))
    ledger.add(record(first))
    ledger.add(record(SignedVersion(replace(second.header, tokens=39), b"")))
    assert ledger.doubts == {Doubt.FEWER_TOKENS: 1} and ledger.entries["p1", 0].tokens == 40


def test_an_absence_is_made_up_for_to_a_limit() -> None:
    first, ledger = chain(1, ("p1", "p2"))[0].header, FragmentLedger(RUN, 0)
    ledger.add(HistoryRecord(START_S, SignedVersion(first, b"")))
    later = signed_part(Contributor("p2", Stamp(1, 2), 40, 4, Stamp(1, 1)))
    header = replace(first, number=199, contributors=(later,), tokens=first.tokens + 40)
    ledger.add(HistoryRecord(START_S, SignedVersion(header, b"")))
    greedy = (
        Contributor("p1", Stamp(1, 2), 10**6, 4, Stamp(1, 1)),
        Contributor("p2", Stamp(1, 3), 10**6, 4, later.stamp),
    )
    header = replace(header, number=200, contributors=greedy, tokens=header.tokens + 10 * (2 + MOST_GAP))
    ledger.add(HistoryRecord(START_S, SignedVersion(header, b"")))
    assert ledger.entries["p1", 0].tokens == 40 + 10 * (1 + MOST_GAP)
    assert ledger.entries["p2", 0].tokens == 80 + 10


@pytest.mark.parametrize("away", [1, WATERMARK_VERSIONS, WATERMARK_VERSIONS + 1])
def test_a_learner_is_forgotten_when_the_chain_forgets_it(away: int) -> None:
    """`away`: versions without it."""
    first, ledger = chain(1, ("p1",))[0].header, FragmentLedger(RUN, 0)
    ledger.add(record(SignedVersion(first, b"")))
    marks = marks_of(()).after(1, first.contributors).after(1 + away, ())
    anew = (signed_part(Contributor("p1", Stamp(2, 1), 40, 4, NEVER)),)
    header = replace(first, number=2 + away, contributors=anew, tokens=first.tokens + 40)
    ledger.add(HistoryRecord(START_S, SignedVersion(header, b"")))
    assert ledger.doubts == ({Doubt.OUT_OF_ORDER: 1} if "p1" in marks else {})


def test_false_signatures_are_found_and_not_credited(tmp_path: Path) -> None:
    versions = chain(3, ("p1", "p2"))
    head = versions[-1].header
    forged = child(head, learners=("p1", "p2"), by="p1")  # p1 signs for p2, too
    unsigned = replace(child(forged.header, learners=("p1",)), signature=b"no")
    history = history_of(tmp_path, [*versions, forged, unsigned])
    signatures = Signatures(RUN, 0, VERIFY)
    ledger = count_line(history, RUN, 0, tip(unsigned), signatures=signatures)
    assert ledger.doubts == {Doubt.FALSE_LABEL: 1, Doubt.FALSE_VERSION: 1}
    assert signatures.checked == 5 + 9
    assert ledger.entries["p2", 0].tokens == 120 and ledger.entries["p1", 0].tokens == 200
    assert ledger.uncredited_tokens == 40 and ledger.tokens == unsigned.header.tokens


def test_of_a_late_history_the_rest_is_said(tmp_path: Path) -> None:
    versions = chain(10, ("p1", "p2"))
    found = credits_of([ledger_of(history_of(tmp_path, versions[6:]), versions[-1])])
    assert found.missing == {0: 7} and found.before_fragment_tokens == 6 * 80
    assert sum(r.fragment_tokens for r in found.rows) + 480 == found.fragment_tokens == 800
    assert not found.doubts, "what its labels come after is not known"


def test_of_a_late_history_who_is_not_trusted_leaves_nothing_uncredited() -> None:
    first = chain(7, ("p1", "p2"))[-1]
    one, other = first.header.contributors
    header = replace(
        first.header, contributors=(one, replace(other, trust=1)), tokens=first.header.tokens - 40
    )
    ledger = FragmentLedger(RUN, 0)
    ledger.add(HistoryRecord(START_S, SignedVersion(header, b"")))
    assert ledger.before_tokens == 6 * 80 and ledger.uncredited_tokens == 0


def test_what_a_claim_beyond_all_measure_counts(tmp_path: Path) -> None:
    """A version counts less than its labels claim: the rest of the learners are credited in full."""
    versions = chain(4, ("p1", "p2", "p3"))
    head = versions[-1].header
    parts = tuple(
        signed_part(Contributor(p, Stamp(1, 5), tokens, 4, Stamp(1, 4)))
        for p, tokens in (("p1", 10**9), ("p2", 40), ("p3", 35))
    )
    header = replace(head, number=5, parent=head.digest(), contributors=parts, tokens=head.tokens + 320 + 75)
    version = SignedVersion(header, b"")
    ledger = ledger_of(history_of(tmp_path, [*versions, version]), version)
    assert ledger.entries["p1", 0].tokens == 160 + 320 and ledger.entries["p1", 0].claimed > 10**9
    assert (ledger.entries["p2", 0].tokens, ledger.entries["p3", 0].tokens) == (200, 195)
    assert ledger.tokens == header.tokens and not ledger.uncredited_tokens


def test_who_was_away_is_credited_for_the_versions_that_it_makes_up_for() -> None:
    """As the chain counts it: the limit holds for every version since the learner's last one."""
    ledger = FragmentLedger(RUN, 0)
    first = chain(1, ("p1", "p2"))[0].header
    stamps = {"p1": NEVER, "p2": NEVER}
    works = {"p1": 40, "p2": 40}, {"p2": 40}, {"p2": 40}, {"p1": 300, "p2": 900}
    for number, work in enumerate(works, 1):
        parts = []
        for peer, tokens in work.items():
            before, stamps[peer] = stamps[peer], Stamp(1, number)
            parts.append(Contributor(peer, stamps[peer], tokens, 4, before))
        counted = ledger.tokens + (400 if number == 4 else sum(work.values()))
        header = replace(first, number=number, contributors=tuple(parts), tokens=counted)
        ledger.add(HistoryRecord(START_S, SignedVersion(header, b"")))
    assert not ledger.doubts
    assert ledger.entries["p1", 0].tokens == 40 + 300 and ledger.entries["p2", 0].tokens == 120 + 100


def test_sums_of_absurd_claims_can_be_told() -> None:
    ledger = FragmentLedger(RUN, 0)
    first = chain(1, ("p1",))[0].header
    before = NEVER
    for number in range(1, 9):
        part = Contributor("p1", Stamp(1, number), 1 << 62, 1 << 62, before)
        header = replace(first, number=number, contributors=(part,), tokens=40 * number)
        ledger.add(HistoryRecord(START_S, SignedVersion(header, b"")))
        before = part.stamp
    (row,) = credits_of([ledger]).rows
    assert (row.fragment_tokens, row.claimed_tokens, row.inner_steps) == (320, 1 << 62, 1 << 62)


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(1, 64)), max_size=20), st.integers(0, 1 << 62))
def test_shares_add_up_and_nobody_gets_more_than_it_claims(weights: list[tuple[int, int]], most: int) -> None:
    shares = shares_of(most, weights)
    assert sum(shares) == min(most, sum(tokens for tokens, _ in weights))
    assert all(0 <= share <= tokens for share, (tokens, _) in zip(shares, weights, strict=True))


def test_stretches_of_time_add_up_to_the_whole(tmp_path: Path) -> None:
    versions = chain(6, ("p1", "p2"))
    history = history_of(tmp_path, [])
    for number, version in enumerate(versions):
        history.append(replace(record(version), at_s=START_S + number * DAY_S // 3))
    rows = credits_of([ledger_of(history, versions[-1], DAY_S)]).rows
    assert {row.begins_s % DAY_S for row in rows} == {0} and len({row.begins_s for row in rows}) > 1
    assert sum(row.tokens for row in rows) == versions[-1].header.tokens
    whole = credits_of([ledger_of(history, versions[-1])]).rows
    assert {r.peer: r.contributions for r in whole} == {"p1": 6, "p2": 6}
    assert whole[0].first_s == START_S and whole[0].last_s == START_S + 5 * DAY_S // 3


def test_a_version_of_another_run_is_said() -> None:
    ledger = FragmentLedger("other", 0)
    ledger.add(record(child(genesis(0).header)))
    assert Doubt.OTHER_RUN in ledger.doubts
