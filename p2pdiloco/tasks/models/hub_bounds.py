"""Bounds of building an architecture of `transformers` from a stranger's config.

A model is first built on torch's meta device, where its tensors take no memory (`tasks.hub_causal_lm`). But
every module is an object, buffers come to life in the second building, and some architectures work out
tables in Python: so all of that is bounded by what the manifest lists. Numbers in a config are bounded before
(`tasks.models.hub_config`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

LEAST_PARTS = 2000
"""Modules, parameters or buffers that any model may have."""
PARTS_PER_PARAMETER = 8
LEAST_BUFFER_BYTES = 128 << 20
"""Buffers that any model may have; else they may be as large as its parameters in fp32."""
LEAST_CPU_S = 2.0
CPU_S_PER_PARAMETER = 0.01
"""Time of the processor for building: without memory, a parameter takes a millisecond."""


class TooMuch(Exception):
    """Error of a config that asks for more than the model's listed parameters need."""


@contextmanager
def bounded(parameters: int, numel: int) -> Iterator[None]:
    """Context in which a model of so many parameters, of `numel` elements in all, is built on the meta
    device. Time is bounded in the main thread only: signals come nowhere else.

    Raises:
        TooMuch: it has more parts or larger buffers than that, or takes too long.
    """
    from torch.nn.modules import module

    budget = _Budget(LEAST_PARTS + PARTS_PER_PARAMETER * parameters, max(LEAST_BUFFER_BYTES, 4 * numel))
    with ExitStack() as stack:
        for register, hook in (
            (module.register_module_module_registration_hook, budget.count),
            (module.register_module_parameter_registration_hook, budget.count),
            (module.register_module_buffer_registration_hook, budget.count_buffer),
        ):
            stack.callback(register(hook).remove)
        stack.enter_context(_cpu_time(LEAST_CPU_S + CPU_S_PER_PARAMETER * parameters))
        yield


class _Budget:
    """Budget of what may still be built. Its methods are hooks of torch, and change nothing."""

    def __init__(self, parts: int, buffer_bytes: int) -> None:
        self._parts, self._buffer_bytes = parts, buffer_bytes

    def count(self, owner: Any, name: str, part: Any) -> None:
        """Count a module or a parameter. Raises: TooMuch."""
        self._parts -= 1
        if self._parts < 0:
            raise TooMuch("it has many more parts than model.parameters lists")

    def count_buffer(self, owner: Any, name: str, buffer: Any) -> None:
        """Count a buffer. Raises: TooMuch."""
        self.count(owner, name, buffer)
        self._buffer_bytes -= 0 if buffer is None else buffer.numel() * buffer.element_size()
        if self._buffer_bytes < 0:
            raise TooMuch("its buffers are larger than its parameters")


@contextmanager
def _cpu_time(most_s: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise TooMuch(f"it takes more than {most_s:.0f} s to build even without memory")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, most_s, most_s)  # again, if an architecture swallows the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
