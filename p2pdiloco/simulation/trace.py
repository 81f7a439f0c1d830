"""What happened, as one digest per seed and, when asked for, as lines for people."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from p2pdiloco.core.events import Event, MessageReceived
from p2pdiloco.core.messages import Progress


class Trace:
    """Every event that a core handled, in order. Equal seeds give equal digests, in any process."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.write = write

    def event(self, now: float, peer: str, event: Event) -> None:
        """A core is about to handle this event."""
        name = type(event).__name__
        if type(event) is MessageReceived:
            name = type(event.message).__name__ + "<" + event.sender
        self._hash.update(f"{now:.9f} {peer} {name}\n".encode())
        if self.write is not None and name[:8] != "Progress" and name not in ("Tick", "LearnerStatus"):
            shown = event.message if type(event) is MessageReceived else event
            self.write(f"{now:9.4f} {peer:>4} <- {name}: {brief(shown)}")

    def decision(self, now: float, peer: str, text: str) -> None:
        """Something that a node decided, or that the world did to it."""
        self._hash.update(f"{peer} {text}\n".encode())
        if self.write is not None:
            self.write(f"{now:9.4f} {peer:>4} == {text}")

    def effect(self, now: float, peer: str, effect: object) -> None:
        """What a core wants done; only shown, its consequences are in the digest."""
        message = getattr(effect, "message", None)
        if self.write is not None and not isinstance(message, Progress):
            self.write(f"{now:9.4f} {peer:>4} -> {type(effect).__name__}: {brief(effect)}")

    def digest(self) -> str:
        """Of everything so far."""
        return self._hash.hexdigest()


def brief(value: object) -> str:
    """A struct with its digests and signatures cut short."""
    fields = getattr(value, "__struct_fields__", None)
    if isinstance(value, bytes):
        return value.hex()[:8]
    if isinstance(value, tuple):
        return "[" + ", ".join(brief(item) for item in value[:8]) + ("…]" if len(value) > 8 else "]")
    if fields is None:
        return f"{value:.3f}" if isinstance(value, float) else str(value)
    skipped = ("signature", "run", "group", "codec", "payload_digest", "update_digest")
    return ", ".join(f"{name}={_part(getattr(value, name))}" for name in fields if name not in skipped)


def _part(value: object) -> str:
    text = brief(value)
    return f"({text})" if hasattr(value, "__struct_fields__") else text
