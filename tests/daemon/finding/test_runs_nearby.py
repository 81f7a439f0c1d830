"""Who looks in the local network, when, and what is made of what is found there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from p2pdiloco.adapters.multiaddrs import Nearby
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.network import discovery
from p2pdiloco.errors import UserError

RUN, OTHER = "ab" * 32, "cd" * 32
ONE, TWO = (
    Nearby(f"peer{n}", (f"/ip4/192.0.2.{n}/tcp/1/p2p/peer{n}",), runs=(run[:12],))
    for n, run in ((1, RUN), (2, OTHER))
)


@pytest.fixture
def nearby(monkeypatch: pytest.MonkeyPatch) -> list[Nearby]:
    found: list[Nearby] = []
    monkeypatch.setattr(discovery, "look_nearby", lambda: found)
    monkeypatch.setattr(discovery, "at_terminal", lambda: True)
    return found


def looked(tmp_path: Path, **values: object) -> NodeSettings:
    settings = NodeSettings(data_dir=tmp_path, **values)  # type: ignore[arg-type]
    return discovery.with_nearby(settings, lambda _text: None)


def test_the_only_run_is_taken(nearby: list[Nearby], tmp_path: Path) -> None:
    nearby.append(ONE)
    found = looked(tmp_path)
    assert found.join == ONE.addresses and found.run == RUN[:12]
    assert looked(tmp_path, run=RUN).run == RUN, "the whole id, of which the manifest is checked"
    named = looked(tmp_path, run="ours")
    assert named.run == "ours" and named.join == ONE.addresses


def test_of_several_one_is_named(nearby: list[Nearby], tmp_path: Path) -> None:
    nearby += [ONE, TWO]
    with pytest.raises(UserError, match="2 runs in this network: abababababab, cdcdcdcdcdcd"):
        looked(tmp_path)
    assert looked(tmp_path, run=OTHER).join == TWO.addresses
    assert looked(tmp_path, run="ef" * 32).join == ()


@pytest.mark.process
@pytest.mark.parametrize(
    "values", [{"join": ("/ip4/192.0.2.9/tcp/1/p2p/x",)}, {"genesis": True}, {"run_file": Path("run.toml")}]
)
def test_who_knows_where_to_go_does_not_look(
    values: dict[str, object], nearby: list[Nearby], tmp_path: Path
) -> None:
    nearby.append(ONE)
    assert looked(tmp_path, lan=True, **values) == NodeSettings(data_dir=tmp_path, lan=True, **values)  # type: ignore[arg-type]


def test_nobody_joins_a_stranger_s_run_unasked(
    nearby: list[Nearby], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearby.append(ONE)
    with pytest.raises(UserError, match="nobody is asked whether to join it"):
        looked(tmp_path, lan=True, yes=True)
    monkeypatch.setattr(discovery, "at_terminal", lambda: False)
    assert looked(tmp_path).join == (), "without a terminal only --lan looks"
    for run in ("", "ours"):
        with pytest.raises(UserError, match="nobody is asked whether to join it"):
            looked(tmp_path, lan=True, run=run)
    assert looked(tmp_path, lan=True, run=RUN).join == ONE.addresses
    (tmp_path / "peers.txt").touch()
    monkeypatch.setattr(discovery, "at_terminal", lambda: True)
    assert looked(tmp_path).join == (), "it has met peers before"
    assert looked(tmp_path, lan=True).join == ONE.addresses


def test_the_library_is_missed_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by who only wants to be announced."""
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(UserError, match="zeroconf"):
        looked(tmp_path, lan=True, genesis=True)


def test_a_network_that_cannot_be_looked_through_matters_with_lan_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> list[Nearby]:
        raise UserError("no multicast")

    monkeypatch.setattr(discovery, "look_nearby", fails)
    monkeypatch.setattr(discovery, "at_terminal", lambda: True)
    assert looked(tmp_path).join == ()
    with pytest.raises(UserError, match="no multicast"):
        looked(tmp_path, lan=True)
