"""Rendering of a page: the whole document for the first paint, and those parts of it that changed since.

The script only puts parts in place: what is shown is worded here, once, for the first paint, for updates, and
for readers without scripts. The script counts ages, so that a part changes only when something happens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from msgspec import Struct

from p2pdiloco.daemon.display.snapshot import short_peer
from p2pdiloco.errors import clean
from p2pdiloco.web.page import curve, wording
from p2pdiloco.web.view import RunView
from p2pdiloco.web.words import MarkKind, MemberWord, NodeWord, Pulse, Why

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"
"""Folder of the script and the style sheets."""
PARTS = ("head", "figures", "loss", "mine", "members", "fragments", "happened", "credits", "join")
"""Parts of a page, each a template and an element with that id. A part may be empty."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'"
)
"""Content security policy: in the page itself, which any web server may carry, and in our own answers."""

Live = Literal["events", "poll"]
"""Way in which the page learns of changes: server-sent events of `events`, or by looking again."""


class Parts(Struct, frozen=True):
    """Parts of a page as they were rendered, by name."""

    html: dict[str, str] = {}

    def since(self, before: Parts) -> dict[str, str]:
        """List those that differ."""
        return {name: text for name, text in self.html.items() if before.html.get(name) != text}


class Page:
    """Page of a run, ready to render any view of it."""

    def __init__(self) -> None:
        self._env = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
            undefined=StrictUndefined,
            finalize=_shown,
        )
        self._env.filters.update(
            age=wording.age,
            ago=wording.ago,
            amount=wording.amount,
            grouped=wording.grouped,
            loss=wording.loss,
            number=wording.number,
            rate=wording.rate,
            short=short_peer,
        )
        self._env.globals.update(
            percent=wording.percent,
            why_words=wording.WHY,
            tones=wording.TONES,
            shapes=wording.MEMBER_SHAPES,
            grave=wording.GRAVE,
            drawing=curve.drawing,
            series=curve.series,
            lane=curve.lane,
            words={"node": NodeWord, "pulse": Pulse, "member": MemberWord, "mark": MarkKind, "why": Why},
            Pulse=Pulse,
            Why=Why,
            MemberWord=MemberWord,
            NodeWord=NodeWord,
            policy=POLICY,
            stamp=wording.stamp,
        )

    def html(self, view: RunView, live: Live = "events", every_s: float = 30.0) -> str:
        """Render the whole document. every_s: how often a page that polls looks again."""
        return self._env.get_template("page.html").render(
            **self._context(view, ticking=True), parts=PARTS, live=live, every_s=every_s
        )

    def parts(self, view: RunView) -> Parts:
        """Render the parts without ages."""
        context = self._context(view, ticking=False)
        return Parts({name: self._env.get_template(f"{name}.html").render(**context) for name in PARTS})

    def update(self, view: RunView, parts: dict[str, str] | None = None) -> bytes:
        """Encode parts for the script, by default all: one line of JSON."""
        parts = self.parts(view).html if parts is None else parts
        at_s = view.public.made_at_s if view.public is not None else None
        return msgspec.json.encode({"at": at_s, "version": view.version, "parts": parts})

    def _context(self, view: RunView, ticking: bool) -> dict[str, Any]:
        public = view.public
        now_s = public.made_at_s if public is not None else 0.0

        return {
            "view": view,
            "run": public,
            "own": view.own,
            "now_s": now_s,
            "ticking": ticking,
            "hues": _hues(view),
            "credited": {row.peer: row for row in public.credits} if public is not None else {},
        }


def _shown(value: Any) -> Any:
    """Make a text safe to read, unless it is a piece of the page; escaping is Jinja's."""
    return clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _hues(view: RunView) -> dict[str, int]:
    """Give every syncer a colour of its own, as long as there are some: the same in every part."""
    if view.public is None:
        return {}
    syncers = sorted({row.syncer for row in view.public.fragments if row.syncer})
    return {peer: index % 8 for index, peer in enumerate(syncers)}
