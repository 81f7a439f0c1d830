"""Gradients of one inner step: forward and backward passes, as many samples at a time as memory holds.

`Passes` makes a step's passes. `Forms` changes how they are made, from slow to fast: as they are, compiled,
recorded as a CUDA graph (`RecordedPass`), whose kernels are a single launch. `RecordedUpdate` does the same
for the optimizer's step.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from p2pdiloco.config.settings import Compile
from p2pdiloco.errors import UserError, first_line
from p2pdiloco.learner.channel import PassOptions
from p2pdiloco.learner.lifeline import PassTooLarge
from p2pdiloco.learner.optimizer import Optimizer, set_learning_rate
from p2pdiloco.learner.ranks import autocast, give_memory_back, out_of_memory
from p2pdiloco.tasks.task import Task

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch


class Passes:
    """Gradients of a step, added up pass by pass. A pass that does not fit into memory is halved from then
    on, so on an accelerator, where the first one is as large as is useful, the largest that fits is found
    within the first steps. A model that torch.compile fails on is trained as it is. Both are said in `notes`.

    Processes among which the parameters are shared out make their passes together, so none of them can halve
    its own, or leave a compiler: they end, and the daemon starts the learner with halved passes.
    """

    def __init__(
        self, task: Task, model: nn.Module, samples: int, options: PassOptions, together: int, bf16: bool
    ) -> None:
        """`samples`: of one pass, to begin with; `together`: processes that make their passes together."""
        self._task, self._model = task, model
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        self.samples = samples
        self.made = 0
        """Passes of the last step."""
        self._together = together
        choice: Compile = options.compile
        if together > 1 or (choice == "auto" and task.shapes_change(self._device, bf16)):
            choice = "never"

        def forward(*part: Tensor) -> Tensor:
            with autocast(self._device, bf16):
                return task.loss(model, part)

        self.forms = Forms(forward, self._parameters, choice, options.compile_cache)
        self._notes: list[str] = []
        if options.compile == "always" and together > 1:
            self._notes.append("torch.compile failed (not with sharded parameters): training without it")

    def take_notes(self) -> list[str]:
        """Remarks for a person since the last call."""
        notes, self._notes = self._notes, []
        return notes + self.forms.take_notes()

    def gradients(self, batch: Batch, whole: int) -> Tensor:
        """Put into every parameter's `grad` the gradient of the mean loss over a step of `whole` samples.

        Gradient and returned loss (a scalar) are the share that the samples of `batch` have in it.

        Raises:
            UserError: not even a single sample fits into memory.
            PassTooLarge: a pass does not fit, and others make theirs with it.
        """
        while True:
            for parameter in self._parameters:
                parameter.grad = None
            self.made = 0
            try:
                return self._passes(batch, whole)
            except Exception as error:
                problem = out_of_memory(error)
                said = problem or first_line(error)
                if not (problem or self.forms.leave(said)):
                    raise
            # Here the failed pass's tensors, which the error's traceback held, are gone. What is compiled may
            # need more than a pass as it is, which makes its loss in chunks.
            if problem and (self.samples > 1 or not self.forms.leave(said)):
                self._halve(said)

    def _passes(self, batch: Batch, whole: int) -> Tensor:
        total = torch.zeros((), device=self._device)
        most = len(batch[0]) if self._together == 1 else -(-whole // self._together)
        for start in range(0, most, self.samples):
            part = tuple(tensor[start : start + self.samples].to(self._device) for tensor in batch)
            counts = len(part[0])
            if not counts:  # others have one more sample, and need us for its pass
                part = tuple(tensor[:1].to(self._device) for tensor in batch)
            total += self.forms.make_pass(part, counts / whole)
            self.made += 1
        return total

    def _halve(self, said: str) -> None:
        before = self.samples * self._task.tokens_per_sample
        if self.samples == 1:
            raise UserError(
                f"a single sample of {before} tokens does not fit into the memory of {self._device}: {said}",
                "this run needs a larger device",
            )
        self.forms.begin_anew()
        give_memory_back(self._device)
        self.samples = (self.samples + 1) // 2
        after = self.samples * self._task.tokens_per_sample
        if self._together > 1:
            raise PassTooLarge(f"a pass of {before} tokens does not fit ({said}): half as many from now on")
        self._notes.append(f"a pass of {before} tokens does not fit ({said}): going on with {after} tokens")


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
    """Form of one model's passes, and the changes between forms. Changes are made between inner steps.

    Compiling takes half a minute, in which the learner makes no step; closing calls are answered. So with
    "auto" the first steps are made as they are, and show what is at stake. A compiled function is of one
    shape: other passes (an odd last one) are made as they are. A thread beside the steps was tried and left:
    torch replaces `nn.Module.__call__` in all threads while one traces, and a loop that launches small
    kernels leaves a thread hardly any time (docs/results.md).

    A model whose passes are short waits for its launches. Where a step is one pass, that pass is recorded
    then, and replayed: one launch. What a replay reads and writes stays where it is: parameters are written
    in place, and the gradients are the graph's.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        parameters: Sequence[Tensor],
        choice: Compile,
        cache: Path | None = None,
    ) -> None:
        """`forward`: the loss of a pass's tensors; `cache`: folder for compiled code, None: torch's own."""
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
        """True: the last pass was replayed: its gradients are in the same memory as those of the last one."""
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
        """None: not known yet."""
        times = self._times_s.get(form, [])
        if len(times) < UNTIMED_STEPS + TIMED_STEPS:
            return None
        return sorted(times[UNTIMED_STEPS:])[TIMED_STEPS // 2]

    def _compile(self) -> None:
        if self._cache is not None:
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
        """Say once what came of compiling; go back if inner steps are no faster."""
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


def use_cache(folder: Path) -> None:
    """Let torch keep compiled code in this folder, unless its user named others, or the folder's path has a
    space or a quote: torch would split it in the command line of a C++ compiler, and nothing would compile.
    """
    path = str(folder.absolute())
    try:
        is_one_word = shlex.split(path) == [path]
    except ValueError:  # a quote without its other one
        is_one_word = False
    for variable in CACHE_VARIABLES if is_one_word else ():
        os.environ.setdefault(variable, str(folder / variable.partition("_")[0].lower()))


def bound_cache(folder: Path) -> None:
    """Begin the folder of compiled code anew if it has grown. Only while no process of this learner compiles:
    it would miss what it has just written."""
    if _size(folder) > CACHE_BYTES:
        shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    """Bytes of all files, some of which an earlier learner may just be removing."""
    found = 0
    with suppress(OSError):  # a file is gone: the next time counts it all
        for path in folder.rglob("*"):
            found += path.stat().st_size
    return found


def _shape(part: Batch) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in part)


WARM_UP_PASSES = 3


class RecordedPass:
    """A pass whose gradients are the whole step's: a replay writes them anew, always to the same memory.

    What its passes keep between forward and backward stays allocated as long as it lives.
    """

    def __init__(
        self, forward: Callable[..., Tensor], parameters: Sequence[Tensor], part: Batch, share: float
    ) -> None:
        """Record passes as large as `part`, a step's only one, of which the loss counts `share`.

        Raises:
            RuntimeError: the device lacks memory for it, or something in the pass waits for the device.
        """
        self._parameters, self._share = parameters, share
        self._part = tuple(tensor.clone() for tensor in part)
        give_memory_back(part[0].device)  # what passes held so far is not for graphs
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_PASSES):
                self._clear()
                torch.autograd.backward(forward(*self._part))
        torch.cuda.current_stream().wait_stream(side)
        self._clear()
        self._graph = torch.cuda.CUDAGraph()
        # Threads beside the inner loop use the device, too.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            loss = forward(*self._part) * share
            torch.autograd.backward(loss)
            self._loss = loss.detach()
        self._gradients = [parameter.grad for parameter in parameters]
        self._clear()

    def fits(self, part: Batch, share: float) -> bool:
        """Tell whether this pass is like the recorded one."""
        return share == self._share and all(a.shape == b.shape for a, b in zip(part, self._part, strict=True))

    def replay(self, part: Batch) -> Tensor:
        """Make the pass; returns the loss, which the next replay overwrites."""
        for ours, theirs in zip(self._part, part, strict=True):
            ours.copy_(theirs, non_blocking=True)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class RecordedUpdate:
    """An optimizer step on gradients that are always in the same memory (`RecordedPass`)."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        """Record the next step, of an optimizer that has made some; nothing is updated yet.

        Raises:
            RuntimeError: the device lacks memory for it, or something in the step waits for the device.
        """
        self._optimizer = optimizer
        self._rate = torch.zeros((), device=device)
        self._used = self._gradients_and_moments()
        rate = optimizer.param_groups[0]["lr"]
        self._graph = torch.cuda.CUDAGraph()
        set_learning_rate(optimizer, self._rate)
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                optimizer.step()
        finally:
            set_learning_rate(optimizer, rate)

    def replay(self) -> bool:
        """Make the step, with the learning rate that is set; False: a gradient or a moment is elsewhere by
        now."""
        used = self._gradients_and_moments()
        if len(used) != len(self._used) or any(a is not b for a, b in zip(used, self._used, strict=True)):
            return False
        self._rate.fill_(self._optimizer.param_groups[0]["lr"])
        self._graph.replay()
        return True

    def _gradients_and_moments(self) -> list[Tensor | None]:
        groups, states = self._optimizer.param_groups, self._optimizer.state.values()
        gradients = [parameter.grad for group in groups for parameter in group["params"]]
        return gradients + [moment for state in states for moment in state.values()]
