"""What tests of known flaws share: a version that nobody made, and peers that serve its whole state."""

from __future__ import annotations

from kit import TABLES, Solo, branch, digest, found, sign, signed_part, table
from msgspec.structs import replace

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.grouping import Roster
from p2pdiloco.core.api.reasons import FetchFailure
from p2pdiloco.core.api.types import Contributor, Stamp, Watermark, table_digest
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain.watermarks import marks_of


def forged(
    liar: str, number: int = 5000, tokens: int = 10**9, voters: tuple[str, ...] | None = None
) -> SignedVersion:
    """A version that never was: the liar signs it, and its table names those who vote from then on."""
    stamp = Stamp(1, 1)
    marks = tuple(Watermark(p, stamp, number, 1, 100, 10, 300, b"", 100) for p in sorted(voters or (liar,)))
    header = replace(
        branch(0)[0].header,
        number=number,
        parent=digest("nobody", number),
        term=4000,
        syncer=liar,
        tokens=tokens,
        state_digest=digest("a state of the liar's choosing"),
        contributors=(signed_part(Contributor(liar, Stamp(1, 2), 40, 4, stamp)),),
        unit=40,
        table=table_digest(marks),
    )
    TABLES[header.digest()] = marks_of(marks)
    return SignedVersion(header, sign(liar, "version", header))


def meet(solo: Solo, peers: tuple[str, ...]) -> list[ef.Effect]:
    """These peers are seen all at once; what they say is heard from then on."""
    solo.peers = peers
    return solo.feed(ev.PresenceSeen(Roster(tuple((peer, 1) for peer in (*peers, solo.me)))))


class States:
    """Peers that have whole states of one version, and updates of none. A copy takes `copy_s`."""

    def __init__(self, solo: Solo, version: SignedVersion, copy_s: float = 0.0) -> None:
        self._solo, self._version, self._copy_s = solo, version, copy_s
        self._due: list[tuple[float, ef.FetchState]] = []

    def given_for(self, seconds: float) -> bool:
        """Let time pass. Whether the version was taken; time ends with that."""
        solo, end_s = self._solo, self._solo.now + seconds
        while solo.now < end_s:
            if self._serve(solo.wait(0.5)):
                return True
        return False

    def _serve(self, effects: list[ef.Effect]) -> bool:
        digest = self._version.header.digest()
        while effects:
            if any(c.version.header.digest() == digest for c in found(effects, ef.CommitVersion)):
                return True
            self._due += [(self._solo.now + self._copy_s, copy) for copy in found(effects, ef.FetchState)]
            gone = found(effects, ef.FetchUpdate)
            here = self._arrived()
            effects = []
            for pull in gone:
                failed = ev.FetchFailed(pull.fragment, pull.number, pull.peer, FetchFailure.GONE)
                effects += self._solo.feed(failed)
            for copy in here:
                fetched = ev.StateFetched(copy.fragment, copy.peer, self._version, table(self._version))
                effects += self._solo.feed(fetched)
        return False

    def _arrived(self) -> list[ef.FetchState]:
        here = [copy for at_s, copy in self._due if at_s <= self._solo.now]
        self._due = [(at_s, copy) for at_s, copy in self._due if at_s > self._solo.now]
        return here
