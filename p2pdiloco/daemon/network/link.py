"""Link of a node: what a run demands of it, what it carries, which settings suit it, and what follows.

`demand` is arithmetic on a manifest. A cycle is H inner steps, in which every fragment is merged once. In it
a member sends each contribution once (C bytes for all fragments) and fetches each update once (U bytes).
Offices rotate over the members. So on the average one of m members also receives (m - l)/m C as the syncer of
one of l leaf groups. It also sends (m - 1)/m U, as a syncer, or as a peer that passes a large update on.

Where there are several leaf groups, all their syncers but one send a partial merge to one above them, four
bytes a parameter whatever the codec; and so on, level by level. Up to the root that is l - 1 partials of
every fragment, in both directions (l - 1)/m of four bytes a parameter on the average. The root itself gets
all of its group's at one time, which takes far longer than anything else where the codec is small.

Inner steps never wait for any of this, so a slow link costs no utilisation by itself. It costs delay, and
from some point on participation, when a round takes longer than a fragment's H inner steps.

`advise` finds settings for a link. `LinkMeters` measure ours, `LinkWatch` judges whether it keeps up,
`LinkTeller` tells core, learner and people.

Rules: docs/protocol/links.md, section 4.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.manifest import CodecName, Manifest
from p2pdiloco.config.presets import warnings_about
from p2pdiloco.config.values import rate_text
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.versions import level_sizes
from p2pdiloco.core.base import Shared
from p2pdiloco.core.capacity import TELL_EVERY_S, UPDATE_COPIES, Meter, UplinkMeter
from p2pdiloco.daemon.budgets import LINK_OVERHEAD, LinkCapacity
from p2pdiloco.daemon.bulk.updates import degree
from p2pdiloco.daemon.diary import Diary
from p2pdiloco.daemon.learner_link import LearnerLink
from p2pdiloco.errors import StorageError
from p2pdiloco.ports import PostEvent, Transport
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import FragmentLayout, plan_fragments
from p2pdiloco.tensors.merge import partial_bytes
from p2pdiloco.util import Frozen, loop_s, read_note

logger = logging.getLogger(__name__)

LABEL_BYTES = 400
"""Bytes of the label of a contribution, a partial merge or a version, without its contributors."""
CONTRIBUTOR_BYTES = 70
HEARTBEAT_BYTES = 700
"""Bytes of one heartbeat with what carries it, and its answer: as `scripts/bench/bench_wire.py` counts a
node's control bytes."""
MAX_EVERY = 8
TOLERANCE = 0.05
"""Share above what the link carries that is no reason yet to leave a version out."""


class Demand(Frozen):
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


class _Bytes(Frozen):
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


def control_doubts(manifest: Manifest, limits: LinkCapacity) -> list[str]:
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


def demand(manifest: Manifest, link: LinkCapacity, members: int, step_s: float) -> Demand:
    """Compute what `manifest` asks of a member with this link, in a run of so many members.

    Raises:
        UserError: as `tasks.registry.task_of`.
    """
    layouts = plan_fragments(task_of(manifest).specs(), manifest.sync.fragments)
    return demand_of(manifest, layouts, link, members, step_s)


def demand_of(
    manifest: Manifest, layouts: tuple[FragmentLayout, ...], link: LinkCapacity, members: int, step_s: float
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


class Advice(Frozen):
    """Advice: the most faithful setting that a link carries with comfort."""

    inner_steps: int
    fragments: int
    delay_steps: int
    codec: CodecName
    demand: Demand
    doubts: tuple[str, ...]
    """Warnings about the manifest with this setting: what nobody has shown to work."""


def advise(manifest: Manifest, link: LinkCapacity, members: int, step_s: float) -> Advice | None:
    """Find the smallest H, and with it the most faithful codec, that the link carries with comfort.

    With them come a P with which rounds are short, and a tau that holds. None: the link carries no setting.

    A shorter H comes before 8 bits: what 4 bits leave out is made up for by error feedback, while a longer H
    costs loss. Top-k comes after 4 bits, but for very long H: what it costs was not measured. P is the run's
    own, or two or four times as large. A smaller fragment's round is shorter, so its work is merged less
    stale, which thin links and partial merges in full precision ask for. It costs messages, and no loss that
    is known.

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
    sync = replace(chosen.sync, delay_steps=found.delay_steps)
    return Advice(
        inner_steps=sync.inner_steps,
        fragments=sync.fragments,
        delay_steps=sync.delay_steps,
        codec=chosen.codec.contribution,
        demand=found,
        doubts=tuple(warnings_about(replace(chosen, sync=sync), numel)),
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
    for inner_steps in sorted({manifest.sync.inner_steps, *horizons}):
        for name in names:
            codecs = replace(manifest.codec, contribution=name, update=name)
            syncs = [
                (replace(manifest.sync, inner_steps=inner_steps, fragments=len(layouts)), layouts)
                for layouts in cuts
                if len(layouts) <= inner_steps
            ]
            yield [(replace(manifest, sync=sync, codec=codecs), layouts) for sync, layouts in syncs]


RISE, FALL = 3, 24
"""Judgements in a row until something worse (`RISE`), or again something better (`FALL`), is believed."""
FOLLOWS, SLOW_OFFICES, FALLS_BEHIND = range(3)
EFFECTS = {
    SLOW_OFFICES: "versions come late, and others' too where this node is syncer",
    FALLS_BEHIND: "it may fall behind for good; contributions to old versions are refused",
}


class SteadyLevel:
    """Level that changes when it was found several times in a row: 0 or 1 is good, more is worse."""

    def __init__(self, level: int) -> None:
        self.level = level
        self._streak: list[int] = []

    def look(self, wanted: int) -> bool:
        """Take another judgement in; return whether the level changes."""
        level, streak = self.level, self._streak
        if wanted == level or (streak and (wanted > level) != (streak[0] > level)):
            streak.clear()
        if wanted != level:
            streak.append(wanted)
        if len(streak) >= (RISE if wanted > level else FALL):
            self.level = min(streak) if wanted > level else max(streak)
            streak.clear()
        return self.level != level


@dataclass
class LinkWatch:
    """Judge of the link: whether it keeps up with the run, and to how many versions the node contributes.

    A node whose link does not keep up says so once, and contributes to fewer versions rather than too late to
    all.

    What the link carries is what a person permits (--max-upload), or what transfers achieved lately; what the
    run asks of it is `demand_of`. Both change slowly, and a false alarm would cost contributions. So the best
    of the last transfers counts, only long ones, and only what is found several times in a row. The best of
    many, since a peer's own link may be what is full: with others' contributions to it, for instance. While a
    transfer of ours is under way, everything that goes the same way counts, also updates that are given to
    others.

    Fewer contributions are for a thin uplink. A thin downlink is only said: every update is fetched and none
    can be left out, however little the node contributes. Where updates come faster than the link carries
    them, the node falls further and further behind, and copies the whole state in the end. It is behind again
    when that has come, and what it measured against versions older than `group.max_base_age_versions` is
    refused.
    """

    _manifest: Manifest
    _layouts: tuple[FragmentLayout, ...]
    meters: LinkMeters

    def __post_init__(self) -> None:
        self._rarer = SteadyLevel(1)
        self._behind = SteadyLevel(FOLLOWS)
        self.every = 1
        """Stride of versions to which the node contributes; 1: to all."""
        self.words = ""
        """Sentence that a person should know about the link; empty: it keeps up."""

    @property
    def uplink_bits_per_s(self) -> float:
        """Rate of the uplink for decisions about offices, where a mistake costs no contribution.

        It is known sooner than `LinkMeters.link`: also from other transfers than contributions, from few of
        them, or from an earlier life. While nothing is known of it, updates that came in say how much it has
        at most: of links to homes the uplink is the thinner part.
        """
        known = min(self.meters.limits.upload_bits_per_s, self.meters.uplink.bits_per_s)
        return known if known < math.inf else self.meters.downlink.early_bits_per_s

    def office_bits_per_s(self, members: int) -> float:
        """Rate of an uplink that carries as much of an office as this link does.

        A syncer takes in what all others of its group contribute, so a person's limit of the downlink counts
        too. What transfers show of the downlink does not count: mostly that is the uplink of whoever sent.
        """
        codecs, group = self._manifest.codec, min(members, self._manifest.group.size)
        contribution, update = (
            sum(codec(name).encoded_bytes(layout.numel) for layout in self._layouts)
            for name in (codecs.contribution, codecs.update)
        )
        up, down = contribution + UPDATE_COPIES * update, (group - 1) * contribution + update
        return min(self.uplink_bits_per_s, self.meters.limits.download_bits_per_s * up / down)

    def judge(self, members: int, step_s: float, catching_up: bool = False) -> bool:
        """Judge the link; return whether there is something new to say, and `every` may have changed.

        `members`: with this node. `step_s`: length of an inner step; 0: not known yet. `catching_up`: only a
        person's limits count, since states come as slowly as suits those who give them.
        """
        if step_s <= 0:
            return False
        link, sync = self.meters.limits if catching_up else self.meters.link, self._manifest.sync
        found = demand_of(self._manifest, self._layouts, link, members, step_s)
        changed = [self._rarer.look(found.every), self._behind.look(behind(found))]
        # Where the others are no quorum without us, rounds would wait for us all the longer.
        every = self._rarer.level if members > sync.quorum else 1
        if every == self.every and not any(changed):
            return False
        self.every = every
        keeps_up = self._rarer.level == 1 and self._behind.level == FOLLOWS
        self.words = "" if keeps_up else self._say(link, found)
        return True

    def _say(self, link: LinkCapacity, found: Demand) -> str:
        has = [
            f"{rate_text(rate)}bit/s {way}"
            for rate, way in ((link.upload_bits_per_s, "up"), (link.download_bits_per_s, "down"))
            if rate < math.inf
        ]
        asked = (
            f"{rate_text(found.upload_bits_per_s)}bit/s up, {rate_text(found.download_bits_per_s)}bit/s down"
        )
        does = [EFFECTS[self._behind.level]] if self._behind.level else []
        if self.every > 1:
            does.append(f"contributing to one in {self.every} versions")
        elif self._rarer.level > 1:
            does.append("contributions come late")
        what = "; ".join(does)
        return f"the link ({', '.join(has)}) cannot keep up with what this run asks ({asked}): {what}"


def behind(found: Demand) -> int:
    """Tell what a thin downlink costs: `FOLLOWS` (nothing), `SLOW_OFFICES`, `FALLS_BEHIND`."""
    if found.fetch_share > 1 + TOLERANCE:
        return FALLS_BEHIND
    return SLOW_OFFICES if found.download_share > 1 + TOLERANCE else FOLLOWS


UNLIMITED = LinkCapacity(math.inf, math.inf)


@dataclass
class LinkMeters:
    """Meters of our link, each way, by all payload bytes of one transport, beside what a person permits."""

    _transport: Transport
    limits: LinkCapacity = UNLIMITED
    """Rates that a person permits; infinite where nothing is said."""
    _remembered_bits_per_s: float = math.inf
    """Rate that the uplink carried in an earlier life."""

    def __post_init__(self) -> None:
        now = loop_s
        self.uplink = UplinkMeter(
            lambda: Meter(lambda: self.sent_bytes, now, LINK_OVERHEAD), self._remembered_bits_per_s
        )
        """Meter that runs while contributions and partial merges go out, and while updates are given to
        others."""
        self.downlink = Meter(lambda: self._transport.payload_bytes()[1], now, LINK_OVERHEAD)
        """Meter that runs while updates that we asked for come."""

    def permit(self, limits: LinkCapacity) -> None:
        """Go by other rates of a person's from now on."""
        self.limits = limits

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that have gone out on all links, also of what is under way."""
        return self._transport.payload_bytes()[0]

    @property
    def link(self) -> LinkCapacity:
        """Rates of the link as far as they are known. Round trips do not count: they cost delay, not
        participation."""
        return LinkCapacity(
            min(self.limits.upload_bits_per_s, self.uplink.sure_bits_per_s),
            min(self.limits.download_bits_per_s, self.downlink.bits_per_s),
            0.0,
        )

    @property
    def uplink_bytes_per_s(self) -> float:
        """Rate of the uplink as far as it is known: what a person permits, or what was measured."""
        return self.link.upload_bits_per_s / 8


@dataclass
class LinkTeller:
    """Teller of what is known of the link: offices for the core, how often to contribute for the learner,
    words for people."""

    _watch: LinkWatch
    _shared: Shared
    _learner: LearnerLink
    _diary: Diary
    _post: PostEvent

    def __post_init__(self) -> None:
        self._tell_uplink(1)

    async def tell_regularly(self) -> None:
        """Judge now and then, for ever."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            self.judge()

    def judge(self) -> None:
        """Judge the link; what is new is said, and done."""
        watch, learner, now = self._watch, self._learner, loop_s()
        members = len(self._shared.view.members(now)) + 1
        self._tell_uplink(members)
        status, others_s = learner.status, self._shared.median_step_s(now)
        step_s = others_s if status is None else status.step_time_s
        if not watch.judge(members, step_s, catching_up=status is None):  # it may never catch up for the link
            return
        learner.take_part(watch.every)
        words = watch.words or "the link keeps up again: contributing to every version"
        up, down = watch.meters.link.upload_bits_per_s, watch.meters.link.download_bits_per_s
        self._diary.say(
            logging.WARNING if watch.words else logging.INFO,
            "link",
            words,
            every=watch.every,
            upload_bits_per_s=round(up) if up < math.inf else None,
            download_bits_per_s=round(down) if down < math.inf else None,
        )

    def _tell_uplink(self, members: int) -> None:
        """Tell the core what our link carries, or is permitted to. With others' links it decides how often
        we hold an office."""
        # A machine that rests for its owner leaves offices to others, as one with a thin uplink does.
        rests = self._learner.handed_over
        rate = 0.0 if rests else self._watch.office_bits_per_s(members)
        if rate != self._shared.uplink.bits_per_s:
            self._post(ev.UplinkMeasured(rate))


MAX_AGE_S = 86_400.0
"""Age after which the file counts no more: the machine may be elsewhere by then."""


class RememberedUplink(msgspec.Struct, forbid_unknown_fields=True):
    """Rate that our uplink carried in an earlier life, in `<data_dir>/uplink.json`: believed for a day, until
    it is measured.

    Losing it costs the first minutes' rank among candidates for offices, nothing else.
    """

    bits_per_s: float
    at_s: float
    """Time of the measurement, in seconds since 1970."""


_decoder = msgspec.json.Decoder(RememberedUplink)


def _file(data_dir: Path) -> Path:
    return data_dir / "uplink.json"


def load_uplink(data_dir: Path) -> float:
    """Load the remembered rate in bits per second; infinite: there is none, or it is too old, or from the
    future."""
    known = read_note(_file(data_dir), _decoder.decode, logger.warning)
    if known is None:
        return math.inf
    fresh = 0 <= time.time() - known.at_s <= MAX_AGE_S
    return known.bits_per_s if fresh and known.bits_per_s > 0 else math.inf


def save_uplink(data_dir: Path, bits_per_s: float) -> None:
    """Save the rate that was measured in this life. A failure is logged: it costs this memory only."""
    if not bits_per_s < math.inf:
        return
    content = msgspec.json.encode(RememberedUplink(bits_per_s, time.time()))
    try:
        Files().save(_file(data_dir), [content], durable=False)
    except StorageError as error:
        logger.warning("what the uplink carries cannot be kept: %s", error)
