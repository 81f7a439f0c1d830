"""Settings file of a guided node, `<data_dir>/node.toml`: what `p2pdiloco node --config` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from p2pdiloco.adapters.data_dir import DataDir, Files, is_in_use
from p2pdiloco.config.manifest import as_toml
from p2pdiloco.config.settings import load_settings_table
from p2pdiloco.daemon.papers import INVITE
from p2pdiloco.daemon.run_files.known_runs import read_word
from p2pdiloco.errors import UserError

NAME = "node.toml"
_HEAD = """\
# Settings of this node, written by `p2pdiloco join`, which asks for them again. It starts with
#   p2pdiloco node --config {path}
# Every flag of `p2pdiloco node` may be a key, with dashes as underscores.
[node]
"""


def saved_settings(data_dir: Path) -> dict[str, Any]:
    """Read what an earlier guide saved; empty: nothing.

    Raises: UserError (a node runs there), ConfigError.
    """
    if data_dir.is_dir() and is_in_use(data_dir):
        raise UserError(
            f"a node runs with the data folder {data_dir}",
            "stop it first (Ctrl-C there, or systemctl --user stop p2pdiloco-node), or name another folder "
            "with --data-dir",
        )
    path = data_dir / NAME
    return load_settings_table(path, "node") if path.exists() else {}


def save_settings(data_dir: Path, values: dict[str, Any]) -> Path:
    """Save settings, all or nothing, for nobody else to read; what is empty is left out.

    Raises: StorageError.
    """
    path = data_dir / NAME
    lines = [f'data_dir = "."  # {str(data_dir)!r}\n']
    for key, value in values.items():
        if value not in ("", (), None, False) and key != "data_dir":
            note = f"  # {_kind_of(value)}" if key == "invite" else ""
            lines.append(f"{key} = {as_toml(str(value) if isinstance(value, Path) else value)}{note}\n")
    text = _HEAD.format(path=path) + "".join(lines)
    with DataDir(data_dir, parents=True):
        Files().save(path, [text.encode()], durable=True, private=True)
    return path


def _kind_of(word: str) -> str:
    """Say what a word is, and whether it is a secret. Raises: ConfigError."""
    if INVITE.fits(word):
        return "an invite: a secret"
    if read_word(word).invite is not None:
        return "a run link with an invite in it: a secret"
    return "a run link, which is no secret"
