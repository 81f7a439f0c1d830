"""Publishing of a notice: changed from the newest that is known, signed, kept, and given to members."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import click

from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.membership.reaching import Reached, reach
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.daemon.display.snapshot import counted
from p2pdiloco.daemon.network.discovery import ask
from p2pdiloco.daemon.papers import NOTICE_WORDS, Notice, is_true_notice, notice_figures
from p2pdiloco.daemon.run_files.known_runs import Ownership, peers_of
from p2pdiloco.daemon.wire import GiveNotice, NoticeAnswer, NoticeQuery
from p2pdiloco.errors import UserError
from p2pdiloco.identity import verify

Change = Callable[[Notice, Reached], Notice]
Agree = Callable[[Notice, Reached], Awaitable[None]]


def publish(
    run: str,
    join: tuple[str, ...],
    data_dir: Path | None,
    change: Change,
    agree: Agree | None = None,
    called: str = "",
) -> None:
    """Change the newest notice, sign it, keep it, and give it to whoever can be reached.

    `agree`: raises if the person does not agree, before anything is signed. `called`: name by which somebody
    may be meant.
    """
    join, _ = joined_through(join)
    owned = Ownership.find(run, data_dir)
    addresses = tuple(dict.fromkeys([*join, *owned.addresses(())]))
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


async def _give(
    owned: Ownership, addresses: tuple[str, ...], change: Change, agree: Agree | None, called: str
) -> tuple[Notice, int]:
    async with visitor(addresses) as transport:
        reached = await reach(transport, owned.run, peers_of(addresses), called)
        newest, sequence = owned.notice or Notice(owned.run, 1), 0
        if owned.notice is not None:
            sequence = newest.sequence
        for peer in reached.peers:  # the owner may have used another folder
            answer = await ask(transport, peer, NoticeQuery(owned.run, sequence), NoticeAnswer)
            theirs = answer.notice if answer is not None else None
            if theirs is None or theirs.sequence <= sequence:
                continue
            if is_true_notice(theirs, owned.run, owned.key.peer_id, verify):
                newest, sequence = theirs, theirs.sequence
        if agree is not None:
            await agree(newest, reached)
        notice = owned.publish(change(newest, reached), sequence)
        answers = [await ask(transport, peer, GiveNotice(notice), NoticeAnswer) for peer in reached.peers]
        return notice, sum(answer is not None for answer in answers)
