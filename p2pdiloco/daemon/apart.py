"""Work in a thread of its own, beside the event loop, for which nobody waits at the end.

Computing version 0 of a large model takes minutes, in which peers are answered and Ctrl-C is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
NAME = "apart"


async def apart(work: Callable[[], T]) -> T:
    """Do the work in a thread; returns its result, or raises what it raised. It goes on when cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(method: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            method(outcome)

    def run() -> None:
        try:
            told = partial(tell, done.set_result, work())
        except BaseException as error:  # noqa: BLE001 (the waiting task raises it)
            told = partial(tell, done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(told)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return await done


def begun(work: Callable[[], T]) -> Future[T]:
    """Begin the work in a thread, for who comes again to see whether it is done."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 (whoever takes the result raises it)
            done.set_exception(error)
        else:
            done.set_result(outcome)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return done


def is_working() -> bool:
    """Tell whether such work goes on, unheard by now. Python must not be taken down under it."""
    return any(thread.name == NAME for thread in threading.enumerate())
