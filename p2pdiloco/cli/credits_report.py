"""`p2pdiloco credits`: collects the credits of a live run, shows them, and writes and checks certificates.

Credits are a keeper's sums, or the history itself, counted here. What the history is follows from the heads
on which members stand. Every version below is compared with the digest that its child names, so the peer that
gave it does not matter. `render`, `as_csv` and `as_json` show credits to people, spreadsheets and scripts. A
keeper or the run's owner writes a certificate (`certify`), and anybody checks it (`check_certificate`).
"""

from __future__ import annotations

import asyncio
import csv
import io
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.cli.options import node_folder, say
from p2pdiloco.cli.owner_notice import ReachedPeers, find_peer, reach_members
from p2pdiloco.cli.status_command import run_of, visiting
from p2pdiloco.config.manifest import SignedManifest, check_signature, decode_signed, encode_signed, run_id
from p2pdiloco.config.values import Addresses
from p2pdiloco.core.api.types import Vouch
from p2pdiloco.credits import (
    MAX_CERTIFICATE_BYTES,
    CertifiedHead,
    CreditCertificate,
    CreditRow,
    Credits,
    FragmentLedger,
    HeadRef,
    HistoryRecord,
    HistoryStore,
    Signatures,
    VersionLine,
    count_line,
    credits_of,
    is_proven,
    is_signed,
    prove,
    read_certificate,
    signed_certificate,
    text_of,
)
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission import owns
from p2pdiloco.daemon.display.logs import waiting
from p2pdiloco.daemon.display.snapshot import count as worded
from p2pdiloco.daemon.display.snapshot import counted, short_peer
from p2pdiloco.daemon.history import Filling, believed, pull_page
from p2pdiloco.daemon.network.discovery import ask
from p2pdiloco.daemon.wire import MAX_ROWS, CreditsAnswer, CreditsQuery
from p2pdiloco.errors import RemoteError, UserError, clean, json_line
from p2pdiloco.identity import Identity, verify
from p2pdiloco.ports import Transport
from p2pdiloco.util import Frozen

MAX_LEARNERS = 1_000_000
MAX_LINES, MAX_AHEAD, SHORT_LINE = 3, 2, 1000
"""Branches of a fragment that are looked at, where members stand on several, and how much longer than the
first the others may be; short ones do not matter."""


DISPUTED = 3
"""Part of the members, one of so many, of whom more on another branch leave open which is the run's."""


class CreditsSearch(Frozen, kw_only=True):
    """Question about credits: of which run, asked of which peers, counted how."""

    join: Addresses
    run: str = ""
    bucket_s: int = 0
    verify: bool = False
    history: Path | None = None
    """Folder in which to keep what was fetched, for the next time."""
    timeout_s: float = 20.0


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
    tips: list[HeadRef] = field(default_factory=list)
    """Heads that were counted back from, of every fragment."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what does not agree, or cannot be told."""
    is_disputed: bool = False
    """True: so many stand on another branch, or one whom a person named, that either may be the run's."""


class _Folder:
    """History in a folder of this program. Implements `FetchedInto`."""

    def __init__(self, folder: Path) -> None:
        self.store = HistoryStore(folder)

    async def line(self, fragment: int, tip: HeadRef) -> VersionLine:
        return await asyncio.to_thread(self.store.line, fragment, tip)

    async def add(self, records: Sequence[HistoryRecord]) -> None:
        for record in records:
            await asyncio.to_thread(self.store.append, record)


async def collect_credits(wish: CreditsSearch) -> RunCredits:
    """Ask the members of a run, and count.

    Raises:
        UserError: nobody answers, or there is nothing to tell from.
    """
    async with visiting(wish.join, wish.run, wish.timeout_s) as (transport, search, report):
        run = await run_of(transport, report, search.joined)
        reached = await reach_members(transport, report.run_id, search.joined)
        if report.answered_by not in reached.peers:
            reached.peers.append(report.answered_by)
        asking = _Collector(transport, report.run_id, search.joined, reached)
        await asking.look()
        notes: list[str] = []
        collected = RunCredits(
            run=report.run_id,
            run_name=run.name,
            manifest=run.signed,
            credits=Credits((), run.manifest.sync.fragments, 0, 0, 0),
            names=asking.names(),
            keepers=list(asking.answers),
            members=len(asking.stands),
            notes=notes,
        )
        if asking.answers and not (wish.verify or wish.bucket_s or wish.history):
            collected.credits = await asking.told(notes)
            collected.names = asking.names()
        else:
            with waiting("reading and counting the run's history"):
                await asking.counted(wish, collected)
        return collected


class _Collector:
    """Questions to the members of one run."""

    def __init__(self, transport: Transport, run: str, joined: Sequence[str], reached: ReachedPeers) -> None:
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
            tuple(rows),
            answer.fragments,
            answer.fragment_tokens,
            answer.before_fragment_tokens,
            answer.uncredited_fragment_tokens,
            dict(answer.missing),
            dict(answer.doubts),
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
        figures = (
            asdict(line) | {"tokens": line.fragment_tokens // first.fragments} for line in unique.values()
        )
        return [msgspec.convert(each, CreditRow) for each in figures]

    # --- the history itself --------------------------------------------------------------------------

    async def counted(self, wish: CreditsSearch, collected: RunCredits) -> None:
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
                            count_line,
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
    ) -> HeadRef | None:
        """Fetch the line on which most members stand, those first that a person named. None: no version."""
        stands = {peer: stood[fragment] for peer, stood in self.stands.items() if fragment in stood}
        voices = {peer: HeadRef(stood.number, stood.digest) for peer, stood in stands.items()}
        said = Counter(voices.values())
        said.update({tip: len(voices) for peer, tip in voices.items() if peer in self._joined})
        best: tuple[tuple[int, int, int, int], HeadRef, set[str]] | None = None
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


# Views.

DAY_S = 86_400
FORMULA = "=+-@＝＋－＠"
"""First characters by which a spreadsheet takes a text for a formula."""
COLUMNS = (
    "begins", "name", "peer", "tokens", "fragment_tokens", "claimed_tokens", "inner_steps", "contributions",
    "first", "last",
)  # fmt: skip


def time_text(at_s: int, day_only: bool = False) -> str:
    """Word a time, UTC; empty: it is not known."""
    if not at_s:
        return ""
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d" if day_only else "%Y-%m-%dT%H:%MZ")
    except (OverflowError, ValueError, OSError):
        return "?"


def spreadsheet_cell(text: str) -> str:
    """Make a text that a spreadsheet takes for a text: names are others' own choice."""
    text = clean(text)
    return f"'{text}" if text[:1] in FORMULA and text else text


def as_csv(found: RunCredits) -> str:
    """Table with one line for each learner, or each learner and stretch of time."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in found.credits.rows:
        figures = row.tokens, row.fragment_tokens, row.claimed_tokens, row.inner_steps, row.contributions
        times = time_text(row.first_s), time_text(row.last_s)
        name = spreadsheet_cell(found.names.get(row.peer, ""))
        writer.writerow((time_text(row.begins_s), name, spreadsheet_cell(row.peer), *figures, *times))
    return out.getvalue()


def as_json(found: RunCredits) -> str:
    """One JSON object."""
    credits = found.credits
    rows = [
        asdict(row)
        | {"name": found.names.get(row.peer, "")}
        | {key: getattr(row, key) or None for key in ("first_s", "last_s", "begins_s")}
        for row in credits.rows
    ]
    return json_line(
        {
            "run_id": found.run,
            "run_name": found.run_name,
            "tokens": credits.tokens,
            "fragments": credits.fragments,
            "fragment_tokens": credits.fragment_tokens,
            "before_fragment_tokens": credits.before_fragment_tokens,
            "uncredited_fragment_tokens": credits.uncredited_fragment_tokens,
            "missing_before": {str(f): number for f, number in credits.missing.items()},
            "counted_here": found.counted_here,
            "signatures_checked": found.checked,
            "doubts": credits.doubts,
            "notes": found.notes,
            "members_asked": found.members,
            "keepers": found.keepers,
            "heads": [{"number": tip.number, "digest": tip.digest.hex()} for tip in found.tips],
            "rows": rows,
        }
    )


def render(found: RunCredits, top: int, buckets: bool) -> RenderableType:
    """Table for people, with what it is worth below it."""
    rows = found.credits.rows
    shown = rows if buckets else rows[:top]
    title = Text.assemble(
        "run ", (clean(found.run_name), "bold"), f" {found.run[:16]}: ",
        f"{worded(found.credits.tokens)} tokens, {counted(len({row.peer for row in rows}), 'learner')}",
    )  # fmt: skip
    parts: list[RenderableType] = [title, Text(), _table(found, shown, buckets)]
    if len(shown) < len(rows):
        parts.append(Text(f"{len(rows) - len(shown)} more: --top {len(rows)}", style="dim"))
    parts += [Text(), *(Text(line, style=style) for line, style in caveats(found))]
    return Group(*parts)


def _table(found: RunCredits, rows: tuple[CreditRow, ...], buckets: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    if buckets:
        table.add_column("from", no_wrap=True)
    table.add_column("name", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("peer", no_wrap=True)
    for heading in ("tokens", "share", "steps", "merged"):
        table.add_column(heading, justify="right", no_wrap=True)
    if not buckets:  # there each row has its own time
        table.add_column("first")
        table.add_column("last")
    whole = max(1, found.credits.fragment_tokens)
    for row in rows:
        cells = [
            clean(found.names.get(row.peer, "")) or "-",
            f"…{short_peer(row.peer)}",
            worded(row.tokens),
        ]
        cells += [f"{100 * row.fragment_tokens / whole:.1f} %", worded(row.inner_steps)]
        cells += [str(row.contributions)]
        if buckets:
            cells = [time_text(row.begins_s) or "not known", *cells]
        else:
            cells += [time_text(row.first_s, True) or "-", time_text(row.last_s, True) or "-"]
        table.add_row(*map(Text, cells))
    return table


def caveats(found: RunCredits) -> list[tuple[str, str]]:
    """Sentences, with a style each, on what the figures are worth."""
    credits, fragments = found.credits, max(1, found.credits.fragments)
    lines = []
    if credits.missing:
        first, number = max(credits.missing.values()), len(credits.missing)
        before = worded(credits.before_fragment_tokens / fragments)
        text = f"Nobody who answers keeps all: in {number} fragments versions before {first} are missing. "
        lines.append((f"{text}Of {before} tokens it is not known whose they are.", "yellow"))
    if not found.keepers:
        text = "No member that answers keeps the history: what is shown is of the newest versions. "
        lines.append((f"{text}`p2pdiloco node --keep-history` keeps it from now on.", "yellow"))
    for doubt, times in credits.doubts.items():
        lines.append((f"{clean(doubt)}: {times} times", "red"))
    if credits.uncredited_fragment_tokens:
        lost = worded(credits.uncredited_fragment_tokens / fragments)
        lines.append((f"for that, {lost} tokens are credited to nobody", "red"))
    lines += [(clean(note), "red") for note in found.notes]
    lines.append((_worth(found), "dim"))
    return lines


def _worth(found: RunCredits) -> str:
    if found.checked is not None:
        heads = f"the heads of {counted(found.members, 'member')}"
        return f"Counted here from {heads}; {found.checked} signatures of learners and syncers checked."
    if found.counted_here:
        return "Counted here; signatures were not checked (--verify does)."
    others = f" of {len(found.keepers)} that keep the history" if len(found.keepers) > 1 else ""
    keeper = f"one member{others}" if others else f"…{short_peer(found.keepers[0])}"
    return f"The word of {keeper}; --verify counts it here, from the learners' signatures."


# Certificates.

EXIT_FALSE = 1
"""Exit status of a check that fails."""
MAX_WORD = 200


def own_key(data_dir: Path | None, name: str = "identity.key") -> Identity:
    """Load a key from a node's folder. Raises: UserError, StorageError."""
    path = node_folder(data_dir) / name
    if not path.exists():
        raise UserError(f"there is no key {path}", "name a node's data folder: --data-dir DIR")
    return Identity.load_or_create(path)


def certify(found: RunCredits, wanted: str, out: Path, data_dir: Path | None) -> None:
    """Write a certificate of what was counted here. The run's owner signs with its key, others with their
    node's.

    Raises:
        UserError: no such learner, something is not as it should be, or there is no key here.
        StorageError: the file cannot be written.
    """
    if out.exists():
        raise UserError(
            f"{out} exists already", "name another file: what somebody signed is not written over"
        )
    rows = {row.peer: row for row in found.credits.rows}
    peer = find_peer(wanted, rows, ReachedPeers(names=found.names), "`p2pdiloco credits` lists all learners")
    if found.is_disputed or found.credits.doubts:
        raise UserError(
            "nothing is certified of a history with doubts", "`p2pdiloco credits --verify` says which"
        )
    is_owner = owns(node_folder(data_dir), found.manifest.owner)
    key = own_key(data_dir, "owner.key" if is_owner else "identity.key")
    row = rows[peer]
    certificate = CreditCertificate(
        run=found.run,
        run_name=found.run_name,
        peer=peer,
        name=found.names.get(peer, ""),
        tokens=row.tokens,
        inner_steps=row.inner_steps,
        contributions=row.contributions,
        run_tokens=found.credits.tokens,
        from_version=max(found.credits.missing.values(), default=1),
        heads=tuple(CertifiedHead(tip.number, tip.digest.hex()) for tip in found.tips),
        issued_s=int(time.time()),
        signer=key.peer_id,
        role="owner" if is_owner else "keeper",
        manifest=encode_signed(found.manifest).hex() if is_owner else "",
    )
    text = text_of(signed_certificate(certificate, key))
    Files().save(out, [text.encode()], durable=False)
    say(f"{out}: {certificate_text(certificate)}\n{signer_text(certificate)}")


def certificate_text(certificate: CreditCertificate) -> str:
    """Word what a certificate says."""
    name = f" ({clean(certificate.name)})" if certificate.name else ""
    since = "" if certificate.from_version <= 1 else f", counted from version {certificate.from_version} on"
    tokens = f"{worded(certificate.tokens)} tokens ({certificate.tokens})"
    return (
        f"peer {clean(certificate.peer)}{name} has {tokens}, "
        f"{certificate.inner_steps} inner steps and {certificate.contributions} merged contributions in run "
        f"{clean(certificate.run_name)} {clean(certificate.run[:16])}"
        + f", of {worded(certificate.run_tokens)} tokens of the run by then{since}"
    )


def load_certificate(path: Path) -> CreditCertificate:
    """Load a certificate. Raises: UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CERTIFICATE_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return read_certificate(content)


def check_certificate(path: Path, word: str, proof: str) -> int:
    """Say what a certificate says, and who says so. Returns the exit status."""
    certificate = load_certificate(path)
    if not is_signed(certificate, verify):
        click.echo("false: its signer did not sign this")
        return EXIT_FALSE
    try:
        who = signer_text(certificate)
    except RemoteError as error:
        click.echo(f"false: it says that the run's owner signed it, and that is not so ({error})")
        return EXIT_FALSE
    click.echo(f"{certificate_text(certificate)}\n{who}")
    if proof and not is_proven(certificate, word, proof, verify):
        click.echo("false: the proof is not of this peer's key for this word")
        return EXIT_FALSE
    if proof:
        click.echo(f'whoever gave the proof has the key of the peer, and signed the word "{clean(word)}"')
    return 0


def signer_text(certificate: CreditCertificate) -> str:
    """Say who signed. Raises: RemoteError (it says owner, and is none)."""
    signer, at = clean(certificate.signer), time_text(certificate.issued_s)
    if certificate.role == "keeper" and certificate.signer == certificate.peer:
        return f"signed on {at} by that peer itself: nobody else vouches for it"
    if certificate.role == "keeper":
        return f"signed on {at} by peer {signer}, who counted it from the learners' signatures"
    signed = decode_signed(bytes.fromhex(certificate.manifest))
    check_signature(signed, verify)
    if run_id(signed) != certificate.run or signed.owner != certificate.signer:
        raise RemoteError("not-the-owner", "the manifest is of another run or owner")
    return f"signed on {at} by the run's owner {signer}, who counted it from the learners' signatures"


def proof_for(path: Path, word: str, data_dir: Path | None) -> str:
    """Prove with the key in a folder that a certificate is of this peer. Raises: UserError."""
    if not 0 < len(word) <= MAX_WORD:
        raise UserError(f"the word to sign has 1 to {MAX_WORD} characters")
    certificate = load_certificate(path)
    if not is_signed(certificate, verify):
        raise UserError("the certificate's signer did not sign it")
    return prove(certificate, word, own_key(data_dir))
