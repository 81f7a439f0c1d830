"""What a program sees of `p2pdiloco.Session`: its names, its types, and the error of losses that are NaN."""

import inspect
import pydoc
import typing
from types import SimpleNamespace

import msgspec
import pytest

import p2pdiloco
from p2pdiloco.config.presets import MICRO
from p2pdiloco.errors import UserError
from p2pdiloco.learner.program_ranks import ProgramTraining
from p2pdiloco.session import Session, SessionNode

USED = {
    "step",
    "computing",
    "close",
    "merged",
    "on_merge",
    "addresses",
    "inner_step",
    "run_tokens",
    "schedule_tokens",
}


def test_help_shows_what_programs_call_and_nothing_else():
    assert {name for name in vars(Session) if not name.startswith("_")} == USED
    text = pydoc.plain(pydoc.render_doc(p2pdiloco.Session))
    assert all(name in text for name in USED) and "_global_loss" not in text
    assert set(dir(p2pdiloco)) == set(p2pdiloco.__all__)


def test_everything_that_programs_call_is_typed():
    names = {}
    for name in (*USED, "__init__", "__enter__"):
        found = inspect.getattr_static(Session, name)
        call = inspect.unwrap(found.fget if isinstance(found, property) else found)
        hints = typing.get_type_hints(call)
        assert set(hints) == {*inspect.signature(call).parameters, "return"} - {"self"}, name
        assert name.startswith("__") or inspect.getdoc(call), name
        names |= {name: hints["return"]}
    assert names["step"] is bool and names["addresses"] == tuple[str, ...]


def node_of(mailbox):
    """A session's node without a daemon, at its steps."""
    node = object.__new__(SessionNode)
    node.stopped, node._lost, node._before, node.mailbox = False, 0, 0, mailbox
    inner = msgspec.structs.replace(MICRO.inner, tokens_per_step=64)
    node._training = ProgramTraining(inner, None, [])
    return node


def test_losses_that_are_no_numbers_are_an_error_after_ten_steps():
    node = node_of(
        SimpleNamespace(
            moved=False, begin_step=lambda: None, let_go=False, stopping=False, boundary=lambda report: True
        )
    )
    for _ in range(2):
        for loss in [float("nan"), float("inf"), float("-inf")] * 3:
            assert node.step(64, loss).goes_on
        assert node.step(64, 0.5).goes_on, "a finite one begins anew"
    for _ in range(9):
        assert node.step(64, float("nan")).goes_on
    with pytest.raises(UserError, match="no finite number in 10 steps in a row, the last is nan") as caught:
        node.step(64, float("nan"))
    assert "diverged" in caught.value.hint


def test_a_program_that_heard_the_end_hears_that_the_run_was_made_longer():
    mailbox = SimpleNamespace(
        moved=False, begin_step=lambda: None, let_go=True, stopping=False, boundary=lambda report: True
    )
    mailbox.attend = lambda timeout_s: None
    node = node_of(mailbox)
    assert not node.step(64, 0.5).goes_on
    mailbox.attend = lambda timeout_s: setattr(mailbox, "let_go", False)
    assert node.step(64, 0.5).goes_on
