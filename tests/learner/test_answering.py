"""Closing calls are answered while a step is computed, with what the last boundary would have given."""

import contextlib
import functools
import select
from pathlib import Path

import pytest
import torch
from deadlines import within_s
from learner_kit import DEVICES

from p2pdiloco.learner import mailbox
from p2pdiloco.learner.channel import (
    MAX_WAITING_COMMANDS,
    Applied,
    ChannelBroken,
    CopiedOut,
    CopyOut,
    DataShare,
    Evaluate,
    Evaluated,
    FreeSlot,
    Install,
    Learners,
    NothingToCopy,
    Save,
    ShareData,
    StateSaved,
    Stop,
    StopStepping,
    TakePart,
)
from p2pdiloco.learner.inner_step import Form
from p2pdiloco.learner.loop import restore_checkpoint
from p2pdiloco.learner.mailbox import Answering

PATIENCE_S = 30.0
HEARD = Learners(3)


@pytest.fixture(params=[kind for kind in DEVICES if kind in mailbox.ANSWERING_DEVICES])
def bench(request, benches):
    return benches(device=request.param)


@contextlib.contextmanager
def answering(bench, give_up=None):
    answer = functools.partial(bench.mailbox.answer_calls, give_up)
    with Answering(bench.still, bench.channel.wait_or, answer, bench.device) as made:
        yield made


def answers(bench):
    """What the learner says next, which comes without a boundary."""
    assert select.select([bench.daemon], [], [], within_s(PATIENCE_S))[0], "nobody answers"
    return bench.events()


def during_a_step(bench, monkeypatch, act):
    """Make an inner step, and do something in the middle of it; what that gave."""
    found, gradients = [], bench.training._passes.gradients

    def computing(*given):
        loss = gradients(*given)
        found.append(act())
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(bench.training._passes, "gradients", computing)
        report = bench.training.step()
    assert bench.mailbox.boundary(report)
    return found[0]


def test_a_call_is_answered_in_the_middle_of_a_step_as_it_was_before_it(bench, monkeypatch):
    tokens = bench.training.section.tokens_per_step
    with answering(bench):
        for _ in range(2):
            assert bench.step()
        bench.events()
        theta = bench.fragments._gather(3).clone()

        def called():
            bench.post(CopyOut(3))
            bench.post(CopyOut(3))
            found = answers(bench)
            return found if len(found) == 2 else found + answers(bench)

        first, second = during_a_step(bench, monkeypatch, called)
    assert isinstance(first, CopiedOut) and not first.due
    assert (first.inner_step, first.inner_steps, first.tokens) == (2, 2, 2 * tokens)
    assert second == NothingToCopy(3, slot_in_use=True)
    assert torch.equal(bench.exchange.sent(3), theta)
    assert not torch.equal(bench.fragments._gather(3), theta), "the step went on and changed it"
    assert bench.fragments.counters[3].unmerged_steps == 3
    assert bench.fragments.counters[3].steps_since_base == 0, "due H whole steps after the copy"


def test_a_call_is_answered_while_torch_fetches_its_compiler(bench, monkeypatch):
    """Importing it takes seconds, before anything is compiled."""
    found = []

    def compiling(function, dynamic):
        bench.post(CopyOut(3))
        found.extend(answers(bench))
        return function

    monkeypatch.setattr(torch, "compile", compiling)
    with answering(bench):
        assert bench.step()
        bench.events()
        forms = bench.training._passes.forms
        forms._choice, forms.form = "always", Form.PLAIN
        assert bench.step()
    assert [(type(event), event.fragment) for event in found] == [(CopiedOut, 3)]


@pytest.mark.parametrize("barrier", [TakePart(1), Save(Path("/nowhere/state"))])
def test_calls_overtake_what_does_not_bear_upon_them_and_nothing_else(bench, monkeypatch, barrier):
    with answering(bench):
        assert bench.step()
        bench.events()
        bench.exchange.base(0, 1).copy_(bench.exchange.base(0, 0))

        def called():
            early = [HEARD, Install(0, 1, 1, "rebase"), CopyOut(0), FreeSlot(2), CopyOut(2), CopyOut(1)]
            for command in (*early, barrier, CopyOut(3)):
                bench.post(command)
            return answers(bench)

        assert [e.fragment for e in during_a_step(bench, monkeypatch, called)] == [1]
        late = bench.events()
    applied, *copied = (e for e in late if isinstance(e, Applied | CopiedOut))
    assert applied == Applied(0, 1, 2)
    copied = [e for e in copied if not e.due]
    assert [(e.fragment, e.inner_steps) for e in copied] == [(0, 2), (2, 2), (3, 2)]
    assert copied[0].base_number == 1


def test_a_call_is_answered_while_the_global_parameters_are_evaluated(bench, monkeypatch):
    assert bench.step()
    bench.events()
    seen, evaluate = [], mailbox.evaluate

    def evaluating(*given, **named):
        bench.post(CopyOut(1))
        seen.extend(answers(bench))
        return evaluate(*given, **named)

    monkeypatch.setattr(mailbox, "evaluate", evaluating)
    bench.post(Evaluate())
    bench.post(FreeSlot(0))
    with answering(bench):
        assert bench.step()
    assert [type(e) for e in seen] == [CopiedOut]
    assert any(isinstance(e, Evaluated) for e in bench.events())


def test_a_daemon_that_is_gone_ends_the_step_and_a_stop_is_the_last_word(bench, monkeypatch):
    with answering(bench):
        bench.post(Stop(None))
        bench.post(CopyOut(1))
        bench.mailbox.answer_calls(None)
        assert bench.events() == [], "the end is what was asked for first"
        assert not bench.step()
        bench.events()
        bench.post(CopyOut(2))
    assert bench.events() == [], "nobody answers after the end"
    with answering(bench) as made, pytest.raises(ChannelBroken):
        bench.daemon.close()
        with bench.still.meanwhile():
            made._thread.join(within_s(PATIENCE_S))  # it has seen it


class GivenUp(Exception):
    """Stands for the end of the process."""


def test_a_step_is_given_up_when_the_end_does_not_wait_for_it(bench, benches, monkeypatch, tmp_path):
    """A step of many seconds kept a leaving node's learner from taking over the last version and saving: all
    that it had made since the last checkpoint was lost."""
    path = tmp_path / "state"

    def over():
        raise GivenUp

    with answering(bench, over), pytest.raises(GivenUp):
        for _ in range(2):
            assert bench.step()
        bench.post(CopyOut(0))
        bench.mailbox.obey()
        assert bench.fragments.counters[0].slot_in_use
        bench.events()
        bench.exchange.base(0, 1).copy_(bench.exchange.sent(0))

        def told():
            for command in (TakePart(2), ShareData(DataShare("other", 0, b"")), Evaluate(), StopStepping()):
                bench.post(command)
            bench.post(Save(tmp_path / "regular"))
            bench.post(Install(0, 1, 1, "merged"))
            applied = answers(bench)
            bench.post(Stop(path))
            return applied + answers(bench)

        said = []
        with monkeypatch.context() as patch:
            gradients = bench.training._passes.gradients
            patch.setattr(
                bench.training._passes, "gradients", lambda *g: (said.extend(told()), gradients(*g))[1]
            )
            bench.training.step()
    assert said == [Applied(0, 1, 2), StateSaved(path, True, last=True)]
    assert bench.training.inner_step == 2 and bench.fragments.counters[1].unmerged_steps == 2
    again = benches(device=bench.device)
    again.fragments.bases[0] = bench.fragments.bases[0]
    again.exchange.base(0, 1).copy_(bench.exchange.base(0, 1))
    restore_checkpoint(path, ["all"] * len(bench.fragments), again.training, again.fragments)
    assert again.training.inner_step == 2
    assert [c.unmerged_steps for c in again.fragments.counters] == [0, *[2] * (len(bench.fragments) - 1)]


def test_an_end_that_comes_between_two_looks_is_seen_all_the_same(bench, monkeypatch):
    told = bench.channel.told_to_finish

    def told_just_before():
        found = told()
        bench.post(StopStepping())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(bench.channel, "told_to_finish", told_just_before)
        bench.mailbox.answer_calls(lambda: None)
    assert select.select([bench._theirs], [], [], 0)[0], "the thread that answers wakes up for it"


def test_before_a_step_or_where_one_cannot_be_given_up_the_end_waits_for_commands(bench, benches):
    bench.post(StopStepping())
    bench.post(Evaluate())
    bench.post(Stop(None))
    assert not bench.mailbox.begin() and bench.events() == []
    other = benches(device=bench.device)
    with answering(other):
        other.post(StopStepping())
        other.mailbox.answer_calls(None)  # a program's process is not ours to end
        other.post(Stop(None))
        assert not other.step()


def test_commands_that_nobody_takes_are_bounded(bench):
    bench.daemon.setblocking(True)
    with pytest.raises(ChannelBroken, match="takes no commands"):
        for count in range(MAX_WAITING_COMMANDS + 64):
            bench.post(HEARD)
            if count % 64 == 63:
                bench.mailbox.answer_calls(None)
