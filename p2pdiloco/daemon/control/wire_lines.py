"""Lines of the control socket: a request and its reply, each one JSON object and a newline, then the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.adapters.p2pd import MAX_SOCKET_PATH_BYTES, socket_folder
from p2pdiloco.daemon.control.controls import ControlState
from p2pdiloco.errors import encoded

MAX_LINE_BYTES = 64 * 1024
SOCKET = "control.sock"
Verb = Literal["state", "pause", "resume", "finish", "limits"]


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """Wish of the owner."""

    do: Verb
    changes: Annotated[dict[Annotated[str, Meta(max_length=64)], str], Meta(max_length=32)] = {}
    """Limits to change, for "limits"."""


class Reply(Struct, frozen=True):
    """Answer: one line for people, and how things stand afterwards."""

    ok: bool
    said: str = ""
    hint: str = ""
    state: ControlState | None = None


def socket_path(data_dir: Path) -> Path:
    """Find the path of a data folder's control socket: in it, or, when that path is too long for a socket,
    beside the folder for the network's sockets."""
    path = data_dir.absolute() / SOCKET
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    folder = socket_folder(data_dir)
    return folder.with_name(f"{folder.name}-{SOCKET}")


_encoder = msgspec.json.Encoder()
_requests, _replies = msgspec.json.Decoder(Request), msgspec.json.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Encode one line."""
    return encoded(message, _encoder) + b"\n"


def decode_request(line: bytes) -> Request:
    """Decode a request. Raises: msgspec.MsgspecError, ValueError (it is none)."""
    return _requests.decode(line)


def decode_reply(line: bytes) -> Reply:
    """Decode a reply. Raises: msgspec.MsgspecError, ValueError (it is none)."""
    return _replies.decode(line)
