"""The page explains its words, and has a look for each; it is a page whatever is known."""

from __future__ import annotations

import asyncio
import html
import json
import time
from collections.abc import AsyncIterator
from typing import get_args

import pytest
from msgspec.structs import replace
from page_scene import scene, with_public

from p2pdiloco.daemon.display.snapshot import ExcludedRow, NodeState
from p2pdiloco.web import live
from p2pdiloco.web.page import MEMBER_SHAPES, PARTS, REASON_TEXTS, TONES, Page
from p2pdiloco.web.view import (
    BehindReason,
    MarkKind,
    MemberCondition,
    NewestView,
    NodeCondition,
    ProgressView,
    PublicView,
    Pulse,
    RunView,
)


@pytest.mark.parametrize("kind", [Pulse, MemberCondition, BehindReason, NodeCondition, MarkKind])
def test_every_word_is_explained_on_the_page(kind: type[Pulse]) -> None:
    page = html.unescape(Page().html(scene(time.time())))
    for word in kind:
        if word.value:
            assert f"<dt>{word.value}</dt><dd>{word}</dd>" in page


def test_every_state_of_a_node_is_a_word() -> None:
    assert {state.replace(" ", "-") for state in get_args(NodeState)} < {word.value for word in NodeCondition}


def test_every_word_has_a_look() -> None:
    assert set(MEMBER_SHAPES) == set(MemberCondition) and set(TONES) == {*MemberCondition, *Pulse}
    assert set(REASON_TEXTS) == set(BehindReason) - {BehindReason.NONE}


@pytest.mark.parametrize("pulse", Pulse)
def test_the_first_sentence_is_one_in_every_state(pulse: Pulse) -> None:
    for newest in (
        NewestView(),
        NewestView(fragment=1, number=7, at_s=time.time() - 300, usual_s=20, contributors=2),
    ):
        page = Page().html(with_public(scene(time.time()), pulse=pulse, newest=newest))
        lede = page.split('<p class="lede')[1].split("</p>")[0]
        assert lede.count("<strong>") == 1 and "None" not in lede


def test_a_view_of_which_nothing_is_known_yet_is_a_page() -> None:
    now_s = time.time()
    bare = PublicView(run_name="new", run_id="ab" * 32, made_at_s=now_s)
    for view in (
        RunView(role="bootstrap", version="1"),
        RunView(role="node", version="1", own=replace(scene(now_s).own, controls=(), limits={})),
        RunView(role="board", version="1", public=bare),
    ):
        page = Page().html(view)
        assert page.count("<h1>") == 1 and ">None" not in page and "<form" not in page
        assert set(Page().parts(view).html) == set(PARTS)


def test_the_page_says_who_is_excluded_and_whose_work_weighs_little() -> None:
    run = scene(time.time()).public
    assert run is not None
    first = replace(run.members[1], why=BehindReason.DISAGREES, weighs=0.123)
    liar = ExcludedRow(peer="12D3liar", name="<b>eve", reason="it voted twice <here>")
    page = Page().html(with_public(scene(time.time()), members=(run.members[0], first), excluded=(liar,)))
    assert "disagrees with the others</span>, weighs 12 %" in page
    assert "is excluded: <bdi>it voted twice &lt;here&gt;</bdi>" in page and "&lt;b&gt;eve" in page


def test_a_part_changes_only_when_something_happens() -> None:
    now_s = time.time()
    page = Page()
    before, later = page.parts(scene(now_s)), page.parts(with_public(scene(now_s), made_at_s=now_s + 3))
    assert later.since(before) == {}
    changed = with_public(scene(now_s), progress=ProgressView(tokens=1, schedule_tokens=2))
    assert set(page.parts(changed).since(before)) == {"head", "figures"}
    assert b"\n" not in page.update(scene(now_s))


async def test_who_watches_is_let_go_when_the_view_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.001)
    views = [scene(time.time())]
    channel = live.ViewChannel(views.pop, Page())  # the second look fails
    events = [event async for event in channel.watch()]
    assert events[0] == live.FIRST and events[1].startswith(b"data: ") and len(events) == 2
    assert channel.watchers == 0
    with pytest.raises(IndexError):  # and whoever comes now is not shown the last one as live
        await anext(channel.watch())


async def test_who_watches_gets_the_parts_that_changed_since_it_took_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.001)
    now_s = time.time()
    looks = asyncio.Queue[RunView]()
    shown = [scene(now_s)]

    def look() -> RunView:
        if not looks.empty():
            shown[0] = looks.get_nowait()
        return shown[0]

    async def parts(events: AsyncIterator[bytes]) -> set[str]:
        while not (event := await anext(events)).startswith(b"data: "):
            pass
        return set(json.loads(event.removeprefix(b"data: "))["parts"])

    channel = live.ViewChannel(look, Page())
    quick, slow = channel.watch(), channel.watch()
    assert await parts(quick) == await parts(slow) == set(PARTS)
    looks.put_nowait(with_public(scene(now_s), progress=ProgressView(tokens=1, schedule_tokens=2)))
    assert await parts(quick) == {"head", "figures"}
    looks.put_nowait(
        with_public(scene(now_s), progress=ProgressView(tokens=1, schedule_tokens=2), members=())
    )
    assert await parts(quick) >= {"members"} and looks.empty()
    assert await parts(slow) >= {"head", "figures", "members"}, "two changes, one event"
    assert await parts(channel.watch()) == set(PARTS)
    channel.close()
