"""Inputs of a new core: the run's protocol numbers, timing constants, amendments, and what was saved."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from p2pdiloco.core.api.events import VoteRecord
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.types import Count, Watermark, Wire
from p2pdiloco.core.api.versions import SignedVersion


class Timing(Struct, frozen=True, kw_only=True):
    """Time-outs in seconds. Each says where it is used, and what a wrong value would cause."""

    heartbeat_s: float = 0.5
    """Pause between two heartbeats (`Progress`) to a member. Longer: deaths are noticed later."""
    suspect_s: float = 3.0
    """Silence after which a member is not counted on. Below a few heartbeats: false elections."""
    failures_to_suspect: int = 2
    """Failed sends in a row, with nothing heard between, that count as silence."""
    probe_s: float = 0.1
    """Pause before a peer is tried again after a first failed send."""
    member_ttl_s: float = 10.0
    """Silence after which a member leaves the view, so that the rest can form a majority without it."""
    redial_s: float = 5.0
    """Pause between two tries to reach a silent member that the DHT still lists."""
    stagger_s: float = 0.4
    """Delay of each rank after the one before it, before it stands for election."""
    election_timeout_s: float = 1.5
    """Time in which a candidate must have a majority; after it, it gives up this term."""
    answer_floor_s: float = 5.0
    """Least time before a syncer is called slow, however short its rounds usually are."""
    retry_s: float = 0.3
    """First pause before something refused or undelivered is tried again; doubles up to 16 times this."""
    hold_floor_s: float = 2.0
    """Least time that a contribution which missed a round waits for company in the next."""
    resume_alone_s: float = 20.0
    """Time for which a node with saved state listens for confirmed members, before it goes on from what it
    has."""
    genesis_wait_s: float = 3.0
    """Time for which a node told to start a run listens for members first, if anybody is listed."""
    leave_s: float = 3.0
    """Most time that a leaving node waits for its last contributions to be merged."""
    durable_s: float = 20.0
    """Time after which a version that a peer holds is certain to survive that peer's crash. Below the
    interval of checkpoints: a peer that goes back to one may start a fork that we have nothing left for."""
    fork_horizon_s: float = 3600.0
    """Time within which a vanished peer may come back with a heavier chain: what it may lack is kept."""
    query_s: float = 1.0
    """Least time between two questions about an unknown office."""

    @property
    def settle_s(self) -> float:
        """Time after which those that are here are expected to have said where they stand, or to have been
        elected. Less fit members stand so much later, and a hidden holder gives way after so long."""
        return 2 * self.suspect_s


class CoreConfig(Struct, frozen=True, kw_only=True):
    """Protocol part of a manifest, with what is derived from it."""

    run: str
    inner_steps: int
    delay_steps: int
    quorum: int
    grace_fraction: float
    grace_cap_s: float
    group_size: int
    term_versions: int
    log_versions: int
    max_base_age_versions: int
    tokens_per_step: int
    update_codec: str
    contribution_codec: str
    genesis_versions: tuple[SignedVersion, ...]
    """Version 0 of every fragment."""
    max_payload_bytes: tuple[int, ...]
    """Largest contribution or update of every fragment."""
    update_bytes: int = 0
    """Bytes of one update of each fragment, added up; 0: as many as contributions have."""
    largest_share: float = 1 / 3
    """Share of a merge that one learner has at most."""
    open_share: float = 0.25
    """Share of a merge that all contributions without a seat have at most, together."""
    most_units: float = 4.0
    """Weight of a contribution at most, in usual ones."""
    audited: bool = False
    """True: merges can be made again: updates have a dense codec."""
    loss_audits: float = 0.0
    """Share of a learner's time, and of what its node receives, for audits of single contributions; 0: there
    are none."""
    owner: str = ""
    """Peer id of the run's owner, who signs papers; empty: there is none."""
    recovery: str = ""
    """Peer id of the owner's recovery key, whose word ends that of the owner's key; empty: there is none."""
    seats: tuple[str, ...] = ()
    """Peers that have a seat from version 0 on, in the order of their places."""
    admits: bool = False
    """True: the run's owner lets members in, so that whoever says that it is confirmed was let in, and H
    inner steps weigh in full beside however slow ones, within `most_units`. False: anybody may say so."""
    timing: Timing = Timing()

    @property
    def owners(self) -> tuple[str, ...]:
        """Keys by which the owner's papers are judged (`core.api.papers.owner_of`)."""
        return tuple(filter(None, (self.owner, self.owner and self.recovery)))

    @property
    def usual_tokens(self) -> int:
        """Tokens of H inner steps: of a usual contribution, before a chain has shown what is usual."""
        return self.inner_steps * self.tokens_per_step

    @property
    def fragments(self) -> int:
        """Number of fragments (P in the paper, Decoupled DiLoCo, arXiv 2604.21428)."""
        return len(self.genesis_versions)


class RestoredFragment(Struct, frozen=True, kw_only=True):
    """State of one fragment that a node had saved when it stopped."""

    log: tuple[SignedVersion, ...]
    """Kept ancestors, oldest first; the newest durable version last. Version 0 if nothing was saved."""
    watermarks: tuple[Watermark, ...] = ()


class Restored(Struct, frozen=True, kw_only=True):
    """State that a node finds in its data folder at start."""

    fragments: tuple[RestoredFragment, ...]
    votes: tuple[VoteRecord, ...] = ()
    proofs: tuple[Evidence, ...] = ()
    """Proofs, and statements of our own, for which members are excluded."""
    saved: bool = False
    """True: something newer than version 0 was found."""


MAX_AMENDMENTS = 32
MAX_MESSAGE = 240
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3


class Going(StrEnum):
    """Ways for a run to go."""

    TRAIN = "train"
    PAUSE = "pause"
    END = "end"


class Amendment(Wire, frozen=True):
    """Change of a run by its owner, from so many tokens on. It says all that holds from then on, whatever
    earlier ones said.

    They change what learners do by themselves: the rate of inner steps, and whether there are any. Merges and
    outer steps know nothing of them: a learner that hears of one late only trains otherwise for a while, and
    still makes the same versions as all others.
    """

    number: Annotated[int, Meta(ge=1, le=1 << 53)]
    from_tokens: Count
    """Tokens merged into the run (the mean over its fragments) from which on it holds."""
    schedule_tokens: Count = 0
    """Length of the schedule; 0: the manifest's."""
    rate_factor: Annotated[float, Meta(ge=LEAST_FACTOR, le=MOST_FACTOR)] = 1.0
    """Factor of the inner learning rate."""
    going: Going = Going.TRAIN
    message: Annotated[str, Meta(max_length=MAX_MESSAGE)] = ""
    """Message to everybody who takes part; shown as soon as it is heard."""


def newest(amendments: Iterable[Amendment]) -> Amendment | None:
    """Return the amendment with the highest number, in force or not; None: there is none."""
    return max(amendments, key=lambda amendment: amendment.number, default=None)


def in_force(amendments: Iterable[Amendment], tokens: int) -> Amendment | None:
    """Return the amendment that holds where so many tokens are merged; None: only the manifest does."""
    return newest(amendment for amendment in amendments if amendment.from_tokens <= tokens)


def amended(amendments: tuple[Amendment, ...], by: Amendment) -> tuple[Amendment, ...]:
    """Add an amendment. Those that were to hold as late, or later, are taken back; the oldest are forgotten
    where there are too many."""
    kept = [amendment for amendment in amendments if amendment.from_tokens < by.from_tokens]
    return tuple([*kept, by][-MAX_AMENDMENTS:])
