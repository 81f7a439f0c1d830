"""Control before data, over real transports and real links: 1 Mbit/s, 50 ms there and back.

Control messages share the connection to a peer with bulk, and the link with the bulk to others. What lies
before them is then what is on its way: windows that follow the delay (`adapters.flow`) and nothing else.
Heartbeats come every half second and a peer is suspected after three seconds at the earliest: no message
may take so long, and the median has to be far below.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import within_s

from p2pdiloco.core.api.config import Timing
from p2pdiloco_lab.namespaces import LinksRefused
from shaped.homes import Shape, ShapedLinks

PEER = str(Path(__file__).with_name("shaped_peer.py"))
MEDIAN_S = 0.5
END_S = 10.0
pytestmark = pytest.mark.net
Load = Callable[..., tuple[dict[str, Any], float, float]]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Peers in a home with a fast link, and one with the given link that sends them bulk and control."""
    try:
        links = ShapedLinks()
    except LinksRefused as error:
        pytest.skip(f"{error}; {error.hint}")
    running: list[subprocess.Popen[str]] = []

    def start(words: list[str], what: str, address: str, *more: object) -> subprocess.Popen[str]:
        (tmp_path / what).mkdir()
        command = [*words, sys.executable, PEER, what, str(tmp_path / what), address, *map(str, more)]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return running[-1]

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def measure(
        shape: Shape, peers: int, seconds: float, upload: float, download: float
    ) -> tuple[dict[str, Any], float, float]:
        """What the sender found, and the bytes a second that it sent and was sent."""
        far = Shape(delay_s=shape.delay_s)
        peer = start(*_home(links, "far", far, "serve"), peers)
        addresses = json.loads(line(peer))
        sender = start(*_home(links, "near", shape, "load"), seconds, 100_000, upload, download, *addresses)
        assert line(sender) == "loading\n"
        before, began_s = links.counts(), time.monotonic()
        assert line(sender) == "loaded\n"
        now, took_s = links.counts(), time.monotonic() - began_s
        sent, received = ((now[home]["bytes"] - before[home]["bytes"]) / took_s for home in ("near", "far"))
        return json.loads(line(sender)), sent, received

    try:
        yield measure
    finally:
        for process in running:
            try:
                process.communicate(timeout=within_s(END_S))  # closes stdin, at which it ends
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        links.close()


def _home(links: ShapedLinks, name: str, shape: Shape, what: str) -> tuple[list[str], str, str]:
    words, address = links.add(name, shape)
    return words, what, address


@pytest.mark.timeout(120)
@pytest.mark.parametrize("peers", [3])
def test_control_messages_do_not_wait_behind_bulk(load: Load, peers: int) -> None:
    found, sent, _ = load(Shape.of(1e6, 0.05), peers, 10.0, 0.0, 0.0)
    assert not found["failed"] and not found["lost"] and found["pushes"] >= 1
    assert sent > 0.5 * 125_000, "there was no bulk to wait behind"
    assert statistics.median(found["busy"]) < MEDIAN_S
    assert max(found["busy"]) < Timing().suspect_s


@pytest.mark.timeout(120)
def test_what_a_person_permits_is_kept_on_the_link(load: Load) -> None:
    """Counted on the link, what libp2p, TCP and IP add included; the DHT's own words are not limited."""
    found, sent, received = load(Shape.of(100e6, 0.02), 2, 10.0, 4e6, 4e6)
    assert not found["failed"] and not found["lost"]
    for moved in (sent, received):  # both at once, each with the other's acknowledgements
        assert 0.5 * 5e5 < moved < 1.05 * 5e5
