"""Errors that p2pdiloco raises on purpose.

    P2PDilocoError
    ├── UserError            the person at the keyboard can mend it; shown as one sentence and a hint
    │   ├── ConfigError      a manifest, a settings file, a flag or an environment variable is wrong
    │   ├── NobodyReached    of the peers to join through, none can be reached
    │   ├── StorageError     a data folder cannot be read or written
    │   └── DataError        what a node shall train on is not what it should be; another try finds the same
    ├── RemoteError          a peer misbehaved: refused with a reason, counted, costs that peer only
    └── TransportError       the world: time-outs, cut links, absent peers; ordinary events
        └── PeerUnreachable  no connection to that peer can be had right now

A broken invariant of our own is an `InvariantViolation`, which no handler of errors takes for one: the
process ends. Where a task would keep it to itself, the event loop's exception handler hears of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec


class P2PDilocoError(Exception):
    """Base of all errors below."""


class UserError(P2PDilocoError):
    """Error that the person at the keyboard can mend. `str(error)` is one clear sentence; `hint` says what to
    do next and may be empty."""

    exit_status = 2
    """Exit status of a command that ends with it."""

    def __init__(self, message: str, hint: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hint = hint
        self.details = details
        """Further lines, each about one of several things that were tried."""


def install_hint(extra: str = "", path: str = ".") -> str:
    """Say how what is missing gets here: p2pdiloco is installed from a clone, and the lab at `path` of it."""
    what = f"'{path}[{extra}]'" if extra else path
    return f"in the clone that p2pdiloco was installed from: pip install -c constraints.txt {what}"


def without_torch(error: ModuleNotFoundError) -> UserError | None:
    """Word that this needs PyTorch, which bootstraps can do without; None: something else is missing."""
    if error.name != "torch":
        return None
    return UserError("this needs PyTorch (the package torch), which is not installed here", install_hint())


class ConfigError(UserError):
    """Error in a manifest, a settings file, a flag or an environment variable."""


class NobodyReached(UserError):
    """Error: of the peers to join through, none can be reached."""


class StorageError(UserError):
    """Error of a data folder that cannot be used: missing, unreadable, full, or owned by a running node."""


class DataError(UserError):
    """Error of data: missing, damaged, or of another form. Another try finds the same."""


MAX_TOLD = 300
"""Characters of what a peer, or an error about its bytes, has to say."""


class RemoteError(P2PDilocoError):
    """Error of a peer, which sent something that is not acceptable. `reason` is a short stable word for
    counters. Both may be the peer's own words: they are made printable, and cut."""

    def __init__(self, reason: str, detail: str = "") -> None:
        reason, detail = clean(reason[:MAX_TOLD]), clean(detail[:MAX_TOLD])
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class TransportError(P2PDilocoError):
    """Error of the network, which did not do what was asked: a time-out, a cut stream, a dead daemon. What it
    says may be a peer's own words, as those of `RemoteError`."""

    def __init__(self, message: str = "") -> None:
        super().__init__(clean(message[:MAX_TOLD]))


class PeerUnreachable(TransportError):
    """Error: no connection to the peer can be had right now."""


class InvariantViolation(BaseException):
    """Error of ours: a rule of the program is broken. Not an `Exception`: whoever catches it hands it on."""


def first_line(error: BaseException) -> str:
    """Take the first line of what an error says, with the next if it only announces that; its class's name if
    it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, *others = lines or [type(error).__name__]
    return f"{first} {others[0]}" if others and first.endswith(":") else first


@contextmanager
def in_a_sentence(beginning: str, hint: str = "") -> Iterator[None]:
    """Context of a library that may raise anything at what it is given: it becomes one sentence.

    Raises:
        UserError: the sentence.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{beginning}: {first_line(error)}"[:500], hint) from error


@contextmanager
def needing(sentence: str, extra: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Context of imports from a package that may be missing, of this extra; `sentence` says what needs it.

    Raises:
        UserError: of this kind: one is missing.
    """
    try:
        yield
    except ImportError as error:
        raise kind(f"{sentence}, and it is not installed: {error}", install_hint(extra)) from error


def invariant(holds: bool, message: str) -> None:
    """Raise `InvariantViolation` unless `holds`. Unlike `assert`, stays on under `python -O`."""
    if not holds:
        raise InvariantViolation(message)


_encoder = msgspec.json.Encoder(enc_hook=str)


class _Encoder(Protocol):
    def encode(self, value: Any, /) -> bytes: ...


def encoded(value: Any, encoder: _Encoder, hook: Callable[[Any], Any] = str) -> bytes:
    """Encode a value (structs too). Names of files need not be UTF-8, and what Python makes of the rest of
    their bytes no encoder takes: such texts are shown, not lost. `hook`: the encoder's own."""
    try:
        return encoder.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=hook)
        return encoder.encode(_readable(plain))


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_readable(key): _readable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner) for inner in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def clean(text: str, keep: str = "") -> str:
    """Replace each character of a text that does not print by a dot in the middle, except those in `keep`.

    A terminal obeys control characters (escape sequences, their one-byte forms U+0080 to U+009F, carriage
    returns), and direction overrides turn what a person reads. Whatever shows a text takes it through here.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else "·" for letter in text)


def json_line(value: Any) -> str:
    """Encode a value (structs too) as JSON in one line. What does not print is escaped, so that readers get
    every character of a text, and terminals none that they obey."""
    text = encoded(value, _encoder).decode()
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return "\\u007f" if letter == "\x7f" else json.dumps(letter)[1:-1]
