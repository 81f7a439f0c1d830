"""The course of a run as a node follows it: progress, the end, what an owner changed."""

from types import SimpleNamespace

import msgspec
import pytest

from p2pdiloco.config.manifest import EndSection
from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api.config import Amendment, Going
from p2pdiloco.daemon.course import SETTLE_S, RunCourse
from p2pdiloco.daemon.display.snapshot import owner_text, progress_text
from p2pdiloco.learner import channel as ch

END = MICRO.inner.schedule_tokens


class World:
    """A node's chain with two fragments, and what it is told of its owner."""

    def __init__(self, learners="stop"):
        self.heads = [SimpleNamespace(tokens=0, number=0) for _ in range(2)]
        fragments = [SimpleNamespace(chain=SimpleNamespace(head=head)) for head in self.heads]
        self.amendments = ()
        self.told, self.said = [], []
        manifest = msgspec.structs.replace(MICRO, end=EndSection(learners=learners))
        self.course = RunCourse(
            manifest,
            SimpleNamespace(fragments=fragments),
            lambda: self.amendments,
            self.told.append,
            lambda words, tokens: self.said.append(words),
        )

    def at(self, tokens, now=0.0):
        """Merge that much, and look."""
        for head in self.heads:
            head.tokens = tokens
            head.number += 1
        self.course.look(now)
        return self.course.rests


def test_a_run_ends_with_its_schedule():
    world = World()
    assert (world.at(END - 1), world.at(END)) == ("no", "ended")
    assert world.told == [ch.FollowCourse((), "ended")]
    assert "the run has ended" in world.said[0]
    assert progress_text(world.course.row(0.0)) == "ended at 100.0 % of 154k tokens"
    assert world.at(END - 1) == "no"  # another chain won, which is not as far
    assert world.told[-1] == ch.FollowCourse((), "no")
    assert world.said[1] == "the run goes on"


def test_a_run_is_as_far_as_its_fragments_are_on_the_mean():
    world = World()
    world.at(END)
    world.heads[1].tokens = END - 2
    world.course.look(0.0)
    assert world.course.rests == "no"


def test_a_run_goes_on_where_its_manifest_says_so():
    world = World("go-on")
    assert world.at(2 * END) == "no"
    assert len(world.said) == 1
    assert "at the floor" in world.said[0]
    assert world.at(3 * END) == "no"
    assert len(world.said) == 1
    assert progress_text(world.course.row(0.0)) == "300.0 % of 154k tokens, past the schedule"


def test_it_is_said_when_the_end_is_reached():
    world = World()
    for second in range(0, 101, 10):
        world.at(second * END // 1000, float(second))
    row = world.course.row(100.0)
    assert row.left_s == pytest.approx(900, rel=0.01)
    assert progress_text(row) == "10.0 % of 154k tokens, 15 min left"
    assert World().course.row(0.0).left_s is None  # nothing is known yet
    assert progress_text(world.course.row(0.0)) == "10.0 % of 154k tokens"


@pytest.mark.parametrize("rests", [True, False])
def test_the_pace_is_that_of_the_present_chain_while_inner_steps_are_made(rests):
    world = World()
    for second in range(0, 101, 10):
        world.at((100 + second) * END // 1000, float(second))
    if rests:
        world.amendments = (Amendment(1, 0, going=Going.PAUSE),)
        world.at(200 * END // 1000, 110.0)
        world.amendments = (Amendment(2, 0),)
    merged = 200 if rests else 0  # or another chain won
    for second in range(0, 101, 10):
        world.at((merged + second) * END // 1000, 300.0 + second)
    assert world.course.row(400.0).left_s == pytest.approx(900 - merged, rel=0.01)


def test_an_amendment_holds_from_its_tokens_on():
    world = World()
    pause = Amendment(1, 500, going=Going.PAUSE, message="a word\x1b[2J")
    world.at(0)
    world.amendments = (pause,)
    assert (world.at(499), world.at(500)) == ("no", "paused")
    assert "message of the run's owner: a word" in world.said[0]
    assert "\x1b" not in world.said[0]
    arrived, held = (words for words in world.said if "amendment 1 of the run's owner" in words)
    assert arrived == held and "holds from 500 tokens on" in held  # once when it comes, once when it holds
    assert [course.rests for course in world.told] == ["no", "paused"]
    assert world.told[0].amendments == (pause,)  # learners know it before it holds
    world.amendments = (Amendment(2, 500, schedule_tokens=3 * END, rate_factor=0.5),)
    assert world.at(500) == "no"
    assert world.at(2 * END) == "no"
    assert world.at(3 * END) == "ended"
    assert (
        owner_text(world.course.row(0.0))
        == "amendment 2 holds: a schedule of 461k tokens, learning rate times 0.5"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"going": Going.END, "rate_factor": 0.5}, "the run ends; learning rate times 0.5"),
        (
            {"going": Going.PAUSE},
            "the run pauses, learning rate times 1; learning rate times 0.5 until then",
        ),
        (
            {"rate_factor": 0.25, "schedule_tokens": 5 * END},
            "a schedule of 768k tokens, learning rate times 0.25; learning rate times 0.5 until then",
        ),
    ],
)
def test_what_an_amendment_does_is_said_before_it_holds(change, words):
    world = World()
    world.amendments = (Amendment(1, 0, rate_factor=0.5), Amendment(2, 700, **change))
    world.at(500)
    assert owner_text(world.course.row(0.0)) == f"amendment 2 will hold from 700 tokens on: {words}"


def test_an_owner_ends_a_run_that_would_go_on_and_it_can_be_taken_back():
    world = World("go-on")
    world.amendments = (Amendment(1, 100, going=Going.END),)
    assert (world.at(99), world.at(100)) == ("no", "ended")
    world.amendments = (Amendment(2, 100),)
    world.course.look(1.0)
    assert world.course.rests == "no"


def test_a_run_that_rests_settles_once_when_no_version_comes_any_more():
    world = World()
    world.at(END - 1, 0.0)
    assert not world.course.settles(100.0)
    world.at(END, 100.0)
    world.at(END, 103.0)
    assert not world.course.settles(103.0 + SETTLE_S - 0.1)
    world.course.look(103.0 + SETTLE_S)
    assert world.course.settles(103.0 + SETTLE_S)
    assert not world.course.settles(1000.0)
    world.at(END + 1, 2000.0)  # somebody came back with work
    assert not world.course.settles(2000.0)
    assert world.course.settles(2000.0 + SETTLE_S)


def test_what_learners_hand_out_when_a_run_begins_to_rest_is_waited_for():
    world = World()
    world.at(100, 0.0)
    world.course.look(100.0)  # no version came for long
    world.amendments = (Amendment(1, 0, going=Going.PAUSE),)
    world.course.look(100.5)
    assert world.course.rests == "paused" and not world.course.settles(100.5)
    assert world.course.settles(100.0 + SETTLE_S)
