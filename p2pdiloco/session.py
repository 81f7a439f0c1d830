"""`p2pdiloco.Session`: a training loop of your own as a node's learner.

The session starts the real daemon as a process of its own (`session_daemon`), as `p2pdiloco node` does, and
is its learner. The program's process has the model. It talks to the daemon over socket and shared memory, as
a learner does that the daemon starts itself (`learner.channel`, `tensors.layout`). Where a program has
several ranks, the first one has the node (`learner.program_ranks`). `new_run` writes the run file of such a
program.
"""

from __future__ import annotations

import math
import operator
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, SupportsFloat, SupportsInt, cast

import msgspec
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from p2pdiloco.adapters.data_dir import own_peer
from p2pdiloco.adapters.result_file import Arrays, checksum, save_tensors
from p2pdiloco.config.manifest import Manifest, table
from p2pdiloco.config.presets import (
    LENGTHS,
    for_other_model,
    for_run,
    with_schedule,
    with_seats,
    without_end,
)
from p2pdiloco.config.values import expanded
from p2pdiloco.daemon.run_files.shared_files import constants_table, first_not_finite, initial_beside
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.learner import loop
from p2pdiloco.learner.channel import ChannelBroken, LearnerEnd, Ready, Start
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.lifeline import save_takes_s
from p2pdiloco.learner.loop import MAX_SKIPPED_IN_A_ROW, StepReport, Training
from p2pdiloco.learner.mailbox import ANSWERING_DEVICES, Answering, Stillness
from p2pdiloco.learner.optimizer import is_shared_out
from p2pdiloco.learner.program_model import MoveWatch, ProgramParameters
from p2pdiloco.learner.program_ranks import (
    CallAnswer,
    FollowingRank,
    ProgramMailbox,
    ProgramRanks,
    ProgramTraining,
    RunPlan,
    begin,
    hold,
    packed,
    ranks_of,
    total,
)
from p2pdiloco.learner.ranks import Distributed, Ranks
from p2pdiloco.learner.schedule import schedule_of
from p2pdiloco.session_daemon import LEAVE_S, POLL_S, SessionDaemon
from p2pdiloco.tasks.description import Description, carried, describe, load_constants
from p2pdiloco.tasks.initial import named_parameters, unwrapped
from p2pdiloco.tasks.own_tasks import OWN_LOOP, section_of
from p2pdiloco.tasks.registry import manifest_from_table, render_toml, task_of
from p2pdiloco.tasks.task import constants_of
from p2pdiloco.tensors.layout import Exchange, plan_fragments
from p2pdiloco.tensors.sizes import TensorSpec
from p2pdiloco.util import Now

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
        evaluate: Now | None = None,
        options: Sequence[str] = (),
        timeout_s: float = 300.0,
        group: ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            model: its parameters are what is trained; on any device. Compiled or not, in DDP or not; of
                FSDP2, after `fully_shard`. They are looked up by name at every step: the model may move to
                another device, and its parameters may get other memory, but keep their names, shapes and
                number types.
            optimizer: its learning rate is looked at, for reports, and whether it has the model's parameters.
            run: name or id of a run that the peers know; or a run.toml (a Path, or ending in .toml) that is
                begun here, of which this node is then the owner.
            join: link to the run, or the address of a bootstrap or of a node, or several.
            data_dir: the node's folder.
            evaluate: the loss of the model on held-out data. It is called now and then between two steps,
                while the model has the global parameters, and must not change it.
            options: further flags of `p2pdiloco node`. These and `join` are for a daemon that is started: one
                that an earlier life of this program left behind goes on as it was.
            timeout_s: how long the run may take to be joined, and other ranks may take to begin.
            group: the torch.distributed processes that train this model together, each of which makes the
                same calls; None: all of the default group, if there is one. The first rank has the node.

        Raises:
            UserError: the daemon cannot start, the run is not found in time, or trains another model; the
                folder is another program's, or its daemon is in another run. Of several ranks: one does not
                begin, or has another model. What is wrong in one is an error in all.
        """
        inside = unwrapped(model)
        folder = expanded(Path(data_dir), "data_dir")
        self._computing = False
        self._on_merge: list[Callable[[], object]] = []
        ranks = ranks_of(group, inside)
        begin(ranks, inside, evaluate is not None, timeout_s)
        self._role: SessionNode | FollowingRank
        if isinstance(ranks, Distributed) and ranks.rank:
            self._role = FollowingRank(ranks, inside, optimizer, evaluate)
        else:
            self._role = SessionNode(folder, inside, evaluate, ranks)
        self._ranks = ProgramRanks(ranks, self._role)
        words = [*_flags(run, join), *options]
        is_file = isinstance(run, Path) or run.endswith(".toml")
        place = Path(run) if is_file else run
        self._answer = self._ranks.call(lambda: self._role.begin(optimizer, place, words, timeout_s))
        takes_over = getattr(optimizer, "reload_model_params", None)
        if callable(takes_over):  # Megatron's, which has masters
            self.on_merge(takes_over)

    def step(self, tokens: SupportsInt, loss: SupportsFloat) -> bool:
        """Count an inner step over so many tokens, with that mean loss, and do what the swarm asks for.
        False: the run has ended, or the daemon: go on without it or end. While the run's owner has paused it,
        or this machine's owner wants it to rest (docs/topics/limits.md), this waits until it goes on.

        Of several ranks each says its own: tokens are summed, losses averaged, weighted by tokens.

        Raises:
            UserError: more tokens than the run allows for one step, no whole number of them, no number for
                the loss (of tensors, NumPy's and Python's all will do), or the daemon broke (with its
                reason); the losses of ten steps in a row are NaN or infinite; within `computing`; another
                rank is gone, or has other parameters than the first. And, which ends the session: a parameter
                is missing, has another shape or number type, or is another object than the optimizer's; or
                what merges put into the model is gone a step later.
        """
        self._outside("step")
        self._answer = replace(self._answer, merged=False)
        if self._role.stopped:
            return False

        def say() -> Sequence[float]:
            self._role.look(stepped=True)
            return _whole(tokens), _real(loss), *self._ranks.few()

        count, mean = total(self._ranks.meet("Session.step", say))
        self._answer = self._ranks.call(lambda: self._role.step(count, mean))
        self._tell_merged()
        return self._answer.goes_on

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context for what takes long in an inner step and changes no parameters: forward and backward.

        The optimizer's step is outside. What the swarm asks for in this time is answered at once, from
        another thread. Without it, that waits for your next `step`; if your steps are long, all others'
        versions wait too.

        Raises:
            UserError: the daemon broke (with its reason); within another such block; parameters are others,
                as `step` says. Of several ranks this one alone has it; the others hear of it in `step`.
        """
        self._outside("computing")
        if self._role.stopped:
            yield
            return
        with self._role.computing():
            self._computing = True
            try:
                yield
            finally:
                self._computing = False

    def close(self) -> None:
        """Leave the run in good order. What is sent already is still merged, what is not is kept for the next
        session with this folder; later calls do nothing. Of several ranks all close together.

        Raises:
            UserError: within `computing`; ranks are in different calls; parameters are others, as `step`
                says: then nothing is kept.
        """
        self._outside("close")
        try:
            if not self._role.stopped:
                self._ranks.meet("Session.close", self._looked)
                self._answer = self._ranks.call(self._role.leave)
                self._tell_merged()
        finally:
            self._role.end()

    def _looked(self) -> Sequence[float]:
        self._role.look()
        return ()

    def _outside(self, what: str) -> None:
        if self._computing:
            raise UserError(f"Session.{what} within Session.computing", "it comes after the block")

    def _tell_merged(self) -> None:
        if self._answer.merged:
            for function in self._on_merge:
                function()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of this node, the best first: what others give as `join`."""
        return self._role.addresses

    @property
    def merged(self) -> bool:
        """True: the last `step` has changed the model's parameters, as a merge came."""
        return self._answer.merged

    def on_merge(self, function: Callable[[], object]) -> None:
        """Have a function called whenever a merge has changed the model's parameters, before `step` returns;
        and now, as the session began with the run's. In it, who has copies of the parameters (an optimizer
        with fp32 masters, an average) takes them over."""
        self._on_merge.append(function)
        function()

    @property
    def inner_step(self) -> int:
        """Inner steps of this session so far."""
        return self._answer.inner_step

    @property
    def run_tokens(self) -> int:
        """Tokens that all learners of the run have consumed, about; they never go back. They are the clock of
        a learning rate that suits a program that joins late, too."""
        return self._answer.run_tokens

    @property
    def schedule_tokens(self) -> int:
        """`run_tokens` at the end of the run's schedule, as its owner wants it now."""
        return self._answer.schedule_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._ranks.part()  # nobody knows where the other ranks are
        self.close()


def _flags(run: str | Path, join: str | Sequence[str]) -> list[str]:
    """Flags of `p2pdiloco node` that say which run, and where it is joined."""
    begins = isinstance(run, Path) or run.endswith(".toml")
    words = ["--genesis", "--run-file", str(run)] if begins else ["--run", str(run)] if run else []
    for address in (join,) if isinstance(join, str) else join:
        words += ["--join", address]
    return words


def _whole(tokens: SupportsInt) -> int:
    """Take whatever programs count with as Python's own number. Raises: UserError."""
    with suppress(*NO_NUMBER):
        if int(tokens) == tokens:
            return int(tokens)
    raise UserError(f"Session.step: tokens must be a whole number, it is {tokens!r:.80}")


def _real(loss: SupportsFloat) -> float:
    """Take a loss in whatever type as Python's own number. Raises: UserError."""
    with suppress(*NO_NUMBER):
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    raise UserError(f"Session.step: loss must be a number, it is {loss!r:.80}")


# The node: its daemon, and the program's process as the daemon's learner.


class SessionNode:
    """Part of a program's only process, or of its first rank, in a session: it has the node."""

    def __init__(self, folder: Path, model: nn.Module, evaluate: Now | None, ranks: Ranks) -> None:
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

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which another thread answers, if it can. Raises: UserError."""
        device = self.parameters.device
        if self._channel is None or self._ranks.sharded or device.type not in ANSWERING_DEVICES:
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
                self._moves.look()
        except UserError:
            self.stopped = True
            self._daemon.terminate()
            raise

    def leave(self) -> CallAnswer:
        """Let the daemon leave in good order, with what was not contributed."""
        self.mailbox.begin_step()
        if self._daemon.terminate():
            until = time.monotonic() + self._leave_s
            with suppress(ChannelBroken):  # it has ended, or does not need us any more
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
        self._moves.close()
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
        self._moves = MoveWatch(self.parameters, layouts)
        before = [self._moves.sample(fragment) for fragment in range(len(layouts))]
        for fragment in range(len(layouts)):
            fragments.reset_to_base(fragment)
        self.parameters.settle()
        groups = optimizer.param_groups if optimizer is not None else [{"lr": 0.0}]
        training = ProgramTraining(manifest.inner, self._model, groups, self._ranks)
        restored, note = loop.take_up_checkpoint(start, cast(Training, training), fragments)
        for fragment, sample in enumerate(before):
            self._moves.moved(fragment, sample, began=True)
        training.run_is_at(fragments.run_tokens(learners=1))
        self._before = training.inner_step
        assert self._channel is not None
        mailbox = ProgramMailbox(
            self._channel, fragments, self.parameters, training, start, self._moves, self._evaluate
        )
        numel = sum(layout.numel for layout in layouts)
        where = f"{self._ranks.count} x " if self._ranks.count > 1 else ""
        device_text = f"{where}{self.parameters.device}, a program's own loop"
        self._channel.emit(Ready(device_text, numel, 0, training.inner_step, restored, note))
        self._moves.look_when_it_steps(optimizer)
        for sentence in parts.left_out([*names, *constants]):
            say(sentence)
        return mailbox, training


def _diverged(loss: float, steps: int) -> UserError:
    return UserError(
        f"Session.step: the loss was no finite number in {steps} steps in a row, the last is {loss}",
        "the program diverged: lower its learning rate, clip gradients, or look at its data; a new Session "
        "begins at the run's parameters",
    )


# The run file, from the names and shapes of the program's model.


def new_run(
    model: nn.Module,
    path: str | Path,
    name: str,
    tokens_per_step: int,
    schedule_steps: int = LENGTHS["day"].steps,
    frozen: bool = False,
    average_statistics: bool = False,
    own_buffers: Collection[str] = (),
    data_dir: str | Path = "~/.p2pdiloco/session",
    seats: Sequence[str] = (),
    **sync: int | float,
) -> Path:
    """Write the run.toml of a run that trains such a model from the parameters that it has now, and these
    beside it. Serve it with `p2pdiloco bootstrap --run PATH`, or give it to the first `Session`.

    Args:
        tokens_per_step: the most that one inner step of one learner counts.
        schedule_steps: about so many inner steps of every learner the run is long. The outer step is chosen
            by it; the program's own learning rates are the program's.
        frozen: True: parameters that do not require gradients are in the run, too, and travel with every
            version. Else they stay each program's own: all must have the same.
        average_statistics: True: running means and variances (of batch norm) are merged as parameters are, by
            plain mean. Else they stay each program's own.
        own_buffers: names of other persistent buffers that training changes: they stay each program's own,
            too. All that are not named are constants, which every program gets from the run.
        data_dir: the folder of the node that begins the run, as `Session` has it: that node has a seat.
        seats: peer ids of further nodes that have one.
        sync: keys of [sync], such as inner_steps and fragments. All else can be edited in the file.

    Raises:
        UserError: the name, a key, or the model is not one for a run (a parameter that is not finite,
            either); the file exists already, or cannot be written; or the folder cannot be used.
    """
    out = Path(path)
    if out.exists():
        raise UserError(f"{out} exists already", "give it to Session as it is, or write another one")
    model = unwrapped(model)
    parts = describe(model)
    specs = _merged(parts, frozen, average_statistics)
    if unknown := [name for name in own_buffers if name not in parts.constants]:
        raise UserError(f"own_buffers: the model has no buffer {unknown[0]}, or it is none of its constants")
    constants = carried({n: value for n, value in parts.constants.items() if n not in own_buffers})
    arrays = _values(named_parameters(model) | parts.statistics, specs)
    fixed = {name: value.numpy() for name, value in constants.items()}
    kind = type(model).__name__[:100]
    me = own_peer(expanded(Path(data_dir), "data_dir"), parents=True)
    base = with_seats(without_end(for_other_model(for_run("tiny", name))), [me, *seats])
    try:
        manifest = replace(
            base,
            run=replace(base.run, task=OWN_LOOP, initial=checksum(arrays | fixed), initial_name=kind),
            model=table(section_of(specs)) | constants_table(fixed),
            inner=replace(base.inner, tokens_per_step=tokens_per_step),
            sync=replace(base.sync, **sync),
        )
    except TypeError as error:
        raise UserError(f"[sync] of a run.toml has no such key: {error}") from error
    # Before the schedule, too: it is reckoned from these keys.
    manifest = with_schedule(_accepted(manifest, out), schedule_steps)
    text = render_toml(_accepted(manifest, out))
    save_tensors(initial_beside(out), arrays | fixed, {})  # first: a run.toml is never without them
    _write(out, text)
    if left := parts.left_out([spec.name for spec in specs] + list(fixed)):
        have = f"{len(specs)} tensors ({sum(spec.numel for spec in specs):,} elements)"
        say(f"the run has {have} of the model; {'; '.join(left)}")
    return out


def _values(found: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> Arrays:
    """Copy tensors of a model, fp32. Raises: UserError (they are cut up, or not finite)."""
    if any(map(is_shared_out, found.values())):
        raise UserError("the model is cut up (fully_shard)", "new_run comes before that, in one process")
    arrays = {spec.name: found[spec.name].detach().float().cpu().contiguous().numpy() for spec in specs}
    if first_not_finite(arrays):
        raise UserError(f"the parameter {first_not_finite(arrays)} has values that are not finite")
    return arrays


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}") from error


def _merged(parts: Description, frozen: bool, average_statistics: bool) -> list[TensorSpec]:
    specs = [spec for spec in parts.parameters if frozen or spec.name in parts.trained]
    if not specs:
        raise UserError(
            "the model has no parameters that are trained (requires_grad)",
            "new_run takes the module that is trained",
        )
    return [*specs, *(parts.averageable if average_statistics else ())]


def say(sentence: str) -> None:
    """Tell the program's people on stderr."""
    print(f"p2pdiloco: {sentence}", file=sys.stderr, flush=True)


def _accepted(manifest: Manifest, out: Path) -> Manifest:
    """Pass a manifest through the strict reader: what is written is what every node accepts. Raises:
    UserError."""
    return manifest_from_table(msgspec.to_builtins(manifest, enc_hook=_plain), str(out))


def _plain(value: Any) -> Any:
    """Take NumPy's integers as integers; all else is refused in a sentence by whoever reads it."""
    try:
        return operator.index(value)
    except TypeError:
        return str(value)


def compare(mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Check that a program's parameters are the run's. Raises: UserError (names the first that is not)."""
    wanted = {spec.name: spec.shape for spec in theirs}
    given = {spec.name: spec.shape for spec in mine}
    for name in [*wanted, *given]:
        if wanted.get(name) != given.get(name):
            raise UserError(
                f"the run trains another model than yours: {name} has shape {wanted.get(name, 'none')} "
                f"there, {given.get(name, 'none')} here"
            )
