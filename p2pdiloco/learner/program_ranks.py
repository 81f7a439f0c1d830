"""Ranks of a program that trains in several processes (DDP, accelerate, FSDP2): they are one learner.

Every rank makes the same calls of its `Session`. In each the ranks first *meet*: what every rank says is
gathered, so that a mistake of one is an error of all, with one sentence. Then rank 0, which has daemon and
channel, leads: it does what the daemon wants, and the others obey its orders (`learner.ranks.Order`)
until it gives an answer, the same for all, or an error.

All of it goes over the program's own process group, in the order of the program's calls. A rank that dies
breaks its connections (gloo), or the group's time-out ends the wait for it.

`FollowingRank` is every rank but the first. `ProgramMailbox` and `ProgramTraining` serve the first as a
learner process has them; task, data, moments and checkpoints are the program's.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from msgspec import msgpack
from torch import nn

from p2pdiloco.config.manifest import InnerSection
from p2pdiloco.errors import P2PDilocoError, UserError, first_line, invariant
from p2pdiloco.learner.channel import AnyCommand, ChannelBroken, FreeSlot, Install, LearnerEnd, Start
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.loop import Evaluation, Training, TrainingCounts
from p2pdiloco.learner.mailbox import Mailbox
from p2pdiloco.learner.optimizer import HeldCopies, HeldParameters, HeldShares, is_shared_out
from p2pdiloco.learner.program_model import FEW, HasGroups, MoveWatch, ProgramParameters
from p2pdiloco.learner.ranks import ALONE, Distributed, RankLost, Ranks
from p2pdiloco.tasks.description import listed, persistent_buffers
from p2pdiloco.tasks.initial import plain_parameters
from p2pdiloco.tasks.own_tasks import OWN_LOOP
from p2pdiloco.tasks.task import Constant
from p2pdiloco.tensors.layout import FragmentLayout, TensorMap, Tensors
from p2pdiloco.util import Frozen, Now, Values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CALLS = ("Session", "Session.step", "Session.close")
WORDS = 2 + FEW * FEW
"""Numbers that a rank says in a call, at most."""
APART = 1e-4
"""Difference between copies, as a share of them, that is no rounding."""
DIGEST_BYTES = 6
"""Bytes of the digest by which ranks compare their models: as many as a word (float64) holds exactly."""
_encode = msgpack.encode


class CallAnswer(Frozen):
    """Answer of rank 0 to a call, for all ranks."""

    goes_on: bool
    stopped: bool
    merged: bool
    inner_step: int
    run_tokens: int
    schedule_tokens: int
    addresses: tuple[str, ...] = ()
    """Addresses of the node, told once, when the session begins."""


class Failure(Frozen):
    """Error of one rank, which ends the call in all."""

    sentence: str
    hint: str
    stopped: bool = False
    """True: later calls do nothing."""


class SessionOver(UserError):
    """Error that ends the session in all ranks: in one of them it has ended already."""


class RunPlan(Frozen):
    """Parameters of the run, its fragments, and the constants of its model."""

    names: tuple[str, ...]
    layouts: tuple[FragmentLayout, ...]
    constants: tuple[tuple[Constant, bytes], ...] = ()


def packed(constants: TensorMap) -> tuple[tuple[Constant, bytes], ...]:
    """Pack constants for other ranks."""
    values = (value.numpy().tobytes() for value in constants.values())
    return tuple(zip(listed(constants), values, strict=True))


def unpacked(constants: Sequence[tuple[Constant, bytes]]) -> Tensors:
    """Unpack what `packed` made."""
    return {
        constant.name: torch.from_numpy(np.frombuffer(data, constant.kind).copy()).view(constant.shape)
        for constant, data in constants
    }


_failure_of = msgpack.Decoder(Failure).decode


_answer_of = msgpack.Decoder(CallAnswer).decode


_plan_of = msgpack.Decoder(RunPlan).decode


def ranks_of(group: ProcessGroup | None, model: nn.Module) -> Ranks:
    """Find this process's place among those of its program: in the group, or (None) in the default one.

    Raises:
        UserError: the process is in no such group.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        if group is None:
            return ALONE
        raise UserError("Session was given a group, but torch.distributed is not initialised here")
    rank, count = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise UserError("this process is not in the group that its Session was given")
    parameters = list(model.parameters())
    if count == 1 and not any(map(is_shared_out, parameters)):
        return ALONE
    device = parameters[0].device if parameters else torch.device("cpu")
    carriers = _carriers(group)
    direct = carriers.get(device.type, "gloo") != "gloo"
    words = "cpu" if "cpu" in carriers else str(device)
    return Distributed(group, group, device if direct else torch.device("cpu"), words)


def _carriers(group: ProcessGroup | None) -> dict[str, str]:
    """Backends by the kind of device whose tensors they carry."""
    words = torch.distributed.get_backend_config(group).split(",")
    return dict(word.split(":") for word in words)


def _check_shares(parameters: TensorMap, ranks: Sequence[int]) -> None:
    """Raises: UserError (a parameter is not cut by rows over these ranks)."""
    for name, parameter in parameters.items():
        found: Any = parameter
        if not is_shared_out(parameter):
            how = "is whole in every rank"
        elif found.device_mesh.mesh.tolist() != list(ranks):
            how = f"is cut over the mesh {found.device_mesh.mesh.tolist()}, the group has ranks {list(ranks)}"
        elif [str(placement) for placement in found.placements] != ["S(0)"]:
            how = f"has the placement {found.placements}"
        else:
            continue
        raise UserError(
            f"the model is cut up, and its parameter {name} {how}",
            "Session takes parameters that torch.distributed.fsdp.fully_shard has all cut by rows, over the "
            "ranks of its group",
        )


def begin(ranks: Ranks, model: nn.Module, evaluates: bool, timeout_s: float) -> None:
    """Meet the other ranks for the first time, for so long.

    Raises:
        UserError: one does not come, has another model, or `evaluate` where others have none.
    """
    if ranks.count == 1:
        return
    distributed = torch.distributed
    assert isinstance(ranks, Distributed)
    if _carriers(ranks.group).get("cpu") == "gloo":
        group = ranks.group or distributed.group.WORLD
        assert group is not None
        try:
            group.monitored_barrier(datetime.timedelta(seconds=timeout_s), wait_all_ranks=False)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise UserError(
                f"not all {ranks.count} ranks of this program began their Session within {timeout_s:g} s: "
                f"{first_line(error)}",
                "every rank calls Session, with the same arguments; a process that is a learner for itself "
                "gives a group of its own",
            ) from error
    tensors = [*plain_parameters(model), *persistent_buffers(model).items()]
    specs = [(name, tuple(value.shape), str(value.dtype)) for name, value in tensors]
    digest = hashlib.sha256(_encode(specs)).digest()[:DIGEST_BYTES]
    found = meet(ranks, "Session", lambda: (int.from_bytes(digest), evaluates))
    for rank, (model_of, evaluates_there, *_) in enumerate(found):
        if model_of != found[0][0]:
            raise UserError(f"rank {rank} of this program has another model than rank 0")
        if evaluates_there != found[0][1]:
            raise UserError(
                f"rank {rank if evaluates_there else 0} of this program gives Session evaluate, and rank "
                f"{0 if evaluates_there else rank} gives none",
                "give it in every rank, or in none",
            )


def meet(
    ranks: Ranks, call: str, say: Callable[[], Sequence[float]], has_ended: Callable[[], bool] = bool
) -> list[Sequence[float]]:
    """Come together with all ranks in a call: what each says, by rank, in at most `WORDS` numbers. All say as
    many. `has_ended`: whether what `say` raised has ended the session in this rank.

    Raises:
        UserError: by what `say` raised in some rank, in all of them; or ranks are in different calls.
        SessionOver: it has ended the session there.
        RankLost: one of them is gone.
    """
    if not isinstance(ranks, Distributed):
        return [say()]
    said, data, cause = list[float](), b"", None
    try:
        said += say()
    except UserError as error:
        data, cause = _encode(failure(error, has_ended())), error
    found = ranks.gather(CALLS.index(call), len(data), *said, *[0.0] * (WORDS - len(said)))
    for rank, (there, length, *_) in enumerate(found):
        if there != found[0][0]:
            raise UserError(
                f"rank {rank} of this program is in {CALLS[int(there)]}, rank 0 in {CALLS[int(found[0][0])]}",
                "every rank makes the same calls of its Session: decide together when to end",
            )
        if length:
            told = _failure_of(ranks.pass_on(data, int(length), rank))
            raise (SessionOver if told.stopped else UserError)(told.sentence, told.hint) from cause
    return [words[2 : 2 + len(said)] for words in found]


def total(said: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Sum tokens, and take the mean of losses, weighted by tokens, of what all ranks say in a step: tokens,
    loss, and a few elements of the parameters. The loss of a rank without a token counts only where no rank
    has one.

    Raises:
        UserError: a rank's parameters are others than rank 0's.
    """
    first = torch.tensor(said[0][2:])
    for rank, (_, _, *elements) in enumerate(said):
        if float((torch.tensor(elements) - first).norm()) > APART * float(first.norm()):
            raise UserError(
                f"the parameters of rank {rank} of this program are others than those of rank 0",
                "sum gradients over all ranks (DistributedDataParallel, fully_shard, or the program itself): "
                "all must make the same step",
            )
    tokens = sum(int(count) for count, *_ in said)
    if len(said) == 1 or not tokens:
        return tokens, sum(loss for _, loss, *_ in said) / len(said)
    return tokens, sum(count * loss for count, loss, *_ in said if count) / tokens


def failure(error: BaseException, stopped: bool = False) -> Failure:
    """Put an error into words for other ranks."""
    if isinstance(error, P2PDilocoError):
        return Failure(str(error), getattr(error, "hint", ""), stopped)
    return Failure(f"rank 0 of this program failed: {type(error).__name__}: {first_line(error)}", "", stopped)


def hold(parameters: ProgramParameters, ranks: Ranks) -> HeldParameters:
    """Hold a program's parameters as its ranks have them: copies, or shares.

    Raises:
        UserError: they are cut up in a way that is not known here.
    """
    if not isinstance(ranks, Distributed):
        return parameters
    found = parameters.parameters
    if not any(map(is_shared_out, found.values())):
        return HeldCopies(found, ranks)
    _check_shares(found, [ranks.named(rank) for rank in range(ranks.count)])
    ranks.shard()
    return HeldShares(found, ranks)


def global_loss(ranks: Ranks, fragments: Fragments, parameters: ProgramParameters, measure: Now) -> float:
    """Measure the global parameters in the program's model, in all ranks, as rank 0: the mean of what they
    find. The model has its own again afterwards.

    Raises:
        UserError: it failed in another rank. What it raises in this one is passed on.
    """
    ranks.order("aside")
    fragments.held.set_aside()
    try:
        for fragment in range(len(fragments)):
            fragments.reset_to_base(fragment)
        parameters.settle()
        ranks.order("evaluate")
        return measured(ranks, measure)
    finally:
        ranks.order("back")
        parameters.look()
        fragments.held.bring_back()


def measured(ranks: Ranks, measure: Now) -> float:
    """Measure the model as it is, in all ranks: the mean of what they find. Raises: UserError (it failed in
    another rank); what it raises in this one is passed on."""
    if not isinstance(ranks, Distributed):
        return float(measure())
    loss, failed = math.nan, None
    try:
        loss = float(measure())
    except Exception as error:  # noqa: BLE001 (raised below, when the other ranks know)
        failed = error
    found = ranks.gather(failed is not None, loss)
    if failed is not None:
        raise failed
    for rank, (has_failed, _) in enumerate(found):
        if has_failed:
            raise UserError(f"evaluate failed in rank {rank} of this program", "its own words say why")
    return sum(loss for _, loss in found) / len(found)


class Role(Protocol):
    """Part of one rank in a session."""

    stopped: bool
    """True: later calls do nothing."""

    @property
    def parameters(self) -> ProgramParameters:
        """The program's parameters."""

    def part(self) -> None:
        """Go on without the other ranks, to the session's end."""


class ProgramRanks:
    """Ranks of a session, as one of them sees them; in a program of one process there is nobody else."""

    def __init__(self, ranks: Ranks, role: Role) -> None:
        self._ranks, self._role = ranks, role
        self._gone: UserError | None = None
        """Error of a rank that is gone."""

    def few(self) -> list[float]:
        """Copy a few elements of the parameters, by which ranks are compared: none, if this one is alone."""
        return self._role.parameters.few() if self._ranks.count > 1 else []

    def meet(self, call: str, say: Callable[[], Sequence[float]]) -> list[Sequence[float]]:
        """Meet in a call, as `meet` does. Raises: UserError (also that a rank is gone)."""
        if self._gone is not None and call == "Session.step":
            raise self._gone
        try:
            return meet(self._ranks, call, say, lambda: self._role.stopped)
        except SessionOver:
            self.part()
            raise
        except RankLost as error:
            raise self._lose(error) from error

    def call(self, do: Callable[[], CallAnswer]) -> CallAnswer:
        """Do this rank's part of a call. The first one's answer, or error, is that of all."""
        try:
            answer = do()
            self._ranks.tell("answer", answer)
            return answer
        except RankLost as error:
            raise self._lose(error) from error
        except BaseException as error:
            with suppress(RankLost):
                self._ranks.tell("fail", failure(error, self._role.stopped))
            raise

    def part(self) -> None:
        """Go on without the others, if there are any."""
        if self._ranks.count > 1:
            self._ranks = ALONE
            self._role.part()

    def _lose(self, error: RankLost) -> UserError:
        self._gone = UserError(
            "another process of this program is gone, or does not answer",
            "its own words say why; start all of them again",
        )
        self.part()
        return self._gone


class FollowingRank:
    """Part of every rank but the first in a session: it obeys orders in every call."""

    def __init__(
        self,
        ranks: Distributed,
        model: nn.Module,
        optimizer: HasGroups | None,
        evaluate: Now | None,
    ) -> None:
        """Take the ranks, which have met, and what this one's `Session` was given."""
        self._ranks = ranks
        self._model, self._optimizer, self._evaluate = model, optimizer, evaluate
        self.parameters: ProgramParameters
        self._held: HeldParameters
        self._layouts: tuple[FragmentLayout, ...] = ()
        self.stopped = False
        """True: later calls do nothing."""
        self.addresses: tuple[str, ...] = ()
        """Addresses of the node when the session began."""

    def begin(self, *_: object) -> CallAnswer:
        """Begin as rank 0 does. Raises: UserError, RankLost."""
        answer = self._obey()
        self.addresses = answer.addresses
        return answer

    def step(self, tokens: int, mean: float) -> CallAnswer:
        """Do this rank's part of a boundary. Raises: UserError, RankLost."""
        return self._obey()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Context in which nothing is asked of this rank."""
        return contextlib.nullcontext()

    def look(self, stepped: bool = False) -> None:
        """Look the parameters up as they are now. Raises: UserError."""
        self.parameters.look()

    def leave(self) -> CallAnswer:
        """Help the first rank to leave. Raises: UserError, RankLost."""
        return self._obey()

    def part(self) -> None:
        """Obey no more."""
        self.stopped = True

    def end(self) -> None:
        """End, after `leave`, or without it."""
        self.stopped = True

    def _obey(self) -> CallAnswer:
        """Obey orders until rank 0 has an answer.

        Raises:
            UserError: rank 0 has an error.
            RankLost: it is gone.
        """
        failed: Exception | None = None
        while (told := self._ranks.next_order()).kind != "fail":
            if told.kind == "answer":
                answer = _answer_of(self._ranks.pass_on(b"", told.number))
                self.stopped = answer.stopped
                return answer
            if told.kind == "evaluate":
                assert self._evaluate is not None
                try:
                    measured(self._ranks, self._evaluate)
                except Exception as error:  # noqa: BLE001 (raised below, when rank 0 ends the call)
                    failed = error
            else:
                self._help(told.kind, told.number)
        said = _failure_of(self._ranks.pass_on(b"", told.number))
        self.stopped = said.stopped
        raise failed or UserError(said.sentence, said.hint)

    def _help(self, kind: str, number: int) -> None:
        match kind:
            case "plan":
                self._take_plan(_plan_of(self._ranks.pass_on(b"", number)))
            case "put":
                self._held.put(self._layouts[number])
                self.parameters.settle()
            case "take":
                self._held.take(self._layouts[number])
            case "aside":
                self._held.set_aside()
            case "back":
                self.parameters.look()
                self._held.bring_back()
            case "wait" | "moments":  # it is alive; moments are the program's
                pass
            case _:
                invariant(False, f"{kind} is no order for a program's rank")

    def _take_plan(self, plan: RunPlan) -> None:
        self._layouts = plan.layouts
        constants = unpacked(plan.constants)
        self.parameters = ProgramParameters(self._model, plan.names, self._optimizer, constants)
        self._held = hold(self.parameters, self._ranks)


class ProgramTraining(TrainingCounts):
    """Training of the program's own loop, as mailbox and checkpoints ask for it."""

    def __init__(
        self, section: InnerSection, model: nn.Module, groups: list[Values], ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.section, self.model, self.ranks = section, model, ranks
        # Its moments are the program's to save: none are kept here.
        self.optimizer = SimpleNamespace(kind=OWN_LOOP, param_groups=groups, state={})
        self.skipped_steps = 0
        # The program's data are its own: it is told of no share.
        self.stream = SimpleNamespace(shared=None, share=lambda share: None, save_place=lambda: None)

    def take_notes(self) -> list[str]:
        """List remarks for a person: none."""
        return []


class ProgramMailbox(Mailbox):
    """Mailbox of a program's loop."""

    def __init__(
        self,
        channel: LearnerEnd,
        fragments: Fragments,
        parameters: ProgramParameters,
        training: ProgramTraining,
        start: Start,
        moves: MoveWatch,
        measure: Now | None,
    ) -> None:
        """`moves` hears of every install; `measure` gives the model's loss on held-out data."""
        super().__init__(
            channel,
            cast(Training, training),
            fragments,
            (),
            lambda: training.model,
            start.options.status_interval_s,
        )
        self.follow(start.course)
        self.spare(start.spare)
        self._parameters, self._moves, self._measure = parameters, moves, measure
        self.moved = False
        """True: installs have moved parameters since `begin_step`."""
        self._told_not_finite = False

    @property
    def let_go(self) -> bool:
        """True: the run has ended, and all that the program made is merged."""
        return self._rests == "ended" and self._fragments.all_merged

    def begin_step(self) -> None:
        """Begin a boundary, at which nothing has moved parameters yet."""
        self.moved = False

    def _obey(self, command: AnyCommand) -> None:
        if isinstance(command, FreeSlot) and command.not_finite and not self._told_not_finite:
            self._told_not_finite = True
            name = self._fragments.not_finite(command.fragment) or "a parameter"
            words = f"{name} has values that are not finite (NaN or infinity): what is made there is kept out"
            print(f"p2pdiloco: {words} of the run until they are", file=sys.stderr, flush=True)
        if not isinstance(command, Install):
            super()._obey(command)
            return
        before = self._moves.sample(command.fragment)
        super()._obey(command)
        self._parameters.settle()
        self._moves.moved(command.fragment, before)
        self.moved = True

    def _evaluate(self) -> Evaluation | None:
        """In the program's model, which has its own parameters again afterwards."""
        if self._measure is None:
            return None
        ranks = self._training.ranks
        return Evaluation(global_loss(ranks, self._fragments, self._parameters, self._measure), 0, {})

    def part(self) -> None:
        """Talk to other ranks no more: this one's parameters are those that count. It must have them all."""
        self._training.ranks = ALONE
        self._fragments.hold(self._parameters)

    def attend(self, timeout_s: float) -> None:
        """Wait so long for commands, and obey them; other ranks hear that this one lives."""
        super().attend(timeout_s)
        self._training.ranks.order("wait")

    def _save(self, path: Path, last: bool = False) -> None:
        """A daemon that does not wait for it is gone."""
        with suppress(ChannelBroken):
            super()._save(path, last)
