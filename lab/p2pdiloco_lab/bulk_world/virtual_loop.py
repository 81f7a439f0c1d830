"""An event loop on which nothing takes time but waiting, and the waited time passes at once.

The order in which things happen depends on nothing but the program: there is no input or output, and jobs of
executors are run by the loop itself, one after the other, at a price in virtual time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Standstill(Exception):
    """Everybody waits for everybody: no timer is left, and nothing is ready."""


class _Skipping(selectors.SelectSelector):
    """Never waits: the time that would have been waited has passed. Files are not looked at."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Standstill("nothing is ready, and no timer is left")
        self.passed_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop whose clock is virtual; it begins at 0."""

    def __init__(self, job_s: Callable[[], float] = lambda: 0.0) -> None:
        """`job_s`: seconds that the next job of an executor takes."""
        self._skipping = _Skipping()
        self._job_s = job_s
        self._free_s: dict[object, float] = {}
        """Executor -> when it is through with what it has to do."""
        super().__init__(self._skipping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._skipping.passed_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run the job here, when those before it are through; its result comes after the job's time."""
        done: asyncio.Future[T] = self.create_future()
        now = self.time()
        begins_s = max(now, self._free_s.get(executor, now))
        ends_s = self._free_s[executor] = begins_s + max(
            self._job_s(), 1e-6
        )  # so equal times keep their order
        if begins_s > now:
            self.call_at(begins_s, self._begin, done, ends_s, func, args)
        else:
            self._begin(done, ends_s, func, args)
        return done

    def _begin(
        self, done: asyncio.Future[T], ends_s: float, func: Callable[..., T], args: tuple[Any, ...]
    ) -> None:
        if done.cancelled():
            return
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - whoever waits for the job gets its error
            self.call_at(ends_s, _end, done, None, error)
        else:
            self.call_at(ends_s, _end, done, result, None)


def _end(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def in_virtual_time(work: Coroutine[Any, Any, T], job_s: Callable[[], float] = lambda: 0.0) -> T:
    """Run on such a loop. Raises: Standstill, and what the work raises."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(job_s)) as runner:
        return runner.run(work)
