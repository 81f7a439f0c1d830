"""Invites: one word that holds all a newcomer needs, and is refused in one sentence when it is damaged."""

from __future__ import annotations

import base64
import os
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemon_kit import signed_run
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.cli import main as cli_main
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.admission import keep_invite, own_admission, with_invite
from p2pdiloco.daemon.papers import (
    INVITE,
    Invite,
    admission_fault,
    decode_invite,
    encode_invite,
    grant,
    grant_fault,
)
from p2pdiloco.daemon.run_files.known_runs import Ownership, save_own_addresses
from p2pdiloco.daemon.run_files.run import save_run, sign_run
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.identity import Identity, verify
from p2pdiloco.tasks.registry import render_toml

OWNER = Identity.from_seed(bytes(32))
KEY = Identity.from_seed(bytes(range(32)))
RUN = "ab" * 32
ADDRESSES = tuple(
    f"/ip4/198.51.100.{n}/tcp/31337/p2p/{Identity.from_seed(bytes([n]) * 32).peer_id}" for n in (1, 2)
)
TEXT = encode_invite(Invite(grant(RUN, KEY.peer_id, 1_900_000_000, 5, OWNER), KEY, ADDRESSES))


def test_it_says_all_that_a_newcomer_needs() -> None:
    invite = decode_invite(f" {TEXT[:100]}\n{TEXT[100:].upper()} ")
    assert invite.run == RUN and invite.addresses == ADDRESSES
    assert (invite.grant.expires, invite.grant.uses) == (1_900_000_000, 5)
    assert grant_fault(invite.grant, RUN, OWNER.peer_id, verify) is None
    shown = invite.admit(ADDRESSES[0][-52:])
    assert admission_fault(shown, ADDRESSES[0][-52:], RUN, OWNER.peer_id, verify) is None
    assert len(TEXT) < 512


def test_it_is_kept_for_nobody_else_to_read(tmp_path: Path) -> None:
    kept = tmp_path / "invite.txt"
    (tmp_path / "invite.txt.tmp").write_text("left over")
    (tmp_path / "invite.txt.tmp").chmod(0o666)
    before = os.umask(0)
    try:
        keep_invite(NodeSettings(data_dir=tmp_path, invite=TEXT))
        assert kept.stat().st_mode & 0o777 == 0o600 and kept.read_text() == TEXT + "\n"
        kept.unlink()
        keep_invite(NodeSettings(data_dir=tmp_path, invite=TEXT))
        assert kept.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@given(st.integers(0, len(TEXT) - 1), st.text(min_size=0, max_size=2))
def test_a_mistyped_one_is_one_sentence(place: int, typed: str) -> None:
    changed = TEXT[:place] + typed + TEXT[place + 1 :]
    try:
        invite = decode_invite(changed)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert "".join(changed.split()).lower() == TEXT and invite.run == RUN


@given(st.binary(max_size=400))
def test_garbage_with_a_right_checksum_is_one_sentence(data: bytes) -> None:
    text = base64.b32encode(data + INVITE.checksum(data)).decode().rstrip("=").lower()
    with pytest.raises(ConfigError):
        decode_invite(INVITE.prefix + text)


def test_cut_and_shuffled_ones_are_one_sentence() -> None:
    rng = random.Random(1)
    for length in (0, 5, 10, 11, len(TEXT) - 1):
        with pytest.raises(ConfigError):
            decode_invite(TEXT[:length])
    body = list(TEXT[10:])
    rng.shuffle(body)
    with pytest.raises(ConfigError):
        decode_invite(TEXT[:10] + "".join(body))
    with pytest.raises(ConfigError):
        decode_invite("p2pdiloco1" + "a" * 5000)


def owned(folder: Path, mode: str = "invite") -> str:
    """A folder of a run's owner, as a bootstrap leaves it. Returns the run's id."""
    path = folder / "run.toml"
    path.write_text(render_toml(for_run("micro", "ours")).replace('mode = "open"', f'mode = "{mode}"'))
    run, vault = sign_run(path, Identity.load_or_create(folder / "owner.key"))
    save_run(folder, run, vault)
    return run.id


def test_the_command_prints_one_that_joins(tmp_path: Path) -> None:
    run = owned(tmp_path)
    data = ["--data-dir", str(tmp_path)]
    assert cli_main.run(["invite", "ours", *data]) == 2, "there is nobody to join through"
    save_own_addresses(tmp_path, ADDRESSES)
    from p2pdiloco.cli.group import cli

    done = CliRunner().invoke(cli, ["invite", "ours", *data, "--uses", "2", "--name", "anna"])
    assert done.exit_code == 0, done.output
    invite = decode_invite(done.stdout)
    assert invite.run == run and invite.addresses == ADDRESSES and invite.grant.uses == 2
    ownership = Ownership.find(run[:8], tmp_path)
    assert ownership.key_of("anna") == ownership.key_of(done.stdout) == invite.grant.key
    for word in ("otto", "p2pdiloco1abc"):
        with pytest.raises(UserError):
            ownership.key_of(word)
    assert cli_main.run(["invite", "another", *data]) == 2
    assert cli_main.run(["invite", "ours", *data, "--expires", "soon"]) == 2


def test_an_invite_to_a_run_that_asks_for_none_says_so(tmp_path: Path) -> None:
    from p2pdiloco.cli.group import cli

    for mode, is_said in (("open", True), ("list", True), ("invite", False)):
        folder = tmp_path / mode
        folder.mkdir()
        owned(folder, mode)
        save_own_addresses(folder, ADDRESSES)
        done = CliRunner().invoke(cli, ["invite", "ours", "--data-dir", str(folder)])
        assert done.exit_code == 0
        assert ("this run does not ask for invites" in done.stderr) is is_said, mode


def test_the_qr_code_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("segno")
    owned(tmp_path)
    save_own_addresses(tmp_path, ADDRESSES)
    from p2pdiloco.cli.group import cli

    done = CliRunner().invoke(cli, ["invite", "ours", "--data-dir", str(tmp_path), "--qr"])
    assert done.exit_code == 0 and "▀" in done.stderr and "▀" not in done.stdout


def settings(folder: Path, **values: str) -> NodeSettings:
    return NodeSettings(data_dir=folder, **values)  # type: ignore[arg-type]


def test_a_node_needs_it_once(tmp_path: Path) -> None:
    first = with_invite(settings(tmp_path, invite=TEXT))
    assert first.run == RUN and first.join == ADDRESSES
    keep_invite(first)
    again = with_invite(settings(tmp_path))
    assert again.run == RUN and again.join == ADDRESSES
    with pytest.raises(ConfigError):
        with_invite(settings(tmp_path, invite=TEXT, run="cd" * 32))
    assert with_invite(settings(tmp_path, run="cd" * 32)).join == (), "it is to another run"
    (tmp_path / "invite.txt").write_text("damaged")
    assert with_invite(settings(tmp_path)).join == ()


def test_what_a_node_shows(tmp_path: Path) -> None:
    """The owner's key admits the node in its folder; an invite is used once and kept in its run."""
    run = signed_run(tmp_path, "other")
    me = Identity.generate().peer_id
    assert own_admission(tmp_path, run, me) is None
    key, guest = Identity.generate(), tmp_path / "guest"
    guest.mkdir()
    invite = Invite(grant(run.id, key.peer_id, 0, 1, OWNER), key, ())
    text = encode_invite(Invite(invite.grant, key, ADDRESSES))
    keep_invite(settings(guest, invite=text))
    shown = own_admission(guest, run, me)
    assert shown is not None and shown.peer == me and shown.grant == invite.grant
    (guest / "invite.txt").unlink()
    assert own_admission(guest, run, me) is None, "this run's owner did not sign it"
    ours = owned(tmp_path)
    mine, _ = sign_run(tmp_path / "run.toml", Identity.load_or_create(tmp_path / "owner.key"))
    assert mine.id == ours
    shown = own_admission(tmp_path, mine, me)
    assert shown is not None and admission_fault(shown, me, ours, mine.signed.owner, verify) is None
    (tmp_path / "owner.key").unlink()
    assert own_admission(tmp_path, mine, me) == shown, "kept"
