"""Somebody who only asks: a new identity in a temporary folder, a client of the DHT that stores nothing and
is gone at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.cli.interrupt import orderly
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.identity import Identity

T = TypeVar("T")
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
ASKS_ONLY = P2PDOptions(listen=False, relay=False)
STOPS = (signal.SIGTERM, signal.SIGHUP)
SIGNALLED = 128
"""A shell's exit status of a program that a signal ended is this and the signal's number."""


def visit(body: Coroutine[Any, Any, T]) -> T:
    """Run it in an event loop of its own. Told to stop (`timeout 30 p2pdiloco status`, a closed terminal), it
    ends as at Ctrl-C: p2pd and the temporary folder are gone before we are.

    Raises:
        SystemExit: a signal came, with the status that says which.
        KeyboardInterrupt: Ctrl-C.
    """
    seen: list[int] = []

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if not seen:  # a second one must not cut the clearing up short
                task.cancel()
            seen.append(number)

        def complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # At the end hivemind's tasks complain of connections that are closed under them.
            if not task.done() and not task.cancelling():
                loop.default_exception_handler(context)

        loop.set_exception_handler(complain)
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                loop.add_signal_handler(number, stop, number)
        return await body

    try:
        with orderly():
            return uvloop.run(main())
    except asyncio.CancelledError:
        if not seen:
            raise
        raise SystemExit(SIGNALLED + seen[0]) from None


@contextlib.asynccontextmanager
async def visitor(
    join: tuple[str, ...], listen: Sequence[str] = LISTEN, options: P2PDOptions = ASKS_ONLY
) -> AsyncIterator[HivemindTransport]:
    """A transport of an identity that exists only here. Without peers to join it is alone at first.

    Raises:
        UserError: none of these peers can be reached.
    """
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-visit-") as folder:
        path = Path(folder) / "identity.key"
        identity = Identity.load_or_create(path)
        transport = HivemindTransport(identity, path, Path(folder), listen, join, options)
        await transport.start(FrontDoor(), may_be_alone=not join)
        try:
            yield transport
        finally:
            await transport.close()
