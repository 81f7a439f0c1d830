"""Guard of the page: who asks, and whether by a way that a browser of the owner's would take.

- Host: a page of somebody else can give its own name our address (DNS rebinding) and would then be of one
  origin with us. So only names that are ours are answered. Any port is: of a tunnel it is another.
- Origin: a deed (POST) with the browser's cookie must come from our own page.
- the owner is who has the token (Authorization: Bearer) or the cookie. The token in the address of the page
  is exchanged for the cookie, and the address is without it from then on.

What it lets through has `scope["state"]["owner"]` set, and gets the headers that keep a browser from doing
more than the page needs.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from p2pdiloco.config.values import WebAddress
from p2pdiloco.web.keys import OwnerKeys
from p2pdiloco.web.page.rendering import POLICY

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


class OurNames:
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


class StrangersTurn:
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


class WebGuard:
    """ASGI application in front of the page's."""

    def __init__(self, app: ASGIApp, keys: OwnerKeys, names: OurNames, is_public: bool) -> None:
        """`is_public`: anybody may see the public part."""
        self._app, self._keys, self._names, self._is_public = app, keys, names, is_public
        self._turn = StrangersTurn()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
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
        refusal = self._refusal(scope, headers, is_owner)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        has_no_turn = is_owner or scope["path"] == HEALTH  # which decides whether a program is started anew
        if not has_no_turn and not await self._turn.comes():
            await PlainTextResponse("too many ask\n", 503, {"retry-after": "10"})(
                scope, receive, send_guarded
            )
            return
        scope.setdefault("state", {})["owner"] = is_owner
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
