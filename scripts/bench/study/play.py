"""Runs one setting of the learning benchmark."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from p2pdiloco.learner.ranks import choose_device
from p2pdiloco.tensors.codecs import codec
from study.baselines import Work, data_parallel, oracle
from study.computing import CPU, Computing
from study.setting import Outcome, Setting
from study.virtual import Circumstances, Fault, Virtual

POINTS = 4
"""Points of a curve."""
LONGEST = 4
"""Times its steps, of a run that ends by tokens: deaths come for so long."""


def play(setting: Setting, heldout_tokens: int, device: torch.device = CPU) -> Outcome:
    """Equal settings give equal results on a CPU (but for the time that they took). `device`: of models;
    merges are the CPU's, as in production."""
    began, computing = time.process_time(), Computing(device, setting.precision == "bf16")
    manifest, every = setting.manifest(), max(1, setting.steps // POINTS)
    if setting.kind == "swarm":
        outcome = _swarm(setting, every, heldout_tokens, computing)
    else:
        baseline = {"parallel": data_parallel, "oracle": oracle}[setting.kind]
        curve = baseline(Work(manifest, setting.names, setting.steps, every, heldout_tokens, computing))
        tokens = setting.steps * setting.learners * manifest.inner.tokens_per_step
        outcome = Outcome(setting=setting, loss=curve[-1][1], curve=curve, tokens=tokens)
    outcome.cpu_s = time.process_time() - began
    return outcome


def play_line(line: bytes, heldout_tokens: int, device: str) -> bytes:
    """`play` in a process of its own, with one thread: setting and outcome as JSON."""
    torch.set_num_threads(1)
    setting = msgspec.json.decode(line, type=Setting)
    return msgspec.json.encode(play(setting, heldout_tokens, choose_device(device)))


def _swarm(setting: Setting, every: int, heldout_tokens: int, computing: Computing) -> Outcome:
    world = Circumstances(
        delay=setting.delay,
        grace=setting.grace,
        speeds=setting.speeds,
        largest_share=setting.largest_share,
        faults=tuple(faults_of(setting)),
        at_once=setting.answers == "at-once",
        fresh_moments=setting.moments == "fresh",
        seed=setting.seed,
    )
    with _feedback(setting):
        swarm = Virtual(setting.manifest(), setting.learners, world, heldout_tokens, computing)
        try:
            tokens = swarm.manifest.inner.schedule_tokens if setting.ends == "tokens" else 0
            curve = swarm.play(setting.steps, every, tokens)
        finally:
            swarm.close()
    return Outcome(
        setting=setting,
        loss=curve[-1][1],
        curve=curve,
        merges=swarm.merges / len(swarm.layouts),
        contributors=swarm.contributions / max(1, swarm.merges),
        tokens=swarm.tokens,
    )


def faults_of(setting: Setting) -> Iterator[Fault]:
    """Poisson, of any learner, away for half to one and a half times the mean."""
    if not setting.faults_per_hour:
        return
    rng, at = random.Random(setting.seed), 0.0
    end = setting.steps * (LONGEST if setting.ends == "tokens" else 1)
    while (at := at + rng.expovariate(setting.faults_per_hour / 3600 * setting.step_s)) < end:
        away = rng.uniform(0.5, 1.5) * setting.away_s / setting.step_s
        yield Fault(at, rng.randrange(setting.learners), away)


@contextmanager
def _feedback(setting: Setting) -> Iterator[None]:
    """Error feedback as the setting says, for as long as its swarm is made and played."""
    chosen = codec(setting.codec)
    usual = chosen.feedback
    try:
        if setting.feedback != "as-is":
            chosen.feedback = setting.feedback == "on"
        yield
    finally:
        chosen.feedback = usual
