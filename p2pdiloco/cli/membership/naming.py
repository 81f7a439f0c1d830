"""Peers that an owner means: found by an id, its end or a name, and shown before anything is signed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import click
import msgspec
from msgspec import Struct

from p2pdiloco.cli.membership.reaching import Reached
from p2pdiloco.daemon.display.logs import ask_terminal, at_terminal
from p2pdiloco.daemon.papers import MAX_LISTED, Notice
from p2pdiloco.daemon.run_files.known_runs import Ownership
from p2pdiloco.errors import UserError, clean
from p2pdiloco.identity import public_of

ENDING = 6
"""Letters of a peer id's end that stand for it."""
SURE_ENDING = 12
"""Letters of an end for which nobody finds an id of his own: six take a home computer days."""
ELLIPSIS = "…"


class PeerChange(Struct, frozen=True):
    """Change that puts a peer on a list of the notice, or takes it off."""

    verb: str
    """Verb by which the person asks for it."""
    entries: Literal["banned", "members"]
    word: str
    """Word for the peer: its id, the end of it, or its name."""
    adds: bool
    yes: bool
    """True: the person agrees beforehand to whomever the word means."""

    async def agree(self, notice: Notice, reached: Reached) -> None:
        """Show who is meant, and ask whoever sits at a terminal. Raises: UserError (it is not to be)."""
        peer = self._peer(notice, reached)
        name = reached.names.get(peer)
        called = f"called {clean(name)}" if name else "whose name is not known here"
        click.echo(f"{self.verb} {peer}, {called}", err=True)
        if self.yes:
            return
        if at_terminal():
            await _consent(f"{self.verb} it?")
        elif not _is_sure(self.word, peer):
            raise UserError(
                f'"{clean(self.word)}" could be others too, and there is nobody to ask: nothing is signed',
                f"give the whole id, the last {SURE_ENDING} letters of it, or --yes",
            )

    def make(self, notice: Notice, reached: Reached) -> Notice:
        """Make the changed notice. Raises: UserError."""
        peer = self._peer(notice, reached)
        if self.adds:
            return with_entry(notice, self.entries, peer)
        left = tuple(entry for entry in getattr(notice, self.entries) if entry != peer)
        return msgspec.structs.replace(notice, **{self.entries: left})

    def _peer(self, notice: Notice, reached: Reached) -> str:
        if self.adds:
            hint = "p2pdiloco status --json shows whole ids"
            if public_of(self.word) is not None:
                return self.word
            return find_peer(self.word, {*reached.names, *reached.lately}, reached, hint)
        listed = getattr(notice, self.entries)
        hint = f"on the list are {', '.join(listed) or 'none'}; no member remembers such a name"
        return find_peer(self.word, listed, reached, hint)


class InviteEnd(Struct, frozen=True):
    """Change that revokes an invite: one of the owner's own, so without a terminal its word is enough."""

    key: str
    name: str
    yes: bool

    @classmethod
    def of(cls, owned: Ownership, word: str, yes: bool) -> InviteEnd:
        """Find the invite that a word means. Raises: UserError."""
        key = owned.key_of(word)
        return cls(key, next((issued.name for issued in owned.issued() if issued.key == key), ""), yes)

    async def agree(self, _notice: Notice, _reached: Reached) -> None:
        """Show what is meant, and ask whoever sits at a terminal. Raises: UserError (it is not to be)."""
        called = f"called {clean(self.name)}" if self.name else "without a name"
        click.echo(f"revoke the invite {self.key}, {called}: whoever came with it is put out", err=True)
        if not self.yes and at_terminal():
            await _consent("revoke it?")

    def make(self, notice: Notice, _reached: Reached) -> Notice:
        """Make the changed notice. Raises: UserError."""
        return with_entry(notice, "revoked", self.key)


async def _consent(question: str) -> None:
    if not await ask_terminal(question):
        raise UserError("nothing is signed", "--yes signs without a question")


def with_entry(notice: Notice, name: str, entry: str) -> Notice:
    """Put an entry on that list of a notice. Raises: UserError (it is full)."""
    entries = tuple(dict.fromkeys([*getattr(notice, name), entry]))
    if len(entries) > MAX_LISTED:
        raise UserError(f"a notice has {MAX_LISTED} entries of a kind, and they are taken", "take some back")
    return msgspec.structs.replace(notice, **{name: entries})


def find_peer(word: str, peers: Collection[str], reached: Reached, hint: str) -> str:
    """Find the one of these peers that a word means. Raises: UserError."""
    if word in peers:
        return word
    ending = _ending(word)
    found = {
        peer
        for peer in peers
        if reached.names.get(peer) == word or (len(ending) >= ENDING and peer.endswith(ending))
    }
    # Whoever answered may lie: what is remembered makes a name doubtful, and never says whom it means.
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
