"""How some faults of versions come about: what `test_verdicts` goes over, by fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit import Solo, branch, child, config, found, genesis, table, word
from scenes import A_PARTIAL

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.versions import SignedVersion

Effects = list[ev.Effect]
PEERS = ("p1", "p2", "p3", "p4")


def an_old_state() -> Effects:
    chain, solo = branch(9), Solo(peers=PEERS)
    solo.announce(chain[1])
    solo.announce(chain[2])
    solo.hear("p1", heads=(chain[1].header.head(),))
    solo.hear("p2", heads=(chain[1].header.head(),))
    far = {"heads": (chain[9].header.head(),)}
    copy = found([effect for peer in PEERS for effect in solo.hear(peer, **far)], ev.FetchState)[0]
    return solo.answer(copy, ev.StateFetched(chain[1], table(chain[1])))


def names_a_partial() -> Effects:
    """One group made it."""
    made, solo = child(genesis(0).header, partials=(A_PARTIAL,)), Solo(peers=PEERS)
    (pull,) = found(solo.hear("p1", heads=(made.header.head(),)), ev.FetchUpdate)
    return solo.answer(pull, ev.UpdateFetched(made, 900))


def gives(made: SignedVersion) -> Effects:
    """p1 names a version, and gives it."""
    solo = Solo(config(owner="owner"), PEERS)
    (pull,) = found(solo.hear("p1", heads=(made.header.head(),)), ev.FetchUpdate)
    return solo.answer(pull, ev.UpdateFetched(made, 900))


def without_a_seat() -> Effects:
    """s1 alone has worked."""
    return gives(child(genesis(0).header, learners=("s1",)))


def by_a_forged_word() -> Effects:
    """Its syncer has signed the word that seats s1."""
    return gives(child(genesis(0).header, papers=(word("s1", by="p1"),)))


def repairs(digest: bytes | None = None, **run: Any) -> Callable[[], Effects]:
    """A version comes that repairs one of ours, or another one; its syncer is not excluded."""

    def row() -> Effects:
        chain = branch(3, syncer="p1", learners=PEERS)
        fragment = RestoredFragment(log=tuple(chain), watermarks=table(chain[-1]))
        solo = Solo(config(**run), PEERS, Restored(fragments=(fragment,), saved=True))
        solo.wait(2.0)
        made = child(chain[3].header, "p2", PEERS, repairs=digest or chain[2].header.digest())
        (pull,) = found(solo.hear("p2", heads=(made.header.head(),)), ev.FetchUpdate)
        return solo.answer(pull, ev.UpdateFetched(made, 900)) + solo.wait(1.0, silent=PEERS)

    return row


ROWS: dict[VersionFault, Callable[[], Effects]] = {
    VersionFault.BEHIND: an_old_state,
    VersionFault.SEATLESS: without_a_seat,
    VersionFault.FALSE_PAPERS: by_a_forged_word,
    VersionFault.FALSE_PARTIALS: names_a_partial,
    VersionFault.FALSE_REPAIR: repairs(audited=False),
}
