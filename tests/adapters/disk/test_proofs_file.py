"""The file of proofs: replaced as a whole, set aside when it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.evidence import TwoVotes
from p2pdiloco.core.api.types import Vote, VoteBody

RUN = "ab" * 32
LIES = tuple(
    TwoVotes(*(Vote(VoteBody(RUN, "all", 0, 3, who, voter), b"s") for who in ("p1", "p2")))
    for voter in ("p3", "p4")
)


def test_proofs_are_what_was_saved_last(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    assert store.proofs() == ()
    store.save_proofs(LIES[:1])
    store.save_proofs(LIES)
    assert RunStore(tmp_path, RUN).proofs() == LIES and not store.take_problems()
    assert [path.name for path in store.folder.iterdir() if path.is_file()] == ["proofs"]


@pytest.mark.parametrize("content", [b"", b"\xc1rotten", b"\x91\x01"])
def test_a_damaged_file_is_told_set_aside_and_as_if_it_had_never_been(tmp_path: Path, content: bytes) -> None:
    store = RunStore(tmp_path, RUN)
    (store.folder / "proofs").write_bytes(content)
    assert store.proofs() == ()
    assert "proofs is damaged" in store.take_problems()[0] and (store.folder / "proofs.corrupt").exists()
    store.save_proofs(LIES)
    assert store.proofs() == LIES
