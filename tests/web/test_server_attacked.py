"""The page's server under attack: many at once, cookies of others, many addresses of one host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from deadlines import within_s
from web_kit import Shown, served

from p2pdiloco.config.values import WebAddress
from p2pdiloco.web import site
from p2pdiloco.web.keys import load_token
from p2pdiloco.web.live import ViewChannel
from p2pdiloco.web.server import serving
from p2pdiloco.web.site import origin_of

pytestmark = pytest.mark.net


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
