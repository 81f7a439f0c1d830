"""Node of a session: its daemon, and the program's process as the daemon's learner."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn
from torch.optim import Optimizer

from p2pdiloco.errors import UserError
from p2pdiloco.learner import checkpoint
from p2pdiloco.learner.answering import DEVICES, Answering, Stillness
from p2pdiloco.learner.channel import ChannelBroken, LearnerEnd
from p2pdiloco.learner.channel_messages import Ready, Start
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.lifeline import save_takes_s
from p2pdiloco.learner.loop import MAX_SKIPPED_IN_A_ROW, StepReport, Training
from p2pdiloco.learner.optimizer.schedule import schedule_of
from p2pdiloco.learner.parallel.ranks import Ranks
from p2pdiloco.learner.program.keeping import Keeping
from p2pdiloco.learner.program.mailbox import ProgramMailbox, ProgramTraining
from p2pdiloco.learner.program.parameters import ProgramParameters
from p2pdiloco.learner.program.ranks import CallAnswer, RunPlan, hold, packed
from p2pdiloco.own_run import compare, say
from p2pdiloco.session_daemon import LEAVE_S, POLL_S, SessionDaemon
from p2pdiloco.tasks.constants import constants_of
from p2pdiloco.tasks.models.description import describe, load_constants
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.exchange import Exchange
from p2pdiloco.tensors.layout import plan_fragments


class SessionNode:
    """Part of a program's only process, or of its first rank, in a session: it has the node."""

    def __init__(
        self, folder: Path, model: nn.Module, evaluate: Callable[[], float] | None, ranks: Ranks
    ) -> None:
        """Start nothing yet: `begin` comes next. `folder`: the node's; `model`: without wrappers."""
        self._model, self._evaluate, self._ranks = model, evaluate, ranks
        self._leave_s = LEAVE_S + save_takes_s(sum(parameter.numel() for parameter in model.parameters()))
        self.stopped = False
        """True: later calls do nothing."""
        self._lost = 0
        """Steps in a row whose loss was no finite number."""
        self._answering: Answering | None = None
        self._daemon = SessionDaemon(folder)
        self._channel: LearnerEnd | None = None

    def begin(
        self, optimizer: Optimizer | None, run: str | Path, words: Sequence[str], timeout_s: float
    ) -> CallAnswer:
        """Reach the daemon, or start one with these flags, and become its learner.

        Raises:
            UserError: as `Session` says.
        """
        until = time.monotonic() + timeout_s
        try:
            self._socket, descriptor = self._daemon.connect(words, until)
            self._channel = LearnerEnd(self._socket)
            start = self._begun(until)
            if self._daemon.adopted and run:
                try:
                    self._daemon.check_run(start.manifest, run)
                except UserError:
                    os.close(descriptor)
                    raise
            self.mailbox, self._training = self._attach(start, descriptor, optimizer)
        except BaseException as error:
            self.stopped = True
            self._end(0.0)
            if isinstance(error, UserError):
                raise error from None  # its sentence says it all
            raise
        self._daemon.tell_addresses(start.manifest.run.name)
        return self._answer(True, self.addresses if self._ranks.count > 1 else ())

    def step(self, tokens: int, mean: float) -> CallAnswer:
        """Count an inner step, and do what the swarm asks for. Raises: UserError."""
        self.mailbox.begin_step()
        if self._has_ended():
            return self._answer(False)
        self._lost = 0 if math.isfinite(mean) else self._lost + 1
        if self._lost >= MAX_SKIPPED_IN_A_ROW:
            raise _diverged(mean, self._lost)
        most = self._training.section.tokens_per_step
        if not 0 <= tokens <= most:
            raise UserError(f"{tokens} tokens in one inner step: this run allows 0 to {most}")
        self._training.count(tokens)
        try:
            goes_on = self.mailbox.boundary(StepReport(self._training.inner_step, mean, tokens))
        except ChannelBroken as error:
            raise self._broke(error) from error
        self.stopped = self.mailbox.stopping
        return self._answer(goes_on)

    def _has_ended(self) -> bool:
        """Tell whether the run has ended. Its owner may have made it longer since."""
        if self.mailbox.let_go:
            try:
                self.mailbox.attend(0.0)
            except ChannelBroken as error:
                raise self._broke(error) from error
        return self.mailbox.let_go

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which another thread answers, if it can. Raises: UserError."""
        device = self.parameters.device
        if self._channel is None or self._ranks.sharded or device.type not in DEVICES:
            yield  # of shares, other ranks copy at boundaries only
            return
        self.look()
        if self._answering is not None and self._answering.device != device:
            self._answer_no_more()
        if self._answering is None:
            answer = partial(self.mailbox.answer_calls, None)
            made = Answering(Stillness(device), self._channel.wait_or, answer, device)
            self._answering = made.__enter__()
        try:
            with self._answering.still.meanwhile():
                yield
        except ChannelBroken as error:
            raise self._broke(error) from error

    def look(self, stepped: bool = False) -> None:
        """Look the parameters up as they are now, and whether the program's step has left what merges put
        there. Of a model that is another one by now nothing is contributed or kept any more.

        Raises:
            UserError: it is another one, or merges are undone.
        """
        try:
            self.parameters.look()
            if stepped:
                self._keeping.look()
        except UserError:
            self.stopped = True
            self._daemon.terminate()
            raise

    def leave(self) -> CallAnswer:
        """Let the daemon leave in good order, with what was not contributed."""
        self.mailbox.begin_step()
        if self._daemon.terminate():
            until = time.monotonic() + self._leave_s
            with contextlib.suppress(ChannelBroken):  # it has ended, or does not need us any more
                while not self.mailbox.stopping and time.monotonic() < until:
                    self.mailbox.attend(POLL_S)
                if self._channel is not None:
                    self._channel.drain(self._leave_s)
        self.stopped = True  # a daemon that is told twice to end leaves in no good order
        return self._answer(False)

    def part(self) -> None:
        """Go on without other ranks, to the end. Where each has a part of the parameters, this is the end:
        what was not contributed is lost."""
        if self.stopped:
            return
        if self._ranks.sharded:
            self.stopped = True
            self._daemon.terminate()
        else:
            self.mailbox.part()

    def end(self) -> None:
        """End the daemon, if it has not ended, and all that was begun here."""
        if not self.stopped:
            self._daemon.terminate()
        self.stopped = True
        self._keeping.close()
        self._end(self._leave_s)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the node, the best first."""
        return self._daemon.addresses()

    def _answer(self, goes_on: bool, addresses: tuple[str, ...] = ()) -> CallAnswer:
        training = self._training
        return CallAnswer(
            goes_on,
            self.stopped,
            self.mailbox.moved,
            training.inner_step - self._before,
            training.run_tokens,
            schedule_of(training.section, training.amendment),
            addresses,
        )

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
        self.stopped = True
        return self._daemon.broke(error)

    def _end(self, patience_s: float) -> None:
        self._answer_no_more()
        if self._channel is not None:
            self._socket.close()
            self._channel = None
        self._daemon.end(patience_s)

    def _answer_no_more(self) -> None:
        if self._answering is not None:
            self._answering.__exit__()
            self._answering = None

    def _attach(
        self, start: Start, descriptor: int, optimizer: Optimizer | None
    ) -> tuple[ProgramMailbox, ProgramTraining]:
        manifest = start.manifest
        specs = task_of(manifest).specs()
        names, parts = tuple(spec.name for spec in specs), describe(self._model)
        compare(parts.of_run(names), specs)
        path, wanted = start.options.initial_path, constants_of(manifest.model)
        constants = {} if path is None else load_constants(path, wanted)
        layouts = plan_fragments(specs, manifest.sync.fragments)
        self.parameters = ProgramParameters(self._model, names, optimizer, constants)
        fragments = Fragments(
            hold(self.parameters, self._ranks),
            layouts,
            Exchange.attach(descriptor, layouts),
            start.bases,
            manifest.sync.inner_steps,
            manifest.sync.keep_in_flight,
        )
        self._ranks.tell("plan", RunPlan(names, layouts, packed(constants)))
        self._keeping = Keeping(self.parameters, layouts)
        before = [self._keeping.sample(fragment) for fragment in range(len(layouts))]
        for fragment in range(len(layouts)):
            fragments.reset_to_base(fragment)
        self.parameters.settle()
        groups = optimizer.param_groups if optimizer is not None else [{"lr": 0.0}]
        training = ProgramTraining(manifest.inner, self._model, groups, self._ranks)
        restored, note = checkpoint.take_up(start, cast(Training, training), fragments)
        for fragment, sample in enumerate(before):
            self._keeping.moved(fragment, sample, began=True)
        training.run_is_at(fragments.run_tokens(learners=1))
        self._before = training.inner_step
        assert self._channel is not None
        mailbox = ProgramMailbox(
            self._channel, fragments, self.parameters, training, start, self._keeping, self._evaluate
        )
        numel = sum(layout.numel for layout in layouts)
        where = f"{self._ranks.count} x " if self._ranks.count > 1 else ""
        device_text = f"{where}{self.parameters.device}, a program's own loop"
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
