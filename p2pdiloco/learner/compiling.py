"""Forms of a pass, from slow to fast: as it is, compiled, recorded as a CUDA graph.

Compiling takes half a minute, in which the learner makes no step; closing calls are answered. So with "auto"
the first steps are made as they are, and show what is at stake. A compiled function is of one shape: other
passes (an odd last one) are made as they are. A thread beside the steps was tried and left: torch replaces
`nn.Module.__call__` in all threads while one traces, and a loop that launches small kernels leaves a thread
hardly any time (docs/results.md).

A model whose passes are short waits for its launches. Where a step is one pass, that pass is recorded then,
and replayed: one launch. What a replay reads and writes stays where it is: parameters are written in place,
and the gradients are the graph's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2pdiloco.config.settings import Compile
from p2pdiloco.errors import first_line
from p2pdiloco.learner.device import give_memory_back
from p2pdiloco.learner.recorded import RecordedPass

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch

TIMED_STEPS = 8
"""Inner steps by which a form is judged."""
UNTIMED_STEPS = 2
"""First ones of a form, which warm up."""
PAYS_AFTER_S = 300.0
"""Seconds of inner steps that must be left of a run for "auto" to compile: several times what it takes."""
RECORDED_BELOW_S = 0.03
"""Length of compiled inner steps below which they may wait for launches: a pass has some hundreds, each some
microseconds."""
VOLTA = 7
"""NVIDIA's first compute capability (major) that torch compiles for."""
CACHE_BYTES = 2 << 30
"""Size of the folder of compiled code at which it is begun anew."""
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Form(Enum):
    """Form that passes are made in."""

    PLAIN = auto()
    COMPILED = auto()
    RECORDED = auto()
    LEFT = auto()
    """Plain passes for good: they cannot be compiled, or are not to be."""


FASTER = (Form.COMPILED, Form.RECORDED)
"""Forms that may be left for plain passes."""


class Forms:
    """Form of one model's passes, and the changes between forms. Changes are made between inner steps."""

    def __init__(
        self, forward: Callable[..., Tensor], parameters: Sequence[Tensor], choice: Compile, cache: str = ""
    ) -> None:
        """`forward`: the loss of a pass's tensors; `cache`: folder for compiled code, empty: torch's own."""
        self._forward, self._parameters = forward, parameters
        self._device = parameters[0].device
        self._choice, self._cache = choice, cache
        self._notes: list[str] = []
        self._compiled: Callable[..., Tensor] | None = None
        self._recorded: RecordedPass | None = None
        self._seen: Batch | None = None
        """Latest of the largest passes: the shape that is compiled."""
        self._shape: tuple[torch.Size, ...] = ()
        """Shape of the compiled pass's tensors; (): whichever comes first."""
        self._share = 1.0
        self._alone = False
        """True: the last step was one pass."""
        self.is_replayed = False
        """True: the last pass was replayed, so that gradients are where they always are."""
        self._times_s: dict[Form, list[float]] = {}
        self._gain_is_told = False
        self.form = Form.PLAIN
        if choice == "never" or (choice == "auto" and not compiles_by_itself(self._device)):
            self.form = Form.LEFT

    def before_step(self, steps_left: float) -> None:
        """Change the form, if it is time to. `steps_left`: inner steps until the end of the run."""
        if self.form is Form.PLAIN:
            step_s = self._step_s(Form.PLAIN)
            if self._choice == "always" or (step_s is not None and step_s * steps_left >= PAYS_AFTER_S):
                self._compile()
        elif self.form is Form.COMPILED and (step_s := self._step_s(Form.COMPILED)) is not None:
            if self._records(step_s):
                self._record()
            self._tell_gain()
        elif self.form is Form.RECORDED and (step_s := self._step_s(Form.RECORDED)) is not None:
            if step_s > (self._step_s(Form.COMPILED) or step_s):
                self._forget_recorded()
            self._tell_gain()

    @property
    def compiles_now(self) -> bool:
        """True: the next pass is the first one in this form, which compiles it."""
        return self.form is Form.COMPILED and not self._times_s.get(Form.COMPILED)

    def step_took(self, step_s: float, passes: int) -> None:
        """Take the length of the last step, of so many passes."""
        self._alone = passes == 1
        times = self._times_s.setdefault(self.form, [])
        if len(times) < UNTIMED_STEPS + TIMED_STEPS:
            times.append(step_s)

    def make_pass(self, part: Batch, share: float) -> Tensor:
        """Make a pass: add its gradient, times `share`, to every parameter's `grad`; returns the loss times
        `share`."""
        if self._seen is None or len(part[0]) >= len(self._seen[0]):
            self._seen, self._share = part, share
        self.is_replayed = self._recorded is not None and self._recorded.fits(part, share)
        if self._recorded is not None and self.is_replayed:
            return self._recorded.replay(part)
        forward = self._forward
        if self.form in FASTER and self._shape in ((), _shape(part)):
            # In the middle of a step, where calls are answered: torch imports its compiler for seconds.
            forward = self._compiled = self._compiled or torch.compile(forward, dynamic=False)
            self._shape = _shape(part)
        loss = forward(*part) * share
        torch.autograd.backward(loss)
        return loss.detach()

    def take_notes(self) -> list[str]:
        """Remarks for a person since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def begin_anew(self) -> None:
        """Forget what was made for passes of another size."""
        self._forget_recorded()
        self._compiled, self._shape, self._seen = None, (), None
        self._times_s.clear()
        self._gain_is_told = False
        if self.form is not Form.LEFT:
            self.form = Form.PLAIN

    def leave(self, said: str) -> bool:
        """Go back to passes as they are, because of these words of an error; False: they are that already."""
        if self.form not in FASTER:
            return False
        self._go_back(f"torch.compile failed ({said}): training without it")
        return True

    def _go_back(self, note: str) -> None:
        self.begin_anew()
        self.form = Form.LEFT
        self._notes.append(note)

    def _step_s(self, form: Form) -> float | None:
        """Usual length of a step in this form; None: not known yet."""
        times = self._times_s.get(form, [])
        if len(times) < UNTIMED_STEPS + TIMED_STEPS:
            return None
        return sorted(times[UNTIMED_STEPS:])[TIMED_STEPS // 2]

    def _compile(self) -> None:
        """Compile at the next pass."""
        use_cache(self._cache)
        self._shape = _shape(self._seen) if self._seen is not None else ()
        self.form = Form.COMPILED

    def _records(self, step_s: float) -> bool:
        is_tried = Form.RECORDED in self._times_s
        return self._device.type == "cuda" and self._alone and step_s < RECORDED_BELOW_S and not is_tried

    def _record(self) -> None:
        self._times_s[Form.RECORDED] = []
        if self._seen is None or self._compiled is None:
            return
        try:
            self._recorded = RecordedPass(self._compiled, self._parameters, self._seen, self._share)
            self.form = Form.RECORDED
        except RuntimeError as error:
            self._notes.append(f"no CUDA graph of this model ({first_line(error)}): it is compiled")
            give_memory_back(self._device)

    def _forget_recorded(self) -> None:
        if self._recorded is not None:
            self._recorded = None
            self.form = Form.COMPILED
            give_memory_back(self._device)

    def _tell_gain(self) -> None:
        """Say once what came of compiling; go back, if that is nothing."""
        now_s = self._step_s(self.form)
        if now_s is None or self._gain_is_told:
            return
        told = f"compiled in {self._times_s[Form.COMPILED][0]:.0f} s"
        self._gain_is_told = True
        plain_s = self._step_s(Form.PLAIN)
        if plain_s is not None and now_s > plain_s:
            self._go_back(f"{told}, and inner steps are no faster: training without it")
            return
        told += " and recorded as a CUDA graph" if self.form is Form.RECORDED else ""
        # Of what was compiled at once there is nothing to compare with.
        told += "" if plain_s is None else f": inner steps are {plain_s / now_s:.1f} times as fast"
        self._notes.append(told)


def compiles_by_itself(device: torch.device) -> bool:
    """Tell whether "auto" may compile for this device: GPUs for which torch has a compiler here."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= VOLTA


def use_cache(folder: str) -> None:
    """Let torch keep compiled code in this folder, unless its user named others, or the folder's path has a
    space or a quote: torch would split it in the command line of a C++ compiler, and nothing would compile.
    """
    path = str(Path(folder).absolute())
    try:
        is_one_word = shlex.split(path) == [path]
    except ValueError:  # a quote without its other one
        is_one_word = False
    for variable in CACHE_VARIABLES if folder and is_one_word else ():
        os.environ.setdefault(variable, str(Path(folder) / variable.partition("_")[0].lower()))


def bound_cache(folder: Path) -> None:
    """Begin the folder of compiled code anew if it has grown. Only while no process of this learner compiles:
    it would miss what it has just written."""
    if _size(folder) > CACHE_BYTES:
        shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    """Bytes of all files in a folder, some of which an earlier learner may just be removing."""
    found = 0
    with contextlib.suppress(OSError):  # a file is gone: the next time counts it all
        for path in folder.rglob("*"):
            found += path.stat().st_size
    return found


def _shape(part: Batch) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in part)
