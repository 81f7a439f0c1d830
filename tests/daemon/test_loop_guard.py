"""Guard of event loops: it finds what it is for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from p2pdiloco.daemon.owner.pauses import OthersWork
from p2pdiloco.daemon.owner.wishes import KeptWishes, save_wishes


def work_of(name: str, folder: Path) -> Callable[[], object]:
    return partial(save_wishes, folder, KeptWishes()) if name == "fsync" else OthersWork().seconds


@pytest.mark.parametrize("name", ["fsync", "cpu_times"])
async def test_a_wait_is_found_in_the_thread_of_a_loop_alone(
    name: str, tmp_path: Path, waits_of_loops: list[str]
) -> None:
    await asyncio.to_thread(work_of(name, tmp_path))
    assert not waits_of_loops
    work_of(name, tmp_path)()  # a test's own: no coroutine of the package is between
    assert not waits_of_loops
    asyncio.get_running_loop().call_soon(work_of(name, tmp_path))
    await asyncio.sleep(0)
    assert waits_of_loops[0].startswith(f"{name} in the thread of the event loop:")
    waits_of_loops.clear()
