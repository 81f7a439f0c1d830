"""Invites, run links, papers and the register of members: each fault is one refusal in one sentence."""

from __future__ import annotations

import base64
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from daemon_kit import signed_run
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pdiloco.adapters import dns
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.cli import main as cli_main
from p2pdiloco.cli.group import cli
from p2pdiloco.cli.options import joined_through
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import BootstrapSettings, NodeSettings
from p2pdiloco.core.api.config import MAX_AMENDMENTS, Amendment, Going
from p2pdiloco.core.api.papers import (
    NUMBERS_FROM_S,
    NUMBERS_PER_H,
    RECOVERY_FROM,
    Admission,
    Grant,
    TwoVotes,
    Word,
    admission_fault,
    grant_fault,
    is_sound,
)
from p2pdiloco.core.api.reasons import AdmissionFault
from p2pdiloco.core.api.types import Vote, VoteBody
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission import (
    NEWS,
    Charter,
    Gate,
    NotAdmitted,
    Register,
    check_owner,
    fault_words,
    joined_through_before,
    own_admission,
    with_invite,
    with_link,
)
from p2pdiloco.daemon.member import Approval
from p2pdiloco.daemon.notice import (
    INVITE,
    MAX_NOTICE_BYTES,
    Invite,
    Notice,
    Vouch,
    _PackedInvite,
    admission,
    decode_invite,
    decode_notice,
    encode_notice,
    grant,
    is_true_notice,
    may_follow,
    pack_peers,
    save_notice,
    signed,
)
from p2pdiloco.daemon.program import print_join
from p2pdiloco.daemon.run_files.known_runs import (
    JOINED,
    LINK,
    RunLink,
    WaysIn,
    change_ways,
    encode_link,
    is_link,
    read_link,
)
from p2pdiloco.daemon.run_files.ownership import LINK_NAME, LINK_USES, Ownership
from p2pdiloco.daemon.run_files.run import save_run, sign_run
from p2pdiloco.daemon.wire import AdmissionShown, GiveNotice, ShowAdmission
from p2pdiloco.errors import ConfigError, RemoteError, UserError
from p2pdiloco.identity import Identity, verify
from p2pdiloco.tasks.registry import render_toml

OWNER = Identity.from_seed(bytes(32))
KEY = Identity.from_seed(bytes(range(32)))
RUN = "ab" * 32
ADDRESSES = tuple(
    f"/ip4/198.51.100.{n}/tcp/31337/p2p/{Identity.from_seed(bytes([n]) * 32).peer_id}" for n in (1, 2)
)


def old_word(invite: Invite) -> str:
    """An invite as earlier releases wrote it."""
    right = invite.right
    given = (right.seed, right.expires, right.uses, right.signature)
    return INVITE.encode(_PackedInvite(bytes.fromhex(invite.run), *given, pack_peers(invite.addresses, "it")))


TEXT = old_word(Invite(grant(RUN, KEY.peer_id, 1_900_000_000, 5, OWNER), KEY, ADDRESSES))


def test_it_says_all_that_a_newcomer_needs() -> None:
    invite = decode_invite(f" {TEXT[:100]}\n{TEXT[100:].upper()} ")
    assert invite.run == RUN and invite.addresses == ADDRESSES
    assert (invite.grant.expires, invite.grant.uses) == (1_900_000_000, 5)
    assert grant_fault(invite.grant, RUN, (OWNER.peer_id,), verify) is None
    shown = invite.admit(ADDRESSES[0][-52:])
    assert admission_fault(shown, ADDRESSES[0][-52:], RUN, (OWNER.peer_id,), verify) is None
    assert len(TEXT) < 512


def keep(folder: Path, text: str) -> None:
    change_ways(folder, WaysIn.given, text)


def test_it_is_kept_for_nobody_else_to_read(tmp_path: Path) -> None:
    kept, left_over = tmp_path / JOINED, tmp_path / f"{JOINED}.tmp"
    left_over.write_text("left over")
    left_over.chmod(0o666)
    before = os.umask(0)
    try:
        keep(tmp_path, f" {TEXT[:100]}\n{TEXT[100:]} ")
        assert kept.stat().st_mode & 0o777 == 0o600 and WaysIn.load(tmp_path).link == TEXT
        kept.unlink()
        keep(tmp_path, TEXT)
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
    change_ways(tmp_path, WaysIn.reached_at, ADDRESSES)
    from p2pdiloco.cli.group import cli

    done = CliRunner().invoke(cli, ["invite", "ours", *data, "--uses", "2", "--name", "anna"])
    assert done.exit_code == 0, done.output
    link = read_link(done.stdout)
    invite = link.invite
    assert invite is not None and link.name == "ours"
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
        change_ways(folder, WaysIn.reached_at, ADDRESSES)
        done = CliRunner().invoke(cli, ["invite", "ours", "--data-dir", str(folder)])
        assert done.exit_code == 0
        assert ("this run does not ask for invites" in done.stderr) is is_said, mode


def test_the_qr_code_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("segno")
    owned(tmp_path)
    change_ways(tmp_path, WaysIn.reached_at, ADDRESSES)
    from p2pdiloco.cli.group import cli

    done = CliRunner().invoke(cli, ["invite", "ours", "--data-dir", str(tmp_path), "--qr"])
    assert done.exit_code == 0 and "▀" in done.stderr and "▀" not in done.stdout


def settings(folder: Path, **values: str) -> NodeSettings:
    return NodeSettings(data_dir=folder, **values)  # type: ignore[arg-type]


def test_a_node_needs_it_once(tmp_path: Path) -> None:
    first = with_invite(settings(tmp_path, invite=TEXT))
    assert first.run == RUN and first.join == ADDRESSES
    keep(tmp_path, first.invite)
    again = with_invite(settings(tmp_path))
    assert again.run == RUN and again.join == ADDRESSES
    with pytest.raises(ConfigError):
        with_invite(settings(tmp_path, invite=TEXT, run="cd" * 32))
    assert with_invite(settings(tmp_path, run="cd" * 32)).join == (), "it is to another run"
    change_ways(tmp_path, lambda ways: replace(ways, link="damaged"))
    assert with_invite(settings(tmp_path)).join == ()


def test_what_a_node_shows(tmp_path: Path) -> None:
    """The owner's key admits the node in its folder; an invite is used once and kept in its run."""
    run = signed_run(tmp_path, "other")
    me = Identity.generate().peer_id
    assert own_admission(tmp_path, run, me) is None
    key, guest = Identity.generate(), tmp_path / "guest"
    guest.mkdir()
    invite = Invite(grant(run.id, key.peer_id, 0, 1, OWNER), key, ())
    text = old_word(Invite(invite.grant, key, ADDRESSES))
    keep(guest, text)
    shown = own_admission(guest, run, me)
    assert shown is not None and shown.peer == me and shown.grant == invite.grant
    (guest / JOINED).unlink()
    assert own_admission(guest, run, me) is None, "this run's owner did not sign it"
    ours = owned(tmp_path)
    mine, _ = sign_run(tmp_path / "run.toml", Identity.load_or_create(tmp_path / "owner.key"))
    assert mine.id == ours
    shown = own_admission(tmp_path, mine, me)
    assert shown is not None and admission_fault(shown, me, ours, mine.owners, verify) is None
    (tmp_path / "owner.key").unlink()
    assert own_admission(tmp_path, mine, me) == shown, "kept"


# Run links: one word that says which run, whose it is, and whom to join through.

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
def test_a_mistyped_link_is_one_sentence(place: int, typed: str) -> None:
    changed = WORD[:place] + typed + WORD[place + 1 :]
    try:
        read = read_link(changed)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert read == read_link(WORD)  # the last letter has bits of no meaning


@given(st.binary(max_size=400))
def test_a_link_of_garbage_with_a_right_checksum_is_one_sentence(data: bytes) -> None:
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


def test_a_node_needs_a_link_once(tmp_path: Path) -> None:
    first = with_invite(settings(tmp_path, invite=WORD))
    assert first.run == RUN and first.join == (*ADDRESSES, NAME)
    keep(tmp_path, first.invite)
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
        keep(tmp_path, word)
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


def test_a_link_takes_no_invite_s_place(tmp_path: Path) -> None:
    run = signed_run(tmp_path, "ours")
    invite = invited(run=run.id)
    keep(tmp_path, encode_link(RunLink(run.id, (), OWNER.peer_id, "", invite)))
    keep(tmp_path, encode_link(RunLink(run.id, ADDRESSES, OWNER.peer_id)))
    saved = WaysIn.load(tmp_path).run_link
    assert saved is not None and saved.invite is not None and saved.invite.grant == invite.grant
    keep(tmp_path, WORD)
    assert WaysIn.load(tmp_path).link == WORD, "another run's link does"


def test_an_expired_invite_lets_only_those_in_who_are(tmp_path: Path) -> None:
    for word in (old_word(invited(1000)), link(addresses=ADDRESSES, invite=invited(1000))):
        with pytest.raises(ConfigError, match="the invite has expired, at 1970-01-01"):
            with_invite(settings(tmp_path, invite=word))
    kept = tmp_path / "runs" / RUN[:16] / "admission"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"kept")
    assert with_invite(settings(tmp_path, invite=TEXT)).run == RUN
    assert with_invite(settings(tmp_path, invite=old_word(invited(1000)))).run == RUN


def called(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def test_the_command_prints_a_link_that_joins(tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path)]
    assert isinstance(called("run", "link", *data).exception, UserError), "there is no run"
    run = owned(tmp_path)
    assert "no address" in str(called("run", "link", *data).exception)
    change_ways(tmp_path, WaysIn.reached_at, (LOOPBACK,))
    only = called("run", "link", "ours", *data)
    assert "loopback only" in only.stderr and "invite ours" in only.stderr
    done = called("run", "link", run[:8], *data, "--join", ADDRESSES[0], "--join", NAME)
    read = read_link(done.stdout)
    owner = Ownership.find("ours", tmp_path).key.peer_id
    assert read == RunLink(run, (ADDRESSES[0], NAME), owner, "ours") and "loopback" not in done.stderr
    assert called("run", "link", "another", *data).exception is not None


def test_by_nothing_it_is_of_the_run_that_was_joined_last(tmp_path: Path) -> None:
    first = owned(tmp_path)
    (tmp_path / "owner.key").unlink()
    second = owned(tmp_path, "open")
    change_ways(tmp_path, WaysIn.reached_at, ADDRESSES)
    asked = ["run", "link", "--data-dir", str(tmp_path)]
    assert "more than one run" in str(called(*asked).exception)
    for run in (first, second):
        change_ways(tmp_path, WaysIn.joined, NodeSettings(), run)
        assert read_link(called(*asked).stdout).run == run


def test_an_owner_s_link_lets_in(tmp_path: Path) -> None:
    run = owned(tmp_path)
    change_ways(tmp_path, WaysIn.reached_at, ADDRESSES)
    done = called("invite", "ours", "--link", "--uses", "2", "--data-dir", str(tmp_path))
    read = read_link(done.stdout)
    assert read.invite is not None and (read.run, read.name, read.invite.grant.uses) == (run, "ours", 2)
    ownership = Ownership.find("ours", tmp_path)
    assert ownership.key_of(done.stdout) == read.invite.grant.key
    with pytest.raises(UserError, match="no invite in this run link"):
        ownership.key_of(WORD)
    guest = tmp_path / "guest"
    guest.mkdir()
    keep(guest, with_invite(settings(guest, invite=done.stdout)).invite)
    shown = own_admission(guest, ownership_run(tmp_path), Identity.generate().peer_id)
    assert shown is not None and shown.grant == read.invite.grant


def ownership_run(folder: Path):  # type: ignore[no-untyped-def]
    from p2pdiloco.daemon.run_files.run import sign_run

    return sign_run(folder / "run.toml", Identity.load_or_create(folder / "owner.key"))[0]


@pytest.mark.parametrize(("name", "beginning"), [("code.svg", b"<?xml"), ("code.png", b"\x89PNG")])
def test_the_code_is_written(name: str, beginning: bytes, tmp_path: Path) -> None:
    owned(tmp_path)
    change_ways(tmp_path, WaysIn.reached_at, ADDRESSES)
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
    six, four = (f"/{where}/tcp/1/p2p/{OWNER.peer_id}" for where in ("ip6/2600::1", "ip4/192.168.1.5"))
    home = f"/ip6/fd00::5/tcp/1/p2p/{OWNER.peer_id}"
    for told, ways in (
        (ADDRESSES, ADDRESSES[0]),
        ((six, four, home), f"{six} --join {four}"),
        ((four, home), four),
        ((f"/dns/x.org/tcp/1/p2p/{OWNER.peer_id}", six), f"/dns/x.org/tcp/1/p2p/{OWNER.peer_id}"),
    ):
        print_join(told, [])
        assert capsys.readouterr().out.splitlines() == [f"p2pdiloco node --join {ways}"]


def test_a_start_without_anything_goes_where_the_last_one_was_told_to_go(tmp_path: Path) -> None:
    """Also beside members that were met; but not where something is given, or a run is begun."""
    bare = settings(tmp_path)
    assert joined_through_before(bare) == ()
    keep(tmp_path, with_invite(settings(tmp_path, invite=WORD)).invite)
    change_ways(tmp_path, WaysIn.having_met, [ADDRESSES])
    assert joined_through_before(with_invite(bare)) == (*ADDRESSES, NAME), "the saved link's peers"
    assert joined_through_before(settings(tmp_path, run="cd" * 32)) == (), "it is to another run"
    change_ways(tmp_path, WaysIn.joined, NodeSettings(join=(NAME,)), RUN)
    assert joined_through_before(with_invite(bare)) == (NAME,), "what was given last"
    assert joined_through_before(settings(tmp_path, join=ADDRESSES)) == ()
    assert joined_through_before(settings(tmp_path, run_file=tmp_path / "run.toml")) == ()


# Papers: whatever is not just as it was signed is one refusal, and nothing else.

GRANT_KEY, PEER, OTHER, *MORE = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 6))
PEERS = (PEER, OTHER, *MORE)
ONE, TWO, THREE, _ = (peer.peer_id for peer in PEERS)
GRANT = grant(RUN, GRANT_KEY.peer_id, 1000, 2, OWNER)
ADMISSION = admission(GRANT, PEER.peer_id, GRANT_KEY)
CHANGE = Amendment(1, 1 << 40, 1 << 41, 0.5, Going.PAUSE, "a word")
NOTICE = signed(
    Notice(
        RUN, 3, (OTHER.peer_id,), (GRANT_KEY.peer_id,), (PEER.peer_id,), (Vouch(0, 9, bytes(32)),), (CHANGE,)
    ),
    OWNER,
)


def fault(shown: Admission, peer: Identity = PEER) -> AdmissionFault | None:
    return admission_fault(shown, peer.peer_id, RUN, (OWNER.peer_id,), verify)


def test_an_honest_one_is_sound() -> None:
    assert fault(ADMISSION) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"run": "cd" * 32}, AdmissionFault.OTHER_RUN),
        ({"expires": 2000}, AdmissionFault.GRANT_SIGNATURE),
        ({"uses": 1000}, AdmissionFault.GRANT_SIGNATURE),
        ({"key": OTHER.peer_id}, AdmissionFault.GRANT_SIGNATURE),
        ({"key": "no peer id"}, AdmissionFault.GRANT_SIGNATURE),
        ({"signature": b""}, AdmissionFault.GRANT_SIGNATURE),
    ],
)
def test_a_changed_grant_is_nobodys(changes: dict[str, Any], expected: AdmissionFault) -> None:
    changed = msgspec.structs.replace(GRANT, **changes)
    assert fault(admission(changed, PEER.peer_id, GRANT_KEY)) is expected


def test_an_admission_is_one_peers_and_of_one_key() -> None:
    assert fault(ADMISSION, OTHER) is AdmissionFault.OTHER_PEER
    assert fault(admission(GRANT, PEER.peer_id, OTHER)) is AdmissionFault.ADMISSION_SIGNATURE
    # A signature of one kind of paper is none of another.
    as_owner = msgspec.structs.replace(ADMISSION, signature=GRANT.signature)
    assert fault(as_owner) is AdmissionFault.ADMISSION_SIGNATURE


@given(st.data())
def test_flipped_bits_are_refused_or_change_nothing(data: st.DataObject) -> None:
    encoded = bytearray(wire.encode(ADMISSION))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        shown = wire.decode(bytes(encoded), Admission)
    except RemoteError:
        return
    assert shown == ADMISSION or fault(shown) is not None


@given(st.binary(max_size=200))
def test_garbage_is_one_refusal(data: bytes) -> None:
    for kind in (Grant, Admission, Notice):
        with pytest.raises(RemoteError):
            wire.decode(data, kind)
    with pytest.raises(RemoteError):
        decode_notice(data)


@given(st.data())
def test_a_changed_notice_is_nobodys(data: st.DataObject) -> None:
    assert is_true_notice(decode_notice(encode_notice(NOTICE)), RUN, (OWNER.peer_id,), verify)
    encoded = bytearray(encode_notice(NOTICE))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        notice = decode_notice(bytes(encoded))
    except RemoteError:
        return
    assert notice == NOTICE or not is_true_notice(notice, RUN, (OWNER.peer_id,), verify)


def test_a_notice_is_bounded() -> None:
    ids = tuple(Identity.from_seed(n.to_bytes(32, "big")).peer_id for n in range(1024))
    words = tuple(signed(Word(RUN, peer, 1 << 51, False), OWNER) for peer in ids)
    for lists in ({"banned": ids, "revoked": ids}, {"seats": words}):
        assert len(encode_notice(signed(Notice(RUN, 1, **lists), OWNER))) < MAX_NOTICE_BYTES  # type: ignore[arg-type]
    with pytest.raises(UserError):
        encode_notice(signed(Notice(RUN, 1, ids, ids, ids, seats=words), OWNER))
    with pytest.raises(RemoteError):
        decode_notice(msgspec.msgpack.encode(Notice(RUN, 1, (*ids, OWNER.peer_id))))
    with pytest.raises(RemoteError):
        decode_notice(msgspec.msgpack.encode(Notice(RUN, 1, amendments=(CHANGE,) * (MAX_AMENDMENTS + 1))))
    with pytest.raises(RemoteError):
        decode_notice(bytes(MAX_NOTICE_BYTES + 1))


# The register of members: who has worked stays, the others are judged by what was seen.


def register(now_s: float = 0.0, worked: tuple[str, ...] = (), mode: str = "invite") -> Register:
    charter = Charter(RUN, (OWNER.peer_id,), mode)  # type: ignore[arg-type]
    return Register(charter, worked.__contains__, clock=lambda: now_s)


def take(book: Register, peer: str, vouched: bool = False) -> AdmissionFault | None:
    return book.take(peer, admission(GRANT, peer, GRANT_KEY), vouched)


def test_who_has_worked_or_is_vouched_for_needs_no_clock() -> None:
    book = register(2000.0, worked=(ONE,))
    assert take(book, ONE) is None and take(book, TWO, vouched=True) is None
    assert take(book, THREE) is AdmissionFault.EXPIRED
    assert book.fault(ONE) is None and book.fault(THREE) is AdmissionFault.NOT_SHOWN


def test_uses_bind_whoever_has_not_worked_and_its_own_return_is_none() -> None:
    book = register(worked=(THREE,))
    assert [take(book, peer) for peer in (ONE, TWO, ONE, THREE)] == [None] * 4
    fourth = PEERS[3].peer_id
    assert take(book, fourth) is take(book, fourth, vouched=True) is AdmissionFault.USED_UP


def test_a_closed_invite_keeps_its_members_and_takes_nobody_new() -> None:
    book = register()
    assert take(book, ONE) is None
    word = signed(Word(RUN, GRANT.key, 1, False), OWNER)
    assert book.take_notice(signed(Notice(RUN, 1, seats=(word,)), OWNER))
    assert book.fault(ONE) is None and take(book, ONE) is None
    assert take(book, TWO) is book.would_take(TWO, GRANT) is AdmissionFault.REVOKED
    assert take(book, THREE, vouched=True) is None, "a member knows it from before"


def test_a_used_up_link_says_for_how_many_it_was() -> None:
    said = "this link's 2 places are taken; ask the owner for another"
    assert fault_words(AdmissionFault.USED_UP, GRANT) == said
    assert fault_words(AdmissionFault.USED_UP, None) == str(AdmissionFault.USED_UP)
    assert fault_words(AdmissionFault.EXPIRED, GRANT) == "the invite has expired"


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.daemon.admission.MAX_ADMITTED", 1)
    book = register()
    assert take(book, ONE) is None and take(book, TWO) is AdmissionFault.FULL and take(book, ONE) is None


def test_an_open_run_has_bans_and_keeps_no_admissions() -> None:
    book = register(mode="open")
    assert take(book, ONE) is None and not book.admissions
    assert book.take_notice(signed(Notice(RUN, 1, (ONE,)), OWNER))
    assert take(book, ONE) is AdmissionFault.BANNED and book.fault(TWO) is None


def test_the_owners_own_nodes_are_admitted_by_its_key_alone() -> None:
    for mode in ("invite", "list"):
        book = register(mode=mode)
        own = admission(grant(RUN, OWNER.peer_id, 0, 1, OWNER), ONE, OWNER)
        assert book.take(ONE, own) is None and book.fault(ONE) is None
        more = admission(grant(RUN, OWNER.peer_id, 0, 1, OWNER), TWO, OWNER)
        assert book.take(TWO, more) is None, "it is never used up"
        book.take_notice(signed(Notice(RUN, 1, revoked=(OWNER.peer_id,)), OWNER))
        assert book.fault(ONE) is None
    assert take(register(mode="list"), ONE) is AdmissionFault.NOT_LISTED


@pytest.mark.parametrize("mode", ["open", "invite"])
def test_who_is_shown_to_have_lied_is_shut_out_like_the_banned(mode: str) -> None:
    lie = TwoVotes(*(Vote(VoteBody(RUN, "all", 0, 3, who, ONE, 0, bytes(32)), b"") for who in (TWO, THREE)))
    proofs = {}
    charter = Charter(RUN, (OWNER.peer_id,), mode)  # type: ignore[arg-type]
    book = Register(charter, clock=lambda: 0.0, proof_of=proofs.get)
    assert take(book, ONE) is None and book.fault(ONE) is None and not book.is_banned(ONE)
    proofs[ONE] = lie
    assert book.fault(ONE) is AdmissionFault.EXCLUDED and book.is_banned(ONE)
    assert take(book, ONE) is AdmissionFault.EXCLUDED, "whatever it shows"
    assert ONE not in [shown.peer for shown in book.newest(9)]
    gate = Gate(book, None, lambda _what: None)
    for check in (gate.check, gate.check_not_banned):
        with pytest.raises(NotAdmitted) as refused:
            check(ONE)
        assert refused.value.reason == "excluded"
    shown = gate.answer(ONE, ShowAdmission(RUN, None, 0))
    assert isinstance(shown, AdmissionShown) and shown.proof == lie, "and it hears why"
    other = gate.answer(TWO, ShowAdmission(RUN, admission(GRANT, TWO, GRANT_KEY), 0))
    assert isinstance(other, AdmissionShown) and other.proof is None


@pytest.mark.parametrize(
    ("hours", "number", "taken"),
    [
        pytest.param(10, 10 * NUMBERS_PER_H, True, id="all-that-there-can-be"),
        pytest.param(10, 10 * NUMBERS_PER_H + 1, False, id="one-more"),
        pytest.param(11, 10 * NUMBERS_PER_H + 1, True, id="an-hour-later"),
        pytest.param(10, RECOVERY_FROM - 1, False, id="the-last-one"),
        pytest.param(-10, 5, True, id="a-clock-far-behind"),
    ],
)
def test_a_notices_number_is_bounded_by_the_time_of_day(hours: int, number: int, taken: bool) -> None:
    """So neither whoever slept, nor a newcomer, is kept from the owner's next ones."""
    book = Register(Charter(RUN, (OWNER.peer_id,), "invite"), clock=lambda: NUMBERS_FROM_S + 3600.0 * hours)
    book.hold(signed(Notice(RUN, 1), OWNER))  # what was saved is gone by, whatever the clock says
    assert book.take_notice(signed(Notice(RUN, 2), OWNER))
    word = signed(Word(RUN, ONE, number, True), OWNER)
    for said in (Notice(RUN, 3, seats=(word,)), Notice(RUN, number, seats=(word,))):
        if taken:
            assert book.take_notice(signed(said, OWNER))
            continue
        with pytest.raises(RemoteError, match="notice-leap"):
            book.take_notice(signed(said, OWNER))
        assert book.sequence == 2


def test_newer_notices_are_taken_at_a_pace_but_for_the_recovery_keys() -> None:
    """Each costs the signatures of all its words, and is given to all members."""
    gate = Gate(Register(Charter(RUN, (OWNER.peer_id, KEY.peer_id), "invite")), None, lambda _what: None)
    for number in range(1, int(NEWS) + 1):
        with pytest.raises(RemoteError, match="notice-signature"):
            gate.answer(f"p{number}", GiveNotice(signed(Notice(RUN, number), KEY)))
        gate.answer(f"p{number}", GiveNotice(signed(Notice(RUN, number), OWNER)))
    with pytest.raises(RemoteError, match="busy"):
        for number in range(int(NEWS) + 1, 3 * int(NEWS)):
            gate.answer(f"p{number}", GiveNotice(signed(Notice(RUN, number), OWNER)))
    gate.answer(TWO, GiveNotice(signed(Notice(RUN, RECOVERY_FROM), KEY)))
    assert gate._register.sequence == RECOVERY_FROM


def test_a_notice_changes_the_rate_by_four_at_most() -> None:
    rates = (Amendment(1, 0, rate_factor=2.0),)
    before = Notice(RUN, 5, amendments=rates)
    for factor, number, may in ((8.0, 6, True), (8.1, 6, False), (8.1, 7, True), (0.4, 6, False)):
        made = (*rates, Amendment(2, 9, rate_factor=factor))
        after = Notice(RUN, number, amendments=made)
        assert may_follow(after, before) is may


def test_the_recovery_key_ends_the_power_of_the_owners(tmp_path: Path) -> None:
    owners = OWNER.peer_id, KEY.peer_id
    book = Register(Charter(RUN, owners, "invite"))
    thief = Ownership(tmp_path / "thief", RUN, OWNER, owners)
    owner = Ownership(tmp_path / "owner", RUN, KEY, owners)
    stolen = thief.publish(Notice(RUN, 1, seats=(Word(RUN, ONE, 1, True),), banned=(TWO,)))
    assert book.take_notice(stolen) and book.fault(TWO) is AdmissionFault.BANNED
    words = *stolen.seats, Word(RUN, ONE, 1, False)
    said = owner.publish(msgspec.structs.replace(stolen, seats=words, banned=()))
    assert (said.sequence, [word.number for word in said.seats]) == (RECOVERY_FROM, [RECOVERY_FROM])
    assert book.take_notice(said) and book.fault(TWO) is AdmissionFault.NOT_SHOWN
    assert not book.take_notice(signed(Notice(RUN, stolen.sequence + 1), OWNER))
    with pytest.raises(RemoteError, match="notice-signature"):
        book.take_notice(signed(Notice(RUN, RECOVERY_FROM + 1), OWNER))
    save_notice(thief._folder, said)
    with pytest.raises(UserError, match="the owner's key signs nothing any more"):
        thief.publish(said)
    with pytest.raises(UserError, match="the owner's key signs nothing any more"):
        thief.invite(0, 1, "eve", ("/ip4/127.0.0.1/tcp/1/p2p/" + ONE,))
    shown = grant(RUN, THREE, 0, 9, OWNER)
    assert book.would_take(THREE, shown) is AdmissionFault.GRANT_SIGNATURE, "nor does an invite of its count"
    assert book.would_take(THREE, grant(RUN, THREE, 0, 9, KEY)) is None


def test_words_on_seats_are_signed_with_the_number_after_the_highest(tmp_path: Path) -> None:
    ownership = Ownership(tmp_path, RUN, OWNER)
    first = ownership.publish(Notice(RUN, 1, seats=(Word(RUN, ONE, 1, True),)), 6)
    second = ownership.publish(msgspec.structs.replace(first, seats=(*first.seats, Word(RUN, TWO, 1, False))))
    assert [(word.peer, word.number, word.seated) for word in second.seats] == [
        (ONE, 1, True),
        (TWO, 2, False),
    ]
    assert second.seats[0] == first.seats[0], "what was said before stays as it was signed"
    again = ownership.publish(msgspec.structs.replace(second, seats=(Word(RUN, TWO, 1, True),)))
    assert [(word.peer, word.number) for word in again.seats] == [(TWO, 3)], "the newest of one peer is newer"
    assert all(is_sound(word, RUN, (OWNER.peer_id,), verify) for word in second.seats)
    hidden = ownership.publish(Notice(RUN, 1, seats=(Word(RUN, ONE, 1, False),)), known={ONE: 900, TWO: 5000})
    assert hidden.seats[0].number == 901, "nor does a word that a table alone has stand above it"
    with pytest.raises(UserError, match="of a number that no notice can have"):
        ownership.publish(Notice(RUN, 1, seats=(Word(RUN, ONE, 1, False),)), known={ONE: 1 << 32})


def test_the_link_that_a_host_prints_admits_twenty_and_is_the_same_after_a_restart(tmp_path: Path) -> None:
    run_folder(tmp_path, RUN).mkdir(parents=True)
    first = Ownership(tmp_path, RUN, OWNER).standing_invite([LOOPBACK])
    again = Ownership(tmp_path, RUN, OWNER).standing_invite([LOOPBACK])
    assert first.grant == again.grant and (first.grant.uses, first.grant.expires) == (LINK_USES, 0)
    assert [(issued.name, issued.key) for issued in Ownership(tmp_path, RUN, OWNER).issued()] == [
        (LINK_NAME, first.grant.key)
    ]
    assert grant_fault(first.grant, RUN, (OWNER.peer_id,), verify) is None
    kept = run_folder(tmp_path, RUN) / "link"
    assert kept.stat().st_mode & 0o077 == 0, "whoever has the key can join"
    owned = Ownership(tmp_path, RUN, OWNER)
    owned.publish(Notice(RUN, 1, revoked=(first.grant.key,)))
    fresh = owned.standing_invite([LOOPBACK])
    assert fresh.grant.key != first.grant.key, "a link that nobody takes is no link"
    assert owned.key_of(LINK_NAME) == fresh.grant.key, "of several links it is the one that has not ended"
    owned.publish(Notice(RUN, 1, seats=(Word(RUN, fresh.grant.key, 1, False),)))
    assert owned.standing_invite([LOOPBACK]).grant.key not in (first.grant.key, fresh.grant.key), "nor closed"
    kept.write_bytes(b"garbage")
    assert Ownership(tmp_path, RUN, OWNER).standing_invite([LOOPBACK]).grant.key != fresh.grant.key
