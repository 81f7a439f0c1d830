"""Runs to start from. Each is a whole, valid `Manifest` named after itself; `for_run` gives it a name.

    micro      some 35 thousand parameters: tests and benchmarks
    tiny       about 1 M: learns visibly within two minutes on two CPU cores (the demo)
    tiny-moe   the same blocks with four experts each, of which a token uses two
    small      about 10 M: one small GPU, or patience
    gpt2       as large as GPT-2 small: 124 M with its vocabulary (`run new` fits it to the run's tokenizer)
    350m       like GPT-2 medium in size
    1.3b       the largest
    digits     some 100 thousand: a vision transformer for scikit-learn's digits (needs the extra `vision`)
    digits-cnn the same with convolutions

All but the last two are of the task causal-lm, transformers in Llama's form.

Schedules are in tokens of the whole run. The outer step's numbers follow from the number of merges that a
schedule is long with `LEARNERS` learners, as in `run check` where nobody says how many. Before the presets
come the tables that they are made with: inner rates for models that exist, and the outer step by length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from p2pdiloco.config.manifest import (
    BYTE_VALUES,
    BYTES,
    CausalLMSection,
    DataSection,
    EndSection,
    GroupSection,
    ImageSection,
    InnerSection,
    Manifest,
    ModelSection,
    OuterSection,
    RunSection,
    Section,
    SyncSection,
    table,
    vocabulary_for,
)
from p2pdiloco.config.values import is_whole
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.util import Frozen

# Inner learning rates for models that exist: by number of parameters and by kind of training.

FINETUNE, CONTINUE, ADAPTER = "finetune", "continue", "adapter"
KINDS = FINETUNE, CONTINUE, ADAPTER
"""Kinds of training: short, on few data; long further training of all parameters, on many; of added
low-rank matrices only."""
VERBS = {FINETUNE: "fine-tune", CONTINUE: "train on", ADAPTER: "train adapters of"}
TOO_LARGE = 3.0
"""Multiple of a row's rate above which a person is warned."""


class RateRow(Frozen):
    """Rates for models of at most so many parameters.

    Rates are AdamW's, the highest of a schedule that warms up and falls. Each row names the published recipes
    that it follows. They differ by ten and more at one size, as batches, data and aims do. A row has a value
    from the lower half of what is published: a rate that is too low costs time, one that is too high costs
    the model. Where a size has no recipe of a kind, the value continues its neighbours.
    """

    most_numel: float
    finetune: float
    continued: float
    adapter: float
    sources: str
    """Recipes that the row follows, shortly, for people."""

    def rate(self, kind: str) -> float:
        """Rate of a kind of training (`KINDS`)."""
        return {FINETUNE: self.finetune, CONTINUE: self.continued, ADAPTER: self.adapter}[kind]


ROWS = (
    RateRow(2e7, 3e-4, 6e-4, 3e-3, "own runs with 0.8 M, docs/results.md"),
    # Fine-tuning: GPT-2 (124 M) for Dutch 2e-5, the same handbook's SmolLM2-135M 1e-3, with a batch of 128.
    # Continuing: GPT-2 for Dutch 2e-4.
    RateRow(2e8, 1e-4, 2e-4, 1e-3, "alignment-handbook: gpt2-nl, smollm2; an own run with 135 M"),
    # Fine-tuning: SmolLM2-360M 1e-3; the default of transformers' Trainer is 5e-5. Continuing: 405 M at 3e-4,
    # its rate of pre-training (2403.08763), after hundreds of billions of tokens.
    RateRow(7e8, 5e-5, 2e-4, 5e-4, "alignment-handbook: smollm2; 2403.08763"),
    # TinyLlama-1.1B-Chat 1e-5, OLMo-2-1B 3e-5, SmolTulu-1.7B 9e-5 (2412.08347), SmolLM2-1.7B 3e-4.
    RateRow(2e9, 3e-5, 1e-4, 3e-4, "OLMo-2-1B, TinyLlama-1.1B-Chat, SmolTulu-1.7B (2412.08347)"),
    RateRow(5e9, 2e-5, 1e-4, 2e-4, "alignment-handbook: smollm3"),
    # Fine-tuning: Alpaca-7B, Vicuna-7B and 13B, Zephyr-7B 2e-5; Tulu-3-8B 5e-6. Continuing: Llama-3.1-8B on
    # The Stack 1e-4 (Fast-LLM's guide), 10 B at 1.2e-4 (2403.08763). Adapters: QLoRA's 7 B and 13 B 2e-4.
    RateRow(1.5e10, 1e-5, 1e-4, 2e-4, "Alpaca, Vicuna, Zephyr, Tulu 3 (2411.15124), QLoRA (2305.14314)"),
    # Tulu-3-70B 2e-6. Continuing: 15 B at 4.5e-5 (2407.07263). Adapters: QLoRA's 33 B and 65 B 1e-4.
    RateRow(math.inf, 2e-6, 4e-5, 1e-4, "Tulu 3 (2411.15124), 2407.07263, QLoRA (2305.14314)"),
)
"""Rows by size, smallest first. Adapters without a recipe of their own have ten times fine-tuning's rate
("LoRA Without Regret", Thinking Machines)."""


def row_for(numel: int) -> RateRow:
    """Row of a model of so many parameters."""
    return next(row for row in ROWS if numel <= row.most_numel)


def too_large(rate: float, numel: int, kind: str) -> str:
    """Warn of a rate that is far above the table's; empty: it is not."""
    usual = row_for(numel).rate(kind)
    if rate <= TOO_LARGE * usual:
        return ""
    return (
        f"a learning rate of {rate:g} is {rate / usual:.2g} times what is usual to {VERBS[kind]} a model of "
        f"this size ({usual:g}): it may lose what it has learned"
    )


# Numbers of the outer step by length, H and learners; warnings about a manifest's values. docs/results.md
# says what is known, and how well (`scripts/bench/study/bench_learning.py`).

LEARNERS = 4
"""Learners assumed where the manifest does not say how many members are expected."""
LONGEST_WARMUP = 20
MANY_MERGES = 100
FEW_STEPS = 1400
"""Inner steps of every learner up to which a run is short. Between 700 and 2800 hardly anything was
measured."""
USUAL_INNER_STEPS = 50
"""Largest H that is not large: H of 24 and of 100 were measured."""
SHORT_WARMUP_STEPS, MOST_WARMUP_STEPS = 70, 1000
LONG_BETA1 = 0.9
"""Decay of the first moment in runs of a day and more, whatever the preset has: lower ones were tried in
shorter runs only."""

LEAST_CLIP_NORM, MOST_LEARNING_RATE, MOST_WEIGHT_DECAY, MOST_STEP_TOKENS = 1e-3, 0.05, 0.5, 1 << 24
"""Bounds beyond which a value is reported as a slip of the pen: all presets are well within."""
MOST_MEMBERS = 1024
"""Members that a run lists at most, in one record of the DHT (`adapters.hivemind_binding`)."""

MUON_LONG_SHARE = 0.5
"""Share of Muon's rate in the presets (made for a demo's length) that longer runs take: half was better after
2800 steps."""


# Bounds within which a swarm was compared with data parallel. Beyond them nothing was measured.

TRIED_LEARNERS = 8
TRIED_STEPS = 2800
"""Inner steps of every learner."""
TRIED_INNER_STEPS = 100
"""H."""
TRIED_NUMEL = 3_230_000
TRIED_TASKS = ("causal-lm", "image-classification")
TRIED_EXPERTS = 4
TRIED_MUON_TASK = "causal-lm"
"""Task on which Muon was compared; everything else was measured with AdamW."""
TRIED_CODECS = ("fp32", "bf16", "int8", "e3m0")
"""Codecs that were measured, or (the first two) lose less than those."""
TRIED_KEEP_IN_FLIGHT = (0.0, 1.0)
TRIED_QUORUM = 1
TRIED_LEARNING_RATES = (0.35, 1.5)
"""Outer learning rates, lowest and highest."""
TRIED_MOMENTUM = 0.9
TRIED_SHORT_MERGES = 29
"""Outer steps of each fragment with which a swarm ended 3 to 6 % behind, but for large inner steps."""
TRIED_LEVEL_STEP_TOKENS = 8192
TRIED_LEVEL_BETA1 = 0.8
TRIED_LEVEL_TASK = "causal-lm"
TRIED_LEVEL_OPTIMIZER = "adamw"
"""Optimizer with which, and with so many tokens in a learner's step, a swarm was within 1 % after
`TRIED_SHORT_MERGES` on that task (117 and 820 thousand parameters; with Muon only the smaller model was
measured)."""
TRIED_LEVEL_MERGES = 116
"""Outer steps of each fragment with which a swarm was level, or up to 2.5 % behind (the larger model with
Muon)."""


class OuterRule(NamedTuple):
    """Numbers and kind of merge of an outer step."""

    learning_rate: float
    momentum: float
    merge: str


USUAL = OuterRule(0.7, 0.8, "rda")
SPARSE = OuterRule(0.9, 0.8, "rda")
"""Rule for a large H. With H = 100 it ended 0.9 % lower in long runs and 1.6 % in short ones than `USUAL`;
with one learner 0.7 % lower than `ALONE` (three seeds each)."""
ALONE = OuterRule(0.5, 0.9, "rda")
"""Rule for one learner in a long run with a usual H."""
EQUALS = OuterRule(1.2, 0.8, "mean")
"""Rule for long runs whose learners are equally fast and seldom die. There it ends lower than `USUAL`; where
they are uneven it ends higher, by much more (docs/results.md). So somebody has to
choose it."""
BY_RULE = USUAL, SPARSE, ALONE
"""Rules that `rule_for` chooses from; any other one was chosen by a person, or for a model that exists."""
GENTLE = OuterRule(0.5, 0.5, "rda")
"""Rule for a short run of a model that exists, without a warm-up of momentum. Where adapters were merged in a
small model, 240 steps and 30 merges ended 3 % behind one process, and 6 % with `USUAL`."""
AVERAGE = OuterRule(1.0, 0.0, "rda")
"""Rule for so few merges that no momentum comes to anything."""
AVERAGE_MERGES, GENTLE_MERGES, GENTLE_STEPS = 10, 30, 700
"""Merges of each fragment, and inner steps of each learner, from which on a run of a model that exists has
more than `AVERAGE`, and than `GENTLE`."""


class Length(Frozen):
    """A run of so many inner steps of every learner, with such an H at most."""

    steps: int
    inner_steps: int


LENGTHS = {"demo": Length(700, 24), "day": Length(10_000, 50), "long": Length(100_000, 100)}


def momentum_warmup(merges: int) -> int:
    """Merges of a fragment over which outer momentum grows, in a run of so many: two thirds, at most 20."""
    return min(LONGEST_WARMUP, round(2 * merges / 3))


def rule_for(steps: int, learners: int, inner_steps: int) -> OuterRule:
    """Choose the rule for a run of `learners` that make `steps` inner steps each; `inner_steps` is H."""
    if inner_steps > USUAL_INNER_STEPS:
        return SPARSE
    return ALONE if learners == 1 and steps > FEW_STEPS else USUAL


def rule_of(outer: OuterSection) -> OuterRule:
    """Take the rule out of a manifest's `[outer]` table."""
    return OuterRule(outer.learning_rate, outer.momentum, outer.merge)


def expected_merges(manifest: Manifest, learners: int = 0) -> int:
    """Outer steps of every fragment until the schedule's end. `learners`: 0, as many as are expected."""
    learners = expected_members(manifest, learners)
    per_interval = learners * manifest.inner.tokens_per_step * manifest.sync.inner_steps
    return manifest.inner.schedule_tokens // per_interval


def warmup_steps(steps: int) -> int:
    """Inner steps over which the inner learning rate grows, in a run of so many: a tenth of a short one, a
    twentieth of a longer one, at most 1000. Swarms suffer from a short warm-up more than data parallel."""
    return min(max(steps // 20, min(steps // 10, SHORT_WARMUP_STEPS)), MOST_WARMUP_STEPS)


def with_schedule(manifest: Manifest, steps: int, learners: int = 0) -> Manifest:
    """Copy of the manifest with schedule and outer step for so many learners that make `steps` inner steps.

    `learners`: 0, as many as are expected.
    """
    return with_outer(_with_steps(manifest, steps, learners), learners)


def _with_steps(manifest: Manifest, steps: int, learners: int = 0) -> Manifest:
    learners = expected_members(manifest, learners)
    step_tokens = learners * manifest.inner.tokens_per_step
    inner = replace(
        manifest.inner, warmup_tokens=warmup_steps(steps) * step_tokens, schedule_tokens=steps * step_tokens
    )
    return replace(manifest, inner=inner)


def for_length(manifest: Manifest, length: str) -> Manifest:
    """Copy of the manifest with schedule and H of that length (`LENGTHS`), for the expected members."""
    chosen, sync, inner = LENGTHS[length], manifest.sync, manifest.inner
    if length != "demo":
        rate = inner.learning_rate * (MUON_LONG_SHARE if inner.optimizer == "muon" else 1)
        inner = replace(inner, beta1=LONG_BETA1, learning_rate=rate)
    inner_steps = chosen.inner_steps if length != "demo" else min(sync.inner_steps, chosen.inner_steps)
    sync = replace(sync, inner_steps=inner_steps, delay_steps=min(sync.delay_steps, max(1, inner_steps // 3)))
    return _with_steps(replace(manifest, sync=sync, inner=inner), chosen.steps)


def with_outer(manifest: Manifest, learners: int = 0) -> Manifest:
    """Copy of the manifest with the outer step that belongs to its length, H and learners.

    Momentum's warm-up always follows them; rate, momentum and kind of merge only if nobody chose others.
    """
    outer = manifest.outer
    if rule_of(outer) in BY_RULE:
        its = rule_for(
            inner_steps_of(manifest, learners),
            expected_members(manifest, learners),
            manifest.sync.inner_steps,
        )
        outer = replace(outer, **its._asdict())
    is_cold = rule_of(outer) in (GENTLE, AVERAGE)
    warmup = 0 if is_cold else momentum_warmup(expected_merges(manifest, learners))
    return replace(manifest, outer=replace(outer, momentum_warmup_merges=warmup))


def for_given(manifest: Manifest) -> Manifest:
    """Copy of the manifest with the outer step for a model that exists: gentler than `with_outer`'s where the
    run is short."""
    merges = expected_merges(manifest)
    rule = USUAL
    if merges < AVERAGE_MERGES:
        rule = AVERAGE
    elif merges < GENTLE_MERGES or inner_steps_of(manifest) < GENTLE_STEPS:
        rule = GENTLE
    outer = replace(manifest.outer, **rule._asdict())
    return with_outer(replace(manifest, outer=outer))


def with_tokens(manifest: Manifest, tokens: int) -> Manifest:
    """Copy of the manifest whose schedule is so many tokens of the run long, with the warm-up that belongs to
    it; H and outer step are as they were.

    Raises:
        UserError: they are less than one inner step of each learner.
    """
    step_tokens = expected_members(manifest) * manifest.inner.tokens_per_step
    if tokens < step_tokens:
        raise UserError(
            f"{tokens} tokens are less than one inner step of each learner ({step_tokens} tokens of all)",
            "more --tokens or --epochs, or fewer --expected-members",
        )
    warmup = min(warmup_steps(tokens // step_tokens) * step_tokens, tokens - 1)
    inner = replace(manifest.inner, warmup_tokens=warmup, schedule_tokens=tokens)
    return replace(manifest, inner=inner)


def warnings_about(manifest: Manifest, numel: int = 0, ids: int = 0) -> list[str]:
    """Warnings: one sentence on all that nobody has shown to work, one on each thing that was seen to hurt.

    `numel`: parameters of the model; 0: nothing is said of it. `ids`: as `unreached_rows`.
    """
    beyond = _beyond(manifest, numel)
    found = [f"not compared with data parallel yet (docs/results.md): {', '.join(beyond)}"] if beyond else []
    unreached = unreached_rows(manifest, ids, numel)
    return found + harmful_settings(manifest) + likely_slips(manifest) + ([unreached] if unreached else [])


def _beyond(manifest: Manifest, numel: int) -> list[str]:
    """List the values outside the bounds that were tried, each with its bound."""
    inner, sync, outer, codec = manifest.inner, manifest.sync, manifest.outer, manifest.codec
    learners, steps = manifest.group.expected_members, inner_steps_of(manifest)
    task, experts = manifest.run.task, manifest.model.get("experts", 0)
    codecs = sorted({codec.contribution, codec.update} - set(TRIED_CODECS))
    low, high = TRIED_LEARNING_RATES
    with_muon = inner.optimizer == "muon"
    rules = (
        (learners > TRIED_LEARNERS, f"{learners} members ({TRIED_LEARNERS} at most)"),
        (steps > TRIED_STEPS, f"{steps} inner steps ({TRIED_STEPS})"),
        (sync.inner_steps > TRIED_INNER_STEPS, f"sync.inner_steps {sync.inner_steps} ({TRIED_INNER_STEPS})"),
        (numel > TRIED_NUMEL, f"{numel / 1e6:.3g} M parameters ({TRIED_NUMEL / 1e6:g} M)"),
        (task not in TRIED_TASKS, f"task {task} ({_all(TRIED_TASKS)})"),
        (isinstance(experts, int) and experts > TRIED_EXPERTS, f"{experts} experts ({TRIED_EXPERTS})"),
        (with_muon and task != TRIED_MUON_TASK, f"Muon with task {task} ({TRIED_MUON_TASK})"),
        (bool(codecs), f"codec {_all(codecs)} ({_all(TRIED_CODECS)})"),
        (
            sync.keep_in_flight not in TRIED_KEEP_IN_FLIGHT,
            f"sync.keep_in_flight {sync.keep_in_flight:g} ({_all(TRIED_KEEP_IN_FLIGHT)})",
        ),
        (sync.quorum > TRIED_QUORUM, f"sync.quorum {sync.quorum} ({TRIED_QUORUM})"),
        (
            not low <= outer.learning_rate <= high,
            f"outer.learning_rate {outer.learning_rate:g} ({low:g} to {high:g})",
        ),
        (outer.momentum > TRIED_MOMENTUM, f"outer.momentum {outer.momentum:g} ({TRIED_MOMENTUM:g})"),
    )
    return [words for holds, words in rules if holds]


def harmful_settings(manifest: Manifest) -> list[str]:
    """List the settings that ended worse where they were tried, a sentence each."""
    inner, sync, outer = manifest.inner, manifest.sync, manifest.outer
    merges, warmup, steps = expected_merges(manifest), outer.momentum_warmup_merges, inner_steps_of(manifest)
    length = f"about {merges} outer steps of each fragment"
    learners = expected_members(manifest)
    ours, better = rule_of(outer), rule_for(steps, learners, sync.inner_steps)
    inner_warmup, usual = inner.warmup_tokens * steps // inner.schedule_tokens, warmup_steps(steps)
    rules = (
        (merges <= TRIED_SHORT_MERGES, _shortness(manifest, merges)),
        (
            outer.momentum >= 0.5
            and ours != GENTLE
            and warmup < momentum_warmup(merges) // 2
            and merges < MANY_MERGES,
            f"outer.momentum {outer.momentum:g} with a warm-up of {warmup} merges overshoots in a run of "
            f"{length}: outer.momentum_warmup_merges = {momentum_warmup(merges)} was better",
        ),
        (
            ours in BY_RULE and ours != better,
            f"outer.learning_rate {ours.learning_rate:g} with outer.momentum {ours.momentum:g}: "
            f"{better.learning_rate:g} with {better.momentum:g} is the choice for learners of such a number "
            f"({learners}), inner steps (about {steps}) and H ({sync.inner_steps})",
        ),
        (
            warmup > max(momentum_warmup(merges), 3 * merges // 4),
            f"outer momentum warms up over {warmup} merges, but the schedule is {length} long: "
            f"outer.momentum_warmup_merges = {momentum_warmup(merges)} was better",
        ),
        (
            steps <= TRIED_STEPS and 2 * inner_warmup < usual,
            f"the inner learning rate warms up over {inner_warmup} steps: with delays so short a warm-up "
            f"cost 8 %; inner.warmup_tokens = {usual * inner.schedule_tokens // max(1, steps)} is usual",
        ),
        (
            2 * sync.delay_steps > sync.inner_steps,
            f"sync.delay_steps {sync.delay_steps} is more than half of sync.inner_steps "
            f"({sync.inner_steps}); delays cost loss",
        ),
    )
    return [sentence for holds, sentence in rules if holds]


def likely_slips(manifest: Manifest) -> list[str]:
    """List values that are allowed, but so far from anything sensible that they are slips of the pen, a
    sentence each."""
    inner, members, steps = manifest.inner, manifest.group.expected_members, inner_steps_of(manifest)
    rules = (
        (
            inner.fresh_warmup_steps > max(1, steps),
            f"inner.fresh_warmup_steps {inner.fresh_warmup_steps} is more than the about {steps} inner steps "
            "of a learner until the schedule's end: none would reach its learning rate",
        ),
        (
            inner.clip_norm < LEAST_CLIP_NORM,
            f"inner.clip_norm {inner.clip_norm:g} leaves next to nothing of any gradient: 1 is usual",
        ),
        (
            inner.learning_rate > MOST_LEARNING_RATE,
            f"inner.learning_rate {inner.learning_rate:g} is far above those of the presets (at most "
            "0.006): learners would diverge",
        ),
        (
            inner.weight_decay > MOST_WEIGHT_DECAY,
            f"inner.weight_decay {inner.weight_decay:g} pulls parameters to zero faster than they learn: "
            "0.1 is usual",
        ),
        (
            inner.tokens_per_step > MOST_STEP_TOKENS,
            f"inner.tokens_per_step {inner.tokens_per_step} is more than a learner computes in one step "
            "(presets: 64 to 262144)",
        ),
        (
            members > MOST_MEMBERS,
            f"group.expected_members {members}: a run lists at most {MOST_MEMBERS} members, no others",
        ),
    )
    return [sentence for holds, sentence in rules if holds]


def _shortness(manifest: Manifest, merges: int) -> str:
    """Say what so few merges cost where they were tried."""
    found = f"with {TRIED_SHORT_MERGES} a swarm was 3 to 6 % behind data parallel"
    if merges < TRIED_SHORT_MERGES:
        found += ", with fewer mostly more"
    elif manifest.run.task == TRIED_MUON_TASK and manifest.inner.optimizer == "muon":
        found += " with Muon, too (level with data parallel with AdamW, or up to 4 % lower)"
    elif manifest.run.task == TRIED_LEVEL_TASK and manifest.inner.optimizer == TRIED_LEVEL_OPTIMIZER:
        found += (
            f" (within 1 % in two small models with inner.tokens_per_step {TRIED_LEVEL_STEP_TOKENS} and "
            f"inner.beta1 {TRIED_LEVEL_BETA1:g})"
        )
    return (
        f"the schedule is about {merges} outer steps of each fragment long: {found}, with "
        f"{TRIED_LEVEL_MERGES} 0 to 2.5 %; make it longer, or sync.inner_steps smaller"
    )


def expected_members(manifest: Manifest, learners: int = 0) -> int:
    """Learners that are expected, or `LEARNERS`. `learners`: these instead."""
    return learners or manifest.group.expected_members or LEARNERS


def inner_steps_of(manifest: Manifest, learners: int = 0) -> int:
    """Inner steps of every learner until the schedule's end. `learners`: as of `expected_merges`."""
    learners = expected_members(manifest, learners)
    return manifest.inner.schedule_tokens // (learners * manifest.inner.tokens_per_step)


def _all(values: Iterable[object]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


GPT2_IDS = vocabulary_for(50_257)
"""GPT-2's own number, rounded up."""
ADAMW_RATE = 2e-3
"""Learning rate of `tiny` with AdamW."""
ADAMW_RATES = {6e-3: ADAMW_RATE, 3e-3: 1e-3}
"""Rates with AdamW by the preset's with Muon, where they differ."""


def _preset(name: str, model: ModelSection, **tables: Section) -> Manifest:
    task = "image-classification" if isinstance(model, ImageSection) else "causal-lm"
    whole = Manifest(run=RunSection(name=name, task=task), model=table(model), **tables)  # type: ignore[arg-type]
    return with_outer(whole)


MICRO = _preset(
    "micro",
    CausalLMSection(layers=2, heads=2, width=32, context_tokens=64),
    inner=InnerSection(
        learning_rate=3e-3, warmup_tokens=15_360, schedule_tokens=153_600, tokens_per_step=256
    ),
    sync=SyncSection(fragments=4, inner_steps=8, delay_steps=4),
    group=GroupSection(term_versions=8),
    end=EndSection(learners="go-on"),  # it is over within seconds
)

TINY = _preset(
    "tiny",
    CausalLMSection(layers=4, heads=4, width=128, context_tokens=128),
    # With Muon swarms end 6 to 7 % lower after 700 steps, and half of data parallel's best rate is theirs
    # (docs/results.md).
    inner=InnerSection(
        optimizer="muon",
        learning_rate=6e-3,
        beta1=0.8,
        warmup_tokens=212_992,
        schedule_tokens=2_150_400,
        tokens_per_step=1024,
    ),
    sync=SyncSection(fragments=8, inner_steps=24, delay_steps=8),
    group=GroupSection(term_versions=8),
)

TINY_MOE = _preset(
    "tiny-moe",
    CausalLMSection(layers=4, heads=4, width=128, hidden_width=176, context_tokens=128, experts=4),
    inner=TINY.inner,
    sync=TINY.sync,
    group=TINY.group,
)

SMALL = _preset(
    "small",
    CausalLMSection(layers=6, heads=6, width=384, context_tokens=256),
    # After 1000 steps of a swarm Muon, H = 100, ended 7 % below AdamW, H = 24 (docs/results.md).
    inner=InnerSection(
        optimizer="muon",
        learning_rate=3e-3,
        warmup_tokens=3_000_000,
        schedule_tokens=160_000_000,
        tokens_per_step=8192,
    ),
    sync=SyncSection(fragments=12, inner_steps=48, delay_steps=6),
)

GPT2 = _preset(
    "gpt2",
    CausalLMSection(layers=12, heads=12, width=768, context_tokens=1024, vocabulary=GPT2_IDS),
    # Muon's updates are as large as AdamW's. For models of this size and above 2502.16982 takes AdamW's
    # rates; in swarms that was not tried.
    inner=InnerSection(
        optimizer="muon",
        learning_rate=6e-4,
        warmup_tokens=370_000_000,
        schedule_tokens=26_000_000_000,
        tokens_per_step=65_536,
    ),
    sync=SyncSection(fragments=24, inner_steps=100, delay_steps=6),
)

GPT2_MEDIUM = _preset(
    "350m",
    CausalLMSection(layers=24, heads=16, width=1024, context_tokens=1024, vocabulary=GPT2_IDS),
    inner=InnerSection(
        optimizer="muon",
        learning_rate=3e-4,
        warmup_tokens=730_000_000,
        schedule_tokens=52_000_000_000,
        tokens_per_step=131_072,
    ),
    sync=SyncSection(fragments=24, inner_steps=100, delay_steps=6),
)

LARGEST = _preset(
    "1.3b",
    CausalLMSection(
        layers=24,
        heads=16,
        key_value_heads=8,
        width=2048,
        context_tokens=2048,
        vocabulary=GPT2_IDS,
        hidden_width=5632,
        tied_head=False,
    ),
    inner=InnerSection(
        optimizer="muon",
        learning_rate=2e-4,
        warmup_tokens=2_100_000_000,
        schedule_tokens=105_000_000_000,
        tokens_per_step=262_144,
    ),
    sync=SyncSection(fragments=48, inner_steps=100, delay_steps=6),
)

DIGITS = _preset(
    "digits",
    ImageSection(classes=10, image_pixels=8, channels=1, layers=2, width=64, heads=4, patch_pixels=2),
    data=DataSection(heldout_percent=20),
    inner=InnerSection(learning_rate=2e-3, warmup_tokens=7_680, schedule_tokens=76_800, tokens_per_step=64),
    sync=SyncSection(fragments=4, inner_steps=16, delay_steps=4),
    group=GroupSection(term_versions=8),
)

DIGITS_CNN = _preset(
    "digits-cnn",
    ImageSection(architecture="cnn", classes=10, image_pixels=8, channels=1, layers=1, width=16),
    data=DIGITS.data,
    inner=DIGITS.inner,
    sync=DIGITS.sync,
    group=DIGITS.group,
)

PRESETS = {
    preset.run.name: preset
    for preset in (MICRO, TINY, TINY_MOE, SMALL, GPT2, GPT2_MEDIUM, LARGEST, DIGITS, DIGITS_CNN)
}


def for_other_model(manifest: Manifest) -> Manifest:
    """A preset's run, if another model than the preset's is to be trained: Muon may have no matrices there,
    and its rate is no rate for AdamW."""
    if manifest.inner.optimizer == "adamw":
        return manifest
    rate = ADAMW_RATES.get(manifest.inner.learning_rate, manifest.inner.learning_rate)
    inner = replace(manifest.inner, optimizer="adamw", learning_rate=rate)
    return replace(manifest, inner=inner)


def for_bytes(manifest: Manifest) -> Manifest:
    """A preset's run with the vocabulary of raw bytes, if it reads those: other ids would never occur."""
    if manifest.data.tokenizer != BYTES or "vocabulary" not in manifest.model:
        return manifest
    return replace(manifest, model=manifest.model | {"vocabulary": BYTE_VALUES})


def with_seats(manifest: Manifest, peers: Iterable[str]) -> Manifest:
    """Give these peers the seats of version 0, each one."""
    section = replace(manifest.admission, seats=tuple(dict.fromkeys(peers)))
    return replace(manifest, admission=section)


def begun_by(manifest: Manifest, peer: str) -> Manifest:
    """Complete a manifest that names no seats, as written by hand: the node that begins the run has one."""
    return manifest if manifest.admission.seats else with_seats(manifest, [peer])


def without_end(manifest: Manifest) -> Manifest:
    """Copy of the manifest whose learners go on when its schedule is over."""
    return replace(manifest, end=EndSection(learners="go-on"))


def for_run(preset: str, name: str, seed: int = 0) -> Manifest:
    """The preset as a run of this name.

    Raises:
        ConfigError: no such preset. (The name is checked when the manifest is written or loaded.)
    """
    if preset not in PRESETS:
        raise ConfigError(f'there is no preset "{preset}"', hint=f"presets: {', '.join(PRESETS)}")
    run = replace(PRESETS[preset].run, name=name, seed=seed)
    return replace(PRESETS[preset], run=run)


# Parameters that nothing will ever reach: rows of token ids which the run's tokenizer does not have.


def unreached_rows(manifest: Manifest, ids: int = 0, numel: int = 0) -> str:
    """Say how many token ids of the model never occur; empty: none, but for rounding.

    `ids`: those of the tokenizer; 0: raw bytes', and of another tokenizer nothing is known. `numel`:
    parameters of the model, of which the share is said; 0: not known.
    """
    ids = ids or (BYTE_VALUES if manifest.data.tokenizer == BYTES else 0)
    vocabulary, width, tables = _embedding(manifest.model)
    if not ids or vocabulary <= max(ids, vocabulary_for(ids)):
        return ""
    unused = (vocabulary - ids) * width * tables
    share = f", {unused / numel:.0%} of the model" if numel else ""
    size = f": {unused / 1e6:.3g} M parameters{share}, are never reached" if width else " never occur"
    enough = ids if manifest.data.tokenizer == BYTES else vocabulary_for(ids)
    return (
        f"the model has {vocabulary} token ids, and {manifest.data.tokenizer} has {ids}{size}; a vocabulary "
        f"of {enough} is enough, or give the tokenizer that the model is for (run new --tokenizer)"
    )


def _embedding(model: Mapping[str, object]) -> tuple[int, int, int]:
    """Return vocabulary, width, and number of tables of one row for an id; zeros: the model has none."""
    found: Mapping[str, object] = model
    keys = ("vocabulary", "width", "tied_head")
    if isinstance(text := model.get("config"), str):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return 0, 0, 0
        keys = ("vocab_size", "hidden_size", "tie_word_embeddings")
        if not isinstance(found, dict):
            return 0, 0, 0
    vocabulary, width, tied = (found.get(key) for key in keys)
    if not is_whole(vocabulary):
        return 0, 0, 0
    return vocabulary, width if is_whole(width) else 0, 1 if tied in (True, None) else 2
