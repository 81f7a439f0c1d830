"""Bounds of what reports carry: texts, numbers and rows that may come from strangers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_LOSS = 1e6
"""Loss beyond which a number is no loss: one like 1e308 would spoil every mean."""
Text = Annotated[str, Meta(max_length=80)]
"""Peer ids, node and run names."""
Words = Annotated[str, Meta(max_length=48)]
"""Words for a table cell."""
Line = Annotated[str, Meta(max_length=240)]
HexDigest = Annotated[str, Meta(max_length=16)]
"""Hexadecimal digits of a digest as shown to people: the first 8, at most 16."""
Seconds = Annotated[float, Meta(ge=-1e11, le=1e11)]
"""Ages, and times since 1970: a number that is none, or is infinite, cannot be made a time."""
Share = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[int, Meta(ge=0, le=1 << 62)]


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all rows: immutable, keyword-only, encoded as a map with the field names."""
