"""Reachability of a member: what it found out by asking peers, and says in its heartbeats.

Rules: docs/protocol/links.md, section 1.
"""

from __future__ import annotations

from enum import IntEnum

from p2pdiloco.util import direct_members


@direct_members
class Reach(IntEnum):
    """Ways in which others can reach a member. Wire format: append only."""

    UNKNOWN = 0
    """Reachable or not: peers have not told it yet."""
    DIRECT = 1
    """Others can dial it."""
    RELAYED = 2
    """Reachable only through a relay, or over connections that it made itself."""
    OUTBOUND = 3
    """Reachable only over connections that it made itself."""


WORDS = {
    Reach.UNKNOWN: "",
    Reach.DIRECT: "direct",
    Reach.RELAYED: "relayed",
    Reach.OUTBOUND: "outbound only",
}
"""Texts for people."""
