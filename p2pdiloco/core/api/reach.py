"""How others can reach a member, as it found out by asking peers, and says in its heartbeats."""

from __future__ import annotations

from enum import IntEnum

from p2pdiloco.core.machine import direct_members


@direct_members
class Reach(IntEnum):
    """Wire format: append only."""

    UNKNOWN = 0
    """Nobody has told it yet."""
    DIRECT = 1
    """Others can dial it."""
    RELAYED = 2
    """Only through a relay, or over connections that it made itself."""
    OUTBOUND = 3
    """Only over connections that it made itself."""


WORDS = {
    Reach.UNKNOWN: "",
    Reach.DIRECT: "direct",
    Reach.RELAYED: "relayed",
    Reach.OUTBOUND: "outbound only",
}
"""For people."""
