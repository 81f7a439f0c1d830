"""Demand of a run on a link: arithmetic on a manifest.

What suits a link is in `daemon.links.linkadvice`.

A cycle is H inner steps, in which every fragment is merged once. In it a member sends each contribution once
(C bytes for all fragments) and fetches each update once (U bytes). Offices rotate over the members. So on the
average one of m members also receives (m - l)/m C as the syncer of one of l leaf groups. It also sends (m -
1)/m U, as a syncer, or as a peer that passes a large update on.

Where there are several leaf groups, all their syncers but one send a partial merge to one above them, four
bytes a parameter whatever the codec; and so on, level by level. Up to the root that is l - 1 partials of
every fragment, in both directions (l - 1)/m of four bytes a parameter on the average. The root itself gets
all of its group's at one time, which takes far longer than anything else where the codec is small.

Inner steps never wait for any of this, so a slow link costs no utilisation by itself. It costs delay, and
from some point on participation, when a round takes longer than a fragment's H inner steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.values import rate_text
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.versions import level_sizes
from p2pdiloco.daemon.bulk.updates.fanout import degree
from p2pdiloco.daemon.links.link import LINK_OVERHEAD, Link
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import FragmentLayout, plan_fragments
from p2pdiloco.tensors.merge import partial_bytes

LABEL_BYTES = 400
"""Bytes of the label of a contribution, a partial merge or a version, without its contributors."""
CONTRIBUTOR_BYTES = 70
HEARTBEAT_BYTES = 700
"""Bytes of one heartbeat with what carries it, and its answer: as `scripts/bench/bench_wire.py` counts a
node's control bytes."""
MAX_EVERY = 8
TOLERANCE = 0.05
"""Share above what the link carries that is no reason yet to leave a version out."""


class Demand(Struct, frozen=True):
    """Demand of taking part on one node, with inner steps of a given length."""

    step_s: float
    upload_bytes_per_cycle: float
    download_bytes_per_cycle: float
    partial_bytes_per_cycle: float
    """Part of both that partial merges cost, on the average of all members, whoever sends and gets them."""
    upload_bits_per_s: float
    download_bits_per_s: float
    upload_share: float
    """Share of the link's upload. Above 1 the node takes part less often."""
    download_share: float
    contribution_share: float
    """Share of the link's upload that this node's own contributions take alone."""
    fetch_share: float
    """Share of the link's download by what no node can do without: updates and control messages."""
    member_round_s: float
    """Time from a contribution's copy-out until its update is here, for the largest fragment."""
    syncer_round_s: float
    """Time of such a round where this node is the syncer of every group up to the root. The others' links
    are like its own: contributions and partial merges come in, and updates go out."""
    delay_steps: int
    """Longer one of both in inner steps: a tau that holds."""
    delay_cycles: float
    """Longer one of both in cycles of H inner steps: how stale merged work is."""
    participation: float
    """Share of the merges that this node can be in."""

    @property
    def every(self) -> int:
        """Stride of versions to which such a link can contribute in time: 1 (all) to `MAX_EVERY`.

        What the node sends as a syncer, and what it fetches, does not become less by that.
        """
        spare = 1.0 - (self.upload_share - self.contribution_share)
        by_bytes = self.contribution_share / spare if spare > 0 else MAX_EVERY
        return min(MAX_EVERY, max(1, math.ceil(by_bytes - TOLERANCE)))

    @property
    def carried(self) -> bool:
        """Tell whether the node can be in every merge."""
        return self.participation >= 1.0


class _Bytes(Struct, frozen=True):
    """Payload bytes of a run with their labels: of all fragments together, and of the largest."""

    contributions: int
    contribution: int
    updates: int
    update: int
    partials: float
    """Partial merges that one member sends, and receives, on the average."""
    partial: int


def control_bits_per_s(peers: float) -> float:
    """Compute the rate of control messages in each direction, with heartbeats to so many peers."""
    return 8 * peers * HEARTBEAT_BYTES / Timing().heartbeat_s


def neighbours(manifest: Manifest, members: int) -> float:
    """Estimate with how many others a member exchanges heartbeats, on the average.

    They are all that share a leaf group with it for one of the fragments, whose groups are drawn
    independently.
    """
    groups = -(-members // manifest.group.size)
    return (members - 1) * (1 - (1 - 1 / groups) ** manifest.sync.fragments)


def control_doubts(manifest: Manifest, limits: Link) -> list[str]:
    """Warn about limits of a person that leave nothing beside control messages.

    Counted are as many members as are expected, or as a group holds, if that is more. Control messages are
    never held up, and bulk gets what is left.
    """
    size, each = manifest.group.size, control_bits_per_s(1)
    met = neighbours(manifest, max(size, manifest.group.expected_members))
    return [
        f"{flag}: {rate_text(rate)}bit/s carry the control messages of {int(rate / each) + 1} members, and "
        f"in this run a node may have to do with {math.ceil(met) + 1} ({rate_text(met * each)}bit/s): then "
        f"{what}"
        for flag, rate, what in (
            ("--max-upload", limits.upload_bits_per_s, "nothing that it learns goes out"),
            ("--max-download", limits.download_bits_per_s, "no update comes in"),
        )
        if rate <= met * each
    ]


def demand(manifest: Manifest, link: Link, members: int, step_s: float) -> Demand:
    """Compute what `manifest` asks of a member with this link, in a run of so many members.

    Raises:
        UserError: as `tasks.registry.task_of`.
    """
    layouts = plan_fragments(task_of(manifest).specs(), manifest.sync.fragments)
    return demand_of(manifest, layouts, link, members, step_s)


def demand_of(
    manifest: Manifest, layouts: tuple[FragmentLayout, ...], link: Link, members: int, step_s: float
) -> Demand:
    """Compute the demand with the model cut into fragments already. An unknown rate of the link is
    infinite."""
    size = manifest.group.size
    sizes = level_sizes(-(-members // size), size)
    moved = _bytes(manifest, layouts, members, sizes)
    cycle_s = manifest.sync.inner_steps * step_s
    some = min(1, members - 1)
    control = control_bits_per_s(neighbours(manifest, members)) / 8 * cycle_s
    given, taken = (members - 1) / members, (members - sizes[0]) / members
    partials = LINK_OVERHEAD * moved.partials
    own, fetched = LINK_OVERHEAD * moved.contributions * some, LINK_OVERHEAD * moved.updates * some
    sent, received = (
        (own + given * fetched + partials + control),
        (fetched + taken * own + partials + control),
    )
    byte_up_s = 8 * LINK_OVERHEAD / link.upload_bits_per_s
    byte_down_s = 8 * LINK_OVERHEAD / link.download_bits_per_s
    # Contribution, acceptance, announcement, fetch: two round trips.
    trips_s = 4 * link.latency_s
    member_s = trips_s + moved.contribution * byte_up_s + moved.update * byte_down_s
    others = -(-members // sizes[0]) - 1
    copies = min(others, degree(moved.update))
    syncer_s = trips_s + others * moved.contribution * byte_down_s + copies * moved.update * byte_up_s
    syncer_s += _climb_s(sizes, moved.partial * byte_up_s, moved.partial * byte_down_s, link.latency_s)
    up_cycle, down_cycle = link.upload_bits_per_s * cycle_s / 8, link.download_bits_per_s * cycle_s / 8
    # A round that is longer than a cycle makes the node miss some; a full link all the more.
    round_s = max(member_s, syncer_s)
    busiest = max(sent / up_cycle, received / down_cycle, round_s / cycle_s)
    return Demand(
        step_s=step_s,
        upload_bytes_per_cycle=sent,
        download_bytes_per_cycle=received,
        partial_bytes_per_cycle=partials,
        upload_bits_per_s=8 * sent / cycle_s,
        download_bits_per_s=8 * received / cycle_s,
        upload_share=sent / up_cycle,
        download_share=received / down_cycle,
        contribution_share=own / up_cycle,
        fetch_share=(fetched + control) / down_cycle,
        member_round_s=member_s,
        syncer_round_s=syncer_s,
        delay_steps=max(1, math.ceil(round_s / step_s)),
        delay_cycles=round_s / cycle_s,
        participation=min(1.0, 1.0 / busiest) if busiest > 0 else 1.0,
    )


def _bytes(
    manifest: Manifest, layouts: Sequence[FragmentLayout], members: int, sizes: tuple[int, ...]
) -> _Bytes:
    up, down = codec(manifest.codec.contribution), codec(manifest.codec.update)
    contributions = [up.encoded_bytes(f.numel) + LABEL_BYTES for f in layouts]
    updates = [down.encoded_bytes(f.numel) + LABEL_BYTES + CONTRIBUTOR_BYTES * members for f in layouts]
    sums = [partial_bytes(f) + LABEL_BYTES for f in layouts]
    partials = 0.0
    for below, above in pairwise(sizes):  # a syncer's own partial crosses no wire
        named = CONTRIBUTOR_BYTES * members / below
        partials += (below - above) / members * (sum(sums) + named * len(layouts))
    return _Bytes(
        contributions=sum(contributions),
        contribution=max(contributions),
        updates=sum(updates),
        update=max(updates),
        partials=partials,
        partial=max(sums),
    )


def _climb_s(sizes: tuple[int, ...], up_s: float, down_s: float, latency_s: float) -> float:
    """Compute how long partial merges take from the leaf groups' syncers to the root.

    On each level all of a group's but the receiver's own go through its link. `up_s`, `down_s`: time of one
    partial merge in each direction.
    """
    fellows = [-(-below // above) - 1 for below, above in pairwise(sizes)]
    return sum(max(up_s, count * down_s) + 2 * latency_s for count in fellows if count)
