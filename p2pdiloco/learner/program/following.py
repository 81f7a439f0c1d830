"""Part of every rank but the first in a program's session: rank 0's orders are obeyed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
from torch import nn

from p2pdiloco.errors import UserError, invariant
from p2pdiloco.learner.parallel.holding import HeldCopies, HeldShares
from p2pdiloco.learner.parallel.ranks import Distributed
from p2pdiloco.learner.program.parameters import HasGroups, ProgramParameters
from p2pdiloco.learner.program.ranks import CallAnswer, Failure, RunPlan, hold, measured, unpacked
from p2pdiloco.tensors.layout import FragmentLayout

_answer_of = msgspec.msgpack.Decoder(CallAnswer).decode
_failure_of = msgspec.msgpack.Decoder(Failure).decode
_plan_of = msgspec.msgpack.Decoder(RunPlan).decode


class FollowingRank:
    """Part of every rank but the first in a session: it obeys orders in every call."""

    def __init__(
        self,
        ranks: Distributed,
        model: nn.Module,
        optimizer: HasGroups | None,
        evaluate: Callable[[], float] | None,
    ) -> None:
        """Take the ranks, which have met, and what this one's `Session` was given."""
        self._ranks = ranks
        self._model, self._optimizer, self._evaluate = model, optimizer, evaluate
        self.parameters: ProgramParameters
        self._held: HeldCopies | HeldShares
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
                assert isinstance(self._held, HeldShares)
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
        held = hold(self.parameters, self._ranks)
        assert isinstance(held, HeldCopies | HeldShares)
        self._held = held
