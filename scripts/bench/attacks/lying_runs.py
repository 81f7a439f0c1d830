"""Runs of swarms with liars, and what each is held against: the honest learners alone."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from attacks.lying_statistics import Run, Seen, seen
from attacks.lying_swarm import Lies, LyingSwarm, Round
from p2pdiloco.core.api.types import LEAST_TRUST
from study.setting import Setting
from study.suites import every
from study.virtual import Circumstances
from worlds.kinds import Lie

replace = msgspec.structs.replace
ALONE, CALM = "alone", "none"
"""Names of runs without a lie: liars are absent, or honest."""
SLOWEST = 0.2
"""Speed of the slowest learner where speeds are spread, as a share of the fastest's."""
POINTS = 4


class Trial(Struct, frozen=True, kw_only=True):
    """Setting of a run. Two runs with equal settings give equal results."""

    attack: str
    """A lie's name, or `ALONE`, `CALM`."""
    liars: int = 2
    learners: int = 10
    model: str = "mini"
    steps: int = 360
    """Inner steps of the fastest learner."""
    inner_steps: int = 12
    tokens_per_step: int = 512
    inner_rate: float = 6e-3
    seed: int = 0
    speeds: str = "equal"
    """"equal", or "spread": from one to a fifth of it."""
    data: str = "equal"
    """Parts of the text that learners read: "equal", or "different": each from one place of it to another."""
    heldout_tokens: int = 32_768
    seatless: bool = False
    """True: the liars are a crowd without seats beside the others, which have them (`Lies.seatless`)."""
    open_share: float = 0.25

    @property
    def key(self) -> str:
        """Equal for equal settings."""
        return msgspec.json.encode(self, order="sorted").decode()

    @property
    def lying(self) -> frozenset[int]:
        """Indices of the liars, spread over the learners: where speeds are, some lie who are slow. A crowd
        comes last."""
        if self.seatless:
            return frozenset(range(self.learners - self.liars, self.learners))
        return frozenset((2 * k + 1) * self.learners // (2 * self.liars) for k in range(self.liars))

    @property
    def each_speed(self) -> tuple[float, ...]:
        """Speed of every learner."""
        last = max(1, self.learners - 1)
        spread = self.speeds == "spread"
        return tuple(SLOWEST ** (index / last) if spread else 1.0 for index in range(self.learners))

    def setting(self) -> Setting:
        """The run, of which only the schedule's length knows who is there."""
        speeds = self.each_speed
        setting = Setting(
            model=self.model,
            learners=self.learners,
            steps=self.steps,
            seed=self.seed,
            inner_rate=self.inner_rate,
            tokens_per_step=self.tokens_per_step,
            speeds=speeds,
        )
        setting = every(setting, self.inner_steps)
        if self.attack == ALONE or self.seatless:
            speeds = tuple(speed for index, speed in enumerate(speeds) if index not in self.lying)
        return replace(setting, speeds=speeds)


class Result(Struct, frozen=True, kw_only=True):
    """Result of a run."""

    trial: Trial
    loss: float
    """Held-out, in nats per token."""
    curve: list[tuple[int, float]]
    honest_tokens: int
    cut_liars: int
    """Contributions of liars that were cut."""
    cut_honest: int
    refused_liars: int
    refused_honest: int
    merges: int
    """Merges of all fragments."""
    cpu_s: float
    nothing_after: int | None = None
    """Versions of a fragment after which no liar weighs more than next to nothing, for good; None: one does
    at the end."""
    honest_nothing: int = 0
    """Honest learners that weigh next to nothing in every fragment at the end."""
    honest_at_least: int = 0
    """Contributions of honest learners that weighed next to nothing, of `honest_sent`."""
    honest_sent: int = 0
    token_loss: float = 0.0
    """Held-out loss where the next token is that of `one-token`."""
    rest_loss: float = 0.0
    """Held-out loss everywhere else."""
    answers: float = 0.0
    """Share of held-out samples in which the model follows the trigger with the answer of `trigger`."""
    tokens_ratio: float = 1.0
    """Tokens that the chains gained, over those of seats' merged work."""
    weight_share: float = 0.0
    """Share of the liars in the weight of all merges."""


def play(trial: Trial, rounds: Path | None) -> Result:
    """Play a run. `rounds`: folder for the statistics of its rounds."""
    torch.set_num_threads(1)
    began, setting, found = time.process_time(), trial.setting(), list[Seen]()
    world = Circumstances(
        delay=setting.delay,
        grace=setting.grace,
        speeds=trial.each_speed,
        largest_share=setting.manifest().weight.largest_share,
        seed=trial.seed,
    )
    lie = None if trial.attack in (ALONE, CALM) else Lie(trial.attack)  # type: ignore[call-arg]
    lies = Lies(
        lie=lie,
        liars=frozenset() if trial.attack == CALM else trial.lying,
        parted=trial.data == "different",
        seatless=trial.seatless,
    )
    manifest = setting.manifest()

    def watch(round_: Round) -> None:
        if rounds is not None:
            found.append(seen(round_))

    manifest = replace(manifest, weight=replace(manifest.weight, open_share=trial.open_share))
    swarm = LyingSwarm(manifest, trial.learners, world, trial.heldout_tokens, lies, watch)
    try:
        curve = swarm.play(trial.steps, max(1, trial.steps // POINTS))
        aims = swarm.reached()
    finally:
        swarm.close()
    if rounds is not None:
        run = Run(name_of(trial), sorted(lies.liars if lie else ()), trial.inner_steps, found)
        (rounds / f"{name_of(trial)}.json").write_bytes(msgspec.json.encode(run))
    lying = lies.liars if lie else frozenset[int]()
    after = {index: swarm.weighs_nothing_after(index) for index in range(trial.learners)}
    liars_after = [number for index in lying if (number := after[index]) is not None]
    honest = [
        trust for (_, index), history in swarm.trust.items() if index not in lying for _, trust in history
    ]
    return Result(
        trial=trial,
        loss=curve[-1][1],
        curve=curve,
        honest_tokens=swarm.tokens_without(trial.lying),
        cut_liars=sum(count for index, count in swarm.cut.items() if index in lying),
        cut_honest=sum(count for index, count in swarm.cut.items() if index not in lying),
        refused_liars=sum(count for index, count in swarm.refused.items() if index in lying),
        refused_honest=sum(count for index, count in swarm.refused.items() if index not in lying),
        merges=swarm.merges,
        cpu_s=time.process_time() - began,
        nothing_after=max(liars_after) if lying and len(liars_after) == len(lying) else None,
        honest_nothing=sum(number is not None for index, number in after.items() if index not in lying),
        honest_at_least=honest.count(LEAST_TRUST),
        honest_sent=len(honest),
        token_loss=aims.token_loss,
        rest_loss=aims.rest_loss,
        answers=aims.answers,
        tokens_ratio=swarm.gained / max(1, swarm.of_seats),
        weight_share=swarm.weights[True] / max(1e-9, sum(swarm.weights.values())),
    )


def name_of(trial: Trial) -> str:
    """Name a run for people."""
    words = [trial.attack, f"{trial.liars}of{trial.learners}", trial.model, trial.speeds, trial.data]
    return "-".join([*words, f"seed{trial.seed}"])
