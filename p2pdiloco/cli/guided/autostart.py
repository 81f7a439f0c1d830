"""Start of a node with this user's session or this machine: a user unit, made of the shipped one.

The shipped unit is the system manager's. A user's manager has neither the privileges that its mount and
capability settings need, nor its folders: what remains are the settings below.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.errors import StorageError, UserError

UNIT = "p2pdiloco-node.service"
KEPT = {
    "Description",
    "Type",
    "NotifyAccess",
    "TimeoutStartSec",
    "WatchdogSec",
    "Restart",
    "RestartSec",
    "RestartPreventExitStatus",
    "KillMode",
    "OOMPolicy",
    "TimeoutStopSec",
    "NoNewPrivileges",
    "RestrictAddressFamilies",
    "RestrictNamespaces",
    "RestrictRealtime",
    "RestrictSUIDSGID",
    "LockPersonality",
    "UMask",
    "SystemCallArchitectures",
    "SystemCallFilter",
    "SystemCallErrorNumber",
}
"""Settings of the shipped unit that a user's manager can keep."""
SYSTEMCTL = ("systemctl", "--user")
TIMEOUT_S = 60.0


def can_start_by_itself() -> bool:
    """Tell whether this machine has systemd, and the shipped unit is here."""
    return sys.platform == "linux" and shutil.which("systemctl") is not None and shipped_unit() is not None


def shipped_unit() -> Path | None:
    """Find the unit that is shipped: beside the package in a clone, under share where it is installed."""
    places = (Path(__file__).parents[3] / "node", Path(sys.prefix) / "share/p2pdiloco/node")
    return next((place / UNIT for place in places if (place / UNIT).is_file()), None)


def unit_path() -> Path:
    """Path of this user's unit."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "systemd/user" / UNIT


def user_unit(shipped: str, config: Path) -> str:
    """Make the user's unit of the shipped one; it starts the node with this settings file."""
    lines = [f"# {UNIT} of this user, written by `p2pdiloco join`", "[Unit]"]
    for line in shipped.splitlines():
        key = line.partition("=")[0]
        if line == "[Service]":
            command = " ".join(
                map(_quoted, (sys.executable, "-m", "p2pdiloco", "node", "--config", str(config)))
            )
            lines += ["", line, f"ExecStart={command}"]
        elif key in KEPT:
            lines.append(line)
    return "\n".join([*lines, "", "[Install]", "WantedBy=default.target", ""])


def _quoted(word: str) -> str:
    """Quote a word of ExecStart."""
    for character, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(character, written)
    return f'"{word}"'


def start_by_itself(config: Path) -> list[str]:
    """Write the unit, enable it, and start it now. Returns what to know of it, in lines.

    Raises: UserError (the user's manager refuses, with what it says), StorageError.
    """
    shipped, path = shipped_unit(), unit_path()
    if shipped is None:
        raise UserError("the unit p2pdiloco-node.service is not here", "see node/RUNBOOK.md in the clone")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = user_unit(shipped.read_text(encoding="utf-8"), config)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    Files().save(path, [text.encode()], durable=True)
    for words in (("daemon-reload",), ("enable", "--now", UNIT)):
        _systemctl(*words)
    return [
        f"the node runs as {UNIT} of this user, and starts with your session ({path})",
        "watch it:       journalctl --user -u p2pdiloco-node -f, or p2pdiloco status",
        "stop it:        systemctl --user stop p2pdiloco-node",
        "without login:  loginctl enable-linger (it then starts with the machine, and outlives your session)",
        f"take it away:   systemctl --user disable --now p2pdiloco-node && rm {path}",
    ]


def _systemctl(*words: str) -> None:
    command = (*SYSTEMCTL, *words)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        said, failed = (done.stderr or done.stdout).strip(), done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        said, failed = str(error), True
    if failed:
        raise UserError(
            f"{' '.join(command)} failed: {' '.join(said.split())[:200]}",
            f"the unit is written; in a session of yours: systemctl --user daemon-reload && systemctl --user "
            f"enable --now {UNIT}",
        )
