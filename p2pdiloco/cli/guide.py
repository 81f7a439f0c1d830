"""`p2pdiloco join`: a guide at a terminal, which asks what a node needs (`cli.questions`).

`Guide` has the questions, and makes settings of the answers. `manifest_to_join` fetches what a run would take
of this machine. `save_settings` keeps the answers in `<data_dir>/node.toml`, which `p2pdiloco node --config`
reads, and `start_by_itself` installs a user unit of systemd.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import DataDir, Files, is_in_use
from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.adapters.multiaddrs import look_nearby
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.cli.options import say
from p2pdiloco.cli.questions import Answers, Question, ask_all, one_of, yes_or_no
from p2pdiloco.cli.status_command import visit, visitor
from p2pdiloco.config.manifest import as_toml
from p2pdiloco.config.settings import NodeSettings, OwnLimits, bounds_of, load_settings_table
from p2pdiloco.config.values import Addresses, check_join_address, expanded, parse_rate, parse_size
from p2pdiloco.daemon.admission import check_owner, owns
from p2pdiloco.daemon.owner.pauses import mains
from p2pdiloco.daemon.run_files.known_runs import (
    PublishedRun,
    RunSearch,
    Way,
    is_link,
    peers_of,
    read_link,
    way_of,
)
from p2pdiloco.errors import RemoteError, StorageError, TransportError, UserError, clean
from p2pdiloco.util import Values

MAX_NAME = 63
LIMITS = ("max_transfer", "hours", "not_on_battery")


class Guide:
    """Guide for one data folder."""

    def __init__(self, data_dir: Path) -> None:
        """Raises: UserError (a node runs with this folder)."""
        self.data_dir = data_dir
        self._before = saved_settings(data_dir)
        self._run: PublishedRun | None = None

    def ask(self, given: str) -> tuple[Values, str]:
        """Ask. `given`: a link, an invite or an address that is already known.

        Returns the settings, and what to do: "start", "service", "save" or "quit".

        Raises: click.Abort; UserError (what was given is wrong).
        """
        known: Answers = {"way": _read_way(given)} if given else {}
        if given:
            self._look_at_word(known)
        answers = ask_all([*([] if given else [self._way_in()]), *self._questions()], known)
        return self._values(answers), answers["then"]

    def _was(self, key: str) -> str:
        return str(self._before.get(key) or "")

    def _way_in(self) -> Question:
        before = " ".join(self._before.get("join", ())).partition(" ")[0]
        way = self._was("invite") or self._nearby() or before
        words = "Run link, invite, or address of a peer"
        return Question("way", words, way, read=_read_way, then=self._look_at_word)

    def _questions(self) -> list[Question]:
        was, has_battery = self._was, mains() is not None
        ends = ("start", "service", "save", "quit") if can_start_by_itself() else ("start", "save", "quit")
        service = "; service: now, and by itself from then on" if "service" in ends else ""

        return [
            Question(
                "run",
                "Name or id of the run",
                was("run"),
                "the one that this peer serves",
                wanted=lambda a: not a["way"].run,
                then=lambda a: self._look(a["way"], a["run"]),
            ),
            Question("name", "Name that others see beside this node", was("name"), "none", _name),
            Question(
                "data",
                "File or folder of your data, on which this run trains",
                was("data"),
                read=_path,
                wanted=lambda _: self._run is not None and self._run.manifest.data.is_each_nodes_own,
            ),
            Question(
                "max_upload", "At most so much to send, such as 20Mbit", was("max_upload"), "no limit", _rate
            ),
            Question("max_download", "At most so much to receive", was("max_download"), "no limit", _rate),
            Question(
                "max_disk",
                "At most so much of the disk, such as 20GiB",
                was("max_disk"),
                "what is free",
                _size,
            ),
            Question(
                "max_transfer",
                "At most so much to send and receive in a month, such as 200GB/month",
                was("max_transfer"),
                "no limit",
                _limit("max_transfer"),
            ),
            Question(
                "hours",
                "Hours in which it trains, such as 22-7",
                was("hours"),
                "at all times",
                _limit("hours"),
            ),
            Question(
                "not_on_battery",
                "Train on mains power only? y or n",
                "n" if self._before and not self._before.get("not_on_battery") else "y",
                read=yes_or_no,
                wanted=lambda _: has_battery,
            ),
            Question(
                "then",
                f"What now? start: save and start here{service}; save: only save; quit: nothing",
                "start",
                read=one_of(ends),
                before=self._show,
            ),
        ]

    def _nearby(self) -> str:
        """Look for runs in the local network, if the library is here: an address of the first, or nothing."""
        try:
            found = look_nearby()
        except UserError:
            return ""
        for near in found:
            say(f"in this network: run {', '.join(near.runs)} at {near.addresses[0]}")
        return found[0].addresses[0] if found else ""

    def _look_at_word(self, answers: Answers) -> None:
        """Look at the run of a link or invite; that of an address is asked for first."""
        if answers["way"].run:
            self._look(answers["way"], "")

    def _look(self, way: Way, run: str) -> None:
        self._run = None
        say("looking at the run …")
        settings = NodeSettings(join=way.join, run=way.run or run, invite=way.text, data_dir=self.data_dir)
        found = manifest_to_join(settings)
        self._check_admission(found, way)
        self._run = found
        say(f"found run {found.title}")

    def _check_admission(self, run: PublishedRun, way: Way) -> None:
        mode = run.manifest.admission.mode
        if mode == "open" or (run_folder(self.data_dir, run.id) / "admission").exists():
            return
        if owns(self.data_dir, run.signed.owner):
            return
        if mode == "list":
            say("note: its owner has to put this node on a list; it prints its id when it starts")
        elif way.link is None or way.link.invite is None:
            raise UserError(
                f"run {run.name} takes members by invite, and there is none in this",
                "ask its owner for an invite, or a link with one in it",
            )

    def _show(self, answers: Answers) -> None:
        values = self._values(answers)
        say("")
        if self._run is not None:
            known = {key: value for key, value in values.items() if key in NodeSettings.__struct_fields__}
            settings = msgspec.convert(
                known | {"data_dir": self.data_dir}, NodeSettings, dec_hook=lambda _kind, value: value
            )
            for line in footprint_lines(settings, self._run):
                say(clean(f"  {line}"))

    def _values(self, answers: Answers) -> Values:
        """Make the settings: what was there before, and the answers in its place."""
        way: Way = answers["way"]
        values = {key: value for key, value in self._before.items() if key not in ("invite", "join", "run")}
        if way.text:
            values["invite"] = "".join(way.text.split())
        else:
            values |= {"join": way.join, "run": self._run.id if self._run is not None else way.run}
        asked = ("name", "data", "max_upload", "max_download", "max_disk", *LIMITS)
        return values | {key: answers[key] for key in asked if key in answers}


def _read_way(word: str) -> Way:
    """Read a link, an invite or an address. Raises: ConfigError."""
    if not is_link(word):
        check_join_address(word)
    return way_of((word,))


def _name(word: str) -> str:
    if len(word) > MAX_NAME:
        raise UserError(f"a name has {MAX_NAME} letters at most")
    return word


def _path(word: str) -> Path:
    path = expanded(Path(word))
    if not word or not path.exists():
        raise UserError(f"{path} does not exist")
    return path.absolute()


def _rate(word: str) -> str:
    parse_rate(word, "the limit")
    return word


def _limit(key: str) -> Callable[[str], str]:
    """Make a reader of one of the owner's limits."""

    def read(word: str) -> str:
        bounds_of(replace(OwnLimits(), **{key: word}))
        return word

    return read


def _size(word: str) -> str:
    parse_size(word, "the limit")
    return word


# The run before it is joined.

PATIENCE_S = 30.0
PAUSE_S = 0.5


def manifest_to_join(settings: NodeSettings) -> PublishedRun:
    """Fetch the manifest of the run that these settings mean, from the peers that they name.

    Raises: UserError (nobody answers, or nobody knows the run; or it is of another owner than the link says).
    """
    join = peers_behind(settings.join)
    if not join:
        raise UserError("there is no peer to ask")
    try:
        run = visit(_look(join, settings.run))
    except TimeoutError:
        raise UserError(f"nobody told about the run within {PATIENCE_S:g} s") from None
    except (RemoteError, TransportError) as error:
        raise UserError(f"the run cannot be looked at: {error}") from error
    check_owner(settings, run)
    return run


async def _look(join: Addresses, wanted: str) -> PublishedRun:
    async with asyncio.timeout(PATIENCE_S), visitor(join) as transport:
        search = RunSearch(transport, wanted, peers_of(join))
        while True:
            chosen = await search.look()
            found = await search.published(chosen) if chosen is not None else None
            if found is not None:
                return found
            await asyncio.sleep(PAUSE_S)


def footprint_lines(settings: NodeSettings, run: PublishedRun) -> list[str]:
    """Say in lines what a run takes of this machine.

    Raises: UserError (more than is here, or than the settings permit).
    """
    place = next(path for path in (settings.data_dir, *settings.data_dir.parents) if path.exists())
    settings = replace(settings, data_dir=place)  # of the folder that will be made there
    from p2pdiloco.daemon.member import Approval  # with torch

    approval = Approval(settings, lambda _text, _figures: None, None)
    lines = approval.describe(run)
    approval.check(run.manifest)
    return lines


# Settings file.

SETTINGS_NAME = "node.toml"
_HEAD = """\
# Settings of this node, written by `p2pdiloco join`, which asks for them again. It starts with
#   p2pdiloco node --config {path}
# Every flag of `p2pdiloco node` may be a key, with dashes as underscores.
[node]
"""


def saved_settings(data_dir: Path) -> Values:
    """Read what an earlier guide saved; empty: nothing.

    Raises: UserError (a node runs there), ConfigError.
    """
    if data_dir.is_dir() and is_in_use(data_dir):
        raise UserError(
            f"a node runs with the data folder {data_dir}",
            "stop it first (Ctrl-C there, or systemctl --user stop p2pdiloco-node), or name another folder "
            "with --data-dir",
        )
    path = data_dir / SETTINGS_NAME
    return load_settings_table(path, "node") if path.exists() else {}


def save_settings(data_dir: Path, values: Values) -> Path:
    """Save settings, all or nothing, for nobody else to read; what is empty is left out.

    Raises: StorageError.
    """
    path = data_dir / SETTINGS_NAME
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
    if read_link(word).invite is not None:
        return "a run link with an invite in it: a secret"
    return "a run link, which is no secret"


# Start with this user's session or this machine.

UNIT = "p2pdiloco-node.service"
KEPT_KEYS = [
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
]
"""Settings of the shipped unit that a user's manager can keep."""
SYSTEMCTL = ("systemctl", "--user")
TIMEOUT_S = 60.0


def can_start_by_itself() -> bool:
    """Tell whether this machine has systemd, and the shipped unit is here."""
    return sys.platform == "linux" and shutil.which("systemctl") is not None and shipped_unit() is not None


def shipped_unit() -> Path | None:
    """Find the unit that is shipped: beside the package in a clone, under share where it is installed."""
    places = (Path(__file__).parents[2] / "node", Path(sys.prefix) / "share/p2pdiloco/node")
    return next((place / UNIT for place in places if (place / UNIT).is_file()), None)


def unit_path() -> Path:
    """Path of this user's unit."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "systemd/user" / UNIT


def user_unit(shipped: str, config: Path) -> str:
    """Make the user's unit of the shipped one; it starts the node with this settings file.

    The shipped unit is the system manager's. A user's manager has neither the privileges that its mount and
    capability settings need, nor its folders: what remains are `KEPT_KEYS`.
    """
    lines = [f"# {UNIT} of this user, written by `p2pdiloco join`", "[Unit]"]
    for line in shipped.splitlines():
        key = line.partition("=")[0]
        if line == "[Service]":
            command = " ".join(
                map(_quoted, (sys.executable, "-m", "p2pdiloco", "node", "--config", str(config)))
            )
            lines += ["", line, f"ExecStart={command}"]
        elif key in KEPT_KEYS:
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
