"""An owner's notice: changed from the newest that is known, signed, kept, and given to members (`publish`).

`amend` changes what may be changed of a run that goes on, from a number of merged tokens on. `vouch_for` is
an owner's word that what a node of its own holds is the run. `PeerChange` and `InviteEnd` ban, admit and
revoke: a peer is found by its id, its end or its name, and shown before anything is signed. `reach_members`
finds members for somebody who only asks. `why_cannot_join` asks what keeps this node out of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import click
import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.cli.options import RunPlace, joined_through, say
from p2pdiloco.cli.status_command import visit, visitor
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.values import Addresses, is_peer_address, peer_in
from p2pdiloco.core.api.config import (
    LEAST_FACTOR,
    MAX_MESSAGE,
    MOST_FACTOR,
    Amendment,
    Going,
    amended,
    in_force,
    newest,
)
from p2pdiloco.core.api.reasons import AdmissionFault
from p2pdiloco.core.api.types import Vouch
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission import fault_words
from p2pdiloco.daemon.course import words_of
from p2pdiloco.daemon.display.logs import ask_terminal, at_terminal
from p2pdiloco.daemon.display.snapshot import SETTLED, StatusReport, counted, progress_text
from p2pdiloco.daemon.network.discovery import ask, presences
from p2pdiloco.daemon.notice import (
    MAX_LISTED,
    NOTICE_WORDS,
    Invite,
    Notice,
    is_true_notice,
    notice_figures,
    with_word,
)
from p2pdiloco.daemon.run_files.known_runs import (
    SHORT,
    RunSearch,
    WaysIn,
    is_link,
    is_whole_id,
    peers_of,
    saved_runs,
    usual_folders,
    way_of,
)
from p2pdiloco.daemon.run_files.ownership import Ownership
from p2pdiloco.daemon.wire import GiveNotice, JoinAnswer, MayJoin, NoticeAnswer, NoticeQuery
from p2pdiloco.errors import ConfigError, PeerUnreachable, UserError, clean
from p2pdiloco.identity import Identity, public_of, verify
from p2pdiloco.ports import Transport
from p2pdiloco.release import WIRE_VERSION

# Amending.

LEAD_S = 60
"""Time ahead at which a change holds where nobody says: by then all members have heard of it."""
LEAD_SHARE = 20
"""Part of the schedule, one of so many, that it holds ahead at most: the pace is what a member says."""
ASKED = 5
"""Members that are asked how far the run is, where no peer of the join line is one: the middle one counts."""


class AmendmentWish(Struct, frozen=True):
    """Changes that an owner wants; what is None stays as it is."""

    schedule_tokens: int | None = None
    rate_factor: float | None = None
    message: str | None = None
    going: Going | None = None
    at_tokens: int | None = None
    """Tokens from which on it holds; None: soon."""

    def check(self) -> None:
        """Raises: UserError (nothing is wanted, or what no amendment can say)."""
        if (self.schedule_tokens, self.rate_factor, self.message, self.going) == (None,) * 4:
            raise UserError(
                "there is nothing to change",
                "say what: --schedule-tokens, --learning-rate-factor, --message, --pause, --resume or --end",
            )
        if self.rate_factor is not None and not LEAST_FACTOR <= self.rate_factor <= MOST_FACTOR:
            raise UserError(f"--learning-rate-factor goes from {LEAST_FACTOR:g} to {MOST_FACTOR:g}")
        if self.message is not None and len(self.message) > MAX_MESSAGE:
            raise UserError(f"the message has {len(self.message)} characters, and may have {MAX_MESSAGE}")


class RunPosition(Struct, frozen=True):
    """Whereabouts of a run, as a member says."""

    tokens: int
    schedule_tokens: int
    tokens_per_s: float
    rests: bool


def amend(place: RunPlace, wish: AmendmentWish) -> None:
    """Amend a run. Raises: UserError."""
    wish.check()
    owned, addresses = _owned(place)
    manifest = saved_runs(owned.data_dir)[owned.run].manifest
    report = visit(_ask_status(owned.run, addresses)) if addresses else None
    if report is None:
        raise UserError(
            "no member of the run says how far it is", "start this folder's node, or name one: --join ADDRESS"
        )
    course = report.course
    pace = max(0, course.schedule_tokens - course.tokens) / course.left_s if course.left_s else 0.0
    position = RunPosition(course.tokens, course.schedule_tokens, pace, course.rests != "no")
    click.echo(f"the run is at {course.tokens} tokens: {progress_text(course)}")

    def change(notice: Notice, _: ReachedPeers) -> Notice:
        made = amendment(notice.amendments, wish, manifest, position)
        click.echo(words_of(made))
        last = newest(notice.amendments)
        if last is not None and last.from_tokens > max(made.from_tokens, position.tokens):
            click.echo(
                f"amendment {last.number}, which was to hold from {last.from_tokens} on, is taken back"
            )
        return replace(notice, amendments=amended(notice.amendments, made))

    publish(place, change)


async def _ask_status(run: str, addresses: Addresses) -> StatusReport | None:
    async with visitor(addresses) as transport:
        named = peers_of(addresses)
        reached = await reach_members(transport, run, named)
        reports: list[StatusReport] = []
        for peer in sorted(reached.peers, key=lambda peer: peer not in named):
            report = await ask(transport, peer, wire.StatusQuery(run), StatusReport)
            if report is None or report.run_id != run or report.state not in SETTLED:
                continue
            if peer in named:
                return report
            reports.append(report)
            if len(reports) == ASKED:
                break
    reports.sort(key=lambda report: report.course.tokens)
    return reports[len(reports) // 2] if reports else None


def amendment(
    known: tuple[Amendment, ...], wish: AmendmentWish, manifest: Manifest, place: RunPosition
) -> Amendment:
    """Make the amendment that an owner wants: what the newest one says, but for what is wished.

    Raises: UserError (it cannot hold, or would change nothing).
    """
    last, moment = newest(known), _start_tokens(newest(known), wish, manifest, place)
    base = (in_force(known, moment) if _is_urgent(wish) else last) or Amendment(1, 0)
    made = Amendment(
        number=last.number + 1 if last is not None else 1,
        from_tokens=moment,
        schedule_tokens=base.schedule_tokens if wish.schedule_tokens is None else wish.schedule_tokens,
        rate_factor=base.rate_factor if wish.rate_factor is None else wish.rate_factor,
        going=wish.going or base.going,
        message=base.message if wish.message is None else wish.message,
    )
    length = made.schedule_tokens or manifest.inner.schedule_tokens
    if length <= manifest.inner.warmup_tokens:
        raise UserError(
            f"a schedule of {length} tokens is over before the warm-up is ({manifest.inner.warmup_tokens})"
        )
    stops = manifest.end.learners == "stop"
    wants_training = wish.going is Going.TRAIN or wish.schedule_tokens is not None
    if wants_training and made.going is Going.TRAIN and stops and length <= place.tokens:
        raise UserError(
            f"the run is at {place.tokens} tokens, so a schedule of {length} is over",
            "give a longer one with --schedule-tokens, or end the run with --end",
        )
    try:
        return msgspec.convert(msgspec.to_builtins(made), Amendment)
    except msgspec.ValidationError as error:
        raise UserError(f"no amendment can say that: {error}", "name a smaller number") from error


def _is_urgent(wish: AmendmentWish) -> bool:
    """Tell whether it comes before what is still to come, which it takes back."""
    return wish.going in (Going.PAUSE, Going.END) and wish.at_tokens is None


def _start_tokens(last: Amendment | None, wish: AmendmentWish, manifest: Manifest, place: RunPosition) -> int:
    """Choose from how many tokens on it holds. Raises: UserError (that is in the past)."""
    if wish.at_tokens is not None:
        if wish.at_tokens < place.tokens and not place.rests:
            raise UserError(
                f"the run is at {place.tokens} tokens: it cannot hold from {wish.at_tokens} on",
                "name a number that is still to come, or leave --at-tokens out",
            )
        if place.rests and wish.at_tokens > place.tokens:
            raise UserError(
                f"no inner step is made now: the run rests at {place.tokens} tokens and never comes to "
                f"{wish.at_tokens}",
                "leave --at-tokens out",
            )
        return wish.at_tokens
    if wish.going is Going.TRAIN:
        # At once, and instead of the pause: where no inner step is made, no token comes any more.
        return min(place.tokens, last.from_tokens) if last is not None else place.tokens
    if place.rests:
        return place.tokens
    lead = min(LEAD_S * place.tokens_per_s, manifest.inner.schedule_tokens / LEAD_SHARE)
    soon = place.tokens + round(lead)
    if last is not None and not _is_urgent(wish):
        soon = max(soon, last.from_tokens)  # what is still to come comes along, and not before its time
    # What makes a run longer must hold before it is over.
    return max(place.tokens, min(soon, place.schedule_tokens)) if manifest.end.learners == "stop" else soon


# Vouching.

DIGITS = 8
"""Hexadecimal digits of a digest that are shown."""
LOST_S = 60
"""Silence of a peer after which it may be a lost node."""
MOST_NAMED = 3
"""Members that are named where none was."""


def vouch_for(place: RunPlace, clear: bool = False) -> None:
    """Vouch for the newest versions of this folder's node, or of the first of these peers that answers.
    `clear`: take the last vouch back instead.

    Raises: UserError.
    """
    versions: tuple[Vouch, ...] = ()
    if not clear:
        versions = own_stands(place).versions
        for version in versions:
            digest = version.digest.hex()[:DIGITS]
            click.echo(f"fragment {version.fragment}: version {version.number} ({digest})")
        members = sum(len(version.members) for version in versions)
        click.echo(f"worked on by {counted(members, 'member')}")
    publish(place, lambda notice, _: replace(notice, vouch=versions))


def end_invite(place: RunPlace, word: str, **how: bool) -> None:
    """Close or revoke an invite (`InviteEnd.of`). Raises: UserError."""
    ended = InviteEnd.of(place.owned(), word, **how)
    publish(place, ended.make, ended.agree)


def lost_seats(place: RunPlace) -> dict[str, str]:
    """Find the peers that have a seat and are not here, by the names that they had."""
    seats: tuple[wire.SeatLine, ...] = ()
    with contextlib.suppress(UserError):
        seats = own_stands(place).seats
    here = {line.name for line in seats if line.silent_s is not None and line.silent_s < LOST_S}
    return {line.name: line.peer for line in seats if line.name and line.name not in here}


def own_stands(place: RunPlace) -> wire.Stands:
    """Ask the owner's node, or the peers that the owner names, what it stands on, and who has a seat.

    Raises: UserError (none that has trained tells; others that are members are named).
    """
    # Peers that the node has met are strangers: what one of those holds is not the owner's word.
    owned, join = place.owned(), joined_through(place.join)[0]
    addresses = join or _own_addresses(owned)
    stands, others = visit(_stands(owned.run, addresses)) if addresses else (None, [])
    if stands is None:
        raise UserError(
            f"no node of yours that has trained is found here{' or behind --join' if join else ''}",
            "name the node whose state you trust: --join ADDRESS",
            others,
        )
    return stands


def _own_addresses(owned: Ownership) -> Addresses:
    """List the addresses of the owner's nodes: of the folder with the key, and of the usual ones, if they
    are in the run."""
    usual = [folder for folder in usual_folders(None) if run_folder(folder, owned.run).exists()]
    found = [address for folder in (owned.data_dir, *usual) for address in WaysIn.load(folder).own]
    return tuple(dict.fromkeys(found))


async def _stands(run: str, addresses: Addresses) -> tuple[wire.Stands | None, list[str]]:
    async with visitor(addresses) as transport:
        for peer in peers_of(addresses):
            answer = await ask(transport, peer, wire.StandsQuery(run), wire.Stands)
            if answer is not None and answer.versions:
                return answer, []
        records = await presences(transport, run)
    return None, [words for peer in sorted(records) if (words := _words_of(peer, records[peer]))][:MOST_NAMED]


def _words_of(peer: str, record: wire.Presence) -> str:
    """Word where a member is; empty: nobody can tell."""
    for address in record.addresses:
        whole = address if "/p2p/" in address else f"{address}/p2p/{peer}"
        if is_peer_address(whole) and peer_in(whole) == peer:
            return f"{clean(record.name) or 'a member'} is at {clean(whole)}"
    return ""


# Peers that an owner means.

ENDING = 6
"""Letters of a peer id's end that stand for it."""
SURE_ENDING = 12
"""Letters of an end for which nobody finds an id of his own: six take a home computer days."""
ELLIPSIS = "…"


class PeerChange(Struct):
    """Change that puts a peer on a list of the notice, or takes it off, gives it a seat, or ends that."""

    verb: str
    """Verb by which the person asks for it."""
    entries: Literal["banned", "members", ""]
    """List; empty: none."""
    word: str
    """Word for the peer: its id, the end of it, or its name."""
    adds: bool
    yes: bool
    """True: the person agrees beforehand to whomever the word means."""
    seated: bool | None = None
    """True: the peer is given a seat; False: it has none any more; None: nothing is said of seats."""
    replaces: str = ""
    """Id of the peer whose seat it gets; empty: nobody's."""
    lost: Mapping[str, str] = {}
    """Peers with a seat that are not here, by the name that each had."""

    async def agree(self, notice: Notice, reached: ReachedPeers) -> None:
        """Show who is meant, and ask whoever sits at a terminal. Raises: UserError (it is not to be)."""
        peer = self._peer(notice, reached)
        name = reached.names.get(peer)
        called = f"called {clean(name)}" if name else "whose name is not known here"
        say(f"{self.verb} {peer}, {called}")
        old = self.lost.get(name or "", peer)
        if old != peer:
            await self._offer(notice.run, peer, old)
        if self.yes:
            return
        if at_terminal():
            await _consent(f"{self.verb} it?")
        elif not _is_sure(self.word, peer):
            raise UserError(
                f'"{clean(self.word)}" could be others too, and there is nobody to ask: nothing is signed',
                f"give the whole id, the last {SURE_ENDING} letters of it, or --yes",
            )

    async def _offer(self, run: str, peer: str, old: str) -> None:
        """Say that a lost node of the same name has a seat, and ask whether this one gets it."""
        say(f"{old}, of the same name, has a seat and is not here")
        if not self.yes and at_terminal() and await ask_terminal("replace it, as its seat is to end?"):
            self.replaces = old
        else:
            command = f"p2pdiloco seat {run[:SHORT]} {peer} --replace {old}"
            say(f"it keeps that; to give it to the new one: {command}")

    def make(self, notice: Notice, reached: ReachedPeers) -> Notice:
        """Make the changed notice. Raises: UserError."""
        peer = self._peer(notice, reached)
        if self.seated is not None:
            notice = with_word(notice, peer, self.seated, self.replaces)
        if not self.entries:
            return notice
        if self.adds:
            return with_entry(notice, self.entries, peer)
        left = tuple(entry for entry in getattr(notice, self.entries) if entry != peer)
        return replace(notice, **{self.entries: left})

    def _peer(self, notice: Notice, reached: ReachedPeers) -> str:
        if self.adds:
            hint = "p2pdiloco status --json shows whole ids"
            if public_of(self.word) is not None:
                return self.word
            return find_peer(self.word, {*reached.names, *reached.lately}, reached, hint)
        listed = getattr(notice, self.entries)
        hint = f"on the list are {', '.join(listed) or 'none'}; no member remembers such a name"
        return find_peer(self.word, listed, reached, hint)


class InviteEnd(Struct, frozen=True):
    """Change that closes or revokes an invite: one of the owner's own, so without a terminal its word is
    enough."""

    key: str
    name: str | None
    """None: this folder gave out no such invite."""
    yes: bool
    leaves: bool = False
    """True: whoever came by it stays, with the seats that it gave."""

    @classmethod
    def of(cls, owned: Ownership, word: str, yes: bool, leaves: bool = False) -> InviteEnd:
        """Find the invite that a word means. Raises: UserError."""
        key = owned.key_of(word)
        return cls(key, owned.names.get(key), yes, leaves)

    async def agree(self, notice: Notice, reached: ReachedPeers) -> None:
        """Show what is meant, and ask whoever sits at a terminal. Raises: UserError (it is not to be)."""
        self.make(notice, reached)
        called = f"called {clean(self.name)}" if self.name else "without a name"
        verb, does = "revoke", "everybody who came with it is put out, and their seats end"
        if self.leaves:
            verb, does = "close", "nobody new comes by it, and its members stay"
        say(f"{verb} the invite {self.key}, {called}: {does}")
        if not self.yes and at_terminal():
            await _consent(f"{verb} it?")

    def make(self, notice: Notice, reached: ReachedPeers) -> Notice:
        """Make the changed notice. Raises: UserError."""
        seated = {word.peer for word in notice.seats if word.seated}
        if self.name is None and self.key in seated.union(reached.names):
            raise UserError("that is a member, and no invite", 'end its seat by "seat --end", or "ban" it')
        if self.leaves:
            return with_word(notice, self.key, False, self.key)
        return with_entry(with_word(notice, self.key, False), "revoked", self.key)


async def _consent(question: str) -> None:
    if not await ask_terminal(question):
        raise UserError("nothing is signed", "--yes signs without a question")


def with_entry(notice: Notice, name: str, entry: str) -> Notice:
    """Put an entry on that list of a notice. Raises: UserError (it is full)."""
    entries = tuple(dict.fromkeys([*getattr(notice, name), entry]))
    if len(entries) > MAX_LISTED:
        raise UserError(f"a notice has {MAX_LISTED} entries of a kind, and they are taken", "take some back")
    return replace(notice, **{name: entries})


def find_peer(word: str, peers: Collection[str], reached: ReachedPeers, hint: str) -> str:
    """Find the one of these peers that a word means. Raises: UserError."""
    if word in peers:
        return word
    ending = _ending(word)
    found = {
        peer
        for peer in peers
        if reached.names.get(peer) == word or (len(ending) >= ENDING and peer.endswith(ending))
    }
    # A peer that answered may lie: what is remembered makes a name doubtful, and never says whom it means.
    possible = sorted(found.union(reached.lately.intersection(peers)))
    if len(found) == len(possible) == 1:
        return possible[0]
    if possible:
        raise UserError(f'"{clean(word)}" is or was lately {", ".join(possible)}', "give the whole id")
    raise UserError(f'nobody is called "{clean(word)}", or has an id that ends so', hint)


def _ending(word: str) -> str:
    """Cut off the ellipsis with which ids are shown."""
    return word.removeprefix(ELLIPSIS)


def _is_sure(word: str, peer: str) -> bool:
    ending = _ending(word)
    return len(ending) >= SURE_ENDING and peer.endswith(ending)


# Members that can be reached: those to join through, and listed ones.

MAX_ASKED = 16
MAX_KEEPERS = 6
LOOKS, PAUSE_S = 3, 0.5


class ReachedPeers(Struct):
    """Peers of a run."""

    peers: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Names by which listed members call themselves."""
    lately: set[str] = field(default_factory=set)
    """Peers that were called as was asked, as members remember it."""
    versions: set[int] = field(default_factory=set)
    """Other versions of the wire that are listed."""


async def reach_members(
    transport: Transport, run: str, joined: Iterable[str], called: str = ""
) -> ReachedPeers:
    """Connect to at most `MAX_ASKED` peers of a run, those to join through first.

    `called`: name whose bearers they are asked for.
    """
    found = ReachedPeers(list(dict.fromkeys(joined)))
    for _ in range(LOOKS):  # who has just joined the DHT may not find all of it at once
        records = await presences(transport, run)
        if records:
            break
        await asyncio.sleep(PAUSE_S)
    for peer, record in _keepers_first(records):
        if record.wire_version != WIRE_VERSION:
            found.versions.add(record.wire_version)
            continue
        found.names[peer] = record.name
        if peer in found.peers or len(found.peers) >= MAX_ASKED:
            continue
        try:
            await transport.connect(peer, record.addresses)
        except PeerUnreachable:
            continue
        found.peers.append(peer)
    if 0 < len(called) <= wire.MAX_NAME:
        query = wire.NameQuery(run, called)
        for answer in await asyncio.gather(*(ask(transport, p, query, wire.NameAnswer) for p in found.peers)):
            found.lately.update(answer.peers if answer is not None else ())
    return found


def _keepers_first(records: Mapping[str, wire.Presence]) -> list[tuple[str, wire.Presence]]:
    """List records; a few of those that say that they keep the run's history come first."""
    keepers = [(peer, record) for peer, record in records.items() if record.keeps_history][:MAX_KEEPERS]
    return list((dict(keepers) | dict(records)).items())


Change = Callable[[Notice, ReachedPeers], Notice]
Agree = Callable[[Notice, ReachedPeers], Awaitable[None]]


def publish(
    place: RunPlace,
    change: Change,
    agree: Agree | None = None,
    called: str = "",
) -> None:
    """Change the newest notice, sign it, keep it, and give it to whoever can be reached.

    `agree`: raises if the person does not agree, before anything is signed. `called`: name by which somebody
    may be meant.
    """
    owned, addresses = _owned(place)
    if not addresses:
        raise UserError("there is no peer to give the notice to", "name one: --join ADDRESS")
    notice, given = visit(_give(owned, addresses, change, agree, called))
    click.echo(
        f"notice {notice.sequence}: {NOTICE_WORDS % notice_figures(notice)}; "
        f"given to {counted(given, 'member')}, to be passed on"
    )
    if not given:
        raise UserError(
            "the notice is kept, but no member took it",
            "start this folder's node, which has it, or try again with --join ADDRESS",
        )


def _owned(place: RunPlace) -> tuple[Ownership, Addresses]:
    """Find a run whose owner's key is here, and addresses of peers that may be in it. Raises: UserError."""
    owned = place.owned()
    return owned, tuple(dict.fromkeys([*joined_through(place.join)[0], *owned.addresses(())]))


async def _give(
    owned: Ownership, addresses: Addresses, change: Change, agree: Agree | None, called: str
) -> tuple[Notice, int]:
    async with visitor(addresses) as transport:
        reached = await reach_members(transport, owned.run, peers_of(addresses), called)
        known: dict[str, int] = {}
        for peer in set(peers_of(_own_addresses(owned))).intersection(reached.peers):
            stands = await ask(transport, peer, wire.StandsQuery(owned.run), wire.Stands)
            known |= {line.peer: line.seat.word for line in stands.seats} if stands else {}
        newest = await _newest(owned, transport, reached.peers)
        if agree is not None:
            await agree(newest, reached)
            newest = await _newest(owned, transport, reached.peers)  # another may be signed meanwhile
        notice = owned.publish(change(newest, reached), newest.sequence, known)
        answers = [await ask(transport, peer, GiveNotice(notice), NoticeAnswer) for peer in reached.peers]
        return notice, sum(answer is not None for answer in answers)


async def _newest(owned: Ownership, transport: Transport, peers: Iterable[str]) -> Notice:
    """Find the newest notice: the owner may have used another folder, and this one while peers are asked."""
    newest = await newest_notice(transport, peers, owned.notice or Notice(owned.run, 0), owned.owners)
    return max(owned.notice or newest, newest, key=lambda notice: notice.sequence)


async def newest_notice(
    transport: Transport, peers: Iterable[str], newest: Notice, owners: Sequence[str]
) -> Notice:
    """Find the newest notice of a run's owner: that one, or what these peers have."""
    for peer in peers:
        answer = await ask(transport, peer, NoticeQuery(newest.run, newest.sequence), NoticeAnswer)
        theirs = (answer and answer.notice) or newest
        if theirs.sequence > newest.sequence and is_true_notice(theirs, newest.run, owners, verify):
            newest = theirs
    return newest


# Admission, seen from outside.


def why_cannot_join(run: str, join: Addresses, folder: Path, timeout_s: float) -> str:
    """Say why this folder's node cannot join; empty: it can. Raises: UserError (there is nobody to ask)."""
    try:
        way = way_of(join, text=run) if is_link(run) else way_of(join, run)
    except ConfigError as error:
        return str(error)
    invite = way.link.invite if way.link is not None else None
    if invite is not None and 0 < invite.grant.expires < time.time():
        return str(AdmissionFault.EXPIRED)
    addresses = tuple(dict.fromkeys([*joined_through(way.join)[0], *WaysIn.load(folder).members]))
    if not addresses:
        raise UserError("there is no peer to ask", "give a run link, an invite, or --join ADDRESS")
    key = folder / "identity.key"
    me = Identity.load_or_create(key) if key.exists() else Identity.generate()
    try:
        return visit(_asked(way.run, invite, addresses, me.peer_id, timeout_s))
    except UserError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"


async def _asked(wanted: str, invite: Invite | None, addresses: Addresses, me: str, timeout_s: float) -> str:
    joined = peers_of(addresses)
    async with asyncio.timeout(timeout_s), visitor(addresses) as transport:
        run = await _run_id(transport, wanted, joined)
        if not run:
            return f'these peers know no run "{wanted}"'
        reached = await reach_members(transport, run, joined)
        grant = invite.grant if invite is not None else None
        for peer in reached.peers:
            answer = await ask(transport, peer, MayJoin(run, me, grant), JoinAnswer)
            if answer is not None:
                return "" if answer.fault is None else fault_words(answer.fault, grant)
        if reached.versions:
            theirs = ", ".join(map(str, sorted(reached.versions)))
            return f"its members speak protocol version {theirs}, this release {WIRE_VERSION}"
        return "no member of the run can be reached"


async def _run_id(transport: Transport, wanted: str, joined: list[str]) -> str:
    if is_whole_id(wanted):
        return wanted
    chosen = await RunSearch(transport, wanted, joined).look()
    return chosen.run if chosen is not None else ""
