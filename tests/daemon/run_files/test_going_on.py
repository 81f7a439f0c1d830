"""Whom nobody answers at a start: who goes on from what is saved, and who made a mistake."""

from __future__ import annotations

from pathlib import Path

from daemon_kit import signed_run

from p2pdiloco.adapters.run_store import signed_file
from p2pdiloco.config.manifest import save_signed
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.run_files.known_runs import goes_on, keep_joined_through
from p2pdiloco.daemon.run_files.run import Run
from p2pdiloco.identity import Identity

BEFORE, OTHER = (f"/ip4/203.0.113.{n}/tcp/31337/p2p/{Identity.generate().peer_id}" for n in (1, 2))


def saved(folder: Path, name: str) -> Run:
    run = signed_run(folder.parent, name)
    path = signed_file(folder, run.id)
    path.parent.mkdir(parents=True)
    save_signed(path, run.signed)
    return run


def test_who_starts_again_with_the_same_addresses_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    again = NodeSettings(data_dir=folder, join=(BEFORE,))
    keep_joined_through(tmp_path, [BEFORE])
    assert not goes_on(again), "nothing is saved: the addresses may be wrong"
    run = saved(folder, "anna")
    assert goes_on(again), "an earlier release kept no addresses"
    keep_joined_through(folder, [BEFORE])
    assert goes_on(again)
    assert goes_on(NodeSettings(data_dir=folder, join=(BEFORE,), run_file=tmp_path / "run.toml"))
    other = NodeSettings(data_dir=folder, join=(OTHER,))
    assert not goes_on(other), "it may be there for another run"
    assert not goes_on(NodeSettings(data_dir=folder, join=(OTHER,), run="ben"))
    assert not goes_on(NodeSettings(data_dir=folder, join=(BEFORE,), run="ben")), "which is not here"
    for named in (run.id, run.id[:12], "anna"):
        assert goes_on(NodeSettings(data_dir=folder, join=(OTHER,), run=named))


def test_of_several_runs_it_has_to_be_clear_which_is_meant(tmp_path: Path) -> None:
    first, _ = saved(tmp_path / "node", "anna"), saved(tmp_path / "node", "ben")
    assert not goes_on(NodeSettings(data_dir=tmp_path / "node", join=(BEFORE,)))
    assert goes_on(NodeSettings(data_dir=tmp_path / "node", join=(BEFORE,), run=first.id))
