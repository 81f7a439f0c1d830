"""Mailbox and training of a program's own loop, as a learner process has them; task, data, moments and
checkpoints are the program's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from p2pdiloco.config.manifest import InnerSection
from p2pdiloco.learner.channel import ChannelBroken, LearnerEnd
from p2pdiloco.learner.channel_messages import AnyCommand, FreeSlot, Install, Start
from p2pdiloco.learner.counts import TrainingCounts
from p2pdiloco.learner.evaluate import Evaluation
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.loop import Training
from p2pdiloco.learner.mailbox import Mailbox
from p2pdiloco.learner.parallel.ranks import ALONE, Ranks
from p2pdiloco.learner.program.keeping import Keeping
from p2pdiloco.learner.program.parameters import ProgramParameters
from p2pdiloco.learner.program.ranks import global_loss
from p2pdiloco.tasks.own_tasks import NAME


class ProgramTraining(TrainingCounts):
    """Training of the program's own loop, as mailbox and checkpoints ask for it."""

    def __init__(
        self, section: InnerSection, model: nn.Module, groups: list[dict[str, Any]], ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.section, self.model, self.ranks = section, model, ranks
        # Its moments are the program's to save: none are kept here.
        self.optimizer = SimpleNamespace(kind=NAME, param_groups=groups, state={})
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
        keeping: Keeping,
        measure: Callable[[], float] | None,
    ) -> None:
        """`keeping` hears of every install; `measure` gives the model's loss on held-out data."""
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
        self._parameters, self._keeping, self._measure = parameters, keeping, measure
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
        before = self._keeping.sample(command.fragment)
        super()._obey(command)
        self._parameters.settle()
        self._keeping.moved(command.fragment, before)
        self.moved = True

    def _evaluate(self) -> Evaluation | None:
        """Measure the global parameters in the program's model, which has its own again afterwards."""
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
        """Save what is unmerged at an orderly end. A daemon that does not wait for it is gone."""
        with contextlib.suppress(ChannelBroken):
            super()._save(path, last)
