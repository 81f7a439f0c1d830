"""A server of the page with views that a test makes: what it was asked for and told is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from p2pdiloco.web.live import STILL_HERE
from p2pdiloco.web.page import POLICY, STATIC, Page
from p2pdiloco.web.view import RunView

KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
BEAT_S = 0.5


class PageServer:
    """One page on loopback, live. `with PageServer(view) as server: server.show(another)`."""

    def __init__(self, view: RunView) -> None:
        self._page = Page()
        self._changed = threading.Condition()
        self._number = 0
        self._ended = False
        self.view = view
        self.silent = False
        """True: it takes no connection for events, and ends those that it has."""
        self.told: list[tuple[str, dict[str, list[str]]]] = []
        """What was posted: path, fields."""
        self.sent: dict[str, int] = {}
        """Bytes of every answer but the events', by path."""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/"

    def show(self, view: RunView) -> None:
        """Send it to everybody who looks."""
        with self._changed:
            self.view = view
            self._number += 1
            self._changed.notify_all()

    def fall_silent(self, silent: bool = True) -> None:
        """End all events, or take connections for them again."""
        with self._changed:
            self.silent = silent
            self._changed.notify_all()

    def html(self) -> bytes:
        """The whole page."""
        return self._page.html(self.view).encode()

    def stream(self, write: Callable[[bytes], object]) -> None:
        """Send events until the end, or until nobody reads them."""
        write(b"retry: 50\n\n")
        number = -1
        while not (self._ended or self.silent):
            with self._changed:
                self._changed.wait_for(
                    lambda number=number: self._number != number or self._ended or self.silent, BEAT_S
                )
                view, fresh, number = self.view, self._number != number, self._number
            write(b"data: " + self._page.update(view) + b"\n\n" if fresh else STILL_HERE)

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._http.shutdown()
        self._http.server_close()  # waits for its threads
        self._thread.join()


def _handler(server: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/events":
                self._events()
            elif path == "/":
                self._answer(server.html(), "text/html; charset=utf-8")
            elif path.startswith("/static/") and (file := STATIC / Path(path).name).is_file():
                self._answer(file.read_bytes(), KINDS[file.suffix])
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
            server.told.append((self.path, parse_qs(body, keep_blank_values=True)))
            if self.headers["Accept"] == "application/json":
                self._answer(b'{"ok": true, "words": "as you wish", "hint": ""}', "application/json")
            else:
                self.send_response(303)
                self.send_header("Location", "../")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _answer(self, data: bytes, kind: str) -> None:
            server.sent[urlsplit(self.path).path] = len(data)
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(data)

        def _events(self) -> None:
            if server.silent:
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):
                server.stream(self._write)

        def _write(self, data: bytes) -> None:
            self.wfile.write(data)
            self.wfile.flush()

    return Handler
