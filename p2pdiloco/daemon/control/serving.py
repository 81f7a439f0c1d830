"""Serving of a node's controls, from the start of its process to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from p2pdiloco.adapters.endpoint import report_bug
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.control.owner import NodeControls
from p2pdiloco.daemon.control.server import ControlServer


@asynccontextmanager
async def owned(settings: NodeSettings, stop: asyncio.Event) -> AsyncIterator[NodeControls]:
    """Context of a node that listens to its machine's owner.

    Raises:
        ConfigError: this machine does not tell what a limit is about.
    """
    controls = NodeControls(settings, stop)
    server = ControlServer(settings.data_dir, controls)
    await server.start()
    watching = asyncio.create_task(controls.watch())
    watching.add_done_callback(_end_for_bug)
    try:
        yield controls
    finally:
        watching.cancel()
        await server.close()
        await controls.close()


def _end_for_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        report_bug("owner's wishes", error)
