"""Server of the page inside the daemon's own event loop: starts early, ends with the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from p2pdiloco.config.values import WebAddress
from p2pdiloco.errors import UserError, install_hint
from p2pdiloco.web.keys import token_file
from p2pdiloco.web.sources import Source, Views

logger = logging.getLogger("p2pdiloco")
BACKLOG = 64
END_S = 1.0
"""Time that answers under way have at the end."""


@contextlib.asynccontextmanager
async def serving(
    address: WebAddress | None, data_dir: Path, source: Source, is_public: bool = False
) -> AsyncIterator[Views]:
    """Serve the page inside the block; without an address nothing is served.

    `is_public`: anybody may see the public part.

    Raises:
        UserError: the address cannot be had, or a package is not installed.
        StorageError: the token cannot be kept.
    """
    views = Views(source)
    if address is None:
        yield views
        return
    try:
        from p2pdiloco.web.site import Site
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("p2pdiloco"):
            raise
        raise UserError(f"the web page needs the package {error.name}", install_hint("web")) from error
    with _listening(address) as sock:
        site = Site(views, data_dir, WebAddress(address.host, sock.getsockname()[1]), is_public)
        _say(site.url, address, is_public, token_file(data_dir))
        serving = asyncio.create_task(site.serve(sock))
        serving.add_done_callback(_tell_if_broken)
        try:
            yield views
        finally:
            site.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * END_S):
                    await asyncio.gather(serving, return_exceptions=True)


def _tell_if_broken(task: asyncio.Task[None]) -> None:
    """A page that breaks must not end the training."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the web page has ended: %s", error, exc_info=error)


@contextlib.contextmanager
def _listening(address: WebAddress) -> Iterator[socket.socket]:
    """Listen there. Raises: UserError."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UserError(f"--web: {address.host} is no address of this machine: {error.strerror}") from error
    sock = socket.socket(found[0], socket.SOCK_STREAM)
    with sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if found[0] == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address.host != "::")
            sock.bind(found[4])
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            raise _bind_error(error, address) from error
        yield sock


def _bind_error(error: OSError, address: WebAddress) -> UserError:
    hint = "choose another port, or 0 for any: --web 0"
    if error.errno == errno.EADDRINUSE:
        return UserError(f"--web: port {address.port} of {address.host} is taken", hint)
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(f"--web: {address.host} is no address of this machine", "leave the host out")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UserError(f"--web: this user may not listen at port {address.port}", "choose one above 1023")
    return UserError(f"--web: cannot listen at {address}: {error.strerror}", hint)


def _say(url: str, address: WebAddress, is_public: bool, token: Path) -> None:
    if os.environ.get("JOURNAL_STREAM"):  # systemd's: others may read it, and it is sent to whoever helps
        print(f"web page: {url.partition('?')[0]} (add ?token= and what is in {token})", flush=True)
    else:
        print(f"web page: {url}", flush=True)
    if not address.is_loopback:
        who = "anybody there sees the public part of it, and" if is_public else "there"
        logger.warning(
            "the web page can be reached from other machines: %s who has the token can pause this program, "
            "change its limits, and give seats if the run owner's key is here. It is not encrypted: put "
            "a web server with TLS in front, or use a tunnel (ssh -L) and the loopback",
            who,
        )
