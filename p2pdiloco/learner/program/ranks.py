"""Ranks of a program that trains in several processes (DDP, accelerate, FSDP2): they are one learner.

Every rank makes the same calls of its `Session`. In each the ranks first *meet*: what every rank says is
gathered, so that a mistake of one is an error of all, with one sentence. Then rank 0, which has daemon and
channel, leads: it does what the daemon wants, and the others obey its orders (`learner.parallel.ranks.Order`)
until it gives an answer, the same for all, or an error.

All of it goes over the program's own process group, in the order of the program's calls. A rank that dies
breaks its connections (gloo), or the group's time-out ends the wait for it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn

from p2pdiloco.errors import P2PDilocoError, UserError, first_line
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.parallel.holding import HeldCopies, HeldParameters, HeldShares
from p2pdiloco.learner.parallel.ranks import ALONE, Distributed, RankLost, Ranks
from p2pdiloco.learner.parallel.sharding import is_shared_out
from p2pdiloco.learner.program.parameters import FEW, ProgramParameters
from p2pdiloco.tasks.description import listed, persistent_buffers
from p2pdiloco.tasks.initial import plain_parameters
from p2pdiloco.tasks.task import Constant
from p2pdiloco.tensors.layout import FragmentLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CALLS = ("Session", "Session.step", "Session.close")
WORDS = 2 + FEW * FEW
"""Numbers that a rank says in a call, at most."""
APART = 1e-4
"""Difference between copies, as a share of them, that is no rounding."""
DIGEST_BYTES = 6
"""Bytes of the digest by which ranks compare their models: as many as a word (float64) holds exactly."""
_encode = msgspec.msgpack.encode


class CallAnswer(Struct, frozen=True):
    """CallAnswer of rank 0 to a call, for all ranks."""

    goes_on: bool
    stopped: bool
    merged: bool
    inner_step: int
    run_tokens: int
    schedule_tokens: int
    addresses: tuple[str, ...] = ()
    """Addresses of the node, told once, when the session begins."""


class Failure(Struct, frozen=True):
    """Error of one rank, which ends the call in all."""

    sentence: str
    hint: str
    stopped: bool = False
    """True: later calls do nothing."""


class SessionOver(UserError):
    """Error that ends the session in all ranks: in one of them it has ended already."""


class RunPlan(Struct, frozen=True):
    """Parameters of the run, its fragments, and the constants of its model."""

    names: tuple[str, ...]
    layouts: tuple[FragmentLayout, ...]
    constants: tuple[tuple[Constant, bytes], ...] = ()


def packed(constants: Mapping[str, Tensor]) -> tuple[tuple[Constant, bytes], ...]:
    """Pack constants for other ranks."""
    values = (value.numpy().tobytes() for value in constants.values())
    return tuple(zip(listed(constants), values, strict=True))


def unpacked(constants: Sequence[tuple[Constant, bytes]]) -> dict[str, Tensor]:
    """Unpack what `packed` made."""
    return {
        constant.name: torch.from_numpy(np.frombuffer(data, constant.kind).copy()).view(constant.shape)
        for constant, data in constants
    }


_failure_of = msgspec.msgpack.Decoder(Failure).decode


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
    """Find what carries tensors in a group, by the kind of device that they are on."""
    words = torch.distributed.get_backend_config(group).split(",")
    return dict(word.split(":") for word in words)


def _check_shares(parameters: Mapping[str, Tensor], ranks: Sequence[int]) -> None:
    """Check that every parameter is cut by rows over these ranks. Raises: UserError."""
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


def global_loss(
    ranks: Ranks, fragments: Fragments, parameters: ProgramParameters, measure: Callable[[], float]
) -> float:
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


def measured(ranks: Ranks, measure: Callable[[], float]) -> float:
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
            with contextlib.suppress(RankLost):
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
