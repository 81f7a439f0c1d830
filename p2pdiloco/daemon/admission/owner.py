"""Owner of a run: the folder with its key, the invites that were given out, and the notice.

<data_dir>/owner.key
<data_dir>/runs/<run id, 16>/invites.json   name, key, expiry and uses of every invite; no secrets
<data_dir>/runs/<run id, 16>/notice         the newest notice
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.daemon.admission.invite import Invite, encode_invite
from p2pdiloco.daemon.admission.known_run import addresses_of, known_addresses, usual_folders
from p2pdiloco.daemon.admission.link import RunLink, encode_link, is_word, read_word
from p2pdiloco.daemon.admission.notice_file import load_notice, save_notice
from p2pdiloco.daemon.admission.papers import Notice, grant, signed
from p2pdiloco.daemon.run_files.listing import ListedRun, choose_run, run_names, saved_runs
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity, public_of
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
MAX_ISSUED = 1024


class Issued(Struct, frozen=True, forbid_unknown_fields=True):
    """Invite that was given out."""

    name: str
    key: str
    expires: int
    uses: int


class Ownership:
    """Run whose owner's key is in a folder."""

    def __init__(self, data_dir: Path, run: str, key: Identity) -> None:
        self.data_dir = data_dir
        self.run = run
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
        known: list[ListedRun] = []
        for folder in folders:
            runs = {run: listed for run, (listed, _) in saved_runs(folder).items()}
            known += runs.values()
            chosen = choose_run(runs, wanted)
            path = folder / "owner.key"
            if chosen is None or not path.exists():
                continue
            key = Identity.load_or_create(path)
            if saved_runs(folder)[chosen.run][1].owner == key.peer_id:
                found.append(cls(folder, chosen.run, key))
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
        """Make an invite and note it. Raises: UserError (there is no address to put in), StorageError."""
        addresses = tuple(addresses_of(self.data_dir, join))
        issued = self.issued()
        if len(issued) >= MAX_ISSUED:
            raise UserError(
                f"{MAX_ISSUED} invites to this run were given out, which is all", "start a new run"
            )
        key = Identity.generate()
        granted = grant(self.run, key.peer_id, expires, uses, self.key)
        made = Invite(granted, key, addresses)
        encode_invite(made)  # what cannot be written is not given out
        issued.append(Issued(name, key.peer_id, expires, uses))
        Files().save(self._folder / "invites.json", [msgspec.json.encode(issued)], durable=True)
        return made

    def link(self, invite: Invite) -> str:
        """Put an invite into a link to the run. Raises: ConfigError."""
        listed, _ = saved_runs(self.data_dir)[self.run]
        return encode_link(RunLink(self.run, invite.addresses, self.key.peer_id, listed.name, invite))

    def issued(self) -> list[Issued]:
        """List the invites that were given out."""
        decode = msgspec.json.Decoder(list[Issued]).decode
        return read_note(self._folder / "invites.json", decode, logger.warning) or []

    def key_of(self, word: str) -> str:
        """Find the key of an invite by its text, its name, or the key itself. Raises: UserError."""
        if is_word(word):
            invite = read_word(word).invite
            if invite is None:
                raise UserError("there is no invite in this run link", "name one, or give the invite itself")
            return invite.grant.key
        if public_of(word) is not None:
            return word
        keys = {issued.key for issued in self.issued() if issued.name == word}
        if len(keys) == 1:
            return keys.pop()
        names = ", ".join(sorted({i.name for i in self.issued() if i.name})[:8])
        raise UserError(
            f'there are {len(keys)} invites of the name "{word}"' if keys else f'there is no invite "{word}"',
            "give the invite itself" + (f", or one of the names {names}" if names else ""),
        )

    @property
    def notice(self) -> Notice | None:
        """Newest notice that this folder knows; None: there is none yet."""
        return load_notice(self._folder, self.run, self.key.peer_id)

    def publish(self, notice: Notice, newest: int = 0) -> Notice:
        """Sign a notice as the one after the newest, and keep it. `newest`: a sequence that members know.

        Raises: UserError (too large), StorageError.
        """
        before = self.notice
        sequence = max(newest, before.sequence if before is not None else 0) + 1
        made = signed(msgspec.structs.replace(notice, sequence=sequence), self.key)
        save_notice(self._folder, made)
        return made
