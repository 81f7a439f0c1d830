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
schedule is long with `config.outer.LEARNERS` learners, as in `run check` where nobody says how many.
"""

from __future__ import annotations

import msgspec

from p2pdiloco.config.manifest import (
    DataSection,
    EndSection,
    GroupSection,
    InnerSection,
    Manifest,
    RunSection,
    SyncSection,
)
from p2pdiloco.config.models import BYTE_VALUES, BYTES, CausalLMSection, ImageSection, table, vocabulary_for
from p2pdiloco.config.outer import with_outer
from p2pdiloco.errors import ConfigError

GPT2_IDS = vocabulary_for(50_257)
"""GPT-2's own number, rounded up."""
ADAMW_RATE = 2e-3
"""Learning rate of `tiny` with AdamW."""
ADAMW_RATES = {6e-3: ADAMW_RATE, 3e-3: 1e-3}
"""Rates with AdamW by the preset's with Muon, where they differ."""

MICRO = with_outer(
    Manifest(
        run=RunSection(name="micro"),
        model=table(CausalLMSection(layers=2, heads=2, width=32, context_tokens=64)),
        inner=InnerSection(
            learning_rate=3e-3, warmup_tokens=15_360, schedule_tokens=153_600, tokens_per_step=256
        ),
        sync=SyncSection(fragments=4, inner_steps=8, delay_steps=4),
        group=GroupSection(term_versions=8),
        end=EndSection(learners="go-on"),  # it is over within seconds
    )
)

TINY = with_outer(
    Manifest(
        run=RunSection(name="tiny"),
        model=table(CausalLMSection(layers=4, heads=4, width=128, context_tokens=128)),
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
)

TINY_MOE = with_outer(
    Manifest(
        run=RunSection(name="tiny-moe"),
        model=table(
            CausalLMSection(layers=4, heads=4, width=128, hidden_width=176, context_tokens=128, experts=4)
        ),
        inner=TINY.inner,
        sync=TINY.sync,
        group=TINY.group,
    )
)

SMALL = with_outer(
    Manifest(
        run=RunSection(name="small"),
        model=table(CausalLMSection(layers=6, heads=6, width=384, context_tokens=256)),
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
)

GPT2 = with_outer(
    Manifest(
        run=RunSection(name="gpt2"),
        model=table(
            CausalLMSection(layers=12, heads=12, width=768, context_tokens=1024, vocabulary=GPT2_IDS)
        ),
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
)

GPT2_MEDIUM = with_outer(
    Manifest(
        run=RunSection(name="350m"),
        model=table(
            CausalLMSection(layers=24, heads=16, width=1024, context_tokens=1024, vocabulary=GPT2_IDS)
        ),
        inner=InnerSection(
            optimizer="muon",
            learning_rate=3e-4,
            warmup_tokens=730_000_000,
            schedule_tokens=52_000_000_000,
            tokens_per_step=131_072,
        ),
        sync=SyncSection(fragments=24, inner_steps=100, delay_steps=6),
    )
)

LARGEST = with_outer(
    Manifest(
        run=RunSection(name="1.3b"),
        model=table(
            CausalLMSection(
                layers=24,
                heads=16,
                key_value_heads=8,
                width=2048,
                context_tokens=2048,
                vocabulary=GPT2_IDS,
                hidden_width=5632,
                tied_head=False,
            )
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
)

DIGITS = with_outer(
    Manifest(
        run=RunSection(name="digits", task="image-classification"),
        model=table(
            ImageSection(classes=10, image_pixels=8, channels=1, layers=2, width=64, heads=4, patch_pixels=2)
        ),
        data=DataSection(heldout_percent=20),
        inner=InnerSection(
            learning_rate=2e-3, warmup_tokens=7_680, schedule_tokens=76_800, tokens_per_step=64
        ),
        sync=SyncSection(fragments=4, inner_steps=16, delay_steps=4),
        group=GroupSection(term_versions=8),
    )
)

DIGITS_CNN = with_outer(
    Manifest(
        run=RunSection(name="digits-cnn", task="image-classification"),
        model=table(
            ImageSection(architecture="cnn", classes=10, image_pixels=8, channels=1, layers=1, width=16)
        ),
        data=DIGITS.data,
        inner=DIGITS.inner,
        sync=DIGITS.sync,
        group=DIGITS.group,
    )
)

PRESETS: dict[str, Manifest] = {
    preset.run.name: preset
    for preset in (MICRO, TINY, TINY_MOE, SMALL, GPT2, GPT2_MEDIUM, LARGEST, DIGITS, DIGITS_CNN)
}


def for_other_model(manifest: Manifest) -> Manifest:
    """A preset's run, if another model than the preset's is to be trained: Muon may have no matrices there,
    and its rate is no rate for AdamW."""
    if manifest.inner.optimizer == "adamw":
        return manifest
    rate = ADAMW_RATES.get(manifest.inner.learning_rate, manifest.inner.learning_rate)
    inner = msgspec.structs.replace(manifest.inner, optimizer="adamw", learning_rate=rate)
    return msgspec.structs.replace(manifest, inner=inner)


def for_bytes(manifest: Manifest) -> Manifest:
    """A preset's run with the vocabulary of raw bytes, if it reads those: other ids would never occur."""
    if manifest.data.tokenizer != BYTES or "vocabulary" not in manifest.model:
        return manifest
    return msgspec.structs.replace(manifest, model=manifest.model | {"vocabulary": BYTE_VALUES})


def without_end(manifest: Manifest) -> Manifest:
    """Copy of the manifest whose learners go on when its schedule is over."""
    return msgspec.structs.replace(manifest, end=EndSection(learners="go-on"))


def for_run(preset: str, name: str, seed: int = 0) -> Manifest:
    """The preset as a run of this name.

    Raises:
        ConfigError: no such preset. (The name is checked when the manifest is written or loaded.)
    """
    if preset not in PRESETS:
        raise ConfigError(f'there is no preset "{preset}"', hint=f"presets: {', '.join(PRESETS)}")
    run = msgspec.structs.replace(PRESETS[preset].run, name=name, seed=seed)
    return msgspec.structs.replace(PRESETS[preset], run=run)
