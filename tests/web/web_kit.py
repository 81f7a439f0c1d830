"""A page's server in this event loop, and a client that says exactly what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from deadlines import within_s
from msgspec import Struct
from page_scene import scene

from p2pdiloco.config.values import WebAddress
from p2pdiloco.web.keys import load_token
from p2pdiloco.web.server import serving
from p2pdiloco.web.sources import Views
from p2pdiloco.web.view import RunView


class Shown:
    """Source of what a test puts there."""

    def __init__(self, view: RunView | None = None) -> None:
        self.shown = view or scene()
        self.looks = 0

    def view(self, run: str) -> RunView | None:
        self.looks += 1
        public = self.shown.public
        return self.shown if not run or (public is not None and run == public.run_id) else None


class Answer(Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Served(Struct):
    """A server that runs."""

    port: int
    token: str
    views: Views
    source: Shown
    host: str = "127.0.0.1"

    async def ask(
        self, path: str = "/view", method: str = "GET", body: bytes = b"", **headers: str
    ) -> Answer:
        """Ask with the token, unless `authorization` or `cookie` says something else."""
        said = {"host": f"{self.host}:{self.port}", "authorization": f"Bearer {self.token}"}
        said |= {name.replace("_", "-"): value for name, value in headers.items()}
        if body or method == "POST":
            said["content-length"] = str(len(body))
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{k}: {v}" for k, v in said.items() if v),
            "connection: close",
        ]
        return await self.say("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def say(self, data: bytes) -> Answer:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        with contextlib.closing(writer):
            writer.write(data)
            return parse(await asyncio.wait_for(reader.read(), within_s(10)))

    async def events(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Watch."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        words = f"GET /events HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.token}\r\n\r\n"
        writer.write(words.encode())
        return reader, writer


def parse(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin1").split("\r\n")
    headers: dict[str, str] = {}
    for name, _, value in (line.partition(": ") for line in lines):
        headers[name.lower()] = value
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(body.split(b"\r\n")[1::2])
    return Answer(int(first.split()[1]), headers, body)


@contextlib.asynccontextmanager
async def served(folder: Path, is_public: bool = False, host: str = "127.0.0.1") -> AsyncIterator[Served]:
    source = Shown()
    lines: list[str] = []
    with contextlib.redirect_stdout(Lines(lines)):
        async with serving(WebAddress(host, 0), folder, source, is_public) as views:
            url = next(line for line in lines if "web page" in line).split()[-1]
            port = int(url.rpartition(":")[2].partition("/")[0])
            yield Served(port, load_token(folder), views, source, host.replace("0.0.0.0", "127.0.0.1"))


class Lines:
    """A stream that keeps what is printed."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines.append(text)
        return len(text)

    def flush(self) -> None:
        pass
