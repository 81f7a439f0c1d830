from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from disk_kit import RUN, chain, checkpoint_path, loaded_number, payload_of, save, vectors, version, votes
from safetensors.numpy import load_file

from p2pdiloco.adapters.run_store import COMPACT_ABOVE_BYTES, KEPT_GROUPS, RunStore
from p2pdiloco.core.api.events import MILESTONES, VoteRecord
from p2pdiloco.core.api.papers import TwoVotes
from p2pdiloco.core.api.types import Vote, VoteBody
from p2pdiloco.errors import InvariantViolation


def numbers(store: RunStore, above: int, parent: bytes | None = None) -> list[int]:
    return [update.header.number for update, _ in store.load_updates(0, above, parent)]


def test_checkpoint_comes_back_after_a_restart_and_two_are_kept(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    assert store.load_checkpoint(0) is None
    for number in (4, 7, 9):
        save(store, number)
    reopened = RunStore(tmp_path, RUN)
    assert loaded_number(reopened) == 9
    assert reopened.load_checkpoint(1) is None
    names = sorted(path.name for path in checkpoint_path(store, 0).parent.iterdir())
    assert names == ["checkpoint-7.safetensors", "checkpoint-9.safetensors"]
    assert reopened.take_problems() == []
    tensors = load_file(checkpoint_path(store, 9))  # as the safetensors library reads it
    theta, momentum = vectors(9)
    assert np.array_equal(tensors["theta"], theta) and np.array_equal(tensors["momentum"], momentum)


def test_checkpoint_of_a_heavier_branch_with_a_lower_number_is_the_newest(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    for number in (4, 20, 18):
        save(store, number)
    assert loaded_number(store) == 18
    assert not checkpoint_path(store, 20).exists()
    assert checkpoint_path(store, 4).exists()


def test_updates_load_as_a_chain_and_are_pruned(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    for update in chain(1, 6):
        store.save_update(update, payload_of(update.header.number), durable=update.header.number % 2 == 0)
    store = RunStore(tmp_path, RUN)
    assert store.load_updates(0, 4) == [(u, payload_of(u.header.number)) for u in chain(1, 6)[4:]]
    assert store.load_update(0, 2) == (chain(1, 6)[1], payload_of(2)) and store.load_update(0, 7) is None
    store.prune_updates(0, 3)
    assert numbers(store, 0) == []
    assert numbers(store, 2) == [3, 4, 5, 6]
    assert numbers(store, 6) == [] and store.load_updates(5, 0) == []


def test_updates_of_a_left_branch_are_not_part_of_the_chain(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    old, new = chain(1, 5), chain(1, 3, parent=b"other".ljust(32))
    for update in (*old, *new):
        store.save_update(update, payload_of(update.header.number), durable=False)
    assert numbers(store, 0) == [1, 2, 3]
    assert numbers(store, 3) == [4, 5]
    assert numbers(store, 3, parent=new[-1].header.digest()) == []
    assert store.take_problems() == []


def test_votes_survive_restarts_and_compaction(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    log = store.folder / "votes.log"
    largest, term = 0, 0
    while log.exists() is False or log.stat().st_size >= largest:
        largest = log.stat().st_size if log.exists() else 0
        term += 1
        store.save_vote(VoteRecord(term % 3, term, f"candidate {term}" + "x" * 1000))
    assert largest > COMPACT_ABOVE_BYTES
    expected = {t % 3: VoteRecord(t % 3, t, f"candidate {t}" + "x" * 1000) for t in range(term - 2, term + 1)}
    assert votes(store) == expected == votes(RunStore(tmp_path, RUN))


def test_a_second_vote_in_a_term_a_version_of_another_run_and_a_run_elsewhere_are_bugs_of_ours(
    tmp_path: Path,
) -> None:
    RunStore(tmp_path, RUN).save_vote(VoteRecord(0, 5, "a"))
    store = RunStore(tmp_path, RUN)
    store.save_vote(VoteRecord(0, 5, "a"))
    with pytest.raises(InvariantViolation):
        store.save_vote(VoteRecord(0, 5, "b"))
    with pytest.raises(InvariantViolation):
        store.save_update(version(1, run="77" * 32), b"", durable=False)
    with pytest.raises(InvariantViolation):
        RunStore(tmp_path, "../../etc")


def test_votes_are_kept_by_group_and_the_groups_of_the_past_are_let_go(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    store.save_vote(VoteRecord(0, 1, "whole"))
    store.save_vote(VoteRecord(0, 8, "00ff", MILESTONES))
    store.save_vote(VoteRecord(1, 4, "other", "0/0/1"))
    last = KEPT_GROUPS + 9
    for epoch in range(last + 1):
        store.save_vote(VoteRecord(0, 7, f"leaf {epoch}", f"{epoch}/0/3"))
        store.save_vote(VoteRecord(0, 8, "again", f"{epoch}/0/3"))
    store.save_vote(VoteRecord(0, 9, "root", f"{last}/1/0"))
    kept = RunStore(tmp_path, RUN).votes()
    assert kept == store.votes()
    assert kept[0, MILESTONES] == VoteRecord(0, 8, "00ff", MILESTONES)
    assert kept[0, "all"].candidate == "whole" and kept[1, "0/0/1"].candidate == "other"
    assert kept[0, f"{last}/1/0"].term == 9 and kept[0, f"{last}/0/3"].term == 8
    groups = [group for fragment, group in kept if fragment == 0 and "/" in group]
    assert len(groups) == KEPT_GROUPS and "9/0/3" not in groups
    with pytest.raises(InvariantViolation):
        store.save_vote(VoteRecord(0, 8, "somebody else", f"{last}/0/3"))


def test_a_line_without_a_group_is_of_the_whole_run(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    text = b'{"fragment":2,"term":5,"candidate":"old"}'
    line = hashlib.sha256(text).hexdigest()[:16].encode() + b" " + text + b"\n"
    (store.folder / "votes.log").write_bytes(line)
    assert RunStore(tmp_path, RUN).votes() == {(2, "all"): VoteRecord(2, 5, "old")}


# The file of proofs: replaced as a whole, set aside when it is damaged.

PROVED_RUN = "ab" * 32
LIES = tuple(
    TwoVotes(
        *(Vote(VoteBody(PROVED_RUN, "all", 0, 3, who, voter, 0, bytes(32)), b"s") for who in ("p1", "p2"))
    )
    for voter in ("p3", "p4")
)


def test_proofs_are_what_was_saved_last(tmp_path: Path) -> None:
    store = RunStore(tmp_path, PROVED_RUN)
    assert store.proofs() == ()
    store.save_proofs(LIES[:1])
    store.save_proofs(LIES)
    assert RunStore(tmp_path, PROVED_RUN).proofs() == LIES and not store.take_problems()
    assert [path.name for path in store.folder.iterdir() if path.is_file()] == ["proofs"]


@pytest.mark.parametrize("content", [b"", b"\xc1rotten", b"\x91\x01"])
def test_a_damaged_file_is_told_set_aside_and_as_if_it_had_never_been(tmp_path: Path, content: bytes) -> None:
    store = RunStore(tmp_path, PROVED_RUN)
    (store.folder / "proofs").write_bytes(content)
    assert store.proofs() == ()
    assert "proofs is damaged" in store.take_problems()[0] and (store.folder / "proofs.corrupt").exists()
    store.save_proofs(LIES)
    assert store.proofs() == LIES
