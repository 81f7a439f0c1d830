"""Presence record of a node, without a node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from p2pdiloco.core.api.types import Reach
from p2pdiloco.daemon.network.discovery import OurRecord


def our_record(incarnation: int = 1, name: str = "me") -> OurRecord:
    """One that can be dialled and has measured nothing."""
    results: Any = SimpleNamespace(news=asyncio.Event(), own=None, heard=lambda peer, result: None)
    reaches: Any = SimpleNamespace(reach=Reach.DIRECT)
    return OurRecord(incarnation, name, reaches, results)
