"""Closing calls on the daemon's side of the learner, against a learner of paper."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.types import Stamp, Watermark
from p2pdiloco.daemon.learner_host import HEALTHY_S, TICK_S, Failures, LearnerExited, Silence
from p2pdiloco.daemon.learner_link import STEP_AT_MOST_S, LearnerLink
from p2pdiloco.daemon.payloads import Tickets
from p2pdiloco.errors import DataError, StorageError, UserError
from p2pdiloco.learner import channel as ch
from p2pdiloco.learner.lifeline import EXIT_DATA, EXIT_FAILED, exit_status


class PaperHost:
    """Notes commands."""

    guest = False

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def send(self, command: Any) -> bool:
        self.commands.append(command)
        return True


class PaperCompute:
    """Every job is done when the test says so."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        await self.gate.wait()
        return ch.BaseRef(5, arguments[1], 700)

    vault = SimpleNamespace(layouts=[None])

    def post(self) -> None: ...


def commit(merged_ticket: int | None) -> Any:
    header = SimpleNamespace(fragment=0, number=1, contributors=(SimpleNamespace(votes=True),) * 3)
    return SimpleNamespace(
        version=SimpleNamespace(header=header),
        merged_ticket=merged_ticket,
        watermarks=tuple(Watermark(peer, Stamp(1, 1), 1) for peer in "abc"),
        overwrite=False,
    )


class Linked:
    """A link to a learner of paper."""

    def __init__(self, host: PaperHost, compute: PaperCompute | None = None) -> None:
        self.posted, self.tasks = list[Any](), list[asyncio.Task[Any]]()
        self.tell: Callable[[Any], None]
        self.learners = 1

        def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            self.tasks.append(asyncio.create_task(work))
            return self.tasks[-1]

        def factory(on_event: Callable[[Any], None]) -> Any:
            self.tell = on_event
            return host

        self.link = LearnerLink(
            factory,
            compute or PaperCompute(),  # type: ignore[arg-type]
            Tickets(),
            Path("none"),
            self.posted.append,
            lambda _: None,
            spawn,
            self,
        )
        self.tell(ch.Ready("cpu", 1, 1, 0, False, ""))

    config = SimpleNamespace(open_share=0.25)

    def training(self, _now: float) -> tuple[int, int]:
        return self.learners, min(8, self.learners)


def test_a_regular_save_beside_the_end_s_is_not_taken_for_it() -> None:
    """Regression: it was taken for it, and what the end's had saved was dropped."""

    async def main() -> None:
        class EndingHost(PaperHost):
            guest = False

            async def stop(self, path: Path | None, timeout_s: float) -> None:
                await linked.link.save()
                for answers in self.saves:
                    linked.tell(answers)

        host = EndingHost()
        linked = Linked(host)
        await linked.link.save()
        host.saves = [ch.StateSaved(Path("state"), False), ch.StateSaved(Path("state"), True, last=True)]
        assert await linked.link.stop(1.0)
        assert host.commands == [ch.Save(Path("none")), ch.StopStepping()]
        host.saves = [ch.StateSaved(Path("state"), True), ch.StateSaved(Path("state"), False, last=True)]
        assert not await linked.link.stop(1.0)

    asyncio.run(main())


def test_who_cannot_give_an_inner_step_up_has_time_to_come_to_its_end() -> None:
    async def main() -> None:
        linked = Linked(PaperHost())
        assert linked.link.listens_in_s == 0.0, "nothing is known of its steps"
        linked.tell(ch.Status(1, 256, 1.0, 4.0, 5.0, 0.01, 0.0))
        assert linked.link.listens_in_s == 6.0
        linked.tell(ch.Status(1, 256, 1.0, 400.0, 5.0, 0.01, 0.0))
        assert linked.link.listens_in_s == STEP_AT_MOST_S
        linked.tell(ch.Ready("cpu", 1, 1, 0, False, gives_up=True))
        assert linked.link.listens_in_s == 0.0

    asyncio.run(main())


def test_a_closing_call_waits_for_the_version_that_makes_room() -> None:
    """The learner's slot is free only when it has taken over the version that merged its copy: asked before
    that it had to pass, and took part in every second round only."""

    async def main() -> None:
        host, compute = PaperHost(), PaperCompute()
        linked = Linked(host, compute)
        link, tell, tasks, posted = linked.link, linked.tell, linked.tasks, linked.posted
        link.request(0)
        assert host.commands == [ch.CopyOut(0)]

        link.committed(commit(None))
        link.after_commit(0)
        link.request(0)
        await asyncio.sleep(0)
        assert host.commands == [ch.CopyOut(0)], "not before the version"
        compute.gate.set()
        await tasks[-1]  # (the first one listens for as long as there is a learner)
        assert host.commands[1:] == [ch.Install(0, 5, 1, "rebase", 700), ch.CopyOut(0)]

        # Asked a moment too early: the two crossed, and the learner is asked again.
        tell(ch.NothingToCopy(0, True))
        assert not posted
        tell(ch.Applied(0, 5, 3))
        assert host.commands[-1] == ch.CopyOut(0) and len(host.commands) == 4
        tell(ch.NothingToCopy(0, False))
        assert posted[-1] == ev.NothingToContribute(0), "no inner step since: that is a pass"

        # Where the run is depends on how many train: told when it changes.
        for _ in range(2):
            tell(ch.Status(1, 256, 1.0, 0.01, 5.0, 0.01, 0.0))
        assert host.commands[4:] == [ch.Learners(3)]
        linked.learners = 5
        tell(ch.Status(1, 256, 1.0, 0.01, 5.0, 0.01, 0.0))
        assert host.commands[5:] == [ch.Learners(5)]
        linked.learners = 7
        link.count_learners()  # a peer's heartbeat says that it has begun
        link.count_learners()
        assert host.commands[6:] == [ch.Learners(7)]
        linked.learners = 1000  # eight of them have a seat, and others a quarter of what those count
        link.count_learners()
        assert host.commands[7:] == [ch.Learners(10)]

    asyncio.run(main())


async def test_a_measurement_is_waited_for_and_given_up_with_its_learner() -> None:
    host = PaperHost()
    linked = Linked(host)
    link = linked.link
    asked = asyncio.ensure_future(link.questions.evaluate())
    await asyncio.sleep(0)
    assert host.commands.count(ch.Evaluate()) == 1 and not asked.done()
    linked.tell(ch.Evaluated(2.5, 64, took_s=7.0))
    assert await asked == 7.0
    asked = asyncio.ensure_future(link.questions.evaluate())
    await asyncio.sleep(0)
    linked.tell(LearnerExited(1, "killed"))
    assert await asked is None
    assert await link.questions.evaluate() is None, "there is no learner"


async def test_an_appraisal_is_waited_for_beside_a_measurement() -> None:
    linked = Linked(PaperHost())
    questions, question = linked.link.questions, ch.Appraise(1, "p1", Path("given"))
    measured, appraised = map(asyncio.ensure_future, (questions.evaluate(), questions.appraise(question)))
    await asyncio.sleep(0)
    found = ch.Appraised(question.path, (0.1,), (0.2,))
    linked.tell(found)
    assert await appraised == found and not measured.done()
    linked.tell(ch.Evaluated(2.5, 64, took_s=7.0))
    linked.tell(found)
    assert await measured == 7.0
    appraised = asyncio.ensure_future(questions.appraise(question))
    await asyncio.sleep(0)
    linked.tell(LearnerExited(1, "killed"))
    assert await appraised is None


async def test_who_can_measure_contributions_is_known_before_any_is_fetched() -> None:
    linked = Linked(PaperHost())
    questions = linked.link.questions
    assert not questions.appraises, "one that shares the model out, or a program of one's own"
    linked.tell(ch.Ready("cpu", 1, 1, 0, False, appraises=True))
    assert questions.appraises
    linked.tell(ch.Status(1, 256, 1.0, 0.01, 5.0, 0.01, 0.0, handed_over=True))
    assert not questions.appraises, "it rests for its machine's owner"
    linked.tell(ch.Status(1, 256, 1.0, 0.01, 5.0, 0.01, 0.0))
    assert questions.appraises
    linked.tell(LearnerExited(1, "killed"))
    assert not questions.appraises


async def test_an_answer_to_a_question_that_was_given_up_counts_for_nothing() -> None:
    """Regression: it was taken for the answer to the next question, so for the finding on another member."""
    linked = Linked(PaperHost())
    questions = linked.link.questions
    first, second = (ch.Appraise(1, peer, Path(f"of {peer}")) for peer in ("p1", "p2"))
    given_up = asyncio.ensure_future(questions.appraise(first))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    asked = asyncio.ensure_future(questions.appraise(second))
    await asyncio.sleep(0)
    linked.tell(ch.Appraised(first.path, (-1.0,), (1.0,)))
    await asyncio.sleep(0)
    assert not asked.done()
    found = ch.Appraised(second.path, (0.5,), (1.0,))
    linked.tell(found)
    assert await asked == found


async def test_a_learner_that_has_trained_and_comes_to_bad_data_cannot_go_on() -> None:
    linked = Linked(PaperHost())
    linked.link._begun = True
    for _ in range(2):
        assert not linked.link.fatal.done()
        linked.tell(ch.Ready("cpu", 1, 1, 0, False))
        linked.tell(ch.Status(1, 256, 1.0, 0.01, 5.0, 0.01, 0.0))
        linked.tell(LearnerExited(EXIT_DATA, "a.jsonl is cut off"))
    for task in linked.tasks:
        task.cancel()
    assert str(linked.link.fatal.exception()).startswith("the learner cannot go on: a.jsonl is cut off")


async def test_a_state_is_asked_for_when_the_last_one_is_written() -> None:
    host = PaperHost()
    linked = Linked(host)
    saves = lambda: sum(isinstance(command, ch.Save) for command in host.commands)  # noqa: E731
    for _ in range(3):
        await linked.link.save()
    assert saves() == 1
    linked.tell(ch.StateSaved(Path("state"), True))
    await linked.link.save()
    assert saves() == 2
    linked.tell(LearnerExited(1, "killed"))
    linked.tell(ch.Ready("cpu", 1, 1, 0, False))
    await linked.link.save()
    assert saves() == 3


async def test_a_copy_that_is_not_finite_makes_room_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """It kept the learner's slot for ever."""
    host, compute = PaperHost(), PaperCompute()
    linked = Linked(host, compute)
    fails = True

    async def run(job: Callable[..., Any], *arguments: Any) -> Any:
        if fails:
            raise ValueError("cannot encode a non-finite value")
        return SimpleNamespace(payload=bytearray(3), digest=b"d", length=1.0)

    compute.run, compute.encode = run, None  # type: ignore[method-assign,attr-defined]
    copied = ch.CopiedOut(0, 64, 1, 5, 0, 1, False)
    for times in (1, 2):
        linked.tell(copied)
        await linked.tasks[-1]
        assert host.commands == [ch.FreeSlot(0, not_finite=True)] * times
        assert linked.posted == [ev.NothingToContribute(0)] * times, "a closing call is answered"
    assert len([x for x in caplog.messages if "fragment 0: parameters are kept out" in x]) == 1
    fails = False
    linked.tell(copied)
    await linked.tasks[-1]
    assert isinstance(linked.posted[-1], ev.ContributionReady)


# Ends of learners: which of them are the last.


def test_no_other_learner_finds_better_data() -> None:
    assert exit_status(DataError("a.jsonl: ...")) == EXIT_DATA
    assert exit_status(UserError("the hub cannot be reached")) == EXIT_FAILED
    assert exit_status(StorageError("the disk is full")) == EXIT_FAILED
    failures = Failures()
    assert failures.ended(LearnerExited(EXIT_DATA, "..."), False, 0.0) == math.inf
    # In the middle of a run a read may fail for once, not twice; and a program is its owner's to start again.
    failures = Failures()
    failures.made_step()
    assert failures.ended(LearnerExited(EXIT_DATA, "..."), False, 100.0) < 30.0
    failures.made_step()
    assert failures.ended(LearnerExited(EXIT_DATA, "..."), False, 110.0) == math.inf
    assert failures.ended(LearnerExited(EXIT_DATA, "..."), True, 200.0) == 0.0
    failures = Failures()
    for now in (300.0, 400.0):
        failures.ready(now)
        failures.made_step()
        assert failures.ended(LearnerExited(EXIT_DATA, "..."), False, now + HEALTHY_S) < 30.0, "long after it"
    assert failures.ended(LearnerExited(EXIT_FAILED, "..."), False, 300.0) < 30.0


# Silence of a learner, and when it is taken for one that hangs.

TICKS = 400


def said(step_s: float) -> list[tuple[float, str]]:
    """List what a silence comes to, and when."""
    silence = Silence()
    found = []
    for _ in range(TICKS):
        if word := silence.tick(step_s):
            found.append((silence.silent_s, word))
        if word == "hangs":
            break
    return found


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (0.1, [(60.0, "doubtful"), (600.0, "hangs")]),
        (6.0, [(120.0, "doubtful"), (600.0, "hangs")]),
        (12.0, [(240.0, "doubtful"), (1200.0, "hangs")]),
        (0.0, [(60.0, "doubtful")]),  # no step yet: it may compile for as long as it likes
    ],
)
def test_it_takes_time_and_many_of_its_own_steps(step_s: float, expected: list[tuple[float, str]]) -> None:
    assert said(step_s) == expected


def test_a_word_ends_a_silence_and_it_is_told_once_that_somebody_doubted() -> None:
    silence = Silence()
    assert not silence.heard()
    while not silence.tick(0.1):
        pass
    assert silence.heard() and not silence.heard()
    assert not silence.tick(0.1) and silence.silent_s == TICK_S
