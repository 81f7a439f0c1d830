"""Free riders: what is a copy, or not trusted, counts no tokens, and no honest learner is robbed."""

from __future__ import annotations

from kit import child, config, contribution, digest, found, genesis
from msgspec.structs import replace
from scenes import one_round, syncer

from p2pdiloco.core import chain as scale
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import LEAST_TRUST, NOTHING, USUAL_SCORE, Contributor, Stamp
from p2pdiloco.core.chain import LAST_BYTES, Chain, copy_mark, earned, marks_of
from p2pdiloco.credits import FragmentLedger, HistoryRecord


def part(learner: str, sequence: int, payload: object, **odd: object) -> Contributor:
    """A contribution of forty tokens."""
    made = Contributor(learner, Stamp(1, sequence), 40, 4, payload_digest=digest(payload))
    return replace(made, **odd)


def grown(chain: Chain, *parts: Contributor) -> list[int]:
    """Tokens of the chain, version after version, as these parts are merged one after another."""
    found = []
    for number, each in enumerate(parts, 1):
        after = chain.marks.stamp(each.learner)
        each = replace(each, stamp=Stamp(1, number), after=after)
        tokens = scale.scale_after(chain, (each,), config()).tokens
        version = child(chain.header, contributors=(each,), tokens=tokens)
        chain.extend(version)
        found.append(chain.header.tokens)
    return found


def chain() -> Chain:
    return Chain((genesis(0),), (), 16)


def test_a_stale_replay_and_a_copy_count_nothing() -> None:
    # 1: the version is heavier than its parent all the same
    assert grown(chain(), part("a", 1, "x"), part("a", 2, "x"), part("b", 1, "x")) == [40, 41, 42]
    assert grown(chain(), part("a", 1, "x"), part("a", 2, "y"), part("b", 1, "x")) == [40, 80, 120]


def test_what_names_no_payload_is_no_copy() -> None:
    unnamed = replace(part("a", 1, "x"), payload_digest=bytes(32))
    assert grown(chain(), unnamed, replace(unnamed, learner="b")) == [40, 80] and not copy_mark(bytes(32))


def test_one_payload_of_several_counts_once() -> None:
    parts = (part("a", 1, "x"), part("b", 1, "x"), part("c", 1, "y"))
    assert earned(parts, frozenset()) == [20, 20, 40]
    assert earned(parts, frozenset([copy_mark(digest("x"))])) == [0, 0, 40]
    assert earned((replace(parts[2], trust=LEAST_TRUST),), frozenset()) == [0]


def test_one_payload_in_many_names_earns_no_votes() -> None:
    marks = marks_of(())
    for number in (1, 2):
        honest = [part(f"h{n}", number, (n, number), score=USUAL_SCORE) for n in range(5)]
        crowd = [part(f"s{n}", number, number, score=USUAL_SCORE) for n in range(20)]
        marks = marks.after(number, (*honest, *crowd))
    assert sorted(marks.voters) == [f"h{n}" for n in range(5)]


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
        version = child(here.header, contributors=(each,), tokens=tokens)
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
    assert found(fresh.feed(ev.Offered(90, "p1", signed)), ef.AcceptTransfer)


def test_a_copy_that_was_on_its_way_beside_the_true_one_is_not_merged() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=3)
    for transfer, learner in ((1, "p1"), (2, "p2")):
        signed = contribution(learner, solo.head, payload_digest=digest("same"))
        assert found(solo.feed(ev.Offered(transfer, learner, signed)), ef.AcceptTransfer), "none is here"
    assert solo.fragment.round is not None
    first = found(solo.feed(ev.PayloadReceived(1, 101)), ef.AnswerTransfer)[0].verdict
    second = found(solo.feed(ev.PayloadReceived(2, 102)), ef.AnswerTransfer)[0].verdict
    assert first.taken and second is Verdict.CHAIN_MOVED
    again = found(solo.feed(ev.Offered(3, "p2", signed)), ef.AnswerTransfer)[0].verdict
    assert again is Verdict.COPY
