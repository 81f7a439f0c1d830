"""Thread that compiles passes while the inner loop makes its own.

torch does not promise to bear that. What is known: while a thread traces, `nn.Module.__call__` is replaced in
all threads, and modules that others call may fail (`Forms.disturbs`). `torch.compiler.is_compiling` is true
in all threads. A parameter that the loop changes behind the thread's forward pass fails its backward pass.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch


class CompilingThread:
    """Thread that compiles a function, by a pass of its own that leaves every `grad` alone."""

    def __init__(self, function: Callable[..., Tensor], part: Batch, parameters: Sequence[Tensor]) -> None:
        self.function = function
        self.failure: Exception | None = None
        self.took_s = 0.0
        self._part, self._parameters = part, parameters
        self._threads = torch.get_num_threads()
        # At the learner's end nobody waits for it.
        self._thread = threading.Thread(target=self._run, name="compiling", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """True: it is made, or has failed."""
        return not self._thread.is_alive()

    def wait(self, longest_s: float | None = None) -> None:
        """Wait for the end, no longer than told."""
        self._thread.join(longest_s)

    def _run(self) -> None:
        began = time.monotonic()
        torch.set_num_threads(self._threads)  # what is compiled is for just so many
        device = self._part[0].device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            try:
                with _backward_at_once():
                    loss = self.function(*self._part)
            except Exception as error:  # noqa: BLE001 (whatever it is: the loop goes on without, and says it)
                self.failure = error
            else:
                self._warm_up(loss)
        self.took_s = time.monotonic() - began

    def _warm_up(self, loss: Tensor) -> None:
        """Make the backward pass, too, for what kernels do when they first run. The loop may have changed a
        parameter since, so that autograd refuses. What is left undone then is done by the loop's own pass,
        which tells what fails there."""
        with contextlib.suppress(RuntimeError):
            wanted = [parameter for parameter in self._parameters if parameter.requires_grad]
            torch.autograd.grad(loss, wanted, allow_unused=True)


def _backward_at_once() -> contextlib.AbstractContextManager[object]:
    """Context in which a backward pass is compiled with its forward pass. Else it is when it is first made:
    on a GPU by autograd's one thread for that device, and the loop's own backward passes wait for it."""
    from torch._functorch import config

    if not hasattr(config, "force_non_lazy_backward_lowering"):  # an older torch
        return contextlib.nullcontext()
    return cast(
        contextlib.AbstractContextManager[object], config.patch(force_non_lazy_backward_lowering=True)
    )
