"""Amending: an owner changes what may be changed of a run that goes on, from a number of merged tokens on."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from msgspec import Struct

from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.membership.publishing import publish
from p2pdiloco.cli.membership.reaching import reach
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.config.manifest import Manifest, manifest_from_canonical
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
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.course import words_of
from p2pdiloco.daemon.display.snapshot import SETTLED, StatusReport, progress_text
from p2pdiloco.daemon.network.discovery import ask
from p2pdiloco.daemon.papers import Notice
from p2pdiloco.daemon.run_files.known_runs import Ownership, peers_of, saved_runs
from p2pdiloco.errors import UserError

LEAD_S = 60
"""Time ahead at which a change holds where nobody says: by then all members have heard of it."""
LEAD_SHARE = 20
"""Part of the schedule, one of so many, that it holds ahead at most: the pace is what a member says."""
ASKED = 5
"""Members that are asked how far the run is, where no peer of the join line is one: the middle one counts."""


class Wish(Struct, frozen=True):
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


class Whereabouts(Struct, frozen=True):
    """Whereabouts of a run, as a member says."""

    tokens: int
    schedule_tokens: int
    tokens_per_s: float
    rests: bool


def amend(run: str, join: tuple[str, ...], data_dir: Path | None, wish: Wish) -> None:
    """Amend a run. Raises: UserError."""
    wish.check()
    join, _ = joined_through(join)
    owned = Ownership.find(run, data_dir)
    manifest = manifest_from_canonical(saved_runs(owned.data_dir)[owned.run][1].manifest)
    addresses = tuple(dict.fromkeys([*join, *owned.addresses(())]))
    report = visit(_ask_status(owned.run, addresses)) if addresses else None
    if report is None:
        raise UserError(
            "no member of the run says how far it is", "start this folder's node, or name one: --join ADDRESS"
        )
    course = report.course
    pace = max(0, course.schedule_tokens - course.tokens) / course.left_s if course.left_s else 0.0
    place = Whereabouts(course.tokens, course.schedule_tokens, pace, course.rests != "no")
    click.echo(f"the run is at {course.tokens} tokens: {progress_text(course)}")

    def change(notice: Notice) -> Notice:
        made = amendment(notice.amendments, wish, manifest, place)
        click.echo(words_of(made))
        last = newest(notice.amendments)
        if last is not None and last.from_tokens > max(made.from_tokens, place.tokens):
            click.echo(
                f"amendment {last.number}, which was to hold from {last.from_tokens} on, is taken back"
            )
        return msgspec.structs.replace(notice, amendments=amended(notice.amendments, made))

    publish(run, join, data_dir, lambda notice, _: change(notice))


async def _ask_status(run: str, addresses: tuple[str, ...]) -> StatusReport | None:
    async with visitor(addresses) as transport:
        named = peers_of(addresses)
        reached = await reach(transport, run, named)
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


def amendment(known: tuple[Amendment, ...], wish: Wish, manifest: Manifest, place: Whereabouts) -> Amendment:
    """Make the amendment that an owner wants: what the newest one says, but for what is wished.

    Raises: UserError (it cannot hold, or would change nothing).
    """
    last, moment = newest(known), _moment(newest(known), wish, manifest, place)
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


def _is_urgent(wish: Wish) -> bool:
    """Tell whether it comes before what is still to come, which it takes back."""
    return wish.going in (Going.PAUSE, Going.END) and wish.at_tokens is None


def _moment(last: Amendment | None, wish: Wish, manifest: Manifest, place: Whereabouts) -> int:
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
