"""A run's owner, by the key in a folder of this machine: its invites, and its notices.

<data_dir>/owner.key       the owner's key; its recovery key, once that has taken its place
<data_dir>/runs/<run id, 16>/invites.json   name, key, expiry and uses of every invite; no secrets
<data_dir>/runs/<run id, 16>/link           the invite of the link that the run's host prints
<data_dir>/runs/<run id, 16>/notice         the newest notice
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import msgspec

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.core.api.papers import RECOVERY_FROM, is_timely, owner_of
from p2pdiloco.daemon.notice import (
    Invite,
    Notice,
    Right,
    grant,
    load_notice,
    save_notice,
    signed,
)
from p2pdiloco.daemon.run_files.known_runs import (
    MAX_PEERS,
    PublishedRun,
    RunLink,
    addresses_of,
    encode_link,
    is_link,
    known_addresses,
    read_link,
    run_names,
    saved_run,
    saved_runs,
    usual_folders,
)
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity, public_of
from p2pdiloco.util import Frozen, read_note

logger = logging.getLogger(__name__)
MAX_ISSUED = 1024
LINK_NAME, LINK_USES = "link", 20
"""Name and uses of the invite in the link that a run's host prints."""


class Issued(Frozen, forbid_unknown_fields=True):
    """Invite that was given out."""

    name: str
    key: str
    expires: int
    uses: int


class Ownership:
    """Run whose owner's key is in a folder."""

    def __init__(self, data_dir: Path, run: str, key: Identity, owners: Sequence[str] = ()) -> None:
        """`key`: the owner's, or its recovery key; `owners`: both, if it is not the first alone."""
        self.data_dir = data_dir
        self.run, self.owners = run, owners or (key.peer_id,)
        self.key = key
        self._folder = run_folder(data_dir, run)

    @classmethod
    def find(cls, wanted: str, data_dir: Path | None) -> Ownership:
        """Find a run by its id, the beginning of it, or its name. Without a folder both default ones are
        looked through.

        Raises: UserError.
        """
        folders = usual_folders(data_dir)
        found: list[Ownership] = []
        known: list[PublishedRun] = []
        for folder in folders:
            runs = saved_runs(folder)
            known += runs.values()
            chosen = saved_run(runs, wanted)
            path = folder / "owner.key"
            if chosen is None or not path.exists():
                continue
            key = Identity.load_or_create(path)
            if key.peer_id in chosen.owners:
                found.append(cls(folder, chosen.id, key, chosen.owners))
        if found:
            return found[0]
        where = " or ".join(map(str, folders))
        names = run_names(known)
        raise UserError(
            f'no run "{wanted}" with its owner\'s key is in {where}'
            + (f"; there is {names}" if names else ""),
            "name the folder of the node or bootstrap that signed the run: --data-dir DIR",
        )

    def addresses(self, join: Sequence[str]) -> list[str]:
        """List addresses for an invite: those that were named, else this folder's own and those met; may be
        none."""
        return known_addresses(self.data_dir, join)

    def invite(self, expires: int, uses: int, name: str, join: Sequence[str]) -> Invite:
        """Make an invite and note it. Raises: UserError (there is no address to put in; the other key has
        spoken), StorageError."""
        self._next_sequence()
        addresses = tuple(addresses_of(self.data_dir, join))
        issued = self.issued()
        if len(issued) >= MAX_ISSUED:
            raise UserError(
                f"{MAX_ISSUED} invites to this run were given out, which is all", "start a new run"
            )
        key = Identity.generate()
        granted = grant(self.run, key.peer_id, expires, uses, self.key)
        made = Invite(granted, key, addresses)
        encode_link(
            RunLink(self.run, addresses, self.owners[0], invite=made)
        )  # what cannot be written is not given out
        issued.append(Issued(name, key.peer_id, expires, uses))
        Files().save(self._folder / "invites.json", [msgspec.json.encode(issued)], durable=True)
        return made

    def standing_invite(self, addresses: Sequence[str]) -> Invite:
        """Find the invite of the link that the run's host prints, or make it: the same after a restart.

        Raises: UserError (too many invites were given out), StorageError.
        """
        path = self._folder / "link"
        kept = read_note(path, msgspec.msgpack.Decoder(Right).decode, logger.warning)
        if kept is None or Identity.from_seed(kept.seed).peer_id in self.ended:
            kept = self.invite(0, LINK_USES, LINK_NAME, addresses).right
            Files().save(path, [msgspec.msgpack.encode(kept)], durable=True, private=True)
        return Invite.of(self.run, kept, tuple(addresses[:MAX_PEERS]))

    def link(self, invite: Invite) -> str:
        """Put an invite into a link to the run. Raises: ConfigError."""
        name = saved_runs(self.data_dir)[self.run].name
        return encode_link(RunLink(self.run, invite.addresses, self.owners[0], name, invite))

    def issued(self) -> list[Issued]:
        """List the invites that were given out."""
        decode = msgspec.json.Decoder(list[Issued]).decode
        return read_note(self._folder / "invites.json", decode, logger.warning) or []

    @property
    def names(self) -> dict[str, str]:
        """Names of the invites that were given out, by key."""
        return {issued.key: issued.name for issued in self.issued()}

    @property
    def ended(self) -> frozenset[str]:
        """Keys of the invites that the owner has closed or revoked, among peers whose seats ended."""
        notice = self.notice or Notice(self.run, 1)
        return frozenset((*notice.revoked, *(word.peer for word in notice.seats if not word.seated)))

    def key_of(self, word: str) -> str:
        """Find the key of an invite by its text, its name, or the key itself. Raises: UserError."""
        if is_link(word):
            invite = read_link(word).invite
            if invite is None:
                raise UserError("there is no invite in this run link", "name one, or give the invite itself")
            return invite.grant.key
        if public_of(word) is not None:
            return word
        keys = {key for key, name in self.names.items() if name == word}
        keys = keys - self.ended or keys
        if len(keys) == 1:
            return keys.pop()
        names = ", ".join(sorted({*self.names.values()} - {""})[:8])
        raise UserError(
            f'there are {len(keys)} invites of the name "{word}"' if keys else f'there is no invite "{word}"',
            "give the invite itself" + (f", or one of the names {names}" if names else ""),
        )

    @property
    def notice(self) -> Notice | None:
        """Newest notice that this folder knows; None: there is none yet."""
        return load_notice(self._folder, self.run, self.owners)

    @property
    def _floor(self) -> int:
        """Number up to which our key says nothing."""
        return RECOVERY_FROM - 1 if self.key.peer_id != self.owners[0] else 0

    def _next_sequence(self, newest: int = 0) -> int:
        before = self.notice
        sequence = max(newest, self._floor, before.sequence if before is not None else 0) + 1
        if owner_of(sequence, self.owners) != self.key.peer_id:
            raise UserError(
                "the run's recovery key has spoken, and the owner's key signs nothing any more",
                "put the recovery key in the place of owner.key",
            )
        return sequence

    def publish(self, notice: Notice, newest: int = 0, known: Mapping[str, int] = {}) -> Notice:
        """Sign a notice as the one after the newest, and keep it; words of it that are not signed yet get, in
        their order, the numbers after the highest of all words. `newest`: a sequence that members know;
        `known`: numbers of the words that a table has on peers (an older notice may have hidden one). Words
        of a key that says nothing any more are left out.

        Raises: UserError (too large; the other key has spoken), StorageError.
        """
        before, floor, sequence = self.notice, self._floor, self._next_sequence(newest)
        said = (*notice.seats, *(before.seats if before is not None else ()))
        numbers = count(1 + max([floor, *(word.number for word in said if word.signatures)]))
        words = [word for word in notice.seats if word.signatures and word.number > floor]
        for word in notice.seats:
            if word.signatures:
                continue
            number = max(next(numbers), known.get(word.peer, 0) + 1)
            if not is_timely(number, time.time()):
                raise UserError(
                    f"the run has a word on {word.peer} of a number that no notice can have",
                    "the recovery key can say another, and so can more than half of the seats",
                )
            words.append(signed(msgspec.structs.replace(word, number=number), self.key))
        made = signed(msgspec.structs.replace(notice, sequence=sequence, seats=tuple(words)), self.key)
        save_notice(self._folder, made)
        return made
