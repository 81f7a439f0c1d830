"""The page's server: who may ask what, and what it bears."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from deadlines import within_s
from page_scene import scene, with_own, with_public
from web_kit import Shown, served

from p2pdiloco.config.values import WebAddress, parse_web
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.web import live, site
from p2pdiloco.web.keys import OwnerKeys, load_token, token_file
from p2pdiloco.web.live import ViewChannel
from p2pdiloco.web.page import Page
from p2pdiloco.web.server import serving
from p2pdiloco.web.site import origin_of
from p2pdiloco.web.sources import StartingSource
from p2pdiloco.web.view import NodeCondition

pytestmark = pytest.mark.net


async def test_the_owner_sees_page_view_and_static_files_and_nobody_else_does(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        for path in ("/", "/view", "/events", "/metrics"):
            assert (await page.ask(path, authorization="")).status == 401
            assert (await page.ask(path, authorization="Bearer " + "x" * 43)).status == 401
        assert (await page.ask("/view")).json()["own"]["state"] == "training"
        shown = await page.ask("/")
        assert shown.status == 200 and "text/html" in shown.headers["content-type"]
        assert (await page.ask("/static/page.js", authorization="")).status == 200
        assert (await page.ask("/view?run=unknown")).status == 404


async def test_every_answer_keeps_the_browser_in_its_place(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        for answer in (
            await page.ask("/"),
            await page.ask("/nothing"),
            await page.ask("/", authorization=""),
        ):
            assert answer.headers["content-security-policy"].startswith(
                "default-src 'none'; script-src 'self'; "
            )
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["cache-control"] == "no-store"
            assert "server" not in answer.headers


async def test_the_token_of_the_address_becomes_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        first = await page.ask(f"/?token={page.token}&run=abc", authorization="")
        assert first.status == 303 and first.headers["location"] == "./?run=abc"
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and page.token not in cookie
        word = cookie.partition(";")[0]
        assert (await page.ask("/view", authorization="", cookie=f"other=1; {word}")).status == 200
        assert (await page.ask("/view", authorization="", cookie=word[:-1])).status == 401
        assert (
            await page.ask("/view", authorization="", cookie=f"{word.partition('=')[0]}={page.token}")
        ).status == 401
        assert (await page.ask("/?token=wrong", authorization="")).status == 401
        assert (await page.ask(f"/view?token={page.token}", authorization="")).status == 401


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "", "[::2]", "192.168.1.5"],
)
async def test_another_name_is_not_answered_as_it_may_be_a_rebound_one(tmp_path: Path, host: str) -> None:
    async with served(tmp_path) as page:
        assert (await page.ask("/view", host=host)).status in (400, 421)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1", "[::1]:8080"])
async def test_our_names_are_answered_at_any_port_as_a_tunnel_has_another(tmp_path: Path, host: str) -> None:
    async with served(tmp_path) as page:
        assert (await page.ask("/view", host=host)).status == 200


async def test_two_hosts_in_a_request_are_one_too_many(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        said = f"GET /view HTTP/1.1\r\nhost: localhost\r\nhost: evil\r\nauthorization: Bearer {page.token}\r\n\r\n"  # noqa: E501
        assert (await page.say(said.encode())).status == 400


async def test_at_another_address_numbers_are_ours_and_names_are_not(tmp_path: Path) -> None:
    async with served(tmp_path, host="0.0.0.0") as page:
        assert (await page.ask("/view", host="10.1.2.3:80")).status == 200
        assert (await page.ask("/view", host="evil.example")).status == 421


async def test_deeds_need_the_owner_and_our_own_origin(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        assert (await page.ask("/control/pause", "POST")).status == 404  # nothing to control yet
        page.views.enter(page.source, Controls())
        cookie = OwnerKeys(page.token, page.port).set_cookie.partition(";")[0]
        own = f"http://127.0.0.1:{page.port}"
        for wrong in (
            "",
            "null",
            "http://evil.example",
            f"http://127.0.0.1:{page.port + 1}",
            f"{own}.evil.example",
        ):
            answer = await page.ask("/control/pause", "POST", authorization="", cookie=cookie, origin=wrong)
            assert answer.status == 403
        assert (await page.ask("/control/pause", "POST", authorization="", origin=own)).status == 401
        assert (await page.ask("/control/pause", "GET", authorization="", cookie=cookie)).status == 405
        done = await page.ask("/control/pause", "POST", authorization="", cookie=cookie, origin=own)
        assert done.status == 303 and done.headers["location"] == "../"
        assert (await page.ask("/control/pause", "POST", accept="application/json")).json()["ok"]
        assert (await page.ask("/control/reboot", "POST")).status == 404
        assert Controls.calls == ["pause", "pause"]


async def test_a_seat_is_a_deed_as_others_are_and_its_answer_is_a_sentence(tmp_path: Path) -> None:
    async with served(tmp_path, is_public=True) as page:
        Controls.calls.clear()
        page.views.enter(page.source, Controls())
        cookie = OwnerKeys(page.token, page.port).set_cookie.partition(";")[0]
        own, path, body = f"http://127.0.0.1:{page.port}", "/control/seat", b"peer=anna"
        for wrong, status in (
            ({"cookie": cookie, "origin": "http://evil.example"}, 403),
            ({"cookie": cookie, "origin": own, "sec_fetch_site": "cross-site"}, 403),
            ({"cookie": cookie, "origin": own, "host": "evil.example"}, 421),
            ({"origin": own}, 401),
        ):
            assert (await page.ask(path, "POST", body, **{"authorization": "", **wrong})).status == status
        assert (await page.ask(path, "POST", body + b"&more=" + b"x" * 5000)).status == 413
        assert Controls.calls == []
        for wish, said in (
            (b"peer=bob", "waits for no seat"),
            (b"x=1", "waits for no seat"),
            (b"", "nothing"),
        ):
            answer = await page.ask(path, "POST", wish, accept="application/json")
            assert answer.status == 400 and said in answer.json()["words"]
        done = await page.ask(path, "POST", body, authorization="", cookie=cookie, origin=own)
        assert done.status == 303, "without a script the page comes again"
        answer = await page.ask(path, "POST", body, accept="application/json")
        assert answer.json() == {"ok": True, "words": "anna has a seat", "hint": ""}
        assert Controls.calls == ["seat anna"] * 2


async def test_limits_come_as_a_form_or_as_json_and_a_refusal_is_a_sentence(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        page.views.enter(page.source, Controls())
        for body in (b"max-upload=20Mbit&max-download=", b'{"max-upload": "20Mbit", "max-download": ""}'):
            answer = await page.ask("/control/limits", "POST", body, accept="application/json")
            assert answer.json() == {"ok": True, "words": "max-download= max-upload=20Mbit", "hint": ""}
        for body in (b"", b'{"max-upload": 3}', b"{", b"\xff=1", b"&".join(b"a%d=1" % n for n in range(99))):
            answer = await page.ask("/control/limits", "POST", body, accept="application/json")
            assert answer.status == 400 and not answer.json()["ok"] and answer.json()["words"]
        assert (await page.ask("/control/limits", "POST", b"a=" + b"x" * 5000)).status == 413


@pytest.mark.parametrize(
    "path",
    [
        "/static/../keys.py",
        "/static/..%2f..%2fkeys.py",
        "/static/%2e%2e/templates/credits.html",
        "/static//etc/passwd",
        "/static/",
        "/static/page.css%00",
        "/static/....//keys.py",
    ],
)
async def test_static_files_are_those_of_the_page_and_no_others(tmp_path: Path, path: str) -> None:
    async with served(tmp_path) as page:
        assert (await page.ask(path)).status in (400, 404)


async def test_public_means_the_public_part_for_anybody_and_the_rest_for_the_owner(tmp_path: Path) -> None:
    async with served(tmp_path, is_public=True) as page:
        for path in ("/", "/view"):
            assert (await page.ask(path, authorization="", host="run.example.org")).status == 200
        assert (await page.ask("/view", authorization="")).json()["own"] is None
        assert b"20Mbit" not in (await page.ask("/", authorization="")).body
        assert (await page.ask("/view")).json()["own"] is not None
        assert (
            await page.ask("/view", host="run.example.org")
        ).status == 421  # the owner's, by a rebound name
        page.views.enter(page.source, Controls())
        assert (await page.ask("/control/pause", "POST", authorization="")).status == 401


async def test_strangers_wait_for_their_turn_and_the_owner_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "STRANGERS_AT_ONCE", 2.0)
    monkeypatch.setattr(site, "STRANGERS_PER_S", 0.05)
    async with served(tmp_path, is_public=True) as page:
        answers = [await page.ask("/view", authorization="") for _ in range(6)]
        assert [answer.status for answer in answers[:3]] == [200] * 3 and answers[-1].status == 503
        assert (await page.ask("/view")).status == 200


async def test_what_many_ask_for_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.web.sources.FRESH_S", 1000.0)
    async with served(tmp_path, is_public=True) as page:
        made: list[bool] = []
        html = Page.html
        monkeypatch.setattr(
            Page, "html", lambda self, view: (made.append(view.own is None), html(self, view))[1]
        )
        for authorization in ("", "", f"Bearer {page.token}", f"Bearer {page.token}"):
            assert (await page.ask("/", authorization=authorization)).status == 200
        assert made == [True, False] and page.source.looks == 1


async def test_health_is_a_word_and_a_status(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        answer = await page.ask("/healthz", authorization="")
        assert (answer.status, answer.body) == (200, b"training\n")
        for word in NodeCondition:
            page.source.shown = with_own(scene(), state=word)
            page.views.enter(page.source)
            answer = await page.ask("/healthz", authorization="")
            assert answer.body.decode().strip() == word.value
            assert answer.status == (
                503 if word in (NodeCondition.JOINING, NodeCondition.WAITING, NodeCondition.LEAVING) else 200
            )


async def test_a_request_that_never_ends_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "HEAD_S", 0.2)
    async with served(tmp_path) as page:
        for begun in (b"", b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"POST /control/pause HTTP/1.1\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
            writer.write(begun)
            assert await asyncio.wait_for(read_to_the_end(reader), within_s(10)) == b""
            writer.close()
        assert (await page.ask("/view")).status == 200


async def test_a_body_that_never_comes_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.web.site.BODY_S", 0.1)
    async with served(tmp_path) as page:
        page.views.enter(page.source, Controls())
        head = f"POST /control/limits HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {page.token}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
        writer.write(head.encode() + b"content-length: 100\r\n\r\nmax")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), within_s(10))
        writer.close()


async def test_a_head_that_is_too_long_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        assert (await page.ask("/view", x="y" * 17_000)).status == 400
        assert (await page.ask("/view?x=" + "y" * 2000)).status == 400
        assert (await page.ask("/view")).status == 200


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(page: Any, *, asks: str = "", key: str = "") -> Connection:
    """A connection of somebody on this machine, which stays open: idle, or after the first bytes of an
    answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
    if asks:
        said = f"authorization: Bearer {key}\r\n" if key else ""
        writer.write(f"GET {asks} HTTP/1.1\r\nhost: localhost\r\n{said}\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), within_s(10))
    return reader, writer


async def is_cut(connection: Connection) -> bool:
    """Wait for its end."""
    return await asyncio.wait_for(read_to_the_end(connection[0]), within_s(5)) is not None


async def test_idle_connections_keep_neither_the_owner_nor_a_monitor_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "HEAD_S", 3600.0)
    monkeypatch.setattr(site, "MAX_CONNECTIONS", 4)
    async with served(tmp_path) as page:
        idle = [await opened(page) for _ in range(3)]
        idle.append(await opened(page))
        idle[3][1].write(b"GET /healthz HTTP/1.1\r\nhost: localh")  # nor one that began to say something
        assert (await page.ask("/healthz", authorization="")).status == 200
        assert await is_cut(idle[0]), "the one that was idle for longest"
        assert (await page.ask("/view")).status == 200, "in the place that is free now"
        later = [await opened(page) for _ in range(4)]
        for old in idle[1:]:
            assert await is_cut(old)
        assert (await page.ask("/view")).status == 200
        for _, writer in [*idle, *later]:
            writer.close()


async def test_an_idle_connection_of_the_owner_goes_after_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "KEEP_ALIVE_S", 3600)
    monkeypatch.setattr(site, "HEAD_S", 3600.0)
    monkeypatch.setattr(site, "MAX_CONNECTIONS", 3)
    async with served(tmp_path) as page:
        owners = await opened(page, asks="/static/page.css", key=page.token)
        others = [await opened(page) for _ in range(8)]
        for other in others[:6]:
            assert await is_cut(other)
        owners[1].write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(owners[0].readuntil(b"training\n"), within_s(10))
        for _, writer in [owners, *others]:
            writer.close()


async def test_where_all_are_busy_only_the_owner_and_a_monitor_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "HEAD_S", 3600.0)
    monkeypatch.setattr(site, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(site, "SPARE_CONNECTIONS", 2)
    async with served(tmp_path, is_public=True) as page:
        busy = [await opened(page, asks="/events") for _ in range(2)]
        for _ in range(2):
            refused = await page.ask("/view", authorization="")
            assert refused.status == 503 and refused.headers["connection"] == "close"
            assert (await page.ask("/healthz", authorization="")).status == 200
            assert (await page.ask("/view")).status == 200
        idle = [await opened(page) for _ in range(2)]
        assert (await page.ask("/view")).status == 200, "the spare places give way, too"
        assert await is_cut(idle[0])
        owners = [await opened(page, asks="/events", key=page.token) for _ in range(2)]
        assert await is_cut(await opened(page)), "there is an end"
        for reader, _ in [*busy, *owners]:
            assert await data_of(reader), "nobody was cut in the middle"
        for _, writer in [*busy, *idle, *owners]:
            writer.close()


async def test_another_host_has_a_part_of_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "HEAD_S", 3600.0)
    monkeypatch.setattr(site, "MAX_PER_HOST", 2)
    monkeypatch.setattr(site, "origin_of", lambda client: "192.0.2.1")
    async with served(tmp_path) as page:
        idle = [await opened(page) for _ in range(3)]
        assert await is_cut(idle[0])
        assert (await page.ask("/view")).status == 200
        assert await is_cut(idle[1])
        for _, writer in idle:
            writer.close()


async def test_watchers_hear_at_once_and_then_only_what_is_new_made_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.02)
    monkeypatch.setattr("p2pdiloco.web.sources.FRESH_S", 0.0)
    async with served(tmp_path) as page:
        watching = [await page.events() for _ in range(20)]
        for reader, _ in watching:
            assert await data_of(reader)  # the whole of it
        page.source.shown = with_own(scene(), state=NodeCondition.LEAVING)
        heard = {await data_of(reader) for reader, _ in watching}
        assert len(heard) == 1
        made = channels()
        assert len(made) == 1
        for _, writer in watching:
            writer.close()
        assert not (await asyncio.wait(made, timeout=within_s(20)))[1], "it is still made, for nobody"


def channels() -> set[asyncio.Task[None]]:
    """Those that look again and again, as long as somebody watches."""
    return {task for task in asyncio.all_tasks() if "ViewChannel._run" in repr(task.get_coro())}


async def test_a_watcher_that_does_not_read_is_let_go_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.005)
    monkeypatch.setattr(site, "STALLED_S", 0.3)
    monkeypatch.setattr("p2pdiloco.web.sources.FRESH_S", 0.0)
    async with served(tmp_path) as page:
        slow = socket.create_connection(("127.0.0.1", page.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.sendall(
            f"GET /events HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {page.token}\r\n\r\n".encode()
        )
        reader, writer = await page.events()
        for turn in range(120):  # more than sockets hold
            page.source.shown = with_public(scene(), run_name=f"{turn} " + "x" * 200_000)
            await data_of(reader)
        writer.close()
        assert not (await asyncio.wait(channels(), timeout=within_s(20)))[1], "the slow one still watches"
        slow.close()


async def test_too_many_watchers_are_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 1)
    async with served(tmp_path) as page:
        reader, writer = await page.events()
        await data_of(reader)
        assert (await page.ask("/events")).status == 503
        writer.close()


async def test_visitors_that_watch_keep_no_owner_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 1)
    async with served(tmp_path, is_public=True) as page:
        visitor = await opened(page, asks="/events")
        assert (await page.ask("/events", authorization="")).status == 503
        owners = await opened(page, asks="/events", key=page.token)
        assert await data_of(owners[0])
        for _, writer in (visitor, owners):
            writer.close()


async def test_the_end_does_not_wait_for_watchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.web.server.END_S", 3600.0)
    monkeypatch.setattr("p2pdiloco.web.site.GRACE_S", 3600)
    async with asyncio.timeout(within_s(30)), served(tmp_path) as page:
        reader, writer = await page.events()
        await data_of(reader)
    writer.close()


def test_the_token_is_ours_alone_and_kept(tmp_path: Path) -> None:
    token = load_token(tmp_path)
    assert stat.S_IMODE(token_file(tmp_path).stat().st_mode) == 0o600 and load_token(tmp_path) == token
    token_file(tmp_path).chmod(0o644)  # others may have read it
    assert load_token(tmp_path) != token and stat.S_IMODE(token_file(tmp_path).stat().st_mode) == 0o600
    token_file(tmp_path).write_text("short")
    assert len(load_token(tmp_path)) == 43


async def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        with pytest.raises(UserError, match=r"port \d+ of .* is taken"):
            async with serving(WebAddress("127.0.0.1", page.port), tmp_path, StartingSource("node", "", "")):
                pass
        with pytest.raises(UserError, match="is no address of this machine"):
            async with serving(WebAddress("192.0.2.1", 0), tmp_path, StartingSource("node", "", "")):
                pass


async def test_before_there_is_a_run_the_page_says_so(tmp_path: Path) -> None:
    async with served(tmp_path) as page:
        page.views.enter(StartingSource("node", "ann", "12D3KooW"))
        assert (await page.ask("/view")).json()["own"]["state"] == "joining"
        assert (await page.ask("/")).status == 200
        assert (await page.ask("/healthz")).status == 503


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8080", "127.0.0.1", 8080),
        ("0", "127.0.0.1", 0),
        ("[::1]:80", "::1", 80),
        ("0.0.0.0:1", "0.0.0.0", 1),
        ("box.example:65535", "box.example", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_web(text) == WebAddress(host, port) and parse_web(str(parse_web(text))) == parse_web(text)


@pytest.mark.parametrize(
    "text", ["x", "65536", ":80", "::1:80", "[::1]", "[::g]:80", "a b:80", "-1", "host:", "1e3"]
)
def test_wrong_addresses_are_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--web must be \[HOST:\]PORT"):
        parse_web(text)


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def data_of(reader: asyncio.StreamReader) -> bytes:
    """The data of the next event that has some."""
    while not (line := await asyncio.wait_for(reader.readline(), within_s(10))).startswith(b"data: "):
        assert line, "the end"
    json.loads(line[6:])
    return line


class Controls:
    """Controls that note what is asked."""

    calls: list[str] = []  # noqa: RUF012

    async def pause(self) -> str:
        Controls.calls.append("pause")
        return "paused"

    async def limits(self, changes: dict[str, str]) -> str:
        return " ".join(f"{name}={value}" for name, value in sorted(changes.items()))

    async def seat(self, peer: str) -> str:
        if peer != "anna":
            raise UserError("that peer waits for no seat now", "p2pdiloco seat")
        Controls.calls.append(f"seat {peer}")
        return "anna has a seat"


# The page's server under attack: many at once, cookies of others, many addresses of one host.


async def test_many_that_ask_at_once_watch_one_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ViewChannel] = []
    before = ViewChannel._renew

    def renew(channel: ViewChannel) -> bool:
        made.append(channel)
        return before(channel)

    monkeypatch.setattr(ViewChannel, "_renew", renew)
    async with served(tmp_path) as page:
        opened = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(20)]
        words = f"GET /events HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {page.token}\r\n\r\n"
        for _, writer in opened:
            writer.write(words.encode())
        for reader, writer in opened:
            await asyncio.wait_for(reader.readuntil(b"data: "), within_s(10))
            writer.close()
    assert len(set(made)) == 1


@pytest.mark.parametrize(
    "others", ['a={"x":1}; {}', "@a=1; {}", "{name}=evil; {}", "{}; {name}=evil", "a b; {}"]
)
async def test_what_other_ports_of_this_host_set_shuts_no_owner_out(tmp_path: Path, others: str) -> None:
    async with served(tmp_path) as page:
        first = await page.ask(f"/?token={page.token}", authorization="")
        word = first.headers["set-cookie"].partition(";")[0]
        cookie = others.replace("{}", word).replace("{name}", word.partition("=")[0])
        assert (await page.ask("/view", authorization="", cookie=cookie)).status == 200


@pytest.mark.parametrize("site", ["same-site", "cross-site"])
async def test_a_page_of_another_port_reads_nothing_with_the_cookie_that_it_is_sent(
    tmp_path: Path, site: str
) -> None:
    async with served(tmp_path) as page:
        for path in ("/view", "/events", "/metrics"):
            assert (await page.ask(path, sec_fetch_site=site)).status == 403
        assert (await page.ask("/", sec_fetch_site=site)).status == 200, "a link to the page is no harm"
        assert (await page.ask("/view", sec_fetch_site="same-origin")).status == 200


@pytest.mark.parametrize(
    ("client", "origin"),
    [
        (None, ""),
        (("192.0.2.1", 1), "192.0.2.1"),
        (("::ffff:192.0.2.1", 1), "192.0.2.1"),
        (("::ffff:127.0.0.1", 1), "127.0.0.1"),
        (("::1", 1), "::1"),
        (("2001:db8::1", 1), "2001:db8::/64"),
        (("2001:db8::ffff:1", 1), "2001:db8::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
    ],
)
def test_the_addresses_of_one_network_are_one_host(client: Any, origin: str) -> None:
    assert origin_of(client) == origin


async def test_a_journal_gets_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    async with serving(WebAddress("127.0.0.1", 0), tmp_path, Shown()):
        said = capsys.readouterr().out
    assert "web page: http://127.0.0.1:" in said and "web.token" in said and load_token(tmp_path) not in said


async def test_strangers_that_ask_without_end_make_no_program_look_ill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "LONGEST_WAIT_S", -10.0)  # as if ever so many waited
    async with served(tmp_path, is_public=True) as page:
        assert (await page.ask("/view", authorization="")).status == 503
        assert (await page.ask("/healthz", authorization="")).status == 200
        assert (await page.ask("/view")).status == 200
