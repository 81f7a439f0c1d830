"""What daemon and learner say to each other: small tagged structs, which `learner.channel` carries.

The first one is `Start`. Tensors never travel, they are in the shared memory (`tensors.exchange`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from p2pdiloco.config.manifest import Manifest

MAX_SHARDS = 1024
"""Into which the data of an epoch is cut at most (`learner.reading.shards`)."""
MAX_EPOCH = 1_000_000
"""A later one is nobody's honest epoch."""

Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Text = Annotated[str, Meta(max_length=4096)]
InstallMode = Literal["merged", "rebase", "overwrite"]
RestoreMode = Literal["all", "rest", "none"]


# --- commands: daemon to learner ---------------------------------------------------------------------


class Command(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what the daemon says."""


class BaseRef(Struct, frozen=True):
    """The version of a fragment that lies in one of its base buffers."""

    number: int
    buffer: int
    tokens: int = 0
    """Merged into this version and all before it."""


class DataShare(Struct, frozen=True):
    """What readers of the same data tell each other (`learner.reading.shards`)."""

    data: Annotated[str, Meta(max_length=64)]
    """Names the data: others may read something else."""
    epoch: Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
    taken: Annotated[bytes, Meta(max_length=MAX_SHARDS // 8)]
    """A bit for every shard of the epoch that somebody has begun."""
    readers: tuple[str, ...] = ()
    """To the learner: who else reads it, by peer id."""
    shards: Annotated[int, Meta(ge=0, le=MAX_SHARDS)] = 0
    """From the learner: of an epoch; bits of `taken` beyond so many are 0."""


class LearnerOptions(Struct, frozen=True, kw_only=True):
    """Node-local choices for the learner process."""

    peer: str
    """Peer id: picks this learner's data stream."""
    data_path: str | None = None
    """--data: a file or a folder, for all sources but "embedded"."""
    tokenizer_path: str | None = None
    """Of the file that the manifest names, if it names one."""
    place_path: str | None = None
    """Where the place in the data is kept (`learner.reading.stream`)."""
    device: str = "auto"
    threads: int = 0
    """CPU threads of torch; 0: torch's own choice."""
    nproc: int = 1
    """Processes of this learner, each with a device of its own; 0: one for every GPU
    (`learner.parallel.ranks`)."""
    shard: str = "auto"
    """Whether these share the parameters out among themselves: auto, never, always
    (`learner.parallel.sharding`)."""
    precision: str = "auto"
    """Of forward and backward passes: "auto", bf16 where the device is fast at it, or "fp32"."""
    compile: bool = False
    """By torch.compile; what cannot be compiled is trained as it is."""
    micro_batch_tokens: int = 0
    """Tokens of one pass, to begin with; 0: the whole step, within a bound on an accelerator. Halved for as
    long as memory does not suffice."""
    halvings: int = 0
    """So often that was halved already: earlier processes ended for it (`lifeline.EXIT_TOO_LARGE`)."""
    niceness: int = 10
    """While it trains, not while it starts: a daemon on the same cores stays responsive, and so does the
    user's machine."""
    min_step_s: float = 0.0
    """An inner step takes at least so long, on average."""
    status_interval_s: float = 1.0
    evaluation_tokens: int = 16_384


class Start(Command, frozen=True):
    """First frame: everything that the learner needs to begin."""

    manifest: Manifest
    options: LearnerOptions
    bases: tuple[BaseRef, ...]
    """Per fragment, what the daemon has put into the exchange: theta starts from it."""
    restore_path: str | None = None
    """Learner state file (`learner.checkpoint`); moments and counters of time are taken."""
    restore: tuple[RestoreMode, ...] = ()
    """Per fragment (empty: none of them): "all" takes the whole saved displacement, "rest" only what was
    not in flight in a contribution when it was saved, "none" starts at the base."""


class Install(Command, frozen=True):
    """A newer version of a fragment lies in base buffer `buffer`: go over to it (`learner.fragments`)."""

    fragment: int
    number: int
    buffer: int
    mode: InstallMode
    tokens: int = 0
    """As in `BaseRef`."""


class CopyOut(Command, frozen=True):
    """A closing call: copy this fragment out, as it is or as it will be at the next boundary
    (`learner.answering`). `CopiedOut` or `NothingToCopy`."""

    fragment: int


class FreeSlot(Command, frozen=True):
    """The last copy of this fragment will never be merged as it stands."""

    fragment: int


class TakePart(Command, frozen=True):
    """From now on contribute to every so-and-so-many-th version only: the link does not carry more."""

    every: Annotated[int, Meta(ge=1)]


class Learners(Command, frozen=True):
    """So many learners train in this run now, as far as the daemon knows, this one included."""

    count: Annotated[int, Meta(ge=1)]


class ShareData(Command, frozen=True):
    """Who else reads the data, and what of it is begun. Also sent right after `Start`."""

    share: DataShare


class Evaluate(Command, frozen=True):
    """Held-out loss of the global parameters (the current bases): `Evaluated` with the same tag."""

    tag: int


class Save(Command, frozen=True):
    """Write the learner's state to this file: `StateSaved`."""

    path: Path


class StopStepping(Command, frozen=True):
    """Make no more inner steps and obey at once, until `Stop`: one that is under way is given up, where that
    can be done (`learner.answering`)."""


class Stop(Command, frozen=True):
    """End at the next boundary, after saving if a path is given."""

    save_path: Path | None = None


AnyCommand = (
    Start
    | Install
    | CopyOut
    | FreeSlot
    | TakePart
    | ShareData
    | Learners
    | Evaluate
    | Save
    | StopStepping
    | Stop
)


# --- events: learner to daemon -----------------------------------------------------------------------


class LearnerEvent(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what the learner says."""


class Ready(LearnerEvent, frozen=True):
    """Start-up is over, the first inner step begins."""

    device: str
    parameters: int
    threads: int
    inner_step: int
    restored: bool
    """Whether `Start.restore_path` was taken."""
    note: Text = ""
    """Why a state that was given was not taken, or what of one that was taken begins anew (moments of another
    optimizer)."""
    gives_up: bool = False
    """Whether `StopStepping` is obeyed in the middle of an inner step."""


class CopiedOut(LearnerEvent, frozen=True):
    """theta of a fragment, or a share of the way to it, is in `exchange.sent`; the pseudo-gradient is
    `base[base_buffer] - sent`.

    The slot is in use until an `Install` of mode merged or overwrite, or `FreeSlot`."""

    fragment: int
    tokens: int
    inner_steps: int
    base_number: int
    base_buffer: int
    inner_step: int
    due: bool


class NothingToCopy(LearnerEvent, frozen=True):
    """Answer to `CopyOut`: the slot is in use, no inner step was made since the last copy-out, or it is not
    this learner's turn (`TakePart`)."""

    fragment: int
    slot_in_use: bool


class Applied(LearnerEvent, frozen=True):
    """An `Install` is done: theta of the fragment is measured against this version."""

    fragment: int
    number: int
    inner_step: int


class Note(LearnerEvent, frozen=True):
    """Something that a person should know."""

    text: Text


class Status(LearnerEvent, frozen=True):
    """Where the learner is; about every `status_interval_s`, the latest one wins."""

    inner_step: int
    tokens_total: int
    tokens_per_s: float
    step_time_s: float
    """Moving average over inner steps, without evaluation and saving."""
    loss: float | None
    """Moving average of the training loss, nats per token; None before the first step."""
    longest_gap_s: float
    """Longest time from the end of an inner step to the end of the next since the previous Status,
    without evaluation and saving."""
    cpu_s: float
    """CPU seconds of the learner process, all threads, since it started."""
    skipped_steps: int = 0
    """Inner steps skipped for a non-finite loss or gradient."""
    run_tokens: int = 0
    """Where the run is, for the schedule (`learner.optimizer.schedule`): tokens that all learners have
    consumed."""
    learning_rate: float = 0.0
    """Of the last inner step."""
    deferred_copies: int = 0
    """How often a fragment was due while its slot was in use (counted once per due date)."""
    share: DataShare | None = None
    """What of the data is begun, by this learner and, as far as it was told, by others."""


class Evaluated(LearnerEvent, frozen=True):
    """Held-out loss of the global parameters, nats per token, over `tokens` tokens."""

    tag: int
    loss: float
    tokens: int
    metrics: dict[str, float] = {}
    """What the task measures beside the loss."""


class StateSaved(LearnerEvent, frozen=True):
    """A save is over. A failed one changes nothing else: an older file is still there."""

    path: Path
    ok: bool
    reason: Text = ""
    last: bool = False
    """Asked for by `Stop`: no inner step comes after it."""


class Failed(LearnerEvent, frozen=True):
    """The learner cannot go on and ends; last event."""

    reason: Text
    hint: Text = ""
    """What the person at the keyboard can do about it."""


AnyEvent = Ready | CopiedOut | NothingToCopy | Applied | Note | Status | Evaluated | StateSaved | Failed
