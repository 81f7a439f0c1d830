"""Somebody who only asks: a new identity in a temporary folder, a client of the DHT that stores nothing and
is gone at the end.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.daemon.frontdoor import FrontDoor
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Transport

LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@contextlib.asynccontextmanager
async def visitor(join: tuple[str, ...]) -> AsyncIterator[Transport]:
    """A transport of an identity that exists only here.

    Raises:
        UserError: none of these peers can be reached.
    """
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-visit-") as folder:
        path = Path(folder) / "identity.key"
        identity = Identity.load_or_create(path)
        options = P2PDOptions(listen=False, relay=False)
        transport = HivemindTransport(identity, path, Path(folder), LISTEN, (), join, options)
        await transport.start(FrontDoor())
        try:
            yield transport
        finally:
            await transport.close()
