"""One run of the learning benchmark: everything that decides its result, and the result of it."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from p2pdiloco.config.manifest import (
    CausalLMSection,
    CodecSection,
    DataSection,
    ImageSection,
    Manifest,
    ModelSection,
    RunSection,
    table,
)
from p2pdiloco.config.presets import for_other_model, for_run, warmup_steps

MODELS: dict[str, tuple[ModelSection, int]] = {
    "pico": (CausalLMSection(layers=1, heads=1, width=16, context_tokens=16), 128),
    "nano": (CausalLMSection(layers=2, heads=2, width=32, context_tokens=64), 1024),
    "mini": (CausalLMSection(layers=2, heads=2, width=64, context_tokens=64), 1024),
    "tiny": (CausalLMSection(layers=4, heads=4, width=128, context_tokens=64), 1024),
    "mid": (CausalLMSection(layers=4, heads=4, width=256, context_tokens=128), 2048),
    "tiny-moe": (
        CausalLMSection(layers=4, heads=4, width=128, hidden_width=176, context_tokens=64, experts=4),
        1024,
    ),
    "mini-moe": (
        CausalLMSection(layers=2, heads=2, width=64, hidden_width=88, context_tokens=64, experts=4),
        1024,
    ),
    "glyphs": (
        ImageSection(classes=36, image_pixels=16, channels=1, layers=2, width=48, heads=4, patch_pixels=4),
        32,
    ),
    "glyphs-cnn": (
        ImageSection(architecture="cnn", classes=36, image_pixels=16, channels=1, layers=1, width=16),
        32,
    ),
}
"""Model and tokens per learner and inner step: for tests; 33 k, 117 k, 0.82 M, 3.2 M parameters; the presets'
shapes, or one between them, with a shorter context; of images that `study.glyphs` draws. Other names are
presets, as they are."""
FRAGMENTS = {"pico": 4, "nano": 4, "mini": 4, "mini-moe": 4, "glyphs": 4, "glyphs-cnn": 4}
HELDOUT_TOKENS = 32_768


class Setting(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Setting of a run. Two runs with equal settings give equal results; the defaults are those of a long
    run."""

    kind: str = "swarm"
    """"swarm", "oracle" or "parallel" (`study.virtual`, `study.baselines`), or "nodes": real processes
    (`scripts/bench/study/bench_nodes.py`)."""
    model: str = "mini"
    learners: int = 4
    steps: int = 700
    seed: int = 0
    inner_rate: float = 0.0
    """0: the preset's."""
    optimizer: str = "adamw"
    """The inner one: "adamw" or "muon", everybody's, data parallel's too."""
    beta1: float = 0.9
    """The inner AdamW's, everybody's."""
    muon_momentum: float = 0.95
    """Momentum of the inner Muon."""
    precision: str = "fp32"
    """Precision of forward and backward passes, and of evaluation: "fp32", or "bf16" (`study.computing`; on
    GPUs it always is that)."""
    tokens_per_step: int = 0
    """Tokens of a learner's inner step (images count as one each); 0: the model's."""
    warmup: int = 0
    """Inner steps until the inner learning rate is reached; 0: as in a run of this length."""
    inner_steps: int = 24
    fragments: int = 0
    outer_rate: float = 0.7
    momentum: float = 0.8
    momentum_warmup: int = 20
    """Merges."""
    codec: str = "int8"
    feedback: str = "as-is"
    """Error feedback of contributions: "as-is", "on", "off"."""
    keep: float = 1.0
    merge: str = "rda"
    """Merge as in `outer.merge` of a manifest."""
    delay: float = 0.5
    """Mean inner steps that a payload is under way, each direction; drawn anew for each. With 0.5 an install
    comes 2 to 3 inner steps after its copy-out (the paper's tau is 2)."""
    quorum: int = 1
    grace: float = 0.75
    """Time that a round waits for called learners, in parts of H inner steps; 0: not at all."""
    speeds: tuple[float, ...] = ()
    """Inner steps of each learner in the time in which others make one; () is everybody 1."""
    largest_share: float = 0.0
    """Share of a merge that one learner has at most; 0: contributions are not cut at all."""
    answers: str = "at-once"
    """Moment of answers to closing calls: "at-once", or at the "boundary" between two inner steps."""
    faults_per_hour: float = 0.0
    """Faults of the whole swarm; `step_s` says how long a step is."""
    step_s: float = 0.25
    away_s: float = 15.0
    moments: str = "disk"
    """A returning learner's: "disk", "fresh"."""
    ends: str = "time"
    """A swarm's run: after the "time" of `steps` inner steps, or of "tokens" that make it last until as many
    are trained as undisturbed learners would have in that time, which is longer where learners die."""

    @property
    def key(self) -> str:
        """Equal for equal settings. What is as usual is left out by value: msgspec goes by identity."""
        usual = Setting()
        its = {name: getattr(self, name) for name in self.__struct_fields__}
        unusual = {name: value for name, value in its.items() if value != getattr(usual, name)}
        return msgspec.json.encode(unusual, order="sorted").decode()

    @property
    def names(self) -> list[str]:
        """Names of the learners: each reads a part of the data of its own."""
        return [f"learner-{index}" for index in range(self.learners)]

    def manifest(self) -> Manifest:
        """The run that production would be told to make."""
        replace = msgspec.structs.replace
        if self.model in MODELS:
            base = for_other_model(for_run("tiny", "learning", self.seed))
            section, usual_tokens = MODELS[self.model]
            images = isinstance(section, ImageSection)
            task = "image-classification" if images else base.run.task
            base = replace(
                base,
                model=table(section),
                run=RunSection(name="learning", task=task, seed=self.seed),
                data=DataSection(source="files", heldout_percent=10) if images else base.data,
                inner=replace(base.inner, tokens_per_step=usual_tokens),
            )
        else:
            base = for_run(self.model, "learning", self.seed)
        rate = self.inner_rate or base.inner.learning_rate
        tokens = self.tokens_per_step or base.inner.tokens_per_step
        step_tokens = round((sum(self.speeds) or self.learners) * tokens)
        fragments = self.fragments or FRAGMENTS.get(self.model, base.sync.fragments)
        codec = CodecSection(contribution=self.codec, update=self.codec)  # type: ignore[arg-type]
        return replace(
            base,
            inner=replace(
                base.inner,
                optimizer=self.optimizer,
                beta1=self.beta1,
                muon_momentum=self.muon_momentum,
                learning_rate=rate,
                tokens_per_step=tokens,
                warmup_tokens=(self.warmup or warmup_steps(self.steps)) * step_tokens,
                schedule_tokens=self.steps * step_tokens,
            ),
            sync=replace(
                base.sync,
                inner_steps=self.inner_steps,
                fragments=fragments,
                delay_steps=min(max(1, round(2 * self.delay)), self.inner_steps - 1),
                quorum=self.quorum,
                keep_in_flight=self.keep,
            ),
            outer=replace(
                base.outer,
                learning_rate=self.outer_rate,
                momentum=self.momentum,
                momentum_warmup_merges=self.momentum_warmup,
                merge=self.merge,
            ),
            codec=codec,
        )


class Outcome(Struct, kw_only=True):
    """One line of results."""

    setting: Setting
    loss: float
    """Loss on held-out samples at the end: of swarms and oracles without look-ahead (`Vault.result`)."""
    curve: list[tuple[int, float]]
    merges: float = 0.0
    """Per fragment."""
    contributors: float = 0.0
    """Contributors of a merge, on the mean."""
    tokens: int = 0
    """Trained by all learners."""
    cpu_s: float = 0.0
