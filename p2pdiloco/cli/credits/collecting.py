"""Collecting the credits of a live run: a keeper's sums, or the history itself, counted here.

What the history is follows from the heads on which members stand. Every version below is compared with the
digest that its child names, so it is of no importance who gave it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, field

from p2pdiloco.cli.membership.reaching import Reached, reach
from p2pdiloco.cli.status import Search, visiting
from p2pdiloco.config.manifest import SignedManifest
from p2pdiloco.core.api.types import Vouch
from p2pdiloco.credits import (
    CreditRow,
    Credits,
    FragmentLedger,
    HistoryRecord,
    HistoryStore,
    Signatures,
    Tip,
    VersionLine,
    count,
    credits_of,
)
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.logs import waiting
from p2pdiloco.daemon.display.snapshot import short_peer
from p2pdiloco.daemon.history import Filling, believed, pull_page
from p2pdiloco.daemon.network.discovery import ask
from p2pdiloco.daemon.run_files.known_runs import ListedRun, peers_of, pull_manifest
from p2pdiloco.daemon.wire import MAX_ROWS, CreditsAnswer, CreditsQuery
from p2pdiloco.errors import UserError
from p2pdiloco.identity import verify
from p2pdiloco.ports import Transport

MAX_LEARNERS = 1_000_000
MAX_LINES, MAX_AHEAD, SHORT_LINE = 3, 2, 1000
"""Branches of a fragment that are looked at, where members stand on several, and how much longer than the
first the others may be; short ones do not matter."""


DISPUTED = 3
"""Part of the members, one of so many, of whom more on another branch leave open which is the run's."""


class CreditsWish(Struct, frozen=True, kw_only=True):
    """CreditsWish of whoever asks for credits."""

    join: tuple[str, ...]
    run: str = ""
    bucket_s: int = 0
    verify: bool = False
    history: Path | None = None
    """Folder in which to keep what was fetched, for the next time."""
    timeout_s: float = 20.0

    @property
    def needs_history(self) -> bool:
        """True: a keeper's sums do not answer it."""
        return self.verify or bool(self.bucket_s)


class RunCredits(Struct, kw_only=True):
    """Credits of a run, and where they are from."""

    run: str
    run_name: str
    manifest: SignedManifest
    credits: Credits
    names: dict[str, str]
    keepers: list[str]
    """Members that keep the history."""
    members: int
    """Members that said on which versions they stand."""
    checked: int | None = None
    """Number of signatures that were checked; None: the sums are a keeper's word."""
    counted_here: bool = False
    tips: list[Tip] = field(default_factory=list)
    """Heads that were counted back from, of every fragment."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what does not agree, or cannot be told."""
    is_disputed: bool = False
    """True: so many stand on another branch, or one whom a person named, that either may be the run's."""


class _Folder:
    """History in a folder of this program. Implements `FetchedInto`."""

    def __init__(self, folder: Path) -> None:
        self.store = HistoryStore(folder)

    async def line(self, fragment: int, tip: Tip) -> VersionLine:
        return await asyncio.to_thread(self.store.line, fragment, tip.number, tip.digest)

    async def add(self, records: Sequence[HistoryRecord]) -> None:
        for record in records:
            self.store.append(record)


async def collect(wish: CreditsWish) -> RunCredits:
    """Ask the members of a run, and count.

    Raises:
        UserError: nobody answers, or there is nothing to tell from.
    """
    search = Search(wish.run, peers_of(wish.join))
    async with visiting(wish.join, search, wish.timeout_s) as (transport, report):
        hosts = [*search.joined, report.answered_by]
        found = await pull_manifest(transport, ListedRun(report.run_id, [report.run_name]), hosts)
        if found is None:
            raise UserError("nobody gives the manifest of the run", "try again, or join through another peer")
        signed, manifest = found
        reached = await reach(transport, report.run_id, search.joined)
        if report.answered_by not in reached.peers:
            reached.peers.append(report.answered_by)
        asking = _CreditsAsking(transport, report.run_id, search.joined, reached)
        await asking.look()
        notes: list[str] = []
        collected = RunCredits(
            run=report.run_id,
            run_name=manifest.run.name,
            manifest=signed,
            credits=Credits((), manifest.sync.fragments, 0, 0, 0),
            names=asking.names(),
            keepers=list(asking.answers),
            members=len(asking.stands),
            notes=notes,
        )
        if asking.answers and not wish.needs_history:
            collected.credits = await asking.told(notes)
            collected.names = asking.names()
        else:
            with waiting("reading and counting the run's history"):
                await asking.counted(wish, collected)
        return collected


class _CreditsAsking:
    """Questions to the members of one run."""

    def __init__(self, transport: Transport, run: str, joined: Sequence[str], reached: Reached) -> None:
        self._transport, self._run, self._joined = transport, run, frozenset(joined)
        self._reached = reached
        self.stands: dict[str, dict[int, Vouch]] = {}
        self.answers: dict[str, CreditsAnswer] = {}
        self._names: dict[str, str] = {}

    async def look(self) -> None:
        """Ask all on which versions they stand, and who keeps the history what it says."""
        peers = self._reached.peers
        query, sums = wire.StandsQuery(self._run), CreditsQuery(self._run)
        stands = await asyncio.gather(*(ask(self._transport, p, query, wire.Stands) for p in peers))
        answers = await asyncio.gather(*(ask(self._transport, p, sums, CreditsAnswer) for p in peers))
        for peer, stood, answer in zip(peers, stands, answers, strict=True):
            if stood is not None:
                self.stands[peer] = {version.fragment: version for version in stood.versions}
            if answer is not None:
                self.answers[peer] = answer
                self._names.update((row.peer, row.name) for row in answer.rows if row.name)

    def names(self) -> dict[str, str]:
        """Names of learners: their own records' where there are any, else what keepers remember."""
        return self._names | {peer: name for peer, name in self._reached.names.items() if name}

    # --- a keeper's sums -----------------------------------------------------------------------------

    async def told(self, notes: list[str]) -> Credits:
        """Take the sums of the keeper that is believed, and compare them with the others'."""
        best = believed(self.answers)
        rows = await self._rows(best)
        for peer, answer in self.answers.items():
            if peer != best and (why := _disagreement(self.answers[best], answer)):
                notes.append(f"…{short_peer(peer)} and …{short_peer(best)} disagree: {why}; see --verify")
        answer = self.answers[best]
        return Credits(
            rows=tuple(rows),
            fragments=answer.fragments,
            fragment_tokens=answer.fragment_tokens,
            before_fragment_tokens=answer.before_fragment_tokens,
            uncredited_fragment_tokens=answer.uncredited_fragment_tokens,
            missing=dict(answer.missing),
            doubts=dict(answer.doubts),
        )

    async def _rows(self, keeper: str) -> list[CreditRow]:
        """Ask a keeper for all its rows. An answer that is not full is the last one."""
        first = self.answers[keeper]
        rows = first.rows
        lines = list(rows)
        while len(rows) == MAX_ROWS and len(lines) < min(first.learners, MAX_LEARNERS):
            query = CreditsQuery(self._run, len(lines))
            more = await ask(self._transport, keeper, query, CreditsAnswer)
            rows = more.rows if more is not None else ()
            lines += rows
        self._names.update((line.peer, line.name) for line in lines if line.name)
        unique = {line.peer: line for line in lines}
        return [
            CreditRow(
                peer=line.peer,
                fragment_tokens=line.fragment_tokens,
                tokens=line.fragment_tokens // first.fragments,
                claimed_tokens=line.claimed_tokens,
                inner_steps=line.inner_steps,
                contributions=line.contributions,
                first_s=line.first_s,
                last_s=line.last_s,
            )
            for line in unique.values()
        ]

    # --- the history itself --------------------------------------------------------------------------

    async def counted(self, wish: CreditsWish, collected: RunCredits) -> None:
        """Fetch what is missing of the history, and count it here."""
        if not self.stands:
            raise UserError(
                "no member that answers has a version yet", "the first merges of a run take a while"
            )
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-credits-") as folder:
            place = wish.history / self._run[:16] if wish.history is not None else Path(folder)
            into, ledgers = _Folder(place), []
            givers = sorted(self._reached.peers, key=lambda peer: peer not in self.answers)
            filling = Filling(self._run, partial(pull_page, self._transport), givers)
            for fragment in range(collected.credits.fragments):
                line = await self._line(fragment, into, filling, collected)
                signatures = Signatures(self._run, fragment, verify) if wish.verify else None
                ledger = FragmentLedger(self._run, fragment)
                if line is not None:
                    ledger = await asyncio.to_thread(
                        partial(
                            count,
                            into.store,
                            self._run,
                            fragment,
                            line,
                            bucket_s=wish.bucket_s,
                            signatures=signatures,
                        )
                    )
                    collected.tips.append(line)
                if signatures is not None:
                    collected.checked = (collected.checked or 0) + signatures.checked
                ledgers.append(ledger)
            collected.credits = credits_of(ledgers)
            collected.counted_here = True
            for peer, why in filling.refusals.items():
                if why.startswith("false-history"):
                    collected.notes.append(f"…{short_peer(peer)} gave false records, which were refused")

    async def _line(
        self, fragment: int, into: _Folder, filling: Filling, collected: RunCredits
    ) -> Tip | None:
        """Fetch the line on which most members stand, those first that a person named. None: no version."""
        stands = {peer: stood[fragment] for peer, stood in self.stands.items() if fragment in stood}
        voices = {peer: Tip(stood.number, stood.digest) for peer, stood in stands.items()}
        said = Counter(voices.values())
        said.update({tip: len(voices) for peer, tip in voices.items() if peer in self._joined})
        best: tuple[tuple[int, int, int, int], Tip, set[str]] | None = None
        left, most = dict(voices), 0
        for _ in range(MAX_LINES):
            if not left:
                break
            # First where most stand, so that who boasts of a version that nobody has hides nobody.
            tip = max(
                left.values(), key=lambda tip: (said[tip] if best is None else 0, tip.number, tip.digest)
            )
            await filling.fill(into, fragment, tip)
            line = await into.line(fragment, tip)
            known = dict(enumerate(line.digests, line.first)) | {tip.number: tip.digest}
            here = {p for p, v in voices.items() if known.get(v.number) == v.digest}
            most = most or max(SHORT_LINE, MAX_AHEAD * tip.number)  # nobody is made to fetch for ever
            left = {p: v for p, v in left.items() if p not in here and v.number <= most}
            support = len(here & self._joined), len(here), len(line.digests), tip.number
            if best is None or support > best[0]:
                against = {p for p, v in voices.items() if p not in here and v.number >= line.first}
                best = support, tip, against
        if best is None:
            return None
        if best[2]:
            collected.notes.append(
                f"fragment {fragment}: {len(best[2])} of {len(voices)} members stand on another branch"
            )
            collected.is_disputed |= bool(best[2] & self._joined) or DISPUTED * len(best[2]) > len(voices)
        return best[1]


def _disagreement(one: CreditsAnswer, other: CreditsAnswer) -> str:
    """Say in what two keepers cannot both be right; empty: nothing is seen."""
    if one.tips == other.tips and not one.missing and not other.missing:
        return "" if one.rows == other.rows or _figures(one) == _figures(other) else "of the same versions"
    if other.before_fragment_tokens or one.before_fragment_tokens:
        return ""  # one of them did not keep all of it
    if other.fragment_tokens > one.fragment_tokens or len(one.rows) == MAX_ROWS:
        return ""
    mine = {row.peer: row.fragment_tokens for row in one.rows}
    more = [row.peer for row in other.rows if row.fragment_tokens > mine.get(row.peer, 0)]
    return f"of …{short_peer(more[0])}'s tokens" if more else ""


def _figures(answer: CreditsAnswer) -> list[tuple[str, int, int]]:
    return [(row.peer, row.fragment_tokens, row.contributions) for row in answer.rows]
