"""Leftovers of a member: tables, counters and pins that must be empty at the end.

All of its objects are searched, whatever they are called."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from p2pdiloco_lab.bulk_world.member import BulkMember

SEARCHED = ("p2pdiloco.daemon.bulk", "p2pdiloco.daemon.payloads", "p2pdiloco.adapters", "p2pdiloco.tensors")
CONTAINERS = (list, dict, set, frozenset, deque)
REMEMBER = frozenset({"_known", "_until", "_given", "takers", "_flows", "refusals", "_committed"})
"""Tables that outlive transfers: who was fast, who failed, who was served, windows."""
OF_RUN = frozenset({"_states", "_spares", "_residuals", "_left_out", "_holders", "_logs"})
"""Tables with a place for each fragment of the run."""
LIMIT = 256
COUNTERS = frozenset(
    {
        "pins",
        "streams",
        "in_flight_bytes",
        "unacknowledged_bytes",
        "_arriving_bytes",
        "_checked_bytes",
        "_reserved_bytes",
        "_refusing",
        "_queued_bytes",
    }
)
"""Counters that go up when something begins, and down when it is over."""


def too_large(member: BulkMember) -> str:
    """Name a table that has outgrown its bound; mostly nothing."""
    for path, value in _found(member.transfers, "transfers", set()):
        if isinstance(value, CONTAINERS) and len(value) > LIMIT:
            return f"{path} holds {len(value)}"
    used, most = member.memory.claimed_bytes, member.memory.most_bytes
    if used > most:
        return f"{used} bytes of {most:.0f} that it may have"
    return ""


def left_over(member: BulkMember) -> str:
    """Name something that is not over although nothing is under way; mostly nothing."""
    member.transfers.pushes_in.forget_old()  # as whoever pushes or pulls next would do
    if member.spool.held_bytes:
        return f"{member.spool.held_bytes} bytes of scratch"
    for root, owner in (("transfers", member.transfers), ("transport", member.transport)):
        for path, value in _found(owner, root, set()):
            name = path.rpartition(".")[2]
            if name in COUNTERS and value:
                return f"{path} is {value}"
            if isinstance(value, CONTAINERS) and value and name not in REMEMBER | OF_RUN:
                return f"{path} holds {len(value)}"
    if member.vault.pins:
        return f"{member.vault.pins} pins"
    if len(member.tickets):
        return f"{len(member.tickets)} tickets"
    if member.memory.claimed_bytes != member.log.held_bytes:
        return f"{member.memory.claimed_bytes} bytes of memory, of which the log has {member.log.held_bytes}"
    return ""


def _found(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield all containers and counters inside the daemon's own objects, depth first."""
    if id(value) in seen or isinstance(value, Struct):
        return
    if isinstance(value, CONTAINERS):
        seen.add(id(value))
        yield path, value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _found(item, path, seen)
    elif type(value).__module__.startswith((*SEARCHED, "p2pdiloco_lab.bulk_world.door")):
        seen.add(id(value))
        for name, inside in vars(value).items():
            if name in COUNTERS:
                yield f"{path}.{name}", inside
            elif name not in ("_hub", "_world", "_member"):
                yield from _found(inside, f"{path}.{name}", seen)
