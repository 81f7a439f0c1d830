"""What a run asks of a link, and which H, tau and codec a link can carry: arithmetic on a manifest.

A cycle is H inner steps, in which every fragment is merged once. In it a member of a group of n sends each
contribution once (C bytes for all fragments) and fetches each update once (U bytes). Offices rotate over the
members, so on the average it also receives (n - 1)/n C as a syncer; and it sends (n - 1)/n U, as a syncer or
passing an update on, which its syncer sends to two or three members only (`fanout.degree`).

Inner steps never wait for any of this, so a slow link costs no utilisation by itself: what it costs is delay,
and from some point on participation, when a round takes longer than a fragment's H inner steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from p2pdiloco.config.manifest import CodecName, Manifest
from p2pdiloco.core.config import Timing
from p2pdiloco.daemon.fanout import degree
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codec import codec
from p2pdiloco.tensors.layout import FragmentLayout, plan_fragments

LABEL_BYTES = 400
"""Of a contribution or a version, beside its contributors."""
CONTRIBUTOR_BYTES = 70
HEARTBEAT_BYTES = 700
"""With what carries it, and its answer: as `scripts/bench_wire.py` counts a node's control bytes."""
LINK_OVERHEAD = 1.04
"""Encryption, multiplexing, TCP and IP headers."""
MAX_EVERY = 8
TOLERANCE = 0.05
"""So much more than the link carries is no reason yet to leave a version out."""
COMFORT = 0.5
"""Share of a link that a plan uses: it has other users, and rounds come in bursts."""
USUAL_H = (24, 30, 50, 100, 200)
LONG_H = (*USUAL_H, 500, 1000)
STAGES: tuple[tuple[tuple[int, ...], tuple[CodecName, ...]], ...] = (
    (USUAL_H, ("int8", "e3m0")),
    (USUAL_H, ("topk",)),
    (LONG_H, ("e3m0", "topk")),
)
"""What is tried, one stage after the other; in each H goes up, and every codec is tried with it."""


class Link(Struct, frozen=True):
    """One node's way to the others."""

    upload_bits_per_s: float
    download_bits_per_s: float
    latency_s: float = 0.05
    """One way."""


class Demand(Struct, frozen=True):
    """What taking part asks of one node, with inner steps of a given length."""

    step_s: float
    upload_bytes_per_cycle: float
    download_bytes_per_cycle: float
    upload_bits_per_s: float
    download_bits_per_s: float
    upload_share: float
    """Of the link. Above 1 the node takes part less often."""
    download_share: float
    contribution_share: float
    """Of the link's upload, by this node's own contributions alone."""
    member_round_s: float
    """From a contribution's copy-out to its update being here, for the largest fragment."""
    syncer_round_s: float
    """The same where this node is the syncer: others' contributions come in, and updates go out."""
    delay_steps: int
    """The longer of both in inner steps: a tau that holds."""
    participation: float
    """Share of the merges that this node can be in."""

    def every(self, inner_steps: int) -> int:
        """To every how many-th version such a link can contribute in time, with H `inner_steps`: 1 to
        `MAX_EVERY`. What the node sends as a syncer, and what it fetches, does not become less by that."""
        spare = 1.0 - (self.upload_share - self.contribution_share)
        by_bytes = self.contribution_share / spare if spare > 0 else MAX_EVERY
        by_time = self.member_round_s / (inner_steps * self.step_s)
        return min(MAX_EVERY, max(1, math.ceil(max(by_bytes, by_time) - TOLERANCE)))

    @property
    def carried(self) -> bool:
        """Whether the node can be in every merge."""
        return self.participation >= 1.0


class Advice(Struct, frozen=True):
    """The most faithful setting that a link carries with comfort."""

    inner_steps: int
    fragments: int
    delay_steps: int
    codec: CodecName
    demand: Demand


def demand(manifest: Manifest, link: Link, members: int, step_s: float) -> Demand:
    """What `manifest` asks of a member with this link, in a run (or group) of so many members.

    Raises:
        UserError: as `tasks.registry.task_of`.
    """
    layouts = plan_fragments(task_of(manifest).specs(), manifest.sync.fragments)
    return demand_of(manifest, layouts, link, members, step_s)


def demand_of(
    manifest: Manifest, layouts: tuple[FragmentLayout, ...], link: Link, members: int, step_s: float
) -> Demand:
    """The same with the model cut into fragments already. An unknown rate of the link is infinite."""
    sync, group = manifest.sync, min(members, manifest.group.size)
    up, down = codec(manifest.codec.contribution), codec(manifest.codec.update)
    contributions = [up.encoded_bytes(f.numel) + LABEL_BYTES for f in layouts]
    updates = [down.encoded_bytes(f.numel) + LABEL_BYTES + CONTRIBUTOR_BYTES * members for f in layouts]
    others = max(0, group - 1)
    as_syncer = others / group
    cycle_s = sync.inner_steps * step_s
    control = others * HEARTBEAT_BYTES * cycle_s / Timing().heartbeat_s
    sent = LINK_OVERHEAD * (sum(contributions) + as_syncer * sum(updates)) * min(1, others) + control
    received = LINK_OVERHEAD * (sum(updates) + as_syncer * sum(contributions)) * min(1, others) + control
    byte_up_s = 8 * LINK_OVERHEAD / link.upload_bits_per_s
    byte_down_s = 8 * LINK_OVERHEAD / link.download_bits_per_s
    largest, answer = max(contributions), max(updates)
    # Contribution, acceptance, announcement, fetch: two round trips.
    trips_s = 4 * link.latency_s
    member_s = trips_s + largest * byte_up_s + answer * byte_down_s
    given = min(others, degree(answer))
    syncer_s = trips_s + others * largest * byte_down_s + given * answer * byte_up_s
    upload_share = 8 * sent / cycle_s / link.upload_bits_per_s
    download_share = 8 * received / cycle_s / link.download_bits_per_s
    # A round that is longer than a cycle makes the node miss some; a full link all the more.
    busiest = max(upload_share, download_share, member_s / cycle_s, syncer_s / cycle_s)
    return Demand(
        step_s=step_s,
        upload_bytes_per_cycle=sent,
        download_bytes_per_cycle=received,
        upload_bits_per_s=8 * sent / cycle_s,
        download_bits_per_s=8 * received / cycle_s,
        upload_share=upload_share,
        download_share=download_share,
        contribution_share=8
        * LINK_OVERHEAD
        * sum(contributions)
        * min(1, others)
        / cycle_s
        / link.upload_bits_per_s,
        member_round_s=member_s,
        syncer_round_s=syncer_s,
        delay_steps=max(1, math.ceil(max(member_s, syncer_s) / step_s)),
        participation=min(1.0, 1.0 / busiest) if busiest > 0 else 1.0,
    )


def advise(manifest: Manifest, link: Link, members: int, step_s: float) -> Advice | None:
    """The smallest H, and with it the most faithful codec, that the link carries with comfort, and a tau that
    holds; None where nothing does. H comes before 4 bits: what they leave out is made up for by error
    feedback, while a longer H costs loss. Top-k comes last but for very long H.

    Raises:
        UserError: as `tasks.registry.task_of`.
    """
    layouts = plan_fragments(task_of(manifest).specs(), manifest.sync.fragments)
    for candidate in _candidates(manifest):
        found = demand_of(candidate, layouts, link, members, step_s)
        easy = max(found.upload_share, found.download_share) <= COMFORT
        if easy and found.delay_steps < candidate.sync.inner_steps:
            return Advice(
                inner_steps=candidate.sync.inner_steps,
                fragments=candidate.sync.fragments,
                delay_steps=found.delay_steps,
                codec=candidate.codec.contribution,
                demand=found,
            )
    return None


def _candidates(manifest: Manifest) -> Iterator[Manifest]:
    own = manifest.sync.inner_steps
    for steps, names in STAGES:
        for inner_steps in sorted({h for h in (own, *steps) if h >= manifest.sync.fragments}):
            for name in names:
                yield msgspec.structs.replace(
                    manifest,
                    sync=msgspec.structs.replace(manifest.sync, inner_steps=inner_steps),
                    codec=msgspec.structs.replace(manifest.codec, contribution=name, update=name),
                )
