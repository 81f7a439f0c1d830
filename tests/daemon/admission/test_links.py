"""Run links: one word that says which run, whose it is, and whom to join through."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from daemon_kit import signed_run
from hypothesis import given
from hypothesis import strategies as st
from test_invites import ADDRESSES, KEY, OWNER, RUN, TEXT, owned, settings

from p2pdiloco.adapters import dns
from p2pdiloco.cli.group import cli
from p2pdiloco.cli.options import joined_through
from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.daemon.admission import (
    check_owner,
    joined_through_before,
    keep_invite,
    own_admission,
    with_invite,
    with_link,
)
from p2pdiloco.daemon.member import Approval
from p2pdiloco.daemon.papers import Invite, encode_invite, grant
from p2pdiloco.daemon.program import print_join
from p2pdiloco.daemon.run_files.known_runs import (
    LINK,
    Ownership,
    RunLink,
    encode_link,
    is_link,
    joined_runs,
    keep_joined_through,
    peers_file,
    read_link,
    remember_joined,
    save_own_addresses,
)
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.identity import Identity

NAME = "/dnsaddr/boot.example"
LOOPBACK = f"/ip4/127.0.0.1/tcp/1/p2p/{KEY.peer_id}"


def link(**changes: object) -> str:
    values = {"addresses": (*ADDRESSES, NAME), "owner": OWNER.peer_id, "name": "ours"} | changes
    return encode_link(RunLink(RUN, **values))


WORD = link()


def invited(expires: int = 0, run: str = RUN) -> Invite:
    return Invite(grant(run, KEY.peer_id, expires, 5, OWNER), KEY, ADDRESSES)


def test_it_says_run_owner_name_and_peers() -> None:
    read = read_link(f" {WORD[:90]}\n{WORD[90:].upper()} ")
    assert read == RunLink(RUN, (*ADDRESSES, NAME), OWNER.peer_id, "ours")
    assert len(WORD) < 400 and is_link(WORD.upper()) and is_link(TEXT) and not is_link(ADDRESSES[0])


def test_what_is_no_address_is_not_put_in() -> None:
    for address in ("/dnsaddr/", "/dnsaddr/a b", "/ip4/203.0.113.1/tcp/1"):
        with pytest.raises(ConfigError):
            link(addresses=(address,))


def test_an_invite_may_be_in_it() -> None:
    read = read_link(link(addresses=ADDRESSES, invite=invited(9)))
    assert read.invite is not None and read.invite.grant == invited(9).grant
    assert read.invite.key.peer_id == KEY.peer_id and read.invite.addresses == ADDRESSES
    assert read_link(TEXT).invite is not None, "an invite by itself is read, too"


def test_loopback_is_left_out_beside_others() -> None:
    assert read_link(link(addresses=(LOOPBACK, *ADDRESSES))).addresses == ADDRESSES
    assert read_link(link(addresses=(LOOPBACK,))).addresses == (LOOPBACK,)


@given(st.integers(0, len(WORD) - 1), st.text(min_size=0, max_size=2))
def test_a_mistyped_one_is_one_sentence(place: int, typed: str) -> None:
    changed = WORD[:place] + typed + WORD[place + 1 :]
    try:
        read = read_link(changed)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert read == read_link(WORD)  # the last letter has bits of no meaning


@given(st.binary(max_size=400))
def test_garbage_with_a_right_checksum_is_one_sentence(data: bytes) -> None:
    text = base64.b32encode(data + LINK.checksum(data)).decode().rstrip("=").lower()
    with pytest.raises(ConfigError):
        read_link(LINK.prefix + text)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (WORD[:-1], "mistyped, or not all of it"),
        (WORD[:11], "too few of them"),
        (WORD + "a" * 5000, "too long for a run link"),
        (WORD.replace(":1", ":2"), "form 2, and this release reads form 1"),
        ("p2pdiloco:" + TEXT, "begins with p2pdiloco:1"),
        (LINK.prefix + TEXT.removeprefix("p2pdiloco1"), "mistyped"),
        ("https://example.org", "a run link begins with p2pdiloco:1"),
    ],
)
def test_what_is_wrong_with_a_link_is_said(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_link(word)


def test_shuffled_ones_are_one_sentence() -> None:
    body = list(WORD.removeprefix(LINK.prefix))
    random.Random(1).shuffle(body)
    with pytest.raises(ConfigError):
        read_link(LINK.prefix + "".join(body))


def test_a_node_needs_it_once(tmp_path: Path) -> None:
    first = with_invite(settings(tmp_path, invite=WORD))
    assert first.run == RUN and first.join == (*ADDRESSES, NAME)
    keep_invite(first)
    assert (tmp_path / "invite.txt").stat().st_mode & 0o777 == 0o600
    again = with_invite(settings(tmp_path))
    assert again.run == RUN and again.join == first.join
    assert with_invite(settings(tmp_path, run="ours")).run == RUN
    assert with_invite(settings(tmp_path, run="cd" * 32)).join == (), "it is to another run"


def test_it_stands_in_an_address_s_place(tmp_path: Path) -> None:
    """Once in `--join` it is as if it had been given by itself, and is remembered."""
    more = f"/ip4/203.0.113.9/tcp/1/p2p/{OWNER.peer_id}"
    filled = with_invite(settings(tmp_path, join=(more, WORD)))
    assert filled.join == (more, *ADDRESSES, NAME) and filled.run == RUN and filled.invite == WORD
    boot = with_link(BootstrapSettings(join=(WORD,)))
    assert boot.run_ids() == [RUN] and boot.join == (*ADDRESSES, NAME)
    kept = with_link(BootstrapSettings(join=(WORD,), run=(Path("run.toml"),)))
    assert kept.run == (Path("run.toml"),)
    with pytest.raises(ConfigError, match="several"):
        with_invite(settings(tmp_path, invite=WORD, join=(TEXT,)))
    with pytest.raises(ConfigError, match="and --run says another"):
        with_invite(settings(tmp_path, invite=WORD, run="another"))


def test_names_in_it_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = f"/ip4/203.0.113.9/tcp/1/p2p/{KEY.peer_id}"
    monkeypatch.setattr(dns, "txt_records", lambda name, until_s: [f"dnsaddr={behind}"])
    assert joined_through([WORD]) == ((*ADDRESSES, behind), RUN)
    assert joined_through([link(addresses=(NAME,))], "ours") == ((behind,), RUN)


def test_a_run_of_another_owner_is_refused(tmp_path: Path) -> None:
    run = signed_run(tmp_path, "ours")
    for owner, is_true in ((run.signed.owner, True), (KEY.peer_id, False)):
        word = encode_link(RunLink(run.id, ADDRESSES, owner, "ours"))
        keep_invite(settings(tmp_path, invite=word))
        for given_now in (word, ""):  # and at the next start
            wish = settings(tmp_path, invite=given_now)
            if is_true:
                check_owner(wish, run)
                continue
            with pytest.raises(UserError, match="and the link says"):
                check_owner(wish, run)


async def test_it_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    run = signed_run(tmp_path, "ours")
    for owner in (KEY.peer_id, run.signed.owner):
        wish = settings(tmp_path, invite=encode_link(RunLink(run.id, (), owner, "ours")))
        approving = Approval(wish, lambda _text, _figures: None, None).approve(run, is_new=True)
        if owner == run.signed.owner:
            await approving
            continue
        with pytest.raises(UserError, match="and the link says"):
            await approving
        assert joined_runs(tmp_path) == []
    assert joined_runs(tmp_path) == [run.id]


def test_a_link_takes_no_invite_s_place(tmp_path: Path) -> None:
    run = signed_run(tmp_path, "ours")
    invite = invited(run=run.id)
    keep_invite(settings(tmp_path, invite=encode_link(RunLink(run.id, (), OWNER.peer_id, "", invite))))
    keep_invite(settings(tmp_path, invite=encode_link(RunLink(run.id, ADDRESSES, OWNER.peer_id))))
    text = (tmp_path / "invite.txt").read_text()
    saved = read_link(text).invite
    assert saved is not None and saved.grant == invite.grant
    keep_invite(settings(tmp_path, invite=WORD))
    assert read_link((tmp_path / "invite.txt").read_text()).run == RUN, "another run's link does"


def test_an_expired_invite_lets_only_those_in_who_are(tmp_path: Path) -> None:
    for word in (encode_invite(invited(1000)), link(addresses=ADDRESSES, invite=invited(1000))):
        with pytest.raises(ConfigError, match="the invite has expired, at 1970-01-01"):
            with_invite(settings(tmp_path, invite=word))
    kept = tmp_path / "runs" / RUN[:16] / "admission"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"kept")
    assert with_invite(settings(tmp_path, invite=TEXT)).run == RUN
    assert with_invite(settings(tmp_path, invite=encode_invite(invited(1000)))).run == RUN


def called(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def test_the_command_prints_one_that_joins(tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path)]
    assert isinstance(called("run", "link", *data).exception, UserError), "there is no run"
    run = owned(tmp_path)
    assert "no address" in str(called("run", "link", *data).exception)
    save_own_addresses(tmp_path, (LOOPBACK,))
    only = called("run", "link", "ours", *data)
    assert "loopback only" in only.stderr and "invite ours --link" in only.stderr
    done = called("run", "link", run[:8], *data, "--join", ADDRESSES[0], "--join", NAME)
    read = read_link(done.stdout)
    owner = Ownership.find("ours", tmp_path).key.peer_id
    assert read == RunLink(run, (ADDRESSES[0], NAME), owner, "ours") and "loopback" not in done.stderr
    assert called("run", "link", "another", *data).exception is not None


def test_by_nothing_it_is_of_the_run_that_was_joined_last(tmp_path: Path) -> None:
    first = owned(tmp_path)
    (tmp_path / "owner.key").unlink()
    second = owned(tmp_path, "open")
    save_own_addresses(tmp_path, ADDRESSES)
    asked = ["run", "link", "--data-dir", str(tmp_path)]
    assert "more than one run" in str(called(*asked).exception)
    for run in (first, second):
        remember_joined(tmp_path, run)
        assert read_link(called(*asked).stdout).run == run


def test_an_owner_s_link_lets_in(tmp_path: Path) -> None:
    run = owned(tmp_path)
    save_own_addresses(tmp_path, ADDRESSES)
    done = called("invite", "ours", "--link", "--uses", "2", "--data-dir", str(tmp_path))
    read = read_link(done.stdout)
    assert read.invite is not None and (read.run, read.name, read.invite.grant.uses) == (run, "ours", 2)
    ownership = Ownership.find("ours", tmp_path)
    assert ownership.key_of(done.stdout) == read.invite.grant.key
    with pytest.raises(UserError, match="no invite in this run link"):
        ownership.key_of(WORD)
    guest = tmp_path / "guest"
    guest.mkdir()
    keep_invite(with_invite(settings(guest, invite=done.stdout)))
    shown = own_admission(guest, ownership_run(tmp_path), Identity.generate().peer_id)
    assert shown is not None and shown.grant == read.invite.grant


def ownership_run(folder: Path):  # type: ignore[no-untyped-def]
    from p2pdiloco.daemon.run_files.run import sign_run

    return sign_run(folder / "run.toml", Identity.load_or_create(folder / "owner.key"))[0]


@pytest.mark.parametrize(("name", "beginning"), [("code.svg", b"<?xml"), ("code.png", b"\x89PNG")])
def test_the_code_is_written(name: str, beginning: bytes, tmp_path: Path) -> None:
    owned(tmp_path)
    save_own_addresses(tmp_path, ADDRESSES)
    path = tmp_path / name
    done = called("run", "link", "--data-dir", str(tmp_path), "--qr", "--qr-file", str(path))
    assert done.exit_code == 0 and "▀" in done.stderr and path.read_bytes().startswith(beginning)
    for wrong in (tmp_path / "code.gif", tmp_path / "no" / name):
        done = called("run", "link", "--data-dir", str(tmp_path), "--qr-file", str(wrong))
        assert isinstance(done.exception, UserError) and not done.stdout, "before anything is printed"


def test_what_a_program_prints_when_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = signed_run(tmp_path, "ours")
    print_join(ADDRESSES, [run])
    join, word = capsys.readouterr().out.splitlines()
    assert join == f"p2pdiloco node --join {ADDRESSES[0]} --run {run.id}"
    assert read_link(word.removeprefix("p2pdiloco node ")) == RunLink(
        run.id, ADDRESSES, run.signed.owner, "ours"
    )
    print_join(ADDRESSES, [])
    assert capsys.readouterr().out.splitlines() == [f"p2pdiloco node --join {ADDRESSES[0]}"]


def test_a_start_without_anything_goes_where_the_last_one_was_told_to_go(tmp_path: Path) -> None:
    """Also beside members that were met; but not where something is given, or a run is begun."""
    bare = settings(tmp_path)
    assert joined_through_before(bare) == ()
    keep_invite(with_invite(settings(tmp_path, invite=WORD)))
    peers_file(tmp_path).write_text(f"{ADDRESSES[0]}\n")
    assert joined_through_before(with_invite(bare)) == (*ADDRESSES, NAME), "the saved link's peers"
    assert joined_through_before(settings(tmp_path, run="cd" * 32)) == (), "it is to another run"
    keep_joined_through(tmp_path, [NAME])
    assert joined_through_before(with_invite(bare)) == (NAME,), "what was given last"
    assert joined_through_before(settings(tmp_path, join=ADDRESSES)) == ()
    assert joined_through_before(settings(tmp_path, run_file=tmp_path / "run.toml")) == ()
