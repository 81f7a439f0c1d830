"""Admission of this node itself: by an invite, by the owner's key in its folder, or from an earlier start.

<data_dir>/invite.txt                    the invite that was given last; a secret
<data_dir>/runs/<run id, 16>/admission   what this node shows its peers
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.adapters.disk.run_store import run_folder
from p2pdiloco.config.folders import expanded
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.admission.invite import Invite, decode_invite
from p2pdiloco.daemon.admission.papers import (
    MAX_USES,
    Admission,
    admission,
    admission_fault,
    grant,
)
from p2pdiloco.daemon.finding.peers_file import peers_file
from p2pdiloco.daemon.run_files.listing import PublishedRun, is_beginning
from p2pdiloco.errors import ConfigError
from p2pdiloco.identity import Identity, verify
from p2pdiloco.notes import read_note

logger = logging.getLogger(__name__)


def invite_file(data_dir: Path) -> Path:
    """Path of the invite that was given last."""
    return data_dir / "invite.txt"


def saved_invite(data_dir: Path) -> Invite | None:
    """Read the invite that was given last; None: there is none that can be read."""
    return read_note(invite_file(data_dir), _decode_invite, logger.warning)


def _decode_invite(content: bytes) -> Invite:
    try:
        return decode_invite(content.decode("ascii"))
    except ConfigError as error:
        raise ValueError(str(error)) from error


def with_invite(settings: NodeSettings) -> NodeSettings:
    """Fill in what an invite says: the run, and the peers to join through.

    The invite is the given one, or, where nothing else says where to go, that of an earlier start.

    Raises: ConfigError.
    """
    data_dir = expanded(settings.data_dir)
    invite = decode_invite(settings.invite) if settings.invite else None
    nowhere = not (settings.join or settings.run_file or peers_file(data_dir).exists())
    if invite is None and nowhere:
        invite = saved_invite(data_dir)
        if invite is not None and settings.run not in ("", invite.run) and not _names(settings.run, invite):
            invite = None
    if invite is None:
        return settings
    if settings.invite and settings.run not in ("", invite.run) and not _names(settings.run, invite):
        raise ConfigError(
            f"the invite is to run {invite.run[:12]}, and --run says {settings.run}", "leave --run out"
        )
    join = (*settings.join, *(a for a in invite.addresses if a not in settings.join))
    return msgspec.structs.replace(settings, join=join, run=invite.run)


def _names(wanted: str, invite: Invite) -> bool:
    return is_beginning(wanted, invite.run)


def owns(data_dir: Path, owner: str) -> bool:
    """Tell whether this folder has the key of that owner."""
    path = data_dir / "owner.key"
    return path.exists() and Identity.load_or_create(path).peer_id == owner


def keep_invite(settings: NodeSettings) -> None:
    """Remember the given invite for later starts. Raises: StorageError."""
    if settings.invite:
        text = "".join(settings.invite.split()) + "\n"
        Files().save(invite_file(settings.data_dir), [text.encode()], durable=True, private=True)


def own_admission(data_dir: Path, run: PublishedRun, me: str) -> Admission | None:
    """Make or find what this node shows the run's peers, and keep it; None: it has nothing to show.

    The owner's key comes first, then the invite that was given last, then what was kept.

    Raises: StorageError.
    """
    path = run_folder(data_dir, run.id) / "admission"
    shown = _by_owner(data_dir, run, me) or _by_invite(data_dir, run, me)
    if shown is None:
        kept = read_note(path, _decode, logger.warning)
        sound = kept is not None and admission_fault(kept, me, run.id, run.signed.owner, verify) is None
        return kept if sound else None
    Files().make_folder(path.parent)
    Files().save(path, [msgspec.msgpack.encode(shown)], durable=True)
    return shown


def _decode(content: bytes) -> Admission:
    return msgspec.msgpack.decode(content, type=Admission)


def _by_owner(data_dir: Path, run: PublishedRun, me: str) -> Admission | None:
    path = data_dir / "owner.key"
    if not path.exists():
        return None
    owner = Identity.load_or_create(path)
    if owner.peer_id != run.signed.owner:
        return None
    return admission(grant(run.id, owner.peer_id, 0, MAX_USES, owner), me, owner)


def _by_invite(data_dir: Path, run: PublishedRun, me: str) -> Admission | None:
    invite = saved_invite(data_dir)
    return invite.admit(me) if invite is not None and invite.run == run.id else None
