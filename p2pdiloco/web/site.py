"""Site: routes, guard, connections, health and controls of the page's server, on uvicorn and starlette.

uvicorn is without what the daemon has itself: signals are the daemon's, and so is the end. Its ten looks a
second are left out: nothing happens here unless somebody asks. `WebGuard` says who may ask what, `Routes`
answer, and `BoundedProtocol` bounds connections. `do_control` does what the owner of the machine asks for at
POST /control/WORD, from the page or by a script.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import mimetypes
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from p2pdiloco.config.values import WebAddress
from p2pdiloco.daemon.owner.control import OwnerControls
from p2pdiloco.errors import UserError, clean, install_hint
from p2pdiloco.util import BoundedDict
from p2pdiloco.web.keys import OwnerKeys, load_token
from p2pdiloco.web.live import Live, TooManyWatchers
from p2pdiloco.web.page import POLICY, STATIC, Page
from p2pdiloco.web.sources import Views
from p2pdiloco.web.view import Control, NodeCondition, RunView, encode_view

KEEP_ALIVE_S = 8
GRACE_S = 1


class Site:
    """Site of one program."""

    def __init__(self, views: Views, data_dir: Path, address: WebAddress, is_public: bool) -> None:
        """Make it; `address`: where it will listen. Raises: StorageError."""
        token = load_token(data_dir)
        page = Page()
        self._live = Live(views, page)
        routes = Routes(views, self._live, page, _metrics_of(views))
        app = WebGuard(routes.application(), OwnerKeys(token, address.port), OwnHostNames(address), is_public)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            )
        )
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
        self.url = f"http://{WebAddress(shown, address.port)}/?token={token}"
        """Address for the owner."""

    async def serve(self, sock: socket.socket) -> None:
        """Serve until `end`."""
        await self._server.serve([sock])

    def end(self) -> None:
        """Let everybody go, and end."""
        self._live.close()
        self._server.end()


def _metrics_of(views: Views) -> Callable[[bool], bytes] | None:
    try:
        from p2pdiloco.web.metrics import Metrics
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("p2pdiloco"):
            raise
        return None
    made: Callable[[bool], bytes] = Metrics(views).exposition
    return made


class _Server(uvicorn.Server):
    """uvicorn's server, which waits for its end and does nothing else."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the daemon."""
        yield

    async def main_loop(self) -> None:
        """Wait for the end."""
        await self._ended.wait()

    def end(self) -> None:
        """End."""
        self._ended.set()


# Routes.

MAX_SHOWN = 64
"""Pages, views and figures that are kept for who asks next."""
CHANGES_S = 3600
BODY_S = 5.0
"""Time for a whole body, of a deed."""


class Routes:
    """Answers to requests that were let through."""

    def __init__(self, views: Views, live: Live, page: Page, metrics: Callable[[bool], bytes] | None) -> None:
        """`metrics`: makes those that anybody may see (False) or all (True); None: the extra is not here."""
        self._views, self._live, self._page = views, live, page
        self._static, self._metrics = _static_files(), metrics
        self._shown = BoundedDict[tuple[str, str, bool], tuple[RunView, bytes]](MAX_SHOWN)

    def application(self) -> Starlette:
        """Make the application."""
        routes = [
            Route("/", self.page),
            Route("/view", self.view),
            Route("/events", self.events),
            Route("/static/{name}", self.file),
            Route("/metrics", self.figures),
            Route("/healthz", self.health),
            Route("/control/{word}", self.control, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def page(self, request: Request) -> Response:
        """Give the page."""
        return HTMLResponse(self._made(request, lambda view: self._page.html(view).encode()))

    async def view(self, request: Request) -> Response:
        """Give what the page shows, as JSON."""
        return Response(self._made(request, encode_view), media_type="application/json")

    async def events(self, request: Request) -> Response:
        """Give it live."""
        self._asked(request)
        try:
            channel = self._live.channel(request.query_params.get("run", ""), request.state.owner)
        except TooManyWatchers:
            return PlainTextResponse("too many watch already\n", 503, {"retry-after": "30"})
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(channel.watch(), media_type="text/event-stream", headers=headers)

    async def file(self, request: Request) -> Response:
        """Give a file of the page."""
        found = self._static.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return Response(found[1], media_type=found[0], headers={"cache-control": f"max-age={CHANGES_S}"})

    async def figures(self, request: Request) -> Response:
        """Give the metrics."""
        if self._metrics is None:
            return PlainTextResponse(f"metrics need another package: {install_hint('metrics')}\n", 404)
        metrics, is_owner = self._metrics, request.state.owner
        made = self._made(request, lambda _view: metrics(is_owner))
        return Response(made, media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        """Say in one word how this program is, with a status for machines."""
        word, is_well = health_of(self._views.view("", True))
        return PlainTextResponse(f"{word}\n", 200 if is_well else 503)

    async def control(self, request: Request) -> Response:
        """Do what the owner of the machine wants."""
        controls = self._views.controls
        if controls is None:
            raise HTTPException(404)
        try:
            async with asyncio.timeout(BODY_S):
                return await do_control(controls, request)
        except TimeoutError:
            raise HTTPException(408) from None

    def _made(self, request: Request, make: Callable[[RunView], bytes]) -> bytes:
        """Make what is asked of the view, or give what was made of the same one: who asks again and again
        costs little."""
        view = self._asked(request)
        key = request.url.path, request.query_params.get("run", ""), bool(request.state.owner)
        view_before, made = self._shown.get(key, (None, b""))
        if view is not view_before:
            made = make(view)
            self._shown[key] = view, made
        return made

    def _asked(self, request: Request) -> RunView:
        view = self._views.view(request.query_params.get("run", ""), request.state.owner)
        if view is None:
            raise HTTPException(404)
        return view


def _static_files() -> dict[str, tuple[str, bytes]]:
    """Read the files of the page, once: nothing else of the disk can be asked for."""
    kinds = {path: mimetypes.guess_type(path.name)[0] for path in STATIC.iterdir()}
    return {path.name: (kind, path.read_bytes()) for path, kind in kinds.items() if kind}


# Guard.

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HEALTH = "/healthz"
OPEN_PATHS = (HEALTH, "/static/")
"""Paths without anything of the run or the machine: nobody needs a token for them."""
SAFE_METHODS = ("GET", "HEAD")
MAX_QUERY = 1024
STRANGERS_PER_S, STRANGERS_AT_ONCE = 100.0, 200.0
LONGEST_WAIT_S = 5.0
MAX_HEAD_BYTES = 16 * 1024
"""Bytes of all headers, also where they came in one piece, of which h11 does not see the length."""
HEADERS = {
    "content-security-policy": f"{POLICY}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
NO_TOKEN = (
    "This page is for the owner of this machine. Open the address that the program printed when it started:\n"
    "it has the token. The token is also in the file web.token of its data folder: add /?token=TOKEN to the\n"
    "address.\n"
)


class OwnHostNames:
    """Names in a Host header that mean this server."""

    def __init__(self, address: WebAddress) -> None:
        """`address`: where it listens."""
        self._names = {address.host.lower(), *LOOPBACK_NAMES}
        # A page of others' can give a name our address, but is never itself at an address.
        self._any_address = not address.is_loopback
        if self._any_address:
            self._names |= {socket.gethostname().lower(), f"{socket.gethostname().lower()}.local"}

    def includes(self, header: str) -> bool:
        """Tell whether a Host header, with or without a port, is one of ours."""
        name = host_of(header)
        return name in self._names or (self._any_address and _is_address(name))


def host_of(header: str) -> str:
    """Take the name out of a Host header: "[::1]:80" is "::1"."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.count(":") == 1 else text


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class StrangersRateLimit:
    """Turn of strangers' requests: so many a second of all together, the others wait, at their own cost."""

    def __init__(self) -> None:
        self._next_s = 0.0

    async def comes(self) -> bool:
        """Wait for it; False: too many wait already."""
        now = asyncio.get_running_loop().time()
        turn_s = max(self._next_s, now - STRANGERS_AT_ONCE / STRANGERS_PER_S)
        if turn_s - now > LONGEST_WAIT_S:
            return False
        self._next_s = turn_s + 1 / STRANGERS_PER_S
        if turn_s > now:
            await asyncio.sleep(turn_s - now)
        return True


@dataclass
class WebGuard:
    """ASGI application in front of the page's: who asks, and by a way that the owner's browser would take?

    - Host: a page of somebody else can give its own name our address (DNS rebinding) and would then be of one
      origin with us. So only names that are ours are answered. Any port is: of a tunnel it is another.
    - Origin: a deed (POST) with the browser's cookie must come from our own page.
    - The owner is who has the token (Authorization: Bearer) or the cookie. The token in the address of the
      page is exchanged for the cookie, and the address is without it from then on.

    What it lets through has `scope["state"]["owner"]` set, and gets the headers that keep a browser from
    doing more than the page needs.
    """

    _app: ASGIApp
    _keys: OwnerKeys
    _names: OwnHostNames
    _is_public: bool
    """True: anybody may see the public part."""
    _turn: StrangersRateLimit = field(default_factory=StrangersRateLimit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        is_owner = self._is_owner(headers)
        state = scope.setdefault("state", {})
        state["owner"] = is_owner
        refusal = self._refusal(scope, headers, is_owner)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        has_no_turn = is_owner or scope["path"] == HEALTH  # which decides whether a program is started anew
        if not has_no_turn and (state.get(SPARE) or not await self._turn.comes()):
            busy = PlainTextResponse("too many ask\n", 503, {"retry-after": "10", "connection": "close"})
            await busy(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope, headers: Headers, is_owner: bool) -> Response | None:
        """Find what to answer in place of the page; None: nothing, it may be passed on."""
        hosts, path, is_safe = headers.getlist("host"), scope["path"], scope["method"] in SAFE_METHODS
        for_anybody = (self._is_public and is_safe) or path.startswith(OPEN_PATHS)
        head_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(hosts) != 1 or len(scope["query_string"]) > MAX_QUERY or head_bytes > MAX_HEAD_BYTES:
            return PlainTextResponse("bad request\n", 400)
        if not self._names.includes(hosts[0]) and (is_owner or not for_anybody):
            return PlainTextResponse("this server does not go by that name\n", 421)
        if path == "/" and is_safe and b"token=" in scope["query_string"]:
            return self._exchange(scope["query_string"])
        # A page of another port of this host counts as the same site, and the cookie comes with its requests.
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and path != "/":
            return PlainTextResponse("only our own page may ask this\n", 403)
        if not is_owner and not for_anybody:
            return PlainTextResponse(NO_TOKEN, 401, {"www-authenticate": "Bearer"})
        if not is_safe and not self._comes_from_us(headers, hosts[0], scope["scheme"]):
            return PlainTextResponse("only our own page may ask this\n", 403)
        return None

    def _is_owner(self, headers: Headers) -> bool:
        kind, _, word = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._keys.is_token(word.strip())
        # A browser sends what other ports of this host have set, too: that may be odd, or of our name.
        pairs = (
            pair.strip().partition("=") for line in headers.getlist("cookie") for pair in line.split(";")
        )
        return any(name == self._keys.cookie_name and self._keys.is_cookie(value) for name, _, value in pairs)

    def _exchange(self, query: bytes) -> Response:
        """Exchange a token in the address for the cookie, and go on without it."""
        asked = parse_qs(query.decode("ascii", "replace"), max_num_fields=8)
        if not self._keys.is_token(asked.pop("token", [""])[0]):
            return PlainTextResponse(NO_TOKEN, 401)
        rest = urlencode({name: values[0] for name, values in asked.items()})
        return RedirectResponse(f"./?{rest}" if rest else "./", 303, {"set-cookie": self._keys.set_cookie})

    def _comes_from_us(self, headers: Headers, host: str, scheme: str) -> bool:
        if headers.get("authorization", "").lower().startswith("bearer "):
            return True  # no page of others' can add this without our permission
        return headers.get("origin", "") in (f"{scheme}://{host}", f"https://{host}")


# Connections, bounded in number, in time and in what waits to be sent.

MAX_CONNECTIONS = 256
MAX_PER_HOST = 64
"""Connections of one host, other than this one, or of one network of IPv6 (/64), which has many addresses."""
SPARE_CONNECTIONS = 16
"""Places beyond those, for the owner and for /healthz."""
SPARE = "spare"
HEAD_S = 10.0
STALLED_S = 20.0


def origin_of(client: tuple[str, int] | None) -> str:
    """Name the host that a connection is from, or its network."""
    host = client[0] if client is not None else ""
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None or address.is_loopback:
        return str(address.ipv4_mapped or address)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class BoundedProtocol(H11Protocol):
    """HTTP of one connection.

    uvicorn waits for ever for the rest of a request's head, and for a client that does not read. Here a
    connection has `HEAD_S` for each request, and ends when nothing of what it was sent is read for
    `STALLED_S`. Where all places are taken, a new connection takes the place of the one that has been idle
    for longest; the owner's go last. Where none is idle, it has one of the spare places: `WebGuard` answers
    only the owner and /healthz there.
    """

    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _idle_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, in another's place if there are too many."""
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        self._host = origin_of(self.client)
        others: list[Any] = [c for c in self.connections if c is not self and not c.transport.is_closing()]
        if self._host not in ("", "127.0.0.1", "::1"):
            self._find_place([other for other in others if other._host == self._host], MAX_PER_HOST)
        self._find_place([other for other in others if not other.transport.is_closing()], MAX_CONNECTIONS)
        if not transport.is_closing():
            self._watch_head()

    def _find_place(self, others: list[BoundedProtocol], most: int) -> None:
        if len(others) < most or self.transport.is_closing():
            return
        idle = [other for other in others if other._is_idle()]
        if idle:
            min(idle, key=lambda other: (other._is_owners(), other._idle_since_s)).transport.abort()
        elif len(others) < most + SPARE_CONNECTIONS:
            self.app_state = {**self.app_state, SPARE: True}
        else:
            self.transport.abort()

    def _is_idle(self) -> bool:
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.response_complete)

    def _is_owners(self) -> bool:
        """Tell whether its last request came with the owner's key."""
        scope: Any = self.scope
        return scope is not None and bool(scope["state"].get("owner"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._idle_since_s = self.loop.time()
        super().on_response_complete()
        self._watch_head()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._end_stall()

    def _watch_head(self) -> None:
        """Bound the time until a request is here; it begins with the connection or the answer before."""
        if not self._is_idle():
            self._end_head()
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


# Health.

UNWELL = (NodeCondition.JOINING, NodeCondition.WAITING, NodeCondition.LEAVING)
"""States in which a node does nothing for its run: 503. In all others: 200."""


def health_of(view: RunView | None) -> tuple[str, bool]:
    """Find the word of the state, and whether the program does what it is for."""
    if view is None or view.own is None:
        return NodeCondition.JOINING.value, False
    return view.own.state.value, view.own.state not in UNWELL


# Controls.

logger = logging.getLogger(__name__)
MAX_BODY = 4096
MAX_CHANGES = 32
_texts = msgspec.json.Decoder(dict[str, str])


async def do_control(controls: OwnerControls, request: Request) -> Response:
    """Do what is asked. The answer is JSON for who wants that, else the way back to the page."""
    try:
        word = Control(request.path_params["word"])
    except ValueError:
        raise HTTPException(404) from None
    body = await _body(request)
    try:
        words, hint, is_done = await _do_control(controls, word, body), "", True
    except UserError as error:
        words, hint, is_done = str(error), error.hint, False
    logger.info("asked for %s on the web page: %s", word.value, clean(words))
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse({"ok": is_done, "words": words, "hint": hint}, 200 if is_done else 400)
    return RedirectResponse("../", 303)


async def _do_control(controls: OwnerControls, word: Control, body: bytes) -> str:
    match word:
        case Control.PAUSE:
            return await controls.pause()
        case Control.RESUME:
            return await controls.resume()
        case Control.FINISH:
            return controls.finish()
        case Control.LIMITS:
            return await controls.limits(_fields(body))
        case Control.SEAT:
            return await controls.seat(_fields(body).get("peer", ""))


def _fields(body: bytes) -> dict[str, str]:
    """Read what is wished: a form of the page, or a JSON object of texts. Raises: UserError."""
    try:
        if body.lstrip().startswith(b"{"):
            found = _texts.decode(body)
        else:
            found = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_CHANGES))
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"what is wished cannot be read: {str(error)[:120]}") from None
    if not found or len(found) > MAX_CHANGES:
        raise UserError("nothing is wished", "for example max-upload=20Mbit")
    return {name: value.strip() for name, value in found.items()}


async def _body(request: Request) -> bytes:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY:
            raise HTTPException(413)
    return bytes(parts)
