"""Run that a folder of this machine knows, as its node is in it or its bootstrap serves it, and its link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from p2pdiloco.config.manifest import Manifest, SignedManifest, manifest_from_canonical
from p2pdiloco.config.settings import BootstrapSettings, NodeSettings
from p2pdiloco.config.values import expanded
from p2pdiloco.daemon.admission.link import link_of
from p2pdiloco.daemon.admission.word import MAX_ADDRESSES
from p2pdiloco.daemon.finding.peers_file import load_own_addresses, load_peers
from p2pdiloco.daemon.run_files.joined import joined_runs
from p2pdiloco.daemon.run_files.listing import (
    ListedRun,
    PublishedRun,
    choose_run,
    run_names,
    saved_runs,
)
from p2pdiloco.errors import UserError

_SETTINGS: tuple[type[NodeSettings] | type[BootstrapSettings], ...] = (NodeSettings, BootstrapSettings)


def usual_folders(data_dir: Path | None) -> list[Path]:
    """List the folders to look through: the given one, or a node's and a bootstrap's default ones."""
    folders = [data_dir] if data_dir is not None else [settings().data_dir for settings in _SETTINGS]
    return [expanded(folder) for folder in folders]


def known_addresses(data_dir: Path, join: Sequence[str]) -> list[str]:
    """List addresses for a word: those that were named, else this folder's own and those met; may be none."""
    return list(join) or load_own_addresses(data_dir)[:MAX_ADDRESSES] + load_peers(data_dir)[::-1]


def addresses_of(data_dir: Path, join: Sequence[str]) -> list[str]:
    """List the same, at least one.

    Raises: UserError (there are none).
    """
    found = known_addresses(data_dir, join)
    if not found:
        raise UserError(
            "there is no address in this folder that could be named",
            "start the node or bootstrap first, or name one: --join ADDRESS",
        )
    return found


class KnownRun:
    """Run that is in a folder."""

    def __init__(self, data_dir: Path, run: str, signed: SignedManifest) -> None:
        self._data_dir = data_dir
        manifest: Manifest = manifest_from_canonical(signed.manifest)
        self._run = PublishedRun(id=run, signed=signed, manifest=manifest)

    @classmethod
    def find(cls, wanted: str, data_dir: Path | None) -> KnownRun:
        """Find a run by its id, the beginning of it, or its name; by nothing the one that was joined last, or
        the only one.

        Raises: UserError (there is none, or there are several).
        """
        folders = usual_folders(data_dir)
        names: list[ListedRun] = []
        for folder in folders:
            saved = saved_runs(folder)
            listed = {run: entry for run, (entry, _) in saved.items()}
            names += listed.values()
            chosen = choose_run(listed, wanted, joined_runs(folder))
            if chosen is not None:
                return cls(folder, chosen.run, saved[chosen.run][1])
        where = " or ".join(map(str, folders))
        if names:
            raise UserError(f'no run "{wanted}" is in {where}', f"there is {run_names(names)}")
        raise UserError(
            f"no run is in {where}: no node joined one from there, and no bootstrap serves one",
            "name the folder of a node or bootstrap of the run: --data-dir DIR",
        )

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._run.name

    @property
    def title(self) -> str:
        """Name and beginning of the id, for people."""
        return self._run.title

    @property
    def is_by_invite(self) -> bool:
        """Tell whether members need an invite."""
        return self._run.manifest.admission.mode == "invite"

    def addresses(self, join: Sequence[str]) -> list[str]:
        """List the addresses that its link names. Raises: UserError (there are none)."""
        return addresses_of(self._data_dir, join)

    def link(self, join: Sequence[str]) -> str:
        """Make its link. Raises: UserError, ConfigError."""
        return link_of(self._run, self.addresses(join))
