"""What the core must know before its first event: the run's protocol numbers and its timing constants."""

from __future__ import annotations

from msgspec import Struct

from p2pdiloco.core.api.effects import VoteRecord
from p2pdiloco.core.api.types import SignedVersion, Watermark


class Timing(Struct, frozen=True, kw_only=True):
    """Time-outs in seconds. Each says where it is used and what you would see if it were wrong."""

    heartbeat_s: float = 0.5
    """Progress is sent to every member this often. Longer: deaths are noticed later."""
    suspect_s: float = 3.0
    """Silence after which a member is not counted on, where its heartbeats come evenly
    (`core/members/suspicion.py`). Below a few heartbeats: false elections."""
    suspect_cap_s: float = 8.0
    """The same where they come as unevenly as can be. Must stay below `member_ttl_s`."""
    failures_to_suspect: int = 2
    """Failed sends in a row, with nothing heard between, that mean the same as silence."""
    probe_s: float = 0.1
    """After a first failed send the peer is tried again this soon."""
    member_ttl_s: float = 10.0
    """Silence after which a member leaves the view, so that the rest can form a majority without it."""
    redial_s: float = 5.0
    """How often a silent member that the DHT still lists is tried again."""
    stagger_s: float = 0.4
    """Each rank waits this much longer than the one before it stands for election."""
    hidden_wait_s: float = 6.0
    """Members that cannot be dialled wait this much longer where somebody who can should stand, and, elected
    nevertheless, give way after a version or so long. Thin uplinks wait as long, and give way after a
    version. Too short: elected where an election is slow."""
    election_timeout_s: float = 1.5
    """A candidate that has no majority by then gives up this term."""
    answer_floor_s: float = 5.0
    """A syncer is never called slow before this, however short its rounds usually are."""
    retry_s: float = 0.3
    """First pause before something refused or undelivered is tried again; doubles up to 16 times this."""
    hold_floor_s: float = 2.0
    """A contribution that missed a round waits at least this long for company in the next."""
    resume_alone_s: float = 20.0
    """A node with saved state that hears of no confirmed member for so long goes on from what it has."""
    genesis_wait_s: float = 3.0
    """A node told to start a run listens this long for members before it does, if anybody is listed."""
    leave_s: float = 3.0
    """A leaving node waits at most this long for its last contributions to be merged."""
    durable_s: float = 20.0
    """A version that a peer has held for so long it still has after a crash. Below the interval of
    checkpoints: a peer that goes back to one may start a fork that we have nothing left for."""
    fork_horizon_s: float = 3600.0
    """A peer that vanished may come back with a heavier chain for so long: what it may lack is kept."""
    query_s: float = 1.0
    """An unknown office is asked about at most this often."""


class CoreConfig(Struct, frozen=True, kw_only=True):
    """The protocol part of a manifest, with what is derived from it."""

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
    """Of one update of each fragment, together; 0: as many as of contributions."""
    timing: Timing = Timing()

    @property
    def fragments(self) -> int:
        """P."""
        return len(self.genesis_versions)


class RestoredFragment(Struct, frozen=True, kw_only=True):
    """What a node knew of a fragment when it stopped."""

    log: tuple[SignedVersion, ...]
    """Kept ancestors, oldest first; the newest durable version last. Version 0 if nothing was saved."""
    watermarks: tuple[Watermark, ...] = ()


class Restored(Struct, frozen=True, kw_only=True):
    """What a node finds in its data folder at start."""

    fragments: tuple[RestoredFragment, ...]
    votes: tuple[VoteRecord, ...] = ()
    saved: bool = False
    """Anything but version 0 was found."""


def restored_nothing(config: CoreConfig) -> Restored:
    """A first start: version 0 everywhere, no vote given."""
    return Restored(fragments=tuple(RestoredFragment(log=(v,)) for v in config.genesis_versions))
