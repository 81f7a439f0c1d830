"""Guide of somebody who describes a run: the flags of `run new` as questions (`run new --guide`)."""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdiloco.cli.given.data import HUB, data_source
from p2pdiloco.cli.guided.questions import Question, ask_all, need_terminal, one_of
from p2pdiloco.config.manifest import Name
from p2pdiloco.config.presets import LENGTHS, PRESETS
from p2pdiloco.errors import UserError

INSTEAD = (
    "p2pdiloco run new NAME, with --preset, --data, --length, --expected-members and --admission as wanted"
)
AS_PRESET = "preset"
MOST_MEMBERS = 16_384
NAME_WORDS = "1 to 63 of a-z 0-9 . _ - and begins with a letter or digit"


def ask_for_run(name: str, preset: str) -> dict[str, Any]:
    """Ask for what `run new` takes; returns its arguments.

    Raises: UserError (nobody is there), click.Abort.
    """
    need_terminal("run new --guide", INSTEAD)
    lengths = ", ".join(f"{key} ({length.steps} steps)" for key, length in LENGTHS.items())
    answers = ask_all(
        [
            Question("name", "Name of the run, for people", name, read=_name),
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


def _name(word: str) -> str:
    try:
        return msgspec.convert(word, Name)
    except msgspec.ValidationError as error:
        raise UserError(f"a name has {NAME_WORDS}") from error


def _members(word: str) -> int:
    if not word.isdecimal() or int(word) > MOST_MEMBERS:
        raise UserError(f"answer a number from 0 to {MOST_MEMBERS}")
    return int(word)
