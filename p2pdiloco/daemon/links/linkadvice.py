"""Advice about H, P, tau and codec: the most faithful setting that a link carries.

A shorter H comes before 8 bits: what 4 bits leave out is made up for by error feedback, while a longer H
costs loss. Top-k comes after 4 bits, but for very long H: what it costs was not measured. P is the run's own,
or two or four times as large. A smaller fragment's round is shorter, so its work is merged less stale, which
thin links and partial merges in full precision ask for. It costs messages, and no loss that is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from p2pdiloco.config.manifest import CodecName, Manifest
from p2pdiloco.config.presets import doubts
from p2pdiloco.daemon.links.link import Link
from p2pdiloco.daemon.links.linkplan import Demand, demand_of
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import FragmentLayout, plan_fragments

COMFORT = 0.5
"""Share of a link that a plan uses: it has other users, and rounds come in bursts."""
DELAYS = (0.5, 1.0)
"""Largest tau that is taken, as shares of H. More than half was not tried, and is taken only where nothing
else fits."""
SHORT_DELAY = 1 / 6
"""Share of H up to which tau is short, about what docs/results.md knows. Where the run's own P gives
a longer one, a larger P is advised."""
USUAL_H = (24, 30, 50, 100, 200)
STAGES: tuple[tuple[tuple[int, ...], tuple[CodecName, ...]], ...] = (
    (USUAL_H, ("int8", "e3m0")),
    ((500,), ("e3m0",)),
    (USUAL_H, ("topk",)),
    ((500, 1000), ("e3m0", "topk")),
)
"""Values of H and codecs that are tried, one stage after the other. In each, H goes up, and every codec
and every P is tried with it."""
SPLITS = (1, 2, 4)
"""Factors by which the run's own P is multiplied."""
MOST_FRAGMENTS = 1024
"""Largest P that a manifest may have (`config.manifest`)."""


class Advice(Struct, frozen=True):
    """Advice: the most faithful setting that a link carries with comfort."""

    inner_steps: int
    fragments: int
    delay_steps: int
    codec: CodecName
    demand: Demand
    doubts: tuple[str, ...]
    """Warnings about the manifest with this setting: what nobody has shown to work."""


def advise(manifest: Manifest, link: Link, members: int, step_s: float) -> Advice | None:
    """Find the smallest H, and with it the most faithful codec, that the link carries with comfort.

    With them come a P with which rounds are short, and a tau that holds. None: the link carries no setting.

    Raises:
        UserError: as `tasks.registry.task_of`.
    """
    cuts = _cuts(manifest)
    for horizons, names in STAGES:
        tried = [
            [
                (candidate, demand_of(candidate, layouts, link, members, step_s))
                for candidate, layouts in splits
            ]
            for splits in _candidates(manifest, cuts, horizons, names)
        ]
        for share in DELAYS:
            for splits in tried:
                chosen = _shortest(splits, share)
                if chosen is not None:
                    return _advice(*chosen, sum(layout.numel for layout in cuts[0]))
    return None


def _shortest(splits: list[tuple[Manifest, Demand]], share: float) -> tuple[Manifest, Demand] | None:
    """Choose among candidates of one H and codec: the smallest P with short rounds, or that with the
    shortest.

    None: the link does not carry any of them with comfort, or tau is above this share of H.
    """
    fits = [
        (candidate, found)
        for candidate, found in splits
        if max(found.upload_share, found.download_share) <= COMFORT
        and found.delay_steps <= min(share * candidate.sync.inner_steps, candidate.sync.inner_steps - 1)
    ]
    short = [pair for pair in fits if pair[1].delay_steps <= SHORT_DELAY * pair[0].sync.inner_steps]
    return short[0] if short else min(fits, key=lambda pair: pair[1].delay_steps, default=None)


def _advice(chosen: Manifest, found: Demand, numel: int) -> Advice:
    sync = msgspec.structs.replace(chosen.sync, delay_steps=found.delay_steps)
    return Advice(
        inner_steps=sync.inner_steps,
        fragments=sync.fragments,
        delay_steps=sync.delay_steps,
        codec=chosen.codec.contribution,
        demand=found,
        doubts=tuple(doubts(msgspec.structs.replace(chosen, sync=sync), numel)),
    )


def _cuts(manifest: Manifest) -> list[tuple[FragmentLayout, ...]]:
    """Cut the model into as many fragments as are tried: no more than it has rows, or a manifest may have."""
    specs, own = task_of(manifest).specs(), manifest.sync.fragments
    most = min(MOST_FRAGMENTS, sum(spec.rows for spec in specs if spec.numel))
    return [plan_fragments(specs, own * times) for times in SPLITS if times == 1 or own * times <= most]


def _candidates(
    manifest: Manifest,
    cuts: list[tuple[FragmentLayout, ...]],
    horizons: tuple[int, ...],
    names: tuple[CodecName, ...],
) -> Iterator[list[tuple[Manifest, tuple[FragmentLayout, ...]]]]:
    """List the candidates: for every H and codec, the manifest with every P."""
    replace = msgspec.structs.replace
    for inner_steps in sorted({manifest.sync.inner_steps, *horizons}):
        for name in names:
            codecs = replace(manifest.codec, contribution=name, update=name)
            syncs = [
                (replace(manifest.sync, inner_steps=inner_steps, fragments=len(layouts)), layouts)
                for layouts in cuts
                if len(layouts) <= inner_steps
            ]
            yield [(replace(manifest, sync=sync, codec=codecs), layouts) for sync, layouts in syncs]
