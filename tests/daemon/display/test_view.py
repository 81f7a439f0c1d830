from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from view_kit import HOSTILE, ME, empty, fragment_rows, peer_rows, printed, snapshot

from p2pdiloco.cli.status_command import render_status
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.daemon.display.snapshot import (
    CourseRow,
    NodeSnapshot,
    count,
    counted,
    decode_status,
    duration,
    encode_status,
    fit,
    folded,
    loss_text,
    ranges,
    size,
    sparkline,
    status_of,
)
from p2pdiloco.daemon.display.terminal import EXPLAINED, log_line, render
from p2pdiloco.errors import clean

SNAPSHOTS = {
    "usual": snapshot(),
    "empty": empty(),
    "many peers": snapshot(peers=64, fragments=24),
    "many fragments": snapshot(peers=3, fragments=1024, recent=20),
    "no peers": snapshot(peers=0),
    "losses that blew up": replace(snapshot(), loss=float("nan"), loss_history=(1.0, float("inf"), 2.0)),
    "wide letters": replace(snapshot(), name="訓練" * 20, recent=("訓練" * 100,)),
}


@pytest.mark.parametrize("size", [(80, 24), (60, 20), (81, 25), (120, 40), (200, 50), (40, 8), (300, 100)])
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_view_fits_the_terminal(name: str, size: tuple[int, int]) -> None:
    width, height = size
    lines = printed(render(SNAPSHOTS[name]), width, height)
    assert 0 < len(lines) <= height - 1
    assert max(map(cell_len, lines)) <= width


def test_all_of_a_usual_node_is_on_80_by_24() -> None:
    lines = printed(render(snapshot()), 80, 24)
    text = "\n".join(lines)
    for word in (
        "ann",
        "training",
        "epoch 1, 57/240 shards",
        "step 1240",
        "2.311",
        "15.2k tokens/s",
        "62 ms/step",
    ):
        assert word in text
    for word in ("node-0", "node-2", "catching up", "refused 4", "versions 12-14", "up 12 MB", "fragment 8:"):
        assert word in text
    for index in range(24):
        assert f" {index} v{12 + index % 3} " in text
    assert "  2 v14   0000 you     grace 0.8 s" in text


def test_wide_terminal_shows_more_peers_and_reasons() -> None:
    text = "\n".join(printed(render(snapshot(peers=12, recent=9)), 200, 50))
    assert "node-11" in text and "fragment 0: waiting" in text and "more" not in text


def test_crowds_are_counted_and_the_busy_fragments_come_first() -> None:
    crowd = replace(snapshot(peers=64, fragments=0), peers_total=500)
    idle = [replace(row, state="idle", pending="") for row in fragment_rows(100, crowd.peers)]
    idle[77] = replace(idle[77], state="electing")
    text = "\n".join(printed(render(replace(crowd, fragments=tuple(idle))), 80, 24))
    assert "peers (500)" in text and "and 498 more" in text
    assert "fragments (100, the " in text and " 77 v" in text and "electing" in text
    exactly = replace(snapshot(peers=2), peers_total=3)
    assert "and 1 more" in "\n".join(printed(render(exactly), 80, 24))


def test_empty_view_says_what_is_missing() -> None:
    text = "\n".join(printed(render(empty()), 80, 24))
    assert "joining" in text and "nobody else so far" in text and "no state yet" in text


def test_words_of_peers_cannot_steer_the_terminal() -> None:
    peers = (replace(peer_rows(1)[0], name=HOSTILE),)
    hostile = replace(
        snapshot(peers=0), name=HOSTILE, peers=peers, recent=(HOSTILE,), refusals={HOSTILE: 1}, device=HOSTILE
    )
    text = "\n".join(printed(render(hostile), 120, 40))
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text and "\x07" not in text
    assert "[red]" in text


def test_log_line() -> None:
    assert log_line(snapshot()) == (
        "step 1240  loss 2.31  tokens/s 15.2k  peers 3  versions 12-14  syncer of 2,5"
    )
    assert log_line(empty()) == "joining:  step 0  loss -  tokens/s 0  peers 0  versions -  syncer of -"
    catching_up: NodeSnapshot = replace(empty(), state="catching up", fragments=fragment_rows(1, ()))
    assert log_line(catching_up).startswith("catching up:  step 0") and "versions 12 " in log_line(
        catching_up
    )


def test_wording() -> None:
    assert [count(n) for n in (0, 950, 999.7, 15_234, 999_999, 3.4e6, 2.5e15, None, float("nan"))] == [
        "0", "950", "1k", "15.2k", "1M", "3.4M", "2500T", "-", "-",
    ]  # fmt: skip
    assert [duration(s) for s in (0.0621, 1.25, 240, 9000, None, float("inf"))] == [
        "62 ms", "1.2 s", "4 min", "2.5 h", "-", "-",
    ]  # fmt: skip
    assert [size(n) for n in (120, 1_234_567)] == ["120 B", "1.23 MB"]
    assert ranges([7, 0, 1, 2]) == "0-2,7" and ranges([]) == "-" and ranges(range(0, 99, 2)).endswith(",14,…")
    assert sparkline([1, 2, 3, 100, 0], 3) == "▁█▁" and sparkline([], 5) == "" and sparkline([2.0], 5) == "▁"
    assert (
        fit("node", 6) == "node  " and fit("a long name", 6) == "a lon…" and cell_len(fit("訓練訓練", 5)) == 5
    )
    assert clean("a\x1bb\u202ec") == "a·b·c" and loss_text(None) == "-" and loss_text(float("nan")) == "nan"
    assert ME[-6:] == "abcdef"


def test_who_cannot_save_a_vote_is_seen_here_and_by_others() -> None:
    usual = snapshot()
    peers = (replace(usual.peers[0], votes=False), *usual.peers[1:])
    text = "\n".join(printed(render(replace(usual, peers=peers)), 80, 24))
    assert text.count("cannot save") == 1 and "no vote" not in text
    full = replace(usual, votes=False)
    assert "the disk takes nothing: no vote" in "\n".join(printed(render(full), 160, 30))
    assert [row.votes for row in status_of(full).members[:2]] == [False, True]


def test_whose_work_weighs_little_is_seen() -> None:
    usual = snapshot()
    peers = (replace(usual.peers[0], weighs=0.125), replace(usual.peers[1], weighs=0.96), *usual.peers[2:])
    text = "\n".join(printed(render(replace(usual, peers=peers)), 120, 50))
    assert text.count("weighs") == 1 and "weighs 12%" in text


def test_who_is_expelled_here_is_seen_and_told() -> None:
    usual = snapshot()
    peers = (replace(usual.peers[0], expelled=LossFinding.HARM), *usual.peers[1:])
    seen = replace(usual, peers=peers)
    assert "\n".join(printed(render(seen), 120, 50)).count("expelled (harm)") == 1
    told = decode_status(encode_status(status_of(seen)))
    assert [row.peer for row in told.members if row.expelled is LossFinding.HARM] == [peers[0].peer]


LOUD = replace(
    snapshot(peers=3),
    name="a-volunteer-with-a-long-name",
    votes=False,
    link="1.2 of 3.4 Mbit/s up: contributing to every third version",
    reach="outbound only",
    course=CourseRow(tokens=372, schedule_tokens=1000, left_s=7200.0, message="please update by Friday"),
    heldout_loss=2.4441,
    heldout_age_s=95.0,
    learner_age_s=42.0,
    recent=("older", "fragment 3: " + "the newest sentence is long and goes on " * 2 + "to its end"),
    peers=(
        replace(peer_rows(1)[0], confirmed=False, votes=False, thin=True, reach="outbound only"),
        *peer_rows(3)[1:],
    ),
)


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
def test_nothing_that_matters_is_cut_on_small_terminals(size: tuple[int, int]) -> None:
    lines = printed(render(LOUD), *size)
    assert len(lines) < size[1] and not any(line.endswith("…") for line in lines)
    assert any(line.startswith("    outbound only") for line in lines)
    text = " ".join(" ".join(line.split()) for line in lines)
    for words in (
        "a-volunteer-with-a-long-name", "training", "step 1240 (42.0 s ago)", "held-out 2.444 (95.0 s ago)",
        "every third version", "outbound only, catching up, cannot save, thin uplink", "no vote",
        "37.2 % of 1k tokens, 2.0 h left", "please update by Friday", "goes on to its end", "? explains",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
def test_the_words_of_the_view_are_explained_on_small_terminals(size: tuple[int, int]) -> None:
    text = " ".join("\n".join(printed(render(LOUD, explained=True), *size)).split())
    assert all(" ".join(words.split()) in text for words in EXPLAINED)


def test_only_figures_that_are_old_are_shown_with_their_age() -> None:
    young = replace(LOUD, heldout_age_s=4.9, learner_age_s=None)
    text = "\n".join(printed(render(young), 120, 40))
    assert "held-out 2.444" in text and "2.444 (" not in text and "step 1240 (" not in text


def test_ages_of_figures_are_in_reports() -> None:
    assert status_of(LOUD).heldout_age_s == 95.0
    said = "\n".join(printed(render_status(status_of(LOUD)), 80))
    assert "2.444 (held-out) (95.0 s ago)" in said


def test_folded() -> None:
    assert folded("one two  three", 7) == ["one two", "three"] and folded("", 5) == [""]
    assert folded("abcdefgh ij", 3) == ["abc", "def", "gh", "ij"]
    assert all(cell_len(line) <= 5 for line in folded("訓練" * 20, 5))
    assert "".join(folded("訓練" * 20, 5)).replace(" ", "") == "訓練" * 20


def test_one_of_something_is_not_several() -> None:
    assert [counted(number, "member") for number in (0, 1, 2)] == ["0 members", "1 member", "2 members"]


@pytest.mark.parametrize("width", [60, 80])
def test_a_peer_without_a_name_is_known_by_its_id(width: int) -> None:
    shown = snapshot(peers=3, fragments=4)
    peers = tuple(replace(row, name="", reach="outbound only") for row in shown.peers)
    text = "\n".join(printed(render(replace(shown, peers=peers)), width, 40))
    assert all(f"…{row.peer[-6:]}" in text for row in peers), text
