"""Mailbox of the daemon's commands: obeyed between inner steps, and never waited for.

`Mailbox` is the loop's boundary. Closing calls are answered by a thread while an inner step's gradients are
computed (`Stillness`, `Answering`).

Rules: docs/protocol/learner.md, section 3.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from msgspec.structs import replace
from torch import nn

from p2pdiloco.errors import StorageError, invariant
from p2pdiloco.learner import loop
from p2pdiloco.learner.channel import (
    AnyCommand,
    Applied,
    Appraise,
    Appraised,
    CopyOut,
    Evaluate,
    Evaluated,
    FollowCourse,
    FreeSlot,
    Install,
    LearnerEnd,
    Learners,
    Note,
    Rests,
    Save,
    ShareData,
    SpareMachine,
    StateSaved,
    Status,
    Stop,
    StopStepping,
    TakePart,
)
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.lifeline import LOOK_EVERY_S
from p2pdiloco.learner.loop import Evaluation, StepReport, Training, appraise, evaluate
from p2pdiloco.learner.optimizer import HeldShares
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.util import Action, MovingAverage, Now

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch

MAX_LATE_S = 2.0
"""Most seconds that late steps with a least length are made up for, after a busy machine or an evaluation:
the pace is kept on average."""
AHEAD_INTERVALS = 8
"""Intervals of all learners that our clock may be ahead of our chain: estimates are no more apart."""
FINISH_POLL_S = 1.0
"""Seconds between two looks for commands while the end is waited for."""


class StepTimes:
    """Times of inner steps, without the pauses that evaluation and saving make."""

    def __init__(self, clock: Now) -> None:
        self._clock = clock
        self._last: float | None = None
        self._step_time_s = MovingAverage()
        self._loss = MovingAverage()
        self.longest_gap_s = 0.0
        self.longest_aside_s = 0.0
        """Longest evaluation or save since it was last asked for."""

    @property
    def step_time_s(self) -> float:
        """Average of the inner steps' times; 0 before the second."""
        return self._step_time_s.value

    @property
    def loss(self) -> float | None:
        """Average of the training loss, nats per token; None before the first step."""
        return None if self._loss.empty else self._loss.value

    def step(self, report: StepReport) -> float:
        """Count an inner step that has ended; returns the time."""
        now = self._clock()
        if self._last is not None:  # the first step warms the libraries up, and has no gap before it
            gap_s = now - self._last
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
            self._step_time_s.add(gap_s)
        self._last = now
        if report.tokens:
            self._loss.add(report.loss)
        return now

    def exclude(self, since: float) -> float:
        """Leave an evaluation or save since then out: it was no inner step. Returns its seconds."""
        aside_s = self._clock() - since
        self.longest_aside_s = max(self.longest_aside_s, aside_s)
        if self._last is not None:
            self._last += aside_s
        return aside_s

    def rested(self) -> None:
        """Count the next inner step from now: none was to be made, whatever was done instead."""
        if self._last is not None:
            self._last = self._clock()

    def take_longest_s(self) -> tuple[float, float]:
        """Longest gap, and longest time aside, since the last call."""
        taken = self.longest_gap_s, self.longest_aside_s
        self.longest_gap_s = self.longest_aside_s = 0.0
        return taken


class Mailbox:
    """The boundary hook of `learner.loop.train`."""

    def __init__(
        self,
        channel: LearnerEnd,
        training: Training,
        fragments: Fragments,
        heldout: Batch,
        spare_model: Callable[[], nn.Module],
        status_interval_s: float,
        clock: Now = time.monotonic,
    ) -> None:
        """Make the hook of one training.

        Args:
            heldout: samples to evaluate on.
            spare_model: makes the second instance that the global parameters are evaluated in, at the first
                evaluation.
        """
        self._channel = channel
        self._training = training
        self._fragments = fragments
        self._heldout = heldout
        self._spare_model = spare_model
        self._spare_instance: nn.Module | None = None
        self._status_interval_s = status_interval_s
        self._clock = clock
        self._meter = StepTimes(clock)
        self._wish = SpareMachine()
        """Wish of the machine's owner."""
        self._next_step_s = clock()
        """Time before which the next step does not begin, if steps have a least length."""
        self._next_status = clock()
        self._learners = 1
        self.stopping = False
        """True: the end is at the next boundary."""
        self._finishing = False
        self._rests: Rests = "no"

    def follow(self, course: FollowCourse) -> None:
        """Go by this course of the run from now on."""
        self._training.amend(course.amendments)
        self._rests = course.rests

    def spare(self, wish: SpareMachine) -> None:
        """Leave so much of the machine to others from now on."""
        self._wish = wish
        self._next_step_s = min(self._next_step_s, self._clock() + wish.min_step_s)

    @property
    def _resting(self) -> bool:
        """True: no inner steps are to be made, for the run's sake or the machine's owner's."""
        return self._rests != "no" or self._wish.rests

    def boundary(self, report: StepReport) -> bool:
        """Do what is due between two inner steps: commands, copies, a status. False: stop.

        Raises:
            ChannelBroken: the daemon is gone, or does not read.
        """
        now = self._meter.step(report)
        if report.tokens:
            self._fragments.count_step(report.tokens)
        self.obey()
        if not self._goes_on():
            return False
        self._look_at_the_clock()
        for note in self._training.take_notes():
            self._channel.emit(Note(note[:4096]))
        for copied in self._fragments.copy_due(self._training.inner_step):
            self._channel.emit(copied)
        self._say_status(now)
        self._channel.flush()
        if self._wish.min_step_s:
            self._keep_pace()
        if self._channel.standstill.lasts():
            self._stand_still()
        return self._goes_on()

    def _look_at_the_clock(self) -> None:
        run_tokens = self._fragments.run_tokens(self._learners)
        interval = self._fragments.period * self._training.section.tokens_per_step
        self._training.run_is_at(run_tokens, self._learners, AHEAD_INTERVALS * self._learners * interval)

    def begin(self) -> bool:
        """Do what has been asked for before the first inner step. False: make none.

        Raises:
            ChannelBroken: the daemon is gone.
        """
        self.obey()
        return self._goes_on()

    def _goes_on(self) -> bool:
        """Tell whether to make another inner step. If not, wait until the daemon has all that it wants, or
        the run goes on."""
        while (self._finishing or self._resting) and not (self.stopping or self.let_go):
            if not self._finishing:
                self._hand_out()
            self.attend(FINISH_POLL_S)
            self._meter.rested()
        return not (self.stopping or self.let_go)

    @property
    def let_go(self) -> bool:
        """True: the run is over for whoever makes the inner steps. A daemon's own process waits instead."""
        return False

    def _hand_out(self) -> None:
        """Hand out what no contribution carries yet: no inner steps come that would add to it."""
        for copied in self._fragments.copy_remaining(self._training.inner_step):
            self._channel.emit(copied)
        self._say_status(self._clock())
        self._channel.flush()

    def _say_status(self, now: float) -> None:
        if now >= self._next_status:
            self._next_status = now + self._status_interval_s
            self._channel.emit(self._status())

    def _keep_pace(self) -> None:
        """Wait until the next step may begin (`SpareMachine.min_step_s`); commands are obeyed meanwhile."""
        while not (self.stopping or self._finishing or self._resting):
            left_s = self._next_step_s - self._clock()
            if left_s <= 0:
                break
            self.attend(left_s)
        self._next_step_s = max(self._next_step_s + self._wish.min_step_s, self._clock() - MAX_LATE_S)

    def _stand_still(self) -> None:
        """The daemon is stopped, by somebody who wants the machine back."""
        print("the daemon is stopped: no inner steps until it goes on", file=sys.stderr, flush=True)
        while self._channel.standstill.lasts() and not (self.stopping or self._finishing):
            self.attend(LOOK_EVERY_S)
        self._meter.rested()

    def obey(self) -> None:
        """Do what has been asked for. Raises: ChannelBroken (the daemon is gone)."""
        for command in self._channel.poll():
            self._obey(command)

    def _obey(self, command: AnyCommand) -> None:
        match command:
            case Install():
                self._fragments.install(command)
                self._channel.emit(Applied(command.fragment, command.number, self._training.inner_step))
            case CopyOut(fragment):
                self._channel.emit(self._fragments.copy_out(fragment, self._training.inner_step))
            case FreeSlot(fragment, not_finite):
                self._fragments.free_slot(fragment, not_finite)
            case Learners(count):
                self._learners = count
            case TakePart(every):
                self._fragments.take_part(every)
            case Evaluate() | Appraise() | ShareData() | Save() if self._finishing:
                pass  # the end's save is to come, and a step that is given up may be at the data
            case FollowCourse():
                self.follow(command)
            case SpareMachine():
                self.spare(command)
            case ShareData(share):
                self._training.stream.share(share)
            case Evaluate():
                since, found = self._clock(), self._evaluate()
                took_s = self._meter.exclude(since)
                if found is None:
                    self._channel.emit(Evaluated(None, 0, took_s=took_s))
                else:
                    self._channel.emit(Evaluated(found.loss, found.tokens, found.metrics, took_s))
            case Appraise():
                since, appraised = self._clock(), self._appraise(command)
                self._channel.emit(replace(appraised, took_s=self._meter.exclude(since)))
            case Save(path):
                self._save(path)
            case StopStepping():
                self._finishing = True
            case Stop(save_path):
                if save_path is not None:
                    self._save(save_path, last=True)
                self.stopping = True
            case _:
                invariant(False, f"a second {type(command).__name__}")

    def answer_calls(self, give_up: Action | None) -> None:
        """Answer closing calls that came since the last boundary, as it was there. Only while nothing writes
        parameters (`Answering`).

        `give_up` ends the process in the middle of an inner step, if nobody waits for that and when all is
        saved and said; None: the end waits for the next boundary.

        Raises: ChannelBroken (the daemon is gone)."""
        for call in self._channel.take_calls():
            copied = self._fragments.copy_out(call.fragment, self._training.inner_step, under_way=True)
            self._channel.emit(copied)
        self._channel.flush()
        if give_up is not None and self._channel.told_to_finish():
            self._finishing = True
            # It may read parameters that change under it: nobody will see what it makes of them.
            self._training.stream.give_back()
            self.obey()
            self._goes_on()
            give_up()

    def attend(self, timeout_s: float) -> None:
        """Wait so long for commands, and obey them. Raises: ChannelBroken."""
        self._channel.wait(timeout_s)
        self.obey()
        self._channel.flush()

    def _evaluate(self) -> Evaluation | None:
        held = self._fragments.held
        if isinstance(held, HeldShares):
            return self._evaluate_together(held)
        training, model = self._training, self._global_model()
        with training.meanwhile():
            return evaluate(training.task, model, self._heldout, precision=training.precision)

    def _global_model(self) -> nn.Module:
        if self._spare_instance is None:
            self._spare_instance = self._spare_model()
        self._fragments.scatter_bases(named_parameters(self._spare_instance))
        return self._spare_instance

    @property
    def appraises(self) -> bool:
        """True: it can measure contributions. Where the model is shared out, a second one has no room."""
        return not isinstance(self._fragments.held, HeldShares) and any(map(len, self._heldout))

    def _appraise(self, command: Appraise) -> Appraised:
        if not self.appraises:
            return Appraised(command.path)
        layout = self._fragments.layouts[command.fragment]
        return appraise(command, self._training, layout, self._heldout, self._global_model)

    def _evaluate_together(self, held: HeldShares) -> Evaluation:
        """Evaluate in the model that trains: there is no room for another one."""
        training, ranks = self._training, self._training.ranks
        ranks.order("aside")
        held.set_aside()
        for fragment in range(len(self._fragments)):
            self._fragments.reset_to_base(fragment)
        ranks.order("evaluate")
        batch = ranks.share(self._heldout)
        found = evaluate(training.task, training.model, batch, training.samples_at_once, training.precision)
        ranks.order("back")
        held.bring_back()
        return found

    def _save(self, path: Path, last: bool = False) -> None:
        since = self._clock()
        try:
            loop.save_checkpoint(path, self._training, self._fragments)
            self._training.stream.save_place()
            saved = StateSaved(path, True, last=last)
        except StorageError as error:
            saved = StateSaved(path, False, str(error)[:4096], last)
        self._meter.exclude(since)
        self._channel.emit(saved)

    def _status(self) -> Status:
        meter, training = self._meter, self._training
        per_step = training.section.tokens_per_step
        longest_gap_s, longest_aside_s = meter.take_longest_s()
        return Status(
            inner_step=training.inner_step,
            tokens_total=training.tokens_total,
            tokens_per_s=per_step / meter.step_time_s if meter.step_time_s and not self._resting else 0.0,
            step_time_s=meter.step_time_s,
            loss=meter.loss,
            longest_gap_s=longest_gap_s,
            longest_aside_s=longest_aside_s,
            cpu_s=time.process_time(),
            skipped_steps=training.skipped_steps,
            run_tokens=training.run_tokens,
            learning_rate=training.optimizer.param_groups[0]["lr"],
            deferred_copies=self._fragments.deferred_copies,
            handed_over=self._wish.rests and self._fragments.all_merged,
            share=training.stream.shared,
        )


ANSWERING_DEVICES = ("cpu", "cuda")
"""Kinds of devices on which parameters can be read beside the inner loop. On others, calls wait for the
boundary."""


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

    @contextmanager
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

    @contextmanager
    def reading(self) -> Iterator[torch.cuda.Event | None]:
        """Context of the other thread, which begins when parameters stand still. Gives what a device is to
        reach before it copies them, if it computes by itself."""
        with self._lock:
            yield self._quiet


class Answering:
    """Thread that answers closing calls while the gradients of an inner step are computed, from `with` to the
    end of the block.

    Parameters stand still from the end of one inner step until the optimizer's step at the end of the next
    one, so a copy that is taken in between is what the last step boundary would have given. Without it a
    round waits for the slowest learner's boundary, and every version is so much later for all
    (docs/results.md).

    The thread and the inner loop are never both at the parameters: the loop holds a lock but while it is in
    `Stillness.meanwhile`. On an accelerator the copies have a stream of their own, which begins behind
    everything that was queued before `meanwhile`; the inner loop's next kernels that write parameters are
    queued after it, when the copies are over.
    """

    def __init__(
        self,
        still: Stillness,
        readable: Callable[[socket.socket], bool],
        answer: Action,
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
