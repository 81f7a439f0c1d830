"""Wording of numbers, names and times for people, made safe: names and reasons come from peers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

from p2pdiloco.errors import clean

SPARKS = "▁▂▃▄▅▆▇█"


def fit(text: str, cells: int) -> str:
    """Fit a text, cleaned, into exactly `cells` columns of a terminal; a longer one is cut with an
    ellipsis."""
    text = clean(text)
    if cell_len(text) > cells:
        text = set_cell_size(text, max(0, cells - 1)) + "…"
    return set_cell_size(text, cells)


def folded(text: str, cells: int) -> list[str]:
    """Fold a cleaned text into lines of at most so many columns, between words where that can be."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= cells:
            lines[-1] = longer
            continue
        if lines[-1].strip():
            lines.append("")
        while cell_len(word) > cells:
            head = set_cell_size(word, cells)
            lines[-1] = head
            lines.append("")
            word = word[len(head.rstrip()) or 1 :]
        lines[-1] = word
    return lines


def short_peer(peer: str) -> str:
    """Shorten a peer id to its end: all beginnings are alike."""
    return clean(peer[-6:])


def count(number: float | None) -> str:
    """Word a number with three significant digits: "950", "15.2k", "3.4M"; "-" for unknown."""
    if number is None or not math.isfinite(number):
        return "-"
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * scale:
            return (
                f"{number / scale:.3g}{unit}" if abs(number) < 1000 * scale else f"{number / scale:.0f}{unit}"
            )
    return f"{number:.0f}"


def counted(number: int, noun: str) -> str:
    """Word so many of something: "1 member", "2 members"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def size(number_bytes: float) -> str:
    """Word a number of bytes: "120 B", "1.2 MB"."""
    text = count(number_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1:].isalpha() else f"{text} B"


def duration(seconds: float | None) -> str:
    """Word a time: "62 ms", "1.3 s", "4 min", "2.5 h"; "-" for unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def loss_text(loss: float | None, digits: int = 2) -> str:
    """Word a loss: "2.31"; "-" for unknown, the word itself for a loss that blew up ("nan", "inf")."""
    return "-" if loss is None else f"{loss:.{digits}f}"


def ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Word numbers as ranges, "0-3,7": at most `most` ranges, then an ellipsis; "-" for none."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in found[:most]]
    return (",".join(texts) + (",…" if len(found) > most else "")) or "-"


def sparkline(values: Sequence[float], cells: int) -> str:
    """Draw the last `cells` values as block characters, low to high; those that are not finite are left
    out."""
    finite = [value for value in values if math.isfinite(value)][-cells:] if cells > 0 else []
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in finite)
