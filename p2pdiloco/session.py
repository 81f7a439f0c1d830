"""`p2pdiloco.Session`: a training loop of your own as a node's learner.

The session starts the real daemon as a process of its own, as `p2pdiloco node` does, and is its learner. The
program's process has the model. It talks to the daemon over socket and shared memory, as a learner does that
the daemon starts itself (`daemon.learner.guest`, `learner.channel`, `tensors.exchange`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self, SupportsFloat, SupportsInt, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from p2pdiloco.config.folders import expanded
from p2pdiloco.errors import UserError
from p2pdiloco.learner import checkpoint
from p2pdiloco.learner.answering import DEVICES, Answering, Stillness
from p2pdiloco.learner.channel import ChannelBroken, LearnerEnd
from p2pdiloco.learner.channel_messages import Ready, Start
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.lifeline import save_takes_s
from p2pdiloco.learner.loop import MAX_SKIPPED_IN_A_ROW, StepReport, Training
from p2pdiloco.learner.optimizer.schedule import schedule_of
from p2pdiloco.learner.program.keeping import Keeping
from p2pdiloco.learner.program.mailbox import ProgramMailbox, ProgramTraining
from p2pdiloco.learner.program.parameters import ProgramParameters
from p2pdiloco.own_run import compare, say
from p2pdiloco.session_daemon import LEAVE_S, POLL_S, SessionDaemon
from p2pdiloco.tasks.constants import constants_of
from p2pdiloco.tasks.models.description import describe, load_constants
from p2pdiloco.tasks.models.parameters import uncompiled
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.exchange import Exchange
from p2pdiloco.tensors.layout import plan_fragments

NO_NUMBER = (TypeError, ValueError, OverflowError, RuntimeError)
"""Errors that `int` and `float` raise for text, NaN, infinity, and tensors of several numbers."""


class Session:
    """Membership of your program in a run. Use it as a context manager; one `step` after every inner step.

    When it begins, the model has the run's global parameters, moved by what an earlier session with this
    folder had not contributed yet when it was closed. Between two inner steps it may change them in place, as
    merges come; your optimizer's moments are left alone. `close` (or the end of the `with` block) lets the
    daemon leave in good order: it takes up to 10 s, of a large model longer (docs/topics/session.md).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        run: str | Path = "",
        join: str | Sequence[str] = (),
        *,
        data_dir: str | Path = "~/.p2pdiloco/session",
        evaluate: Callable[[], float] | None = None,
        options: Sequence[str] = (),
        timeout_s: float = 300.0,
    ) -> None:
        """
        Args:
            model: its parameters are what is trained; on any device. Compiled or not; of DDP, the
                module inside. They are looked up by name at every step: the model may move to another device,
                and its parameters may get other memory, but keep their names, shapes and number types.
            optimizer: its learning rate is looked at, for reports, and whether it has the model's parameters.
            run: name or id of a run that the peers know; or a run.toml (a Path, or ending in .toml) that is
                begun here, of which this node is then the owner.
            join: link to the run, or the address of a bootstrap or of a node, or several.
            data_dir: the node's folder.
            evaluate: the loss of the model on held-out data. It is called now and then between two steps,
                while the model has the global parameters, and must not change it.
            options: further flags of `p2pdiloco node`. These and `join` are for a daemon that is started: one
                that an earlier life of this program left behind goes on as it was.
            timeout_s: how long the run may take to be joined.

        Raises:
            UserError: the daemon cannot start, the run is not found in time, or trains another model; the
                folder is another program's, or its daemon is in another run.
        """
        self._model, self._evaluate = uncompiled(model), evaluate
        self._folder = expanded(Path(data_dir), "data_dir")
        self._leave_s = LEAVE_S + save_takes_s(sum(parameter.numel() for parameter in model.parameters()))
        self._stopped = False
        self._computing = False
        self._lost = 0
        """Steps in a row whose loss was no finite number."""
        self._answering: Answering | None = None
        self._on_merge: list[Callable[[], object]] = []
        self._daemon = SessionDaemon(self._folder)
        self._channel: LearnerEnd | None = None
        join = (join,) if isinstance(join, str) else join
        begins = isinstance(run, Path) or run.endswith(".toml")
        words = ["--genesis", "--run-file", str(run)] if begins else ["--run", run] if run else []
        for address in join:
            words += ["--join", address]
        until = time.monotonic() + timeout_s
        try:
            self._socket, descriptor = self._daemon.connect([*words, *options], until)
            self._channel = LearnerEnd(self._socket)
            start = self._begun(until)
            if self._daemon.adopted and run:
                try:
                    self._daemon.check_run(start.manifest, Path(run) if begins else str(run))
                except UserError:
                    os.close(descriptor)
                    raise
            self._mailbox, self._training = self._attach(start, descriptor, optimizer)
        except BaseException:
            self._end(0.0)
            raise
        self._daemon.tell_addresses(start.manifest.run.name)
        takes_over = getattr(optimizer, "reload_model_params", None)
        if callable(takes_over):  # Megatron's, which has masters
            self.on_merge(takes_over)

    def step(self, tokens: SupportsInt, loss: SupportsFloat) -> bool:
        """Count an inner step over so many tokens, with that mean loss, and do what the swarm asks for.
        False: the run has ended, or the daemon: go on without it or end. While the run's owner has paused it,
        or this machine's owner wants it to rest (docs/topics/limits.md), this waits until it goes on.

        Raises:
            UserError: more tokens than the run allows for one step, no whole number of them, no number for
                the loss (of tensors, NumPy's and Python's all will do), or the daemon broke (with its
                reason); the losses of ten steps in a row are NaN or infinite; within `computing`. And, which
                ends the session: a parameter is missing, has another shape or number type, or is another
                object than the optimizer's; or what merges put into the model is gone a step later.
        """
        self._outside("step")
        self._mailbox.begin_step()
        if self._stopped:
            return False
        self._look(stepped=True)
        if self._has_ended():
            return False
        tokens, mean = _whole(tokens), _real(loss)
        self._lost = 0 if math.isfinite(mean) else self._lost + 1
        if self._lost >= MAX_SKIPPED_IN_A_ROW:
            raise _diverged(mean, self._lost)
        most = self._training.section.tokens_per_step
        if not 0 <= tokens <= most:
            raise UserError(f"{tokens} tokens in one inner step: this run allows 0 to {most}")
        self._training.count(tokens)
        try:
            goes_on = self._mailbox.boundary(StepReport(self._training.inner_step, mean, tokens))
        except ChannelBroken as error:
            raise self._broke(error) from error
        self._stopped = self._mailbox.stopping
        self._tell_merged()
        return goes_on

    def _has_ended(self) -> bool:
        """Tell whether the run has ended. Its owner may have made it longer since."""
        if self._mailbox.let_go:
            try:
                self._mailbox.attend(0.0)
            except ChannelBroken as error:
                raise self._broke(error) from error
        return self._mailbox.let_go

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Context for what takes long in an inner step and changes no parameters: forward and backward.

        The optimizer's step is outside. What the swarm asks for in this time is answered at once, from
        another thread. Without it, that waits for your next `step`; if your steps are long, all others'
        versions wait too.

        Raises:
            UserError: the daemon broke (with its reason); within another such block; parameters are others,
                as `step` says.
        """
        self._outside("computing")
        if not self._stopped:
            self._look()
        device = self._parameters.device
        if self._stopped or self._channel is None or device.type not in DEVICES:
            yield
            return
        if self._answering is not None and self._answering.device != device:
            self._answer_no_more()
        if self._answering is None:
            answer = partial(self._mailbox.answer_calls, None)
            made = Answering(Stillness(device), self._channel.wait_or, answer, device)
            self._answering = made.__enter__()
        self._computing = True
        try:
            with self._answering.still.meanwhile():
                yield
        except ChannelBroken as error:
            raise self._broke(error) from error
        finally:
            self._computing = False

    def close(self) -> None:
        """Leave the run in good order. What is sent already is still merged, what is not is kept for the next
        session with this folder; later calls do nothing.

        Raises:
            UserError: within `computing`; parameters are others, as `step` says: then nothing is kept.
        """
        self._outside("close")
        try:
            if not self._stopped:
                self._look()
                self._leave()
        finally:
            self._stopped = True
            self._keeping.close()
            self._end(self._leave_s)

    def _leave(self) -> None:
        if not self._daemon.terminate():
            return
        until = time.monotonic() + self._leave_s
        with contextlib.suppress(ChannelBroken):  # it has ended, or does not need us any more
            while not self._mailbox.stopping and time.monotonic() < until:
                self._mailbox.attend(POLL_S)
            if self._channel is not None:
                self._channel.drain(self._leave_s)
        self._tell_merged()

    def _look(self, stepped: bool = False) -> None:
        """Look the parameters up as they are now, and whether the program's step has left what merges put
        there. Of a model that is another one by now nothing is contributed or kept any more."""
        try:
            self._parameters.look()
            if stepped:
                self._keeping.look()
        except UserError:
            self._stopped = True
            self._daemon.terminate()
            raise

    def _outside(self, what: str) -> None:
        if self._computing:
            raise UserError(f"Session.{what} within Session.computing", "it comes after the block")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of this node, the best first: what others give as `join`."""
        return self._daemon.addresses()

    @property
    def merged(self) -> bool:
        """True: the last `step` has changed the model's parameters, as a merge came."""
        return self._mailbox.moved

    def on_merge(self, function: Callable[[], object]) -> None:
        """Have a function called whenever a merge has changed the model's parameters, before `step` returns;
        and now, as the session began with the run's. In it, who has copies of the parameters (an optimizer
        with fp32 masters, an average) takes them over."""
        self._on_merge.append(function)
        function()

    @property
    def inner_step(self) -> int:
        """Inner steps of this session so far."""
        return int(self._training.inner_step - self._before)

    @property
    def run_tokens(self) -> int:
        """Tokens that all learners of the run have consumed, about; they never go back. They are the clock of
        a learning rate that suits a program that joins late, too."""
        return int(self._training.run_tokens)

    @property
    def schedule_tokens(self) -> int:
        """`run_tokens` at the end of the run's schedule, as its owner wants it now."""
        return schedule_of(self._training.section, self._training.amendment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begun(self, until: float) -> Start:
        """Wait for the daemon's first command: the run is found, and all of it is here."""
        assert self._channel is not None
        try:
            while not self._channel.arrived(POLL_S):
                self._daemon.check(until)
            start = self._channel.wait_start()
        except ChannelBroken as error:
            raise self._broke(error) from error
        if start is None:
            raise self._broke(None)
        return start

    def _broke(self, error: Exception | None) -> UserError:
        self._stopped = True
        return self._daemon.broke(error)

    def _end(self, patience_s: float) -> None:
        self._answer_no_more()
        if self._channel is not None:
            self._socket.close()
            self._channel = None
        self._daemon.end(patience_s)

    def _tell_merged(self) -> None:
        if self._mailbox.moved:
            for function in self._on_merge:
                function()

    def _answer_no_more(self) -> None:
        if self._answering is not None:
            self._answering.__exit__()
            self._answering = None

    # --- the learner ---------------------------------------------------------------------------------

    def _attach(
        self, start: Start, descriptor: int, optimizer: Optimizer | None
    ) -> tuple[ProgramMailbox, ProgramTraining]:
        manifest = start.manifest
        specs = task_of(manifest).specs()
        names, parts = {spec.name for spec in specs}, describe(self._model)
        compare(parts.of_run(names), specs)
        path, wanted = start.options.initial_path, constants_of(manifest.model)
        constants = {} if path is None else load_constants(path, wanted)
        layouts = plan_fragments(specs, manifest.sync.fragments)
        self._parameters = ProgramParameters(self._model, [spec.name for spec in specs], optimizer, constants)
        fragments = Fragments(
            self._parameters,
            layouts,
            Exchange.attach(descriptor, layouts),
            start.bases,
            manifest.sync.inner_steps,
            manifest.sync.keep_in_flight,
        )
        self._keeping = Keeping(self._parameters, layouts)
        before = [self._keeping.sample(fragment) for fragment in range(len(layouts))]
        fragments.scatter_bases(self._parameters.tensors())
        self._parameters.settle()
        groups = optimizer.param_groups if optimizer is not None else [{"lr": 0.0}]
        training = ProgramTraining(manifest.inner, self._model, groups)
        restored, note = checkpoint.take_up(start, cast(Training, training), fragments)
        for fragment, sample in enumerate(before):
            self._keeping.moved(fragment, sample, began=True)
        training.run_is_at(fragments.run_tokens(learners=1))
        self._before = training.inner_step
        assert self._channel is not None
        mailbox = ProgramMailbox(
            self._channel,
            fragments,
            self._parameters,
            training,
            start,
            self._keeping,
            self._evaluate,
        )
        numel = sum(layout.numel for layout in layouts)
        device_text = f"{self._parameters.device}, a program's own loop"
        self._channel.emit(Ready(device_text, numel, 0, training.inner_step, restored, note))
        self._keeping.look_when_it_steps(optimizer)
        for sentence in parts.left_out([*names, *constants]):
            say(sentence)
        return mailbox, training


def _diverged(loss: float, steps: int) -> UserError:
    return UserError(
        f"Session.step: the loss was no finite number in {steps} steps in a row, the last is {loss}",
        "the program diverged: lower its learning rate, clip gradients, or look at its data; a new Session "
        "begins at the run's parameters",
    )


def _whole(tokens: SupportsInt) -> int:
    """Take whatever programs count with as Python's own number. Raises: UserError."""
    with contextlib.suppress(*NO_NUMBER):
        if int(tokens) == tokens:
            return int(tokens)
    raise UserError(f"Session.step: tokens must be a whole number, it is {tokens!r:.80}")


def _real(loss: SupportsFloat) -> float:
    """Take a loss in whatever type as Python's own number. Raises: UserError."""
    with contextlib.suppress(*NO_NUMBER):
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    raise UserError(f"Session.step: loss must be a number, it is {loss!r:.80}")
