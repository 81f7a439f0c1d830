"""The page of a real node, in a real browser, and the board of a real run, while a peer is killed."""

from __future__ import annotations

import json

import pytest
from chromium import Chromium, program
from system_kit import Swarm

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
LIVE = "document.getElementById('stream').className === 'stream live'"
ROW = "[...document.querySelectorAll('#members tbody tr')].find(r => r.innerText.includes('NAME'))"


@pytest.mark.skipif(program() is None, reason="no Chromium is installed here (apt install chromium)")
def test_a_peer_that_is_killed_shows(visited_swarm: Swarm) -> None:
    swarm = visited_swarm
    bootstrap = swarm.bootstrap()
    one = swarm.node("one", bootstrap, "--genesis", "--web", "0")
    with Chromium() as browser:
        page = browser.page(width=360, height=800)
        # The page is there before the run is: it opens at once.
        page.open(swarm.until(one.page, "the page's address", 90.0))
        assert "token" not in page.js("location.href")
        page.until(LIVE, "the connection", 60.0)
        swarm.training(one)
        page.until(f"{ROW.replace('NAME', 'one')}?.innerText.includes('you')", "the node itself", 60.0)
        page.until("document.querySelector('.state').innerText === 'training'", "its state", 60.0)

        two = swarm.node("two", bootstrap)
        page.until(ROW.replace("NAME", "two"), "a peer that joins", 90.0)
        page.until("document.querySelector('.lede').innerText.startsWith('Alive.')", "a merge", 90.0)
        swarm.training(two)
        page.until(f"!{ROW.replace('NAME', 'two')}.innerText.includes('catching')", "a full member", 60.0)
        swarm.kill(two)
        page.until(f"{ROW.replace('NAME', 'two')}?.innerText.includes('silent')", "the peer that died", 60.0)
        page.until("document.querySelector('#happened ol').innerText.includes('two')", "what happened", 60.0)

        # The owner of the machine wants it for something else, and gives it back.
        page.js("document.querySelector('form[action$=pause] button').click()")
        page.until("document.querySelector('.state').innerText === 'idle'", "the rest", 60.0)
        page.js("document.querySelector('form[action$=resume] button').click()")
        page.until("document.querySelector('.state').innerText === 'training'", "training again", 60.0)
        assert page.text("#said") and "Not done" not in page.text("#said")

        assert page.js("document.documentElement.scrollWidth") <= 360
        foreign = [url for url in page.asked if not url.startswith(("http://127.0.0.1:", "about:"))]
        assert (page.said, foreign) == ([], [])

    out = swarm.folder / "board"
    made = swarm.command("board", "--join", bootstrap.address() or "", "--out", str(out), "--timeout-s", "60")
    assert made.returncode == 0, made.stderr
    public = json.loads((out / "view.json").read_text())["public"]
    assert public["run_name"] == "test" and "one" in [member["name"] for member in public["members"]]
    shown = (out / "index.html").read_text()
    assert "<h1><bdi>test</bdi></h1>" in shown and "p2pdiloco node p2pdiloco:1" in shown
