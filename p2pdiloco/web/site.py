"""Site: guard, routes and live views of one server, on uvicorn without what the daemon has itself.

Signals are the daemon's, and so is the end. uvicorn's ten looks a second are left out: nothing happens here
unless somebody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from p2pdiloco.config.values import WebAddress
from p2pdiloco.web.app import Routes
from p2pdiloco.web.connections import BoundedProtocol
from p2pdiloco.web.guard import MAX_HEAD_BYTES, OurNames, WebGuard
from p2pdiloco.web.keys import OwnerKeys, load_token
from p2pdiloco.web.live import Live
from p2pdiloco.web.page.rendering import Page
from p2pdiloco.web.sources import Views

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
        app = WebGuard(routes.application(), OwnerKeys(token, address.port), OurNames(address), is_public)
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
