"""Guide of somebody who joins a run: the questions, and the settings that the answers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from p2pdiloco.adapters.multiaddrs import look_nearby
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.cli.guided.autostart import can_start_by_itself
from p2pdiloco.cli.guided.looking import look_at, takes
from p2pdiloco.cli.guided.questions import Answers, Question, ask_all, one_of, yes_or_no
from p2pdiloco.cli.guided.saved import saved_settings
from p2pdiloco.config.settings import NodeSettings, OwnLimits, bounds_of
from p2pdiloco.config.values import check_join_address, expanded, parse_rate, parse_size
from p2pdiloco.daemon.admission import owns
from p2pdiloco.daemon.owner.pauses import mains
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, Way, is_word, way_of
from p2pdiloco.errors import UserError, clean

MAX_NAME = 63
LIMITS = ("max_transfer", "hours", "not_on_battery")


class Guide:
    """Guide for one data folder."""

    def __init__(self, data_dir: Path) -> None:
        """Raises: UserError (a node runs with this folder)."""
        self.data_dir = data_dir
        self._before = saved_settings(data_dir)
        self._run: PublishedRun | None = None

    def ask(self, given: str) -> tuple[dict[str, Any], str]:
        """Ask. `given`: a link, an invite or an address that is already known.

        Returns the settings, and what to do: "start", "service", "save" or "quit".

        Raises: click.Abort; UserError (what was given is wrong).
        """
        known: Answers = {"way": _way(given)} if given else {}
        if given:
            self._look_at_word(known)
        answers = ask_all([*([] if given else [self._way_in()]), *self._questions()], known)
        return self._values(answers), answers["then"]

    def _was(self, key: str) -> str:
        """Tell what was answered before."""
        return str(self._before.get(key) or "")

    def _way_in(self) -> Question:
        before = " ".join(self._before.get("join", ())).partition(" ")[0]
        way = self._was("invite") or self._nearby() or before
        words = "Run link, invite, or address of a peer"
        return Question("way", words, way, read=_way, then=self._look_at_word)

    def _questions(self) -> list[Question]:
        was = self._was
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
            *self._limits(),
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
            click.echo(f"in this network: run {', '.join(near.runs)} at {near.addresses[0]}", err=True)
        return found[0].addresses[0] if found else ""

    def _limits(self) -> list[Question]:
        """List the questions about how much of this machine the run may have, and when."""
        was, has_battery = self._was, mains() is not None
        return [
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
        ]

    def _look_at_word(self, answers: Answers) -> None:
        """Look at the run of a link or invite; that of an address is asked for first."""
        if answers["way"].run:
            self._look(answers["way"], "")

    def _look(self, way: Way, run: str) -> None:
        self._run = None
        click.echo("looking at the run …", err=True)
        settings = NodeSettings(join=way.join, run=way.run or run, invite=way.word, data_dir=self.data_dir)
        found = look_at(settings)
        self._check_admission(found, way)
        self._run = found
        click.echo(f"found run {found.title}", err=True)

    def _check_admission(self, run: PublishedRun, way: Way) -> None:
        mode = run.manifest.admission.mode
        if mode == "open" or (run_folder(self.data_dir, run.id) / "admission").exists():
            return
        if owns(self.data_dir, run.signed.owner):
            return
        if mode == "list":
            click.echo(
                "note: its owner has to put this node on a list; it prints its id when it starts", err=True
            )
        elif way.link is None or way.link.invite is None:
            raise UserError(
                f"run {run.name} takes members by invite, and there is none in this",
                "ask its owner for an invite, or a link with one in it",
            )

    def _show(self, answers: Answers) -> None:
        values = self._values(answers)
        click.echo("", err=True)
        if self._run is not None:
            known = {key: value for key, value in values.items() if key in NodeSettings.__struct_fields__}
            settings = msgspec.convert(
                known | {"data_dir": self.data_dir}, NodeSettings, dec_hook=lambda _kind, value: value
            )
            for line in takes(settings, self._run):
                click.echo(clean(f"  {line}"), err=True)

    def _values(self, answers: Answers) -> dict[str, Any]:
        """Make the settings: what was there before, and the answers in its place."""
        way: Way = answers["way"]
        values = {key: value for key, value in self._before.items() if key not in ("invite", "join", "run")}
        if way.word:
            values["invite"] = "".join(way.word.split())
        else:
            values |= {"join": way.join, "run": self._run.id if self._run is not None else way.run}
        asked = ("name", "data", "max_upload", "max_download", "max_disk", *LIMITS)
        return values | {key: answers[key] for key in asked if key in answers}


def _way(word: str) -> Way:
    """Read a link, an invite or an address. Raises: ConfigError."""
    if not is_word(word):
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
        bounds_of(msgspec.structs.replace(OwnLimits(), **{key: word}))
        return word

    return read


def _size(word: str) -> str:
    parse_size(word, "the limit")
    return word
