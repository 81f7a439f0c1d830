"""Publishing of a notice: changed from the newest that is known, signed, kept, and given to members."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from p2pdiloco.cli.membership.reaching import Reached, ask, reach
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.config.settings import check_peer_address
from p2pdiloco.daemon.admission.owner import Ownership
from p2pdiloco.daemon.admission.papers import MAX_LISTED, Notice, is_true_notice
from p2pdiloco.daemon.admission.queries import GiveNotice, NoticeAnswer, NoticeQuery
from p2pdiloco.errors import UserError
from p2pdiloco.identity import public_of, verify

ENDING = 6
"""Letters of a peer id's end that stand for it."""
Change = Callable[[Notice, Reached], Notice]


def with_peer(name: str, word: str) -> Change:
    """Make the change that puts a peer, by its id, the end of it, or its name, on that list."""
    return lambda notice, reached: _with(notice, name, _peer_of(word, reached))


def without(name: str, word: str) -> Change:
    """Make the change that takes an entry off that list."""
    return lambda notice, _: _without(notice, name, word)


def revoke_invite(run: str, data_dir: Path | None, word: str) -> Change:
    """Make the change that revokes an invite: by its text, its key, or its name. Raises: UserError."""
    key = Ownership.find(run, data_dir).key_of(word)
    return lambda notice, _: _with(notice, "revoked", key)


def publish(run: str, join: tuple[str, ...], data_dir: Path | None, change: Change) -> None:
    """Change the newest notice, sign it, keep it, and give it to whoever can be reached."""
    for address in join:
        check_peer_address(address)
    owned = Ownership.find(run, data_dir)
    addresses = tuple(dict.fromkeys([*join, *owned.addresses(())]))
    if not addresses:
        raise UserError("there is no peer to give the notice to", "name one: --join ADDRESS")
    notice, given = visit(_give(owned, addresses, change))
    click.echo(
        f"notice {notice.sequence}: {len(notice.banned)} banned, {len(notice.revoked)} invites revoked, "
        f"{len(notice.members)} listed; {given} members have it and pass it on"
    )
    if not given:
        raise UserError(
            "the notice is kept, but no member took it",
            "start this folder's node, which has it, or try again with --join ADDRESS",
        )


async def _give(owned: Ownership, addresses: tuple[str, ...], change: Change) -> tuple[Notice, int]:
    async with visitor(addresses) as transport:
        reached = await reach(transport, owned.run, [a.rpartition("/p2p/")[2] for a in addresses])
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
        notice = owned.publish(change(newest, reached), sequence)
        answers = [await ask(transport, peer, GiveNotice(notice), NoticeAnswer) for peer in reached.peers]
        return notice, sum(answer is not None for answer in answers)


def _peer_of(word: str, reached: Reached) -> str:
    """Find the peer that is meant by an id, the end of one, or a name. Raises: UserError."""
    if public_of(word) is not None:
        return word
    ending = word.lstrip("…")
    found = {
        peer
        for peer, name in reached.names.items()
        if name == word or (len(ending) >= ENDING and peer.endswith(ending))
    }
    if len(found) == 1:
        return found.pop()
    raise UserError(
        f'{len(found) or "no"} members are called "{word}" or have an id that ends so',
        "p2pdiloco status --json shows whole ids",
    )


def _with(notice: Notice, name: str, entry: str) -> Notice:
    entries = tuple(dict.fromkeys([*getattr(notice, name), entry]))
    if len(entries) > MAX_LISTED:
        raise UserError(f"a notice has {MAX_LISTED} entries of a kind, and they are taken", "take some back")
    return msgspec.structs.replace(notice, **{name: entries})


def _without(notice: Notice, name: str, word: str) -> Notice:
    entries = getattr(notice, name)
    found = {entry for entry in entries if entry.endswith(word.lstrip("…")) and len(word) >= ENDING}
    if len(found) != 1:
        raise UserError(
            f'{len(found) or "no"} entries are "{word}"', f"there are: {', '.join(entries) or 'none'}"
        )
    return msgspec.structs.replace(notice, **{name: tuple(e for e in entries if e not in found)})
