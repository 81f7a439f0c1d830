"""Every table and queue inside a core stays below a bound, whatever it is called: all of it is searched."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from p2pdiloco.core.pending import KEPT_MAX

BASE = 32
PER_NODE = 2
LARGER = {**dict.fromkeys(("_parts", "parts", "_combining"), 2 * KEPT_MAX), "_of": 256, "_on": 256}
"""Tables that may hold more, by name: contributions that are kept until they are beyond doubt, and heads on
which members stand, each on eight."""
CONTAINERS = (list, dict, set, frozenset, deque, tuple)
PLAIN = frozenset((bool, bytes, float, int, str, type(None)))
"""Types with nothing inside. Most values are of these, so they are told first."""


def too_large(core: object, nodes: int) -> str:
    """Find a container inside `core` that has outgrown its bound in a world of so many nodes; mostly none."""
    limit = BASE + PER_NODE * nodes
    for path, container in _containers(core, "core", set()):
        if len(container) > LARGER.get(path.rpartition(".")[2], limit):
            return f"{path} holds {len(container)}"
    return ""


def _containers(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Depth first through the core's own objects; values that travel (structs) are bounded by the wire."""
    if type(value) in PLAIN or id(value) in seen or isinstance(value, Struct):
        return
    if isinstance(value, CONTAINERS):
        seen.add(id(value))
        yield path, value
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            yield from _containers(item, path, seen)
    elif type(value).__module__.startswith("p2pdiloco.core"):
        seen.add(id(value))
        for name in _attributes(value):
            yield from _containers(getattr(value, name, None), f"{path}.{name}", seen)


def _attributes(value: object) -> list[str]:
    names = list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        names += cls.__dict__.get("__slots__", ())
    return names
