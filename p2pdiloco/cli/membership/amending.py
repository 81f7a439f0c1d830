"""Amending: an owner changes what may be changed of a run that goes on, from a number of merged tokens on."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from msgspec import Struct

from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.cli.membership.publishing import publish
from p2pdiloco.cli.membership.reaching import ask, reach
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.config.loader import manifest_from_canonical
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api.amendments import (
    LEAST_FACTOR,
    MAX_MESSAGE,
    MOST_FACTOR,
    Amendment,
    Going,
    amended,
    newest,
)
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission.owner import Ownership
from p2pdiloco.daemon.admission.papers import Notice
from p2pdiloco.daemon.display.progress import progress_text
from p2pdiloco.daemon.display.snapshot import SETTLED, StatusReport
from p2pdiloco.daemon.learner.course import words_of
from p2pdiloco.daemon.run_files.listing import peers_of, saved_runs
from p2pdiloco.errors import UserError

LEAD_S = 60
"""Time ahead at which a change holds where nobody says: by then all members have heard of it."""


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
        if self.message is not None and not _is_text(self.message):
            raise UserError("the message is not in UTF-8")


class Whereabouts(Struct, frozen=True):
    """Whereabouts of a run, as a member says."""

    tokens: int
    schedule_tokens: int
    tokens_per_s: float
    rests: bool


def amend(run: str, join: tuple[str, ...], data_dir: Path | None, wish: Wish) -> None:
    """Amend a run. Raises: UserError."""
    wish.check()
    join = peers_behind(join)
    owned = Ownership.find(run, data_dir)
    manifest = manifest_from_canonical(saved_runs(owned.data_dir)[owned.run][1].manifest)
    addresses = tuple(dict.fromkeys([*join, *owned.addresses(())]))
    report = visit(_ask_status(owned.run, addresses)) if addresses else None
    if report is None:
        raise UserError(
            "no member of the run says how far it is", "start this folder's node, or name one: --join ADDRESS"
        )
    course = report.course
    pace = sum(max(0.0, member.tokens_per_s) for member in report.members)
    place = Whereabouts(course.tokens, course.schedule_tokens, pace, course.rests != "no")
    click.echo(f"the run is at {course.tokens} tokens: {progress_text(course)}")

    def change(notice: Notice) -> Notice:
        made = amendment(notice.amendments, wish, manifest, place)
        click.echo(words_of(made))
        return msgspec.structs.replace(notice, amendments=amended(notice.amendments, made))

    publish(run, join, data_dir, lambda notice, _: change(notice))


async def _ask_status(run: str, addresses: tuple[str, ...]) -> StatusReport | None:
    async with visitor(addresses) as transport:
        reached = await reach(transport, run, peers_of(addresses))
        for peer in reached.peers:
            report = await ask(transport, peer, wire.StatusQuery(run), StatusReport)
            if report is not None and report.run_id == run and report.state in SETTLED:
                return report
    return None


def amendment(known: tuple[Amendment, ...], wish: Wish, manifest: Manifest, place: Whereabouts) -> Amendment:
    """Make the amendment that an owner wants: what the newest one says, but for what is wished.

    Raises: UserError (it cannot hold, or would change nothing).
    """
    last = newest(known)
    base = last or Amendment(1, 0)
    made = Amendment(
        number=last.number + 1 if last is not None else 1,
        from_tokens=_moment(last, wish, manifest, place),
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
    return made


def _moment(last: Amendment | None, wish: Wish, manifest: Manifest, place: Whereabouts) -> int:
    """Choose from how many tokens on it holds. Raises: UserError (that is in the past)."""
    if wish.at_tokens is not None:
        if wish.at_tokens < place.tokens and not place.rests:
            raise UserError(
                f"the run is at {place.tokens} tokens: it cannot hold from {wish.at_tokens} on",
                "name a number that is still to come, or leave --at-tokens out",
            )
        return wish.at_tokens
    if wish.going is Going.TRAIN:
        # At once, and instead of the pause: where no inner step is made, no token comes any more.
        return min(place.tokens, last.from_tokens) if last is not None else place.tokens
    if place.rests:
        return place.tokens
    # What is still to come comes along, and not before its time.
    soon = max(place.tokens + round(LEAD_S * place.tokens_per_s), last.from_tokens if last is not None else 0)
    # What makes a run longer must hold before it is over.
    return max(place.tokens, min(soon, place.schedule_tokens)) if manifest.end.learners == "stop" else soon


def _is_text(words: str) -> bool:
    """Tell whether the wire takes it: a shell may give bytes that are no text."""
    try:
        words.encode()
    except UnicodeEncodeError:
        return False
    return True
