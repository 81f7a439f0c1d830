"""Whom an owner means by a word, and that nothing is signed before that is said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pdiloco.cli import owner_notice
from p2pdiloco.cli.owner_commands import COMMANDS
from p2pdiloco.cli.owner_notice import ENDING, SURE_ENDING, InviteEnd, PeerChange, ReachedPeers, with_word
from p2pdiloco.daemon.notice import Notice
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity

BOB, EVE, ANN = (Identity.from_seed(bytes([i]) * 32).peer_id for i in range(3))
NAMES = {BOB: "bob", EVE: "eve"}
BANNED = Notice("ab" * 32, 1, banned=(BOB, ANN))


def ban(word: str, names: dict[str, str], yes: bool = False, lately: tuple[str, ...] = ()) -> Notice:
    """The notice after a ban without a terminal."""
    return after(PeerChange("ban", "banned", word, True, yes), Notice("ab" * 32, 1), names, lately)


def unban(word: str, names: dict[str, str], yes: bool = True, lately: tuple[str, ...] = ()) -> Notice:
    return after(PeerChange("unban", "banned", word, False, yes), BANNED, names, lately)


def after(change: PeerChange, notice: Notice, names: dict[str, str], lately: tuple[str, ...]) -> Notice:
    reached = ReachedPeers([], names, set(lately))
    asyncio.run(change.agree(notice, reached))
    return change.make(notice, reached)


def refused(what: Any, *given: Any) -> str:
    with pytest.raises(UserError) as caught:
        what(*given)
    return f"{caught.value} / {caught.value.hint}"


@pytest.fixture(autouse=True)
def nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_notice, "at_terminal", lambda: False)


def test_who_is_meant_is_shown_with_name_and_whole_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert ban("bob", NAMES, yes=True).banned == (BOB,)
    assert ban(ANN, NAMES).banned == (ANN,)
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"ban {BOB}, called bob", f"ban {ANN}, whose name is not known here"]


def test_without_a_terminal_a_name_or_a_short_end_is_not_enough() -> None:
    for word in ("bob", BOB[-ENDING:], "…" + BOB[-SURE_ENDING + 1 :]):
        assert "nothing is signed" in refused(ban, word, NAMES)
        assert ban(word, NAMES, True).banned == (BOB,)
    assert ban(BOB, NAMES).banned == ban("…" + BOB[-SURE_ENDING:], NAMES).banned == (BOB,)
    assert "nothing is signed" in refused(unban, "bob", NAMES, False)


@pytest.mark.parametrize("agreed", [True, False])
def test_at_a_terminal_a_person_is_asked_once(agreed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def ask(question: str) -> bool:
        asked.append(question)
        return agreed

    monkeypatch.setattr(owner_notice, "at_terminal", lambda: True)
    monkeypatch.setattr(owner_notice, "ask_terminal", ask)
    for word in ("bob", BOB):
        if agreed:
            assert ban(word, NAMES).banned == (BOB,)
        else:
            assert "nothing is signed" in refused(ban, word, NAMES)
    assert len(asked) == 2
    assert ban("bob", NAMES, yes=True).banned == (BOB,) and len(asked) == 2


@pytest.mark.parametrize(("there", "agreed", "yes"), [(1, 1, 0), (1, 0, 0), (1, 0, 1), (0, 0, 0)])
def test_whoever_revokes_is_asked_as_whoever_bans(
    there: int, agreed: int, yes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ask(_question: str) -> bool:
        return bool(agreed)

    monkeypatch.setattr(owner_notice, "at_terminal", lambda: bool(there))
    monkeypatch.setattr(owner_notice, "ask_terminal", ask)
    revoke = InviteEnd(ANN, "friends", bool(yes))
    if there and not agreed and not yes:
        assert "nothing is signed / --yes" in refused(
            asyncio.run, revoke.agree(BANNED, ReachedPeers([], {}, set()))
        )
    else:
        asyncio.run(revoke.agree(BANNED, ReachedPeers([], {}, set())))
        assert revoke.make(BANNED, ReachedPeers([], {}, set())).revoked == (ANN,)
    assert f"revoke the invite {ANN}, called friends" in capsys.readouterr().err


def test_the_commands_that_ask_take_yes() -> None:
    asking = [command for command in COMMANDS if command.name != "vouch"]
    assert len(asking) == 6
    for command in asking:
        assert "yes" in {parameter.name for parameter in command.params}, command.name


def test_a_word_that_means_several_is_refused_with_their_ids() -> None:
    both = {BOB: "bob", EVE: "bob"}
    for words in (ban, unban):
        pair = (BOB, EVE) if words is ban else (BOB, ANN)
        said = refused(words, "bob", dict.fromkeys(pair, "bob"), True)
        assert all(peer in said for peer in pair)
    said = refused(ban, "bob", {BOB: "bob"}, True, (BOB, EVE))
    assert BOB in said and EVE in said, "the other one has taken the name off again"
    for words, whole in ((ban, EVE), (unban, ANN)):
        said = refused(words, "bob", {}, True, (whole,))
        assert f"was lately {whole} / give the whole id" in said, "who says so may lie"
    assert unban("bob", NAMES, True, (EVE, BOB)).banned == (ANN,), "the other one is not banned"
    ending = BOB[-ENDING:]
    assert BOB in refused(ban, ending, {BOB: "bob", EVE: ending}, True), "one is called as another ends"
    assert ban(BOB, both).banned == (BOB,)
    assert "nobody is called" in refused(ban, "bob", {EVE: "eve"}, True)


def test_a_ban_is_taken_back_by_id_ending_or_a_name_that_is_known() -> None:
    for word in (BOB, BOB[-ENDING:], "…" + BOB[-ENDING:], "bob"):
        assert unban(word, NAMES).banned == (ANN,)
    for word in ("…" + BOB[-ENDING + 1 :], "…" * ENDING, "", "eve", EVE):
        assert f"{BOB}, {ANN}; no member remembers such a name" in refused(unban, word, NAMES)


SEAT_CHANGES = (
    (PeerChange("ban", "banned", BOB, True, True, seated=False), (BOB, False, "")),
    (PeerChange("unban", "banned", BOB, False, True), None),
    (PeerChange("admit", "members", BOB, True, True, seated=True), (BOB, True, "")),
    (PeerChange("dismiss", "members", BOB, False, True, seated=False), (BOB, False, "")),
    (PeerChange("seat", "", BOB, True, True, seated=True), (BOB, True, "")),
    (PeerChange("seat", "", BOB, True, True, seated=True, replaces=EVE), (BOB, True, EVE)),
    (PeerChange("end the seat of", "", BOB, True, True, seated=False), (BOB, False, "")),
    (InviteEnd(BOB, "", True), (BOB, False, "")),
)
"""Change of a notice, and its word on a seat: peer, whether it is seated, in whose place."""


@pytest.mark.parametrize(("change", "word"), SEAT_CHANGES)
def test_a_notice_has_one_word_on_a_peers_seat(
    change: PeerChange | InviteEnd, word: tuple[str, bool, str] | None
) -> None:
    before = Notice("ab" * 32, 1, banned=(BOB,), members=(BOB,))
    before = with_word(with_word(before, ANN, True), BOB, word is None)
    found = change.make(before, ReachedPeers([], NAMES, set()))
    assert [(w.peer, w.seated, w.replaces) for w in found.seats] == [(ANN, True, ""), word or (BOB, True, "")]
