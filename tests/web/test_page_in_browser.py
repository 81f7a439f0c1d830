"""The page in a real browser: what it shows, how it follows what happens, and what it never does."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from page_looks import Looks
from page_scene import NAMES, member, peer, scene, several, with_own, with_public
from page_server import PageServer

from p2pdiloco.daemon.display.snapshot import ProposedSeat
from p2pdiloco.web.page import age, ago
from p2pdiloco.web.view import BehindReason, Mark, MarkKind, MemberCondition, NewestView

pytestmark = pytest.mark.process

MOST_BYTES = 150_000
LIVE = "document.getElementById('stream').className === 'stream live'"
OLD = "document.getElementById('stream').className === 'stream old'"
OPEN = "document.querySelectorAll('details').forEach(d => { d.open = true })"
CHART = "document.querySelector('#plot canvas')"
ROWS = "[...document.querySelectorAll('#members tbody tr')].map(r => r.innerText.replace(/\\s+/g, ' '))"
OVERFLOW = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
STOPS = """[...document.querySelectorAll('a[href], button, input, summary, pre[tabindex]')]
  .filter(e => e.checkVisibility() && !(e.type === 'radio' && !e.checked)).length"""
CONTRAST = Path(__file__).with_name("contrast.js").read_text()
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "\u202egnihtemos\u202c\u2066",
    "界" * 80,
    "W" * 80,
    "\x1b[31m\x07\n\t",
    "{{ 7 * 7 }}</time></script>&amp;",
)


def test_all_is_there_at_once_without_scripts(server: PageServer, looks: Looks) -> None:
    page = looks.at(server.url, scripts=False)
    head = page.text("#head")
    assert "Alive. Version 214 of fragment 17 came 8 s ago, with the work of 4 of 6." in head.replace(
        "\n", " "
    )
    assert "37.3 % of 153M tokens" in " ".join(head.split()) and "2.8 h left" in head
    figures = " ".join(page.text("#figures").split())
    assert (
        "Tokens merged 57.1M in 5,123 versions" in figures and "1 behind" in figures and "1 silent" in figures
    )
    assert "At this pace 2.950 at the end" in page.text("#loss")
    assert len(page.js("document.querySelector('#loss .curve').getAttribute('points')")) > 1000
    mine = " ".join(page.text("#mine").split())
    for words in ("training", "merged 482", "waiting 2", "refused 7", "5 stale", "8.2 Mbit/s of 20 Mbit/s"):
        assert words in mine
    rows = page.js(ROWS)
    assert rows[0].startswith("anna you here ✓ in it") or "anna" in rows[0]
    assert any("behind: thin uplink, 3 versions behind, relayed" in row for row in rows)
    assert any("silent, last heard 71 s ago" in row for row in rows)
    assert page.js("document.querySelectorAll('#fragments .strip li').length") == 24
    happened = " ".join(page.text("#happened").split())
    assert "68 s silent dmitri: not counted on: silent" in happened and "eva: elected with 4" in happened
    assert "57 of 240 shards begun" in page.text("#credits") and "fukuoka-2" in page.text("#credits")
    assert "p2pdiloco node p2pdiloco:" in page.text("#join") and page.js(
        "!!document.querySelector('.qr svg')"
    )
    assert not page.js("[...document.querySelectorAll('.scripted')].some(e => e.checkVisibility())")


def test_it_loads_is_live_and_small(server: PageServer, looks: Looks) -> None:
    page = looks.at(server.url)
    page.until(f"{CHART} && {LIVE}")
    assert page.text("#stream-words") == "live"
    assert not page.js("document.querySelector('.drawn').checkVisibility()")  # the chart has its place
    page.js("document.querySelector('input[value=time]').click()")
    page.until("document.querySelector('.u-legend th').innerText.startsWith('at')")
    assert {"/", "/static/page.css", "/static/page.js", "/static/uplot.js"} <= set(server.sent)
    assert sum(server.sent.values()) < MOST_BYTES


def test_it_follows_what_happens(server: PageServer, looks: Looks) -> None:
    page = looks.at(server.url)
    page.until(LIVE)
    page.js(
        "document.querySelector('.limits summary').click(); document.querySelector('[name=hours]').focus()"
    )
    page.js(
        "document.querySelector('[name=hours]').value = '20-6';"
        "window.first = document.querySelector('#members tr[data-key]')"
    )
    now_s = time.time()
    before = scene(now_s)
    assert before.public is not None
    came = with_public(
        before,
        made_at_s=now_s,
        members=(*before.public.members, member(6, now_s)),
        members_total=7,
        newest=NewestView(fragment=3, number=215, at_s=now_s, contributors=5),
        marks=(*before.public.marks, Mark(at_s=now_s, kind=MarkKind.JOIN, name=NAMES[6], words="came")),
    )
    server.show(came)
    page.until(f"({ROWS}).length === 7", "a peer that joins")
    assert "fukuoka-2" in page.js(ROWS)[-1] and "fukuoka-2: came" in page.text("#happened li")
    assert "Version 215 of fragment 3 came just now" in " ".join(page.text(".lede").split())

    silent = member(
        6,
        now_s,
        state=MemberCondition.SILENT,
        why=BehindReason.SILENT,
        in_last_merge=False,
        seen_at_s=now_s - 12,
    )
    server.show(with_public(came, members=(*before.public.members, silent)))
    page.until(f"({ROWS})[6].includes('silent, last heard')", "a peer that dies")
    # Who reads, types or has something open is not disturbed.
    assert page.js("document.activeElement.name + document.activeElement.value") == "hours20-6"
    assert page.js("document.querySelector('.limits').open && window.first.isConnected")
    page.until("document.querySelector('.lede time').innerText.endsWith(' s ago')", "ages that are counted")


def test_it_says_when_it_is_old_and_when_no_more(server: PageServer, looks: Looks) -> None:
    page = looks.at(server.url)
    page.until(LIVE)
    server.fall_silent()
    page.until(OLD, "the lost connection")
    assert page.text("#stream").startswith("no connection: as of")
    server.fall_silent(False)
    page.until(LIVE, "the connection")
    # A page of an older release fetches itself anew.
    page.js("window.old = 1")
    server.show(replace(server.view, version="9.9.9"))
    page.until("!window.old && document.readyState === 'complete'", "the new release's page")
    page.said[:] = [line for line in page.said if "503" not in line]  # of the lost connection


@pytest.mark.parametrize("width", [360, 700, 1280])
def test_it_fits_also_with_hostile_names(server: PageServer, looks: Looks, width: int) -> None:
    now_s = time.time()
    view = scene(now_s)
    assert view.public is not None and view.own is not None
    rows = tuple(member(index, now_s, name=name) for index, name in enumerate(HOSTILE))
    strip = tuple(
        replace(row, syncer_name=HOSTILE[row.index % 7], state=HOSTILE[row.index % 7][:48])
        for row in view.public.fragments
    )
    marks = tuple(Mark(at_s=now_s - 9, kind=MarkKind.FAULT, words=name * 2) for name in HOSTILE)
    credit = tuple(replace(row, name=HOSTILE[index]) for index, row in enumerate(view.public.credits))
    view = with_public(
        view,
        run_name=HOSTILE[3],
        told_by_name=HOSTILE[4],
        members=rows,
        fragments=strip,
        marks=marks,
        credits=credit,
        progress=replace(view.public.progress, seats=2),
    )
    own = replace(
        view.own,
        me=replace(view.own.me, name=HOSTILE[3]),
        device=HOSTILE[4],
        recent=HOSTILE,
        rest=HOSTILE[0],
        refusals={HOSTILE[1]: 3},
        proposed=tuple(ProposedSeat(peer=peer(index), name=name) for index, name in enumerate(HOSTILE[:5])),
    )
    server.show(replace(view, own=own))
    page = looks.at(server.url, width=width, height=800)
    page.until(LIVE)
    page.js(OPEN)
    assert page.js(OVERFLOW) <= width
    server.show(with_public(server.view, members=(*rows, member(7, now_s, name=HOSTILE[0]))))
    page.until(f"({ROWS}).length === 8")
    assert page.js("window.hacked === undefined && !document.querySelector('img, main script:not([type])')")
    shown = page.js("[...document.querySelectorAll('#members .who')].map(e => e.textContent)")
    assert shown[0] == HOSTILE[0] and shown[1] == HOSTILE[1] and shown[3] == HOSTILE[3]
    assert "\u202e" not in "".join(shown) and shown[2].startswith("·gnihtemos") and shown[6] == HOSTILE[6]
    assert page.js(OVERFLOW) <= width


def test_the_keyboard_reaches_everything(server: PageServer, looks: Looks) -> None:
    server.show(several(server.view))
    page = looks.at(server.url)
    page.until(CHART)
    page.js(OPEN)
    wanted = page.js(STOPS)
    reached = []
    for _ in range(wanted + 5):
        page.key("Tab", 9)
        here = page.js(
            "(() => { const e = document.activeElement; if (e === document.body) return null;"
            " const s = getComputedStyle(e.type === 'radio' ? e.nextElementSibling : e);"
            " const seen = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2;"
            " return [e.outerHTML.slice(0, 90), seen]; })()"
        )
        if here is None or (reached and here[0] == reached[0][0]):
            break
        reached.append(here)
    assert len(reached) == wanted and all(visible for _, visible in reached), reached
    page.js("document.querySelector('.axis input:checked').focus()")
    page.key("ArrowRight", 39)
    page.until("document.querySelector('.u-legend th').innerText.startsWith('at')")
    page.js("[...document.querySelectorAll('#mine button')].find(b => b.innerText === 'Pause').focus()")
    page.key("Enter", 13)
    page.until("document.getElementById('said').innerText === 'as you wish'")
    assert server.told == [("/control/pause", {})]


def test_a_screen_reader_finds_its_way(server: PageServer, looks: Looks) -> None:
    server.show(several(server.view))
    page = looks.at(server.url)
    page.until(CHART)
    nodes = page.accessible()
    roles = [node["role"]["value"] for node in nodes]
    assert {"banner", "main", "navigation", "contentinfo", "complementary", "heading", "table"} <= set(roles)
    for node in nodes:
        if node["role"]["value"] in (
            "button",
            "textbox",
            "radio",
            "link",
            "table",
            "region",
            "progressbar",
            "image",
        ):
            assert node["name"]["value"], node
    levels = page.js(
        "[...document.querySelectorAll('h1, h2, h3')].filter(h => h.checkVisibility())"
        ".map(h => +h.tagName[1])"
    )
    assert levels.count(1) == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    assert page.js("document.querySelectorAll('[aria-live], [role=status]').length") == 2
    assert page.js("document.documentElement.lang") == "en" and NAMES[0] in json.dumps(nodes)


@pytest.mark.parametrize("dark", [False, True])
def test_dark_and_light_can_be_read(server: PageServer, looks: Looks, dark: bool) -> None:
    page = looks.at(server.url, dark=dark)
    page.until(CHART)
    page.js(OPEN)
    paper = page.js("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == dark
    assert page.js(CONTRAST) == []
    page.prefers(dark=not dark, calm=True)
    assert page.js("getComputedStyle(document.documentElement).backgroundColor") != paper
    assert page.js("document.getAnimations().length") == 0  # the person wants no motion


def test_the_owner_of_the_run_gives_a_seat_in_two_steps(server: PageServer, looks: Looks) -> None:
    """With a script or without: the whole id is shown before the button is."""
    waiting = (ProposedSeat(peer=peer(5), name="eve"), ProposedSeat(peer=peer(6)))
    server.show(with_own(scene(time.time()), proposed=waiting))
    button = "document.querySelector('form[action$=seat] button')"
    for scripts in (False, True):
        page = looks.at(server.url, scripts=scripts)
        assert not page.js(f"{button}.checkVisibility()")
        page.js("document.querySelector('[data-key] summary').click()")
        page.until(f"{button}.checkVisibility()", "the button")
        assert f"eve, {peer(5)}, votes and merges" in " ".join(page.text("#mine").split())
        page.js(f"{button}.click()")
        if scripts:
            page.until("document.getElementById('said').innerText === 'as you wish'", "the answer")
        else:
            page.until("document.readyState === 'complete' && location.pathname === '/'", "the page again")
    assert server.told == [("/control/seat", {"peer": [peer(5)]})] * 2


def test_the_owner_of_the_machine_commands(server: PageServer, looks: Looks) -> None:
    page = looks.at(server.url, scripts=False)
    page.js("document.querySelector('form[action$=pause] button').click()")
    page.until("document.readyState === 'complete' && location.pathname === '/'")
    page = looks.at(server.url)
    page.js("window.confirm = (text) => { window.asked = text; return false; }")
    page.js("document.querySelector('form[action$=finish] button').click()")
    assert "leave the run" in page.js("window.asked")
    page.js(
        "document.querySelector('.limits').open = true;"
        "document.querySelector('[name=max-download]').value = '5Mbit'"
    )
    page.js("document.querySelector('.limits button').click()")
    page.until("document.getElementById('said').innerText === 'as you wish'")
    assert [path for path, _ in server.told] == ["/control/pause", "/control/limits"]
    assert server.told[-1][1]["max-download"] == ["5Mbit"] and server.told[-1][1]["hours"] == ["22-7"]
    server.show(scene(time.time(), own=False))
    page.until("!document.querySelector('form')", "the public page, without controls")
    assert "This node" not in page.text("main")


@pytest.mark.parametrize("answers", ["Promise.resolve()", "Promise.reject(new Error('not here'))"])
def test_the_line_to_join_is_copied(server: PageServer, looks: Looks, answers: str) -> None:
    page = looks.at(server.url)
    line = page.text("#join-line")
    page.js(
        "Object.defineProperty(navigator, 'clipboard', {value: "
        f"{{writeText: text => {{ window.copied = text; return {answers}; }}}}}});"
        "document.execCommand = () => { window.copied = getSelection().toString().trim() + '!'; };"
        "document.querySelector('.copy').click()"
    )
    page.until("document.querySelector('.copy').innerText === 'Copied'")
    assert page.js("window.copied") == (line if "resolve" in answers else line + "!")


def test_ages_are_worded_as_the_server_does(server: PageServer, looks: Looks) -> None:
    page = looks.at(server.url)
    ages = [0, 1.9, 2.4, 59, 99.4, 99.6, 3599, 5399, 5401, 86400, 172799, 172801, 1e7, -8, -9000]
    module = f"{server.url}static/page.js?{server.view.version}"
    worded = page.js(f"import('{module}').then(m => {json.dumps(ages)}.map(a => [m.age(a), m.ago(a)]))")
    assert worded == [[age(seconds), ago(seconds)] for seconds in ages]
