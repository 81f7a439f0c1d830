"""A swarm in one process whose learners all step together: what a merge rule does to learning, and no more.

Learners, copy-out and install, codecs, error feedback, merges and outer steps are those of production. What
is missing is everything around them: rounds take a fixed number of inner steps, everybody takes part in each,
nothing is lost. So two runs that differ in one thing can be compared, and a run costs what its inner steps
cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.learner.channel import BaseRef, CopiedOut, Install, InstallMode, NothingToCopy
from p2pdiloco.learner.fragments import Fragments, first_due
from p2pdiloco.learner.loop import Training, evaluate, heldout_batch
from p2pdiloco.learner.optimizer import HeldParameters, moments, set_moments
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import Exchange, plan_fragments, scatter
from p2pdiloco.tensors.merge import Input
from p2pdiloco.tensors.vault import Vault
from study.computing import FP32, Computing
from study.data import acquainted, data_of

HELDOUT_TOKENS = 32_768


@dataclass(frozen=True)
class Absence:
    """A learner trains on and contributes nothing. What it contributed before still comes."""

    learner: int
    from_step: int
    steps: int

    def covers(self, learner: int, step: int) -> bool:
        """Tell whether that learner is away when it has made `step` inner steps."""
        return learner == self.learner and self.from_step <= step < self.from_step + self.steps


Moments = Literal["disk", "peer", "none"]


@dataclass(frozen=True)
class Restart:
    """A learner's node dies and is back at once, from the global parameters: what was unmerged is lost."""

    learner: int
    step: int
    moments: Moments
    """Moments of its inner optimizer after an absence: "disk", its own as they were `saved_steps` ago;
    "peer", those that the next learner has now; "none", so that they warm up again
    (`inner.fresh_warmup_steps`)."""
    saved_steps: int = 0


class Learner:
    """One learner and what its daemon would do for it."""

    def __init__(self, swarm: Lockstep, name: str) -> None:
        sync, model = swarm.manifest.sync, swarm.task.model().to(swarm.computing.device)
        self.training = swarm.training_of(name, model)
        self.exchange = Exchange.create(swarm.layouts)
        self._parameters = named_parameters(model)
        self._settings = sync.inner_steps, sync.keep_in_flight
        self._saved: dict[str, Tensor] = {}
        """Moments of its optimizer on the disk."""
        self.begin(swarm)

    def begin(self, swarm: Lockstep) -> None:
        """Begin from the global parameters, without a displacement: at first, and after its node's death."""
        self.vault, bases = swarm.vault(), []
        for layout in swarm.layouts:
            self.exchange.base(layout.index, 0).copy_(swarm.global_state.theta(layout.index))
            number = swarm.global_state.version(layout.index) or 0
            bases.append(BaseRef(number, 0))
        self.fragments = Fragments(
            HeldParameters(self._parameters), swarm.layouts, self.exchange, bases, *self._settings
        )
        self.fragments.scatter_bases(self._parameters)

    def restart(self, swarm: Lockstep, how: Moments, peer: Learner) -> None:
        """Begin anew, with such moments."""
        self.begin(swarm)
        if how == "none":
            self.training.optimizer.state.clear()
            self.training.optimizer_steps = 0
            return
        theirs = moments(peer.training.model, peer.training.optimizer)
        taken = self._saved if how == "disk" else theirs
        set_moments(self.training.model, self.training.optimizer, taken)

    def save(self) -> None:
        """Keep the moments as they are, for a restart."""
        found = moments(self.training.model, self.training.optimizer)
        self._saved = {name: tensor.clone() for name, tensor in found.items()}

    def step(self) -> int:
        """One inner step: its tokens."""
        tokens = self.training.step().tokens
        self.fragments.count_step(tokens)
        return tokens

    def install(self, fragment: int, number: int, theta: Tensor, merged: bool) -> None:
        """Go over to a version."""
        buffer = 1 - self.fragments.bases[fragment].buffer
        self.exchange.base(fragment, buffer).copy_(theta)
        if merged:
            self.vault.own.commit_residual(fragment)
        mode: InstallMode = "merged" if merged else "rebase"
        self.fragments.install(Install(fragment, number, buffer, mode))

    def contribution(self, fragment: int, step: int) -> Input | None:
        """Copied out and encoded; None while the last one is under way."""
        copied = self.fragments.copy_out(fragment, step)
        return None if isinstance(copied, NothingToCopy) else self.encoded(copied)

    def encoded(self, copied: CopiedOut) -> Input:
        """A copy as its syncer gets it."""
        base = self.exchange.base(copied.fragment, copied.base_buffer)
        encoded = self.vault.own.encode(copied.fragment, base, self.exchange.sent(copied.fragment))
        return Input(encoded.payload, copied.tokens, copied.inner_steps)


class Lockstep:
    """A run of so many learners. `close` gives its shared memory back."""

    def __init__(
        self,
        manifest: Manifest,
        learners: int,
        delay_steps: int = 0,
        names: str = "learner",
        heldout_tokens: int = HELDOUT_TOKENS,
        computing: Computing = FP32,
    ) -> None:
        """`delay_steps`: inner steps between a copy-out and the install of the version that merged it.

        `names`: learners of other names read other parts of the data."""
        self.manifest, self.computing, self._delay_steps = manifest, computing, delay_steps
        self.task = task_of(manifest)
        self.data = data_of(self.task)
        self.layouts = plan_fragments(self.task.specs(), manifest.sync.fragments)
        self.global_state = self.vault()
        self.global_state.load_initial(self.task.initial_parameters())
        self._learners = [Learner(self, f"{names}-{index}") for index in range(learners)]
        acquainted({f"{names}-{i}": learner.training.stream for i, learner in enumerate(self._learners)})
        self._evaluated = self.task.model().to(computing.device)
        self._heldout = heldout_batch(self.task, self.data.heldout, heldout_tokens)

    def training_of(self, name: str, model: nn.Module) -> Training:
        """Prepare a learner's training: all have the same task and data."""
        return self.computing.training(self.task, model, self.data.train, name)

    def vault(self) -> Vault:
        """An empty one of this run."""
        return Vault.of(self.manifest, self.layouts)

    def head(self, fragment: int) -> tuple[int, Tensor]:
        """The newest version: its number, Theta (read only, until the next)."""
        return self.global_state.version(fragment) or 0, self.global_state.theta(fragment)

    def close(self) -> None:
        """Give shared memory back."""
        for learner in self._learners:
            learner.exchange.close()

    def loss(self) -> float:
        """Held-out loss of the global parameters, as a run's result has them (text: nats per byte)."""
        into = named_parameters(self._evaluated)
        for layout in self.layouts:
            scatter(self.global_state.result(layout.index), layout, into)
        with self.computing.passes():
            return evaluate(self.task, self._evaluated, self._heldout).loss

    def run(
        self,
        steps: int,
        evaluate_every: int,
        absences: Sequence[Absence] = (),
        restarts: Sequence[Restart] = (),
    ) -> list[tuple[int, float]]:
        """Make so many inner steps: (inner step, held-out loss), every `evaluate_every` steps."""
        losses = []
        flying: list[tuple[int, int, list[Learner]]] = []
        period, count = self.manifest.sync.inner_steps, len(self.layouts)
        for step in range(1, steps + 1):
            for learner in self._learners:
                learner.step()
            total = sum(learner.training.tokens_total for learner in self._learners)
            for learner in self._learners:
                learner.training.run_is_at(total)
            for restart in restarts:
                self._restart(step, restart)
            away = {a.learner for a in absences if a.covers(a.learner, step)}
            here = [learner for index, learner in enumerate(self._learners) if index not in away]
            for fragment in range(count):
                if (step - first_due(fragment, count, period)) % period == 0:
                    merged = self._merge(fragment, step, here)
                    flying.append((step + self._delay_steps, fragment, merged))
            for due in [due for due in flying if due[0] <= step]:
                flying.remove(due)
                for learner in due[2]:
                    # A new process has no copy in flight: the version with the old one's is news to it.
                    in_flight = learner.fragments.counters[due[1]].slot_in_use
                    learner.install(due[1], *self.head(due[1]), merged=in_flight)
            if step % evaluate_every == 0:
                losses.append((step, self.loss()))
        return losses

    def _restart(self, step: int, restart: Restart) -> None:
        learner = self._learners[restart.learner]
        if step == restart.step - restart.saved_steps:
            learner.save()
        if step == restart.step:
            learner.restart(
                self, restart.moments, self._learners[(restart.learner + 1) % len(self._learners)]
            )

    def _merge(self, fragment: int, step: int, learners: Sequence[Learner]) -> list[Learner]:
        """A round of one fragment: who is in the version that it made."""
        inputs: list[Input] = []
        merged = []
        for learner in learners:
            if learner.fragments.counters[fragment].slot_in_use:
                continue
            if learner.fragments.bases[fragment].number != self.global_state.version(fragment):
                learner.install(fragment, *self.head(fragment), merged=False)
            contribution = learner.contribution(fragment, step)
            if contribution is not None:
                inputs.append(contribution)
                merged.append(learner)
        if inputs:
            number = (self.global_state.version(fragment) or 0) + 1
            self.global_state.merge(fragment, number, inputs)
            self.global_state.commit(fragment, number)
        return merged


def mean_loss(losses: Sequence[tuple[int, float]], share: float) -> float:
    """Mean over the last `share` of a run's steps."""
    since = losses[-1][0] * (1 - share)
    found = [loss for step, loss in losses if step > since]
    return float(torch.tensor(found, dtype=torch.float64).mean())
