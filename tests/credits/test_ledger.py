"""The ledger of credits: each contribution once, in worlds and random trees; its history and names kept."""

from __future__ import annotations

import logging
import tempfile
import zlib
from pathlib import Path

import pytest
from credits_kit import DAY_S, START_S, chain, history_of, ledger_of, record, tip
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import RUN, child, genesis, signed_part
from msgspec.structs import replace

from p2pdiloco import credits
from p2pdiloco.core.api.events import CommitVersion, Effect
from p2pdiloco.core.api.types import NEVER, Contributor, Stamp
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import MOST_GAP, WATERMARK_VERSIONS, marks_of
from p2pdiloco.credits import (
    MAX_NAMES,
    Doubt,
    FragmentLedger,
    HeadRef,
    HistoryRecord,
    HistoryStore,
    NamesFile,
    Signatures,
    count_line,
    credits_of,
    decode_page,
    frame_record,
    read_frames,
    shares_of,
)
from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco_lab.simulation.lineage import HashCrypto
from p2pdiloco_lab.simulation.seed_plan import RUN as WORLD_RUN
from p2pdiloco_lab.simulation.seed_plan import draw_plan
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World

VERIFY = HashCrypto("asker").verify


def test_the_credits_of_a_run_are_the_mean_over_fragments(tmp_path: Path) -> None:
    ledgers = []
    for fragment, learners in enumerate([("p1", "p2"), ("p1",), ("p1", "p2", "p3")]):
        versions = chain(5, learners, fragment)
        ledgers.append(ledger_of(history_of(tmp_path / str(fragment), versions), versions[-1]))
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


# Credits of simulated runs with partitions and crashes: what every learner did that is in the state.


class Kept:
    """Histories that all nodes of a world keep, in one store: every branch that anybody took is in it."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.history = world, HistoryStore(folder)
        self.digests: dict[tuple[int, int], set[bytes]] = {}
        world.on_effect = self._effect

    def _effect(self, host: Host, effect: Effect) -> None:
        if not isinstance(effect, CommitVersion):
            return
        header = effect.version.header
        known = self.digests.setdefault((header.fragment, header.number), set())
        if header.digest() not in known:
            known.add(header.digest())
            self.history.append(HistoryRecord(round(host.now), effect.version))

    def forks(self) -> int:
        """Number of versions of which there were several."""
        return sum(len(digests) > 1 for digests in self.digests.values())


@pytest.mark.parametrize(("mix", "seed"), [("partition", 5), ("partition", 14), ("storm", 2), ("churn", 16)])
def test_credits_are_what_the_state_has_of_every_learner(mix: str, seed: int, tmp_path: Path) -> None:
    world = World(draw_plan(seed, mix))
    kept = Kept(world, tmp_path)
    assert not world.run().violation
    counted = 0
    for host in world.core_hosts():
        for store in host.stores:
            head = store.version.header
            signatures = Signatures(WORLD_RUN, head.fragment, HashCrypto("asker").verify)
            ledger = count_line(
                kept.history, WORLD_RUN, head.fragment, HeadRef.of(head.head()), signatures=signatures
            )
            assert not ledger.doubts and ledger.first <= 1
            steps = {peer: entry.inner_steps for (peer, _), entry in ledger.entries.items()}
            truth = {p: sum(b - a for a, b in spans) for p, spans in store.state.covered.items()}
            assert steps == truth, "exactly what is in the state"
            assert ledger.tokens == head.tokens
            assert sum(e.tokens for e in ledger.entries.values()) == head.tokens
            counted += len(steps)
    assert counted and kept.forks(), "branches were displaced"


# Credits of random trees of versions: on every head's line each piece of work counts once, whatever was
# displaced, sent again together with newer work, or put in twice.

STEP_TOKENS = 10
LEARNERS = ("p1", "p2", "p3")
Merge = tuple[int, dict[str, int], str]
"""Which version is the parent, how far each learner has trained since its last label, whose label is there
again."""


class Branch:
    """A version, and what was merged on the line that ends in it."""

    def __init__(self, version: SignedVersion) -> None:
        self.version = version
        self.steps: dict[str, int] = {}
        """Inner steps of every learner that are in the state."""
        self.labels: dict[str, Contributor] = {}
        self.replayed, self.replayed_tokens = 0, 0

    def grown(self, trained: dict[str, int], sequence: int, again: str) -> Branch:
        """The next version. A label is of all that its learner has trained and is not on this line."""
        header, parts = self.version.header, []
        for learner in sorted(trained):
            steps = trained[learner] - self.steps.get(learner, 0)
            before = self.labels[learner].stamp if learner in self.labels else NEVER
            stamp = Stamp(1, sequence)
            parts.append(signed_part(Contributor(learner, stamp, STEP_TOKENS * steps, steps, before)))
        replays = [self.labels[again]] if again in self.labels else []
        merged = (*parts, *replays)
        tokens = header.tokens + sum(part.tokens for part in merged)
        child = replace(
            header, number=header.number + 1, parent=header.digest(), contributors=merged, tokens=tokens
        )
        grown = Branch(SignedVersion(child, b""))
        grown.steps, grown.labels = self.steps | trained, self.labels | {p.learner: p for p in parts}
        grown.replayed = self.replayed + len(replays)
        grown.replayed_tokens = self.replayed_tokens + sum(part.tokens for part in replays)
        return grown


MERGES = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.dictionaries(st.sampled_from(LEARNERS), st.integers(1, 9), min_size=1),
        st.sampled_from(("", *LEARNERS)),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60)
@given(MERGES, st.randoms(use_true_random=False))
def test_on_every_line_each_piece_of_work_counts_once(merges: list[Merge], random: object) -> None:
    branches, trained = [Branch(genesis(0))], dict.fromkeys(LEARNERS, 0)
    for sequence, (parent, more, again) in enumerate(merges, 1):
        for learner, steps in more.items():
            trained[learner] += steps
        its = {learner: trained[learner] for learner in more}
        branches.append(branches[-1 - parent % len(branches)].grown(its, sequence, again))
    kept = [branch.version for branch in branches[1:]] * 2  # what several gave is there twice
    random.shuffle(kept)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        history = history_of(Path(folder), kept)
        for branch in branches[1:]:
            ledger = ledger_of(history, branch.version)
            entries = {peer: entry for (peer, _), entry in ledger.entries.items()}
            assert {peer: entry.inner_steps for peer, entry in entries.items()} == branch.steps
            assert {peer: entry.tokens for peer, entry in entries.items()} == {
                peer: STEP_TOKENS * steps for peer, steps in branch.steps.items()
            }
            assert ledger.doubts == ({Doubt.TWICE: branch.replayed} if branch.replayed else {})
            assert ledger.uncredited_tokens == branch.replayed_tokens
            assert ledger.tokens == branch.version.header.tokens


# The history on the disk: what was appended is found, whatever a crash, a fork or a damaged file did.


def numbers(history: HistoryStore, head: SignedVersion) -> list[int]:
    return [r.version.header.number for r in history.down(0, tip(head))]


def test_a_line_is_found_also_by_a_later_life(tmp_path: Path) -> None:
    versions = chain(60)
    history = history_of(tmp_path, versions)
    for _ in range(2):
        line = history.line(0, tip(versions[-1]))
        assert line.is_whole and line.wanted == versions[0].header.parent
        assert [r.version for r in history.along(0, line)] == versions
        history.close()
    assert history.find(0, tip(versions[6])) == record(versions[6])
    assert history.find(0, HeadRef(7, bytes(32))) is None
    digest = versions[6].header.digest()
    assert [history.find(f, HeadRef(n, digest)) for f, n in ((0, 8), (1, 7))] == [None, None]


def test_what_was_appended_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    versions = chain(6)
    history_of(tmp_path / "alive", versions)
    (tmp_path / "later").mkdir()
    for path in (tmp_path / "alive").iterdir():  # as they are at that moment, the database still open
        (tmp_path / "later" / path.name).write_bytes(path.read_bytes())
    assert numbers(HistoryStore(tmp_path / "later"), versions[-1]) == [6, 5, 4, 3, 2, 1]


def test_what_earlier_releases_kept_is_taken_in(tmp_path: Path) -> None:
    versions = chain(6)
    frames = [frame_record(record(version)) for version in versions]
    folder = tmp_path / "0000"
    folder.mkdir()
    (folder / "00000000-1-4.z").write_bytes(zlib.compress(b"".join(frames[:4]), 6))
    (folder / "00000001.log").write_bytes(b"".join(frames[4:]) + frames[0][:9])
    assert numbers(HistoryStore(tmp_path), versions[-1]) == [6, 5, 4, 3, 2, 1]


def test_a_full_disk_takes_nothing_of_what_is_there(tmp_path: Path) -> None:
    versions = chain(40)
    history = history_of(tmp_path, versions[:3])
    with history._database("save") as database:
        database.execute("PRAGMA max_page_count = 1").fetchall()
    with pytest.raises(StorageError, match=r"cannot save .*history\.db: database or disk is full"):
        for version in versions[3:]:
            history.append(record(version))
    assert numbers(history, versions[2]) == [3, 2, 1]


def test_of_branches_the_line_of_the_head_counts(tmp_path: Path) -> None:
    versions = chain(10)
    other = [child(versions[4].header, syncer="p2", learners=("p2",))]
    for _ in range(7):
        other.append(child(other[-1].header, syncer="p2", learners=("p2",)))
    history = history_of(tmp_path, [*versions, *other])
    line = history.line(0, tip(other[-1]))
    assert [r.version for r in history.along(0, line)] == [*versions[:5], *other]


def test_what_is_missing_is_said_and_can_come_later(tmp_path: Path) -> None:
    versions = chain(30)
    history = history_of(tmp_path, versions[20:])
    line = history.line(0, tip(versions[-1]))
    assert (line.first, line.wanted) == (21, versions[19].header.digest()) and not line.is_whole
    for version in reversed(versions[:20]):
        history.append(record(version))
    assert history.line(0, tip(versions[-1])).is_whole


def test_a_damaged_record_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    versions = chain(9)
    history = history_of(tmp_path, versions)
    with history._database("save") as database:
        database.execute(
            "UPDATE versions SET record = x'00' WHERE digest = ?", (versions[3].header.digest(),)
        )
    assert history.line(0, tip(versions[-1])).first == 5
    history.append(record(versions[3]))
    assert history.line(0, tip(versions[-1])).is_whole


def test_a_damaged_file_is_set_aside_and_filled_anew(tmp_path: Path) -> None:
    versions = chain(9)
    history = history_of(tmp_path, versions)
    history.close()
    path = tmp_path / "history.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match="is damaged, and was set aside"):
        history.line(0, tip(versions[-1]))
    assert not history.line(0, tip(versions[-1])).digests and (tmp_path / "history.db.corrupt").exists()
    for version in versions:
        history.append(record(version))
    assert history.line(0, tip(versions[-1])).is_whole


def test_a_page_ends_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [record(version) for version in chain(3)]
    monkeypatch.setattr(credits, "PAGE_BYTES", len(frame_record(kept[0])) + 1)
    assert credits.page_of(kept) == frame_record(kept[0]) + frame_record(kept[1])


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_page_of_a_peer_is_whole_or_refused(cut: int) -> None:
    page = b"".join(frame_record(record(version)) for version in chain(3))
    assert len(decode_page(page)) == 3 and decode_page(b"") == []
    with pytest.raises(RemoteError, match="garbage"):
        decode_page(page[:-cut])
    changed = bytearray(page)
    changed[-cut] ^= 1
    with pytest.raises(RemoteError, match="garbage"):
        decode_page(bytes(changed))
    assert len(list(read_frames(page[:-cut]))) == 2


# Names beside a history: they outlive restarts, however many and long; a damaged file is set aside.


def test_names_are_kept_however_long(tmp_path: Path) -> None:
    path = tmp_path / "history" / "names.json"
    known = {f"12D3KooW{n:044}": "\N{MATHEMATICAL BOLD CAPITAL A}" * 63 for n in range(MAX_NAMES)}
    NamesFile(path, known).save(known)
    again = NamesFile(path, {})
    assert all(again.get(peer) == name for peer, name in known.items())


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "names.json"
    path.write_bytes(b"[1")
    with caplog.at_level(logging.WARNING):
        names = NamesFile(path, {"p1": "ada"})
    assert "damaged" in caplog.text and (tmp_path / "names.json.corrupt").exists()
    path.mkdir()
    names.save(["p1"])
    assert NamesFile(path, {}).get("p1") == "ada"
