"""Application of the page: its routes. Who may ask what is the guard's affair (`web.guard`)."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from p2pdiloco.errors import install_hint
from p2pdiloco.util import BoundedDict
from p2pdiloco.web import health
from p2pdiloco.web.deeds import do
from p2pdiloco.web.live import Full, Live
from p2pdiloco.web.page.rendering import STATIC, Page
from p2pdiloco.web.sources import Views
from p2pdiloco.web.view import RunView, encode_view

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
        except Full:
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
        word, is_well = health.of(self._views.view("", True))
        return PlainTextResponse(f"{word}\n", 200 if is_well else 503)

    async def control(self, request: Request) -> Response:
        """Do what the owner of the machine wants."""
        controls = self._views.controls
        if controls is None:
            raise HTTPException(404)
        try:
            async with asyncio.timeout(BODY_S):
                return await do(controls, request)
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
