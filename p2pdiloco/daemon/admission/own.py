"""Admission of this node itself: by an invite, by the owner's key in its folder, or from an earlier start.

<data_dir>/invite.txt                    the invite or run link that was given last; perhaps a secret
<data_dir>/runs/<run id, 16>/admission   what this node shows its peers
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.config.settings import BootstrapSettings, NodeSettings
from p2pdiloco.config.values import expanded
from p2pdiloco.daemon.admission.link import RunLink, Way, read_word, way_of
from p2pdiloco.daemon.admission.papers import (
    MAX_USES,
    Admission,
    admission,
    admission_fault,
    grant,
)
from p2pdiloco.daemon.finding.peers_file import load_joined_through, peers_file
from p2pdiloco.daemon.run_files.listing import PublishedRun
from p2pdiloco.errors import ConfigError, UserError, clean
from p2pdiloco.identity import Identity, verify
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)


def invite_file(data_dir: Path) -> Path:
    """Path of the invite or link that was given last."""
    return data_dir / "invite.txt"


def saved_word(data_dir: Path) -> RunLink | None:
    """Read the invite or link that was given last; None: there is none that can be read."""
    return read_note(invite_file(data_dir), _decode_word, logger.warning)


def _decode_word(content: bytes) -> RunLink:
    try:
        return read_word(content.decode("ascii"))
    except ConfigError as error:
        raise ValueError(str(error)) from error


def with_invite(settings: NodeSettings) -> NodeSettings:
    """Fill in what an invite or a run link says: the run, and the peers to join through.

    It is the given one, among the addresses to join too, or, where nothing else says where to go, that of an
    earlier start.

    Raises: ConfigError.
    """
    data_dir = expanded(settings.data_dir)
    way = way_of(settings.join, settings.run, settings.invite)
    _refuse_expired(data_dir, way)
    link = way.link
    if link is None and not (settings.join or settings.run_file or peers_file(data_dir).exists()):
        link = saved_word(data_dir)
        if link is None or not link.means(settings.run):
            return settings
        way = Way(link.addresses, link.run)
    return msgspec.structs.replace(settings, join=way.join, run=way.run, invite=way.word)


def with_link(settings: BootstrapSettings) -> BootstrapSettings:
    """Fill in what a link or an invite among the addresses to join says. Raises: ConfigError."""
    way = way_of(settings.join)
    if way.link is None:
        return settings
    run = settings.run or (Path(way.run),)
    return msgspec.structs.replace(settings, join=way.join, run=run)


def joined_through_before(settings: NodeSettings) -> tuple[str, ...]:
    """List what this folder's node joined through before, where nothing is given now: the addresses given
    last, else those of the link or invite that was."""
    if settings.join or settings.run_file is not None:
        return ()
    if kept := load_joined_through(settings.data_dir):
        return kept
    link = saved_word(settings.data_dir)
    return link.addresses if link is not None and link.means(settings.run) else ()


def _refuse_expired(data_dir: Path, way: Way) -> None:
    """Refuse an invite that lets nobody in any more. Who was let in by it stays in. Raises: ConfigError."""
    invite = way.link.invite if way.link is not None else None
    if invite is None or not 0 < invite.grant.expires < time.time():
        return
    if not (run_folder(data_dir, invite.run) / "admission").exists():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(invite.grant.expires))
        raise ConfigError(
            f"the invite has expired, at {when} by this machine's clock", "ask the run's owner for another"
        )


def check_owner(settings: NodeSettings, run: PublishedRun) -> None:
    """Check that a run is of the owner that the link to it names, the given one or the saved one.

    Raises: UserError.
    """
    link = read_word(settings.invite) if settings.invite else saved_word(settings.data_dir)
    if link is not None and link.run == run.id and link.owner not in ("", run.signed.owner):
        raise UserError(
            f"run {run.name} is of owner {clean(run.signed.owner)}, and the link says {link.owner}",
            "do not use this link; ask the run's owner for the true one",
        )


def owns(data_dir: Path, owner: str) -> bool:
    """Tell whether this folder has the key of that owner."""
    path = data_dir / "owner.key"
    return path.exists() and Identity.load_or_create(path).peer_id == owner


def keep_invite(settings: NodeSettings) -> None:
    """Remember the given invite or link for later starts; a link that lets nobody in takes no invite's place.

    Raises: StorageError.
    """
    if not settings.invite:
        return
    before, now = saved_word(settings.data_dir), read_word(settings.invite)
    if before is not None and before.invite is not None and (before.run, None) == (now.run, now.invite):
        return
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
    link = saved_word(data_dir)
    invite = link.invite if link is not None else None
    return invite.admit(me) if invite is not None and invite.run == run.id else None
