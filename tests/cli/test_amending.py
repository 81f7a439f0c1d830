"""`p2pdiloco run amend`: what an owner's wish becomes, and when it holds."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from p2pdiloco.cli.group import cli
from p2pdiloco.cli.owner_notice import LEAD_SHARE, AmendmentWish, RunPosition, amendment
from p2pdiloco.config.manifest import EndSection
from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api.config import Amendment, Going, amended, in_force
from p2pdiloco.errors import UserError

STOPS = msgspec.structs.replace(MICRO, end=EndSection())
END = STOPS.inner.schedule_tokens
MIDDLE = RunPosition(END // 2, END, 10.0, rests=False)
OVER = RunPosition(END + 100, END, 0.0, rests=True)


def test_it_holds_about_a_minute_ahead_and_says_all_that_held_before() -> None:
    first = amendment((), AmendmentWish(rate_factor=0.5, message="slower"), STOPS, MIDDLE)
    assert first == Amendment(1, MIDDLE.tokens + 600, 0, 0.5, Going.TRAIN, "slower")
    second = amendment(
        (first,), AmendmentWish(schedule_tokens=2 * END, at_tokens=MIDDLE.tokens + 9), STOPS, MIDDLE
    )
    assert second == Amendment(2, MIDDLE.tokens + 9, 2 * END, 0.5, Going.TRAIN, "slower")
    assert amendment((second,), AmendmentWish(message=""), STOPS, MIDDLE).message == ""


def test_it_holds_before_the_run_is_over() -> None:
    late = RunPosition(END - 5, END, 10.0, rests=False)
    assert amendment((), AmendmentWish(schedule_tokens=2 * END), STOPS, late).from_tokens == END
    assert amendment((), AmendmentWish(schedule_tokens=2 * END), MICRO, late).from_tokens == END + 595
    # It is over: no token comes any more.
    assert amendment((), AmendmentWish(schedule_tokens=2 * END), STOPS, OVER).from_tokens == OVER.tokens


def test_what_is_still_to_come_does_not_come_before_its_time() -> None:
    pause = amendment((), AmendmentWish(going=Going.PAUSE, at_tokens=END - 1), STOPS, MIDDLE)
    assert amendment((pause,), AmendmentWish(rate_factor=2.0), STOPS, MIDDLE) == Amendment(
        2, END - 1, 0, 2.0, Going.PAUSE
    )


@pytest.mark.parametrize("going", [Going.PAUSE, Going.END])
def test_a_pause_and_an_end_wait_for_nothing_that_is_still_to_come(going: Going) -> None:
    known = (Amendment(1, 0, 0, 0.5), Amendment(2, END - 1, 3 * END, 0.1))
    made = amendment(known, AmendmentWish(going=going), STOPS, MIDDLE)
    assert made == Amendment(3, MIDDLE.tokens + 600, 0, 0.5, going)
    assert amended(known, made) == (known[0], made), "what was to come is taken back"


def test_no_member_s_word_moves_it_far_ahead() -> None:
    for pace in (1e6, 1e17, float("inf")):
        place = RunPosition(MIDDLE.tokens, END, pace, rests=False)
        for manifest in (STOPS, MICRO):
            made = amendment((), AmendmentWish(going=Going.PAUSE), manifest, place)
            assert made.from_tokens == MIDDLE.tokens + END // LEAD_SHARE
    beyond = RunPosition(1 << 63, END, 0.0, rests=False)
    with pytest.raises(UserError, match="no amendment can say that"):
        amendment((), AmendmentWish(going=Going.PAUSE), MICRO, beyond)


@pytest.mark.parametrize("pause_at", [MIDDLE.tokens - 700, MIDDLE.tokens + 1])
def test_going_on_takes_a_pause_back_at_once(pause_at: int) -> None:
    known = (Amendment(1, pause_at, going=Going.PAUSE),)
    known = amended(known, amendment(known, AmendmentWish(going=Going.TRAIN), STOPS, MIDDLE))
    for tokens in (pause_at, MIDDLE.tokens, END):
        held = in_force(known, tokens)
        assert held is None or held.going is Going.TRAIN


@pytest.mark.parametrize(
    ("wish", "place", "words"),
    [
        (AmendmentWish(), MIDDLE, "nothing to change"),
        (AmendmentWish(at_tokens=1), MIDDLE, "nothing to change"),
        (AmendmentWish(rate_factor=0.0), MIDDLE, "from 0.001 to 1000"),
        (AmendmentWish(rate_factor=float("nan")), MIDDLE, "from 0.001 to 1000"),
        (AmendmentWish(message="x" * 241), MIDDLE, "has 241 characters"),
        (AmendmentWish(going=Going.PAUSE, at_tokens=5), MIDDLE, "cannot hold from 5 on"),
        (AmendmentWish(schedule_tokens=9 * END, at_tokens=2 * END), OVER, "never comes to"),
        (AmendmentWish(schedule_tokens=STOPS.inner.warmup_tokens), MIDDLE, "before the warm-up"),
        (AmendmentWish(schedule_tokens=END // 2), MIDDLE, "is over"),
        (AmendmentWish(going=Going.TRAIN), OVER, "is over"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(wish: AmendmentWish, place: RunPosition, words: str) -> None:
    with pytest.raises(UserError, match=words):
        wish.check()
        amendment((), wish, STOPS, place)


def test_ways_to_go_exclude_each_other(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["run", "amend", "any", "--pause", "--end", "--data-dir", str(tmp_path)])
    assert done.exit_code and "exclude each other" in str(done.exception)
