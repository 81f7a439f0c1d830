"""Pictures of a terminal: the last whole picture of a live view, as an SVG that asks no other host."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

import pictures


def drawn(*frames: str) -> str:
    """All that a live view writes when it shows these, one after the other, and is cut off in the last."""
    out = io.StringIO()
    with Live(console=Console(file=out, force_terminal=True, width=40), auto_refresh=False) as live:
        for frame in frames:
            live.update(Text(frame, style="red"), refresh=True)
        return "a sentence before\n" + out.getvalue()


def frame(word: str) -> str:
    return "\n".join(f"{word} {line}" for line in range(12))


def test_the_last_whole_picture_is_taken() -> None:
    found = pictures.last_frame(drawn(frame("first"), frame("second"), frame("cut off")))
    assert "second 11" in found and "first" not in found and "cut off" not in found


def test_who_draws_nothing_gives_no_picture() -> None:
    with pytest.raises(ValueError, match="drew no picture"):
        pictures.last_frame("error: no such run\n")


def test_a_picture_asks_no_other_host() -> None:
    found = pictures.svg("\x1b[1;32mtraining\x1b[0m  step 7", "p2pdiloco node")
    assert "training" in found and "@font-face" not in found and "url(http" not in found
