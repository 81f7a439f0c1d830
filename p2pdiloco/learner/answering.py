"""Answers to closing calls while the gradients of an inner step are computed.

Parameters stand still from the end of one inner step until the optimizer's step at the end of the next one,
so a copy that is taken in between is what the last step boundary would have given. Without it a round waits
for the slowest learner's boundary, and every version is so much later for all (docs/results.md).

One thread waits for commands; it and the inner loop are never both at the parameters: the loop holds a lock
but while it is in `meanwhile`. On an accelerator the copies have a stream of their own, which begins behind
everything that was queued before `meanwhile`; the inner loop's next kernels that write parameters are queued
after it, when the copies are over.

Rules: docs/protocol/learner.md, section 3.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

import torch

DEVICES = ("cpu", "cuda")
"""Kinds on which parameters can be read beside the inner loop. On others, calls wait for the boundary."""


class Stillness:
    """Stillness of the parameters while the inner loop does not write them: another thread may read."""

    def __init__(self, device: torch.device) -> None:
        """Make one in which no thread reads before `begin`. `device` has the parameters."""
        self._device = device
        self._lock = threading.Lock()
        self._read = False
        self._quiet: torch.cuda.Event | None = None
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Let the other thread read from now on, inside `meanwhile`."""
        if self._device.type == "cuda":
            self._quiet = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._lock.acquire()
        self._read = True

    def end(self) -> None:
        """Let nobody wait any more: the other thread ends."""
        self._read = False
        self._lock.release()

    def fail(self, error: Exception) -> None:
        """Take in what ended the other thread."""
        self._failure = error

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Context inside of which the other thread reads; nothing inside may write parameters.

        Raises:
            ChannelBroken: the daemon is gone.
        """
        if not self._read:
            yield
            return
        if self._quiet is not None:
            self._quiet.record(torch.cuda.current_stream(self._device))
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def reading(self) -> Iterator[torch.cuda.Event | None]:
        """Context of the other thread, which begins when parameters stand still. Gives what a device is to
        reach before it copies them, if it computes by itself."""
        with self._lock:
            yield self._quiet


class Answering:
    """Thread that answers, from `with` to the end of the block."""

    def __init__(
        self,
        still: Stillness,
        readable: Callable[[socket.socket], bool],
        answer: Callable[[], None],
        device: torch.device,
    ) -> None:
        """`readable` waits until there may be commands, or the given socket can be read, and says False in
        that case; `answer` does what may be done between two inner steps' ends; `device` has the parameters.
        """
        self.still = still
        self.device = device
        self._readable, self._answer = readable, answer
        self._over = False
        self._wake, self._woken = socket.socketpair()
        # Whoever never closes this can end all the same.
        self._thread = threading.Thread(target=self._run, name="answering", daemon=True)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        self.still.begin()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._wake.shutdown(socket.SHUT_RDWR)  # closed alone, a forked process would keep it open
        self._wake.close()
        self.still.end()
        self._thread.join()
        self._woken.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is raised where the inner loop is)
            self.still.fail(error)

    def _serve(self) -> None:
        # Both are of this thread. With several here, OpenMP would let the inner loop's sleep at barriers.
        torch.set_num_threads(1)
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
        while self._readable(self._woken):
            with self.still.reading() as quiet:
                if self._over:
                    return
                with self._aside(quiet):
                    self._answer()

    def _aside(self, quiet: torch.cuda.Event | None) -> contextlib.AbstractContextManager[object]:
        if self._stream is None or quiet is None:
            return contextlib.nullcontext()
        self._stream.wait_event(quiet)
        return torch.cuda.stream(self._stream)
