"""Questions at a terminal, and those of `run new --guide`, which needs neither a network nor torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from p2pdiloco.cli.given_wish import HUB, data_source
from p2pdiloco.cli.options import say
from p2pdiloco.config.manifest import Name
from p2pdiloco.config.presets import LENGTHS, PRESETS
from p2pdiloco.daemon.display.logs import YES, at_terminal
from p2pdiloco.errors import UserError, clean
from p2pdiloco.util import Frozen, Values

BACK = "back"
NO = ("n", "no")
Answers = Values


class Question(Frozen):
    """One question."""

    key: str
    """Key of its answer."""
    text: str
    default: str = ""
    """Answer of somebody who only presses Enter."""
    none: str = ""
    """Words for that, where it is empty."""
    read: Callable[[str], Any] = str
    """Reader of an answer. Raises UserError: it is asked again."""
    wanted: Callable[[Answers], bool] = lambda _answers: True
    """Condition under which it is asked, by what was answered before."""
    before: Callable[[Answers], None] = lambda _answers: None
    """Words to be said before it. Raises UserError: that is said, and it is asked all the same."""
    then: Callable[[Answers], None] = lambda _answers: None
    """Work between this answer and the next question, such as to look at what was named. Raises as `read`."""


def need_terminal(command: str, instead: str) -> None:
    """Check that somebody can be asked. Raises: UserError."""
    if not at_terminal():
        raise UserError(f"p2pdiloco {command} asks questions, and there is nobody at a terminal", instead)


def ask_all(questions: Sequence[Question], known: Answers | None = None) -> Answers:
    """Ask one after the other; "back" goes to the one before. `known`: answers that were given already.

    Raises: click.Abort (Ctrl-C, or the input's end).
    """
    say(f"Enter takes what is in brackets; {BACK} goes to the question before; Ctrl-C ends.")
    answers = dict(known or {})
    asked: list[int] = []
    index = 0
    while index < len(questions):
        question = questions[index]
        if not question.wanted(answers):
            answers.pop(question.key, None)
            index += 1
            continue
        try:
            question.before(answers)
        except UserError as error:
            _complain(error)
        word = _typed(question)
        if word.lower() == BACK:
            index = asked.pop() if asked else index
            continue
        try:
            answers[question.key] = question.read(word)
            question.then(answers)
        except UserError as error:
            _complain(error)
            continue
        asked.append(index)
        index += 1
    return answers


def _complain(error: UserError) -> None:
    say(clean(f"  {error}" + (f" ({error.hint})" if error.hint else "")))


def _typed(question: Question) -> str:
    bracket = question.default or question.none
    text = f"{question.text} [{bracket}]" if bracket else question.text
    word = click.prompt(clean(text), default=question.default, show_default=False, err=True)
    return str(word).strip()


def yes_or_no(word: str) -> bool:
    """Read a yes or a no. Raises: UserError."""
    if word.lower() in YES:
        return True
    if word.lower() in NO:
        return False
    raise UserError("answer y or n")


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Make a reader of one of these, or the beginning of one."""

    def read(word: str) -> str:
        fits = [choice for choice in choices if choice == word] or [
            choice for choice in choices if word and choice.startswith(word.lower())
        ]
        if len(fits) != 1:
            raise UserError(f"answer one of {', '.join(choices)}")
        return fits[0]

    return read


INSTEAD = (
    "p2pdiloco run new NAME, with --preset, --data, --length, --expected-members and --admission as wanted"
)


AS_PRESET = "preset"


MOST_MEMBERS = 16_384


NAME_WORDS = "1 to 63 of a-z 0-9 . _ - and begins with a letter or digit"


def ask_for_run(name: str, preset: str) -> Values:
    """Ask for what `run new` takes; returns its arguments.

    Raises: UserError (nobody is there), click.Abort.
    """
    need_terminal("run new --guide", INSTEAD)
    lengths = ", ".join(f"{key} ({length.steps} steps)" for key, length in LENGTHS.items())
    answers = ask_all(
        [
            Question("name", "Name of the run, for people", name, read=_run_name),
            Question(
                "preset",
                f"Model to start from ({', '.join(PRESETS)}; README says what they are)",
                preset,
                read=one_of(list(PRESETS)),
            ),
            Question(
                "data",
                "Data: embedded (what the model's task brings), files, jsonl or parquet (each node's own, "
                f"--data), or {HUB}OWNER/NAME (a data set of Hugging Face)",
                "embedded",
                read=data_source,
            ),
            Question(
                "length",
                f"Length, in inner steps of each node: {lengths}, or {AS_PRESET} (the model's own)",
                AS_PRESET,
                read=one_of([*LENGTHS, AS_PRESET]),
            ),
            Question("expected_members", "Members at the start, about (0: not known)", "0", read=_members),
            Question(
                "admission",
                "Who may be a member: open (anybody), invite (who has one of yours), list (whom you list)",
                "invite",
                read=one_of(["open", "invite", "list"]),
            ),
        ]
    )
    if answers["length"] == AS_PRESET:
        del answers["length"]
    return answers


def _run_name(word: str) -> str:
    try:
        return msgspec.convert(word, Name)
    except msgspec.ValidationError as error:
        raise UserError(f"a name has {NAME_WORDS}") from error


def _members(word: str) -> int:
    if not word.isdecimal() or int(word) > MOST_MEMBERS:
        raise UserError(f"answer a number from 0 to {MOST_MEMBERS}")
    return int(word)
