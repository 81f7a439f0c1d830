"""The comparisons of the learning benchmark: named lists of settings, each held against one of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from p2pdiloco.config.presets import EQUALS, FEW_STEPS, USUAL, OuterRule, momentum_warmup, rule_for
from study.setting import Setting

replace = msgspec.structs.replace
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
BETAS = (0.9, 0.8, 0.7, 0.6)
MODEL_RATE = {
    "mini": 3e-3,
    "mini-moe": 3e-3,
    "nano": 3e-3,
    "tiny": 1.5e-3,
    "mid": 1e-3,
    "glyphs": 2e-3,
    "glyphs-cnn": 2e-3,
}
MUON_TIMES = 2
"""Factor of a swarm's rate with Muon."""
ORACLE_RATE = 0.7
ORACLE_MOMENTUM = 0.9
"""Momentum of oracles in long runs: with 1.2 and 0.8 it ended 0.7 % higher (one seed)."""
MUON_MOMENTUM, PARALLEL_MUON_MOMENTUM = 0.85, 0.9
"""Momenta of the inner Muon: with the first a swarm ended lowest, with the second data parallel."""
PARALLEL_RATES = (2, 1, 4)
"""Times the model's rate. For `mini` the first was the best of 700 inner steps, the last of 2800."""
SWARM_RATES = (1, 2)
"""Rates of swarms and of the oracle: the first was the best of long runs, the second of short ones."""


class Case(Struct, frozen=True):
    """One row of a table."""

    name: str
    setting: Setting


Suite = Callable[[Setting], list[Case]]
"""The rows of one seed; the first is what the others are compared with."""


def parallel(base: Setting) -> Setting:
    """The data-parallel process of the same model, learners, tokens and seed; nothing else matters to it."""
    return Setting(
        kind="parallel",
        model=base.model,
        learners=base.learners,
        steps=base.steps,
        seed=base.seed,
        inner_rate=base.inner_rate,
        optimizer=base.optimizer,
        beta1=base.beta1,
        muon_momentum=PARALLEL_MUON_MOMENTUM if base.optimizer == "muon" else base.muon_momentum,
        precision=base.precision,
        tokens_per_step=base.tokens_per_step,
        warmup=base.warmup,
    )


def of_optimizer(base: Setting, name: str) -> Setting:
    """Change a setting to that inner optimizer, as a swarm's is set."""
    momentum = MUON_MOMENTUM if name == "muon" else Setting().muon_momentum
    return replace(base, optimizer=name, muon_momentum=momentum)


def usual_rate(model: str, optimizer: str) -> float:
    """The best of long runs, where it is known; else 0."""
    return MODEL_RATE.get(model, 0.0) * (MUON_TIMES if optimizer == "muon" else 1)


def oracle(base: Setting) -> Setting:
    """The synchronous DiLoCo of the same H, with the outer rate and momentum that are its best."""
    return replace(
        parallel(base),
        kind="oracle",
        muon_momentum=base.muon_momentum,
        inner_steps=base.inner_steps,
        outer_rate=ORACLE_RATE,
        momentum=ORACLE_MOMENTUM if base.steps > FEW_STEPS else base.momentum,
        momentum_warmup=base.momentum_warmup,
    )


def every(base: Setting, inner_steps: int) -> Setting:
    """Change a setting to this H, and the outer step that belongs to it."""
    warmup = momentum_warmup(base.steps // inner_steps)
    rule = rule_for(base.steps, base.learners, inner_steps)
    return by(replace(base, inner_steps=inner_steps, momentum_warmup=warmup), rule)


def by(base: Setting, rule: OuterRule) -> Setting:
    """Change a setting to that outer step."""
    return replace(base, outer_rate=rule.learning_rate, momentum=rule.momentum, merge=rule.merge)


def parity(base: Setting) -> list[Case]:
    """Figure 1: data parallel, oracle, swarm."""
    cases = _alone(base)
    for period in (24, 100):
        found = _swarms(every(base, period))
        usual = found[1]
        cases += [*found, Case(f"{usual.name}, e3m0", replace(usual.setting, codec="e3m0"))]
    return cases


def _swarms(base: Setting) -> list[Case]:
    """Oracle and swarm at several rates."""
    rate, cases = base.inner_rate or base.manifest().inner.learning_rate, []
    for times in SWARM_RATES:
        swarm = replace(base, inner_rate=rate * times)
        words = f"H = {base.inner_steps}, {swarm.inner_rate:g}"
        cases += [Case(f"oracle, {words}", oracle(swarm)), Case(f"swarm, {words}", swarm)]
    return cases


def _alone(base: Setting) -> list[Case]:
    """Data parallel at several rates."""
    rate = base.inner_rate or base.manifest().inner.learning_rate
    tried = [replace(parallel(base), inner_rate=rate * times) for times in PARALLEL_RATES]
    return [Case(f"data parallel, {one.inner_rate:g}", one) for one in tried]


def rates(base: Setting) -> list[Case]:
    """Inner learning rates: what data parallel and swarm do best with."""
    tried = [replace(base, inner_rate=rate) for rate in RATES]
    return [Case(f"data parallel, {one.inner_rate:g}", parallel(one)) for one in tried] + [
        Case(f"swarm, {one.inner_rate:g}", one) for one in tried
    ]


def betas(base: Setting) -> list[Case]:
    """Vary how long the inner AdamW remembers gradients: what data parallel and swarm do best with."""
    tried = [replace(base, beta1=beta1) for beta1 in BETAS]
    return [Case(f"data parallel, beta1 {one.beta1:g}", parallel(one)) for one in tried] + [
        Case(f"swarm, beta1 {one.beta1:g}", one) for one in tried
    ]


def outer(base: Setting) -> list[Case]:
    """Outer learning rate, momentum, and its warm-up; H is the base's."""
    merges = base.steps / base.inner_steps
    middle = momentum_warmup(round(merges))
    tried = [
        (OuterRule(0.5, 0.9, "rda"), warm) for warm in sorted({0, round(merges / 3), middle, round(merges)})
    ]
    others = [(0.35, 0.9), (0.7, 0.9), (1.0, 0.9), (0.5, 0.8), (0.7, 0.8), (0.9, 0.8)]
    tried += [(OuterRule(*numbers, "rda"), middle) for numbers in others]
    tried += [
        (OuterRule(*numbers, "mean"), middle) for numbers in ((1.0, 0.8), (1.2, 0.8), (1.5, 0.8), (1.2, 0.9))
    ]
    return [Case("data parallel", parallel(base))] + [
        Case(
            f"H = {base.inner_steps}: {rule.merge} {rule.learning_rate:g} / {rule.momentum:g}, over {warm}",
            replace(by(base, rule), momentum_warmup=warm),
        )
        for rule, warm in tried
    ]


def causes(base: Setting) -> list[Case]:
    """Search for what makes a swarm worse than synchronous DiLoCo: one thing after the other is made as
    there."""
    one = replace(base, delay=0.0)
    return [
        Case("oracle", oracle(base)),
        Case("swarm", base),
        Case("no delay", one),
        Case("plain mean", replace(base, merge="mean")),
        Case("plain mean, no delay", replace(one, merge="mean")),
        Case("one fragment", replace(base, fragments=1)),
        Case("fp32", replace(base, codec="fp32")),
        Case(f"plain mean, outer rate {EQUALS.learning_rate:g}", by(base, EQUALS)),
        Case("momentum 0.9", replace(base, momentum=0.9)),
    ]


def codecs(base: Setting) -> list[Case]:
    """Codecs of both directions, with error feedback and without."""
    rows = [("fp32", "as-is"), ("int8", "off"), ("int8", "on"), ("int4", "on"), ("int4", "off")]
    rows += [("e3m0", "on"), ("e3m0", "off"), ("topk", "on")]
    words = {"as-is": "", "on": ", feedback", "off": ", no feedback"}
    return [Case(f"{name}{words[how]}", replace(base, codec=name, feedback=how)) for name, how in rows]


def in_flight(base: Setting) -> list[Case]:
    """Keep or overwrite what was trained while a contribution was under way, after various delays."""
    return [
        Case(f"delay {delay:g}, rho = {keep:g}", replace(base, delay=delay, keep=keep))
        for delay in (0.5, 2.0, 4.0)
        for keep in (1.0, 0.5, 0.0)
    ]


def merging(base: Setting) -> list[Case]:
    """Radial-directional averaging against the plain mean, each with a rate of its own, at several sizes of
    the swarm."""
    return [
        Case(f"{count} learners, {rule.merge}", by(replace(base, learners=count), rule))
        for count in (1, 2, 4, 8)
        for rule in (USUAL, EQUALS)
    ]


def speeds(base: Setting) -> list[Case]:
    """Slow learners among others, no two of which are equally fast, as equal ones would be in step for ever;
    and K = 1 with and without the grace window where speeds differ five times."""
    usual, spread = (1.0, 0.98, 0.96), (1.0, 0.8, 0.4, 0.2)
    three = replace(base, learners=3, speeds=usual)
    slow = replace(base, learners=4, speeds=(*usual, 0.2))
    many = replace(base, learners=8, speeds=(*usual, *[0.2] * 5))
    uneven = replace(base, learners=4, speeds=spread)
    return [
        Case("three learners", three),
        Case("three, and one five times slower", slow),
        Case("three, and five that are five times slower", many),
        Case("three and one, calls answered at boundaries", replace(slow, answers="boundary")),
        Case("four learners", replace(base, learners=4)),
        Case("speeds 1, 0.8, 0.4, 0.2", uneven),
        Case("the same, K = 1, no grace window", replace(uneven, grace=0.0)),
        Case("the same, K = 4, no grace window", replace(uneven, grace=0.0, quorum=4)),
        Case("equal speeds, K = 1, no grace window", replace(base, learners=4, grace=0.0)),
        Case("plain mean, speeds 1, 0.8, 0.4, 0.2", by(uneven, EQUALS)),
    ]


def shares(base: Setting) -> list[Case]:
    """One learner five times as fast as three others, with and without a limit of its share in merges."""
    fast = replace(base, learners=4, speeds=(1.0, 0.2, 0.197, 0.194))
    return [
        Case("one five times as fast, no share", replace(fast, largest_share=1.0)),
        Case("one five times as fast, half at most", replace(fast, largest_share=0.5)),
        Case("one five times as fast, a third at most", replace(fast, largest_share=1 / 3)),
    ]


def faults(base: Setting) -> list[Case]:
    """125 nodes killed an hour, whichever: in as much time, so with fewer tokens, and with as many."""
    hit = replace(base, faults_per_hour=125.0)
    return [
        Case("no faults", base),
        Case("125 an hour, moments from disk", hit),
        Case("the same, as many tokens", replace(hit, ends="tokens")),
        Case("125 an hour, fresh moments", replace(hit, moments="fresh")),
        Case("125 an hour, plain mean", by(hit, EQUALS)),
    ]


def alone(base: Setting) -> list[Case]:
    """One learner against plain AdamW (or Muon)."""
    one = every(replace(base, learners=1), base.inner_steps)
    return [
        Case("AdamW" if one.optimizer == "adamw" else "Muon", parallel(one)),
        Case("one learner", one),
        Case("one learner, H = 100", every(one, 100)),
    ]


def experts(base: Setting) -> list[Case]:
    """Mixture of experts."""
    return _against_parallel(
        replace(base, model="mini-moe", inner_rate=usual_rate("mini-moe", base.optimizer))
    )


def vision(base: Setting) -> list[Case]:
    """The vision transformer on images that are drawn here (`study.glyphs`)."""
    return _against_parallel(replace(base, model="glyphs", inner_rate=usual_rate("glyphs", base.optimizer)))


def _against_parallel(base: Setting) -> list[Case]:
    return [*_alone(base), *_swarms(base)]


def optimizers(base: Setting) -> list[Case]:
    """Muon as the inner optimizer, of data parallel and of swarms, against AdamW."""
    muon = of_optimizer(base, "muon")
    found = [
        Case(f"{swarm.optimizer}: {case.name}", case.setting)
        for swarm in (of_optimizer(base, "adamw"), muon)
        for case in _against_parallel(swarm)
    ]
    others = [replace(muon, muon_momentum=momentum) for momentum in (0.8, 0.9, 0.95)]
    return found + [Case(f"muon: swarm, momentum {one.muon_momentum:g}", one) for one in others]


def sizes(base: Setting) -> list[Case]:
    """More learners, each with its own tokens."""
    found = []
    for count in (1, 2, 4, 8, 16):
        swarm = replace(base, learners=count)
        found += [Case(f"{count}: data parallel", parallel(swarm)), Case(f"{count}: swarm", swarm)]
    return found


SUITES: dict[str, Suite] = {
    suite.__name__.replace("_", "-"): suite
    for suite in (
        parity,
        rates,
        betas,
        causes,
        outer,
        codecs,
        in_flight,
        merging,
        speeds,
        shares,
        faults,
        alone,
        experts,
        vision,
        optimizers,
        sizes,
    )
}


def settings_of(names: Sequence[str], base: Setting, seeds: Sequence[int]) -> list[Setting]:
    """List all runs of some suites, seed by seed, none twice."""
    found: dict[str, Setting] = {}
    for seed in seeds:
        for name in names:
            for case in SUITES[name](replace(base, seed=seed)):
                found.setdefault(case.setting.key, case.setting)
    return list(found.values())
