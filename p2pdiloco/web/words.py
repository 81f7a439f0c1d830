"""Words of the web page: closed lists of what a node, a member or a run can be, each with what it means.

The value is the word that is shown and encoded; `str` explains it. docs/topics/web.md has the same lists.
"""

from __future__ import annotations

from p2pdiloco.core.api.reasons import Reason
from p2pdiloco.util import direct_members


@direct_members
class NodeWord(Reason):
    """State of this node in one word."""

    JOINING = "joining", "looks for its run and for whom to join through"
    WAITING = "waiting", "no member of the run answers yet"
    CATCHING_UP = "catching-up", "copies what the others hold"
    TRAINING = "training", "makes inner steps and contributes"
    IDLE = "idle", "a full member that makes no steps: its machine's owner, or a limit of theirs, wants it so"
    AWAY = "away", "has left its run for now: the month's transfer is used up. It comes back by itself"
    PAUSED = "paused", "the run's owner has paused the run"
    ENDED = "ended", "the run is over; this node gives its result to whoever asks"
    LEAVING = "leaving", "finishes what is in flight, saves, and ends"
    SERVING = "serving", "a bootstrap: lists runs and helps peers to meet, trains nothing"


@direct_members
class Pulse(Reason):
    """Pulse of a run: whether versions come."""

    NEW = "new", "nothing is merged yet"
    ALIVE = "alive", "versions come as they should"
    LATE = "late", "the newest version is older than is usual here"
    STILL = "still", "no version has come for long, though learners train"
    PAUSED = "paused", "the run's owner has paused it"
    ENDED = "ended", "the run is over"
    UNKNOWN = "unknown", "no member of the run answers"


@direct_members
class MemberWord(Reason):
    """State of a member as others see it."""

    HERE = "here", "trains and keeps up"
    BEHIND = "behind", "is a member, but something keeps it from contributing as it should"
    RESTING = "resting", "a full member that makes no inner steps now"
    SILENT = "silent", "was not heard of lately"


@direct_members
class Why(Reason):
    """Reason for which a member is behind."""

    NONE = "", "nothing is wrong"
    SILENT = "silent", "no message came from it for longer than members are waited for"
    CATCHING_UP = "catching-up", "it copies the run's state and has no confirmed versions yet"
    OLD_VERSIONS = "old-versions", "it holds versions older than the newest"
    NOT_MERGED = "not-merged", "it trains, but its work was in none of the last merges"
    NO_DISK = "no-disk", "its disk takes nothing, so it has no vote"
    THIN_UPLINK = "thin-uplink", "its uplink carries less than an office asks"
    NOT_TRAINING = "not-training", "no learner runs there"
    DISAGREES = "disagrees", "its work goes where no other's goes, so it weighs less than half"
    EXPELLED = "expelled", "this node's loss audits have shown that its work does harm, or nothing"


@direct_members
class MarkKind(Reason):
    """Kind of a mark on the time axis."""

    JOIN = "join", "a member came"
    LEAVE = "leave", "a member said good-bye"
    SILENT = "silent", "a member went silent: it died, or its network did"
    ELECTION = "election", "members elect a syncer"
    OFFICE = "office", "a syncer took office, or laid it down"
    SUSPICION = "suspicion", "a syncer is not counted on any more"
    FORK = "fork", "two histories met, and one gave way"
    EXCLUDED = "excluded", "a member is shown to have lied, and has lost its place for good"
    COURSE = "course", "the run's owner changed something, or the run rests or ends"
    FAULT = "fault", "something went wrong on this node: its learner, its link, its disk, its p2p process"


@direct_members
class Control(Reason):
    """Deed that the owner of the machine can do from the page."""

    PAUSE = "pause", "make no more steps until told to resume; what is done is handed over first"
    RESUME = "resume", "make steps again"
    FINISH = "finish", "hand over what is done, then leave"
    LIMITS = "limits", "change what this node may use"
