"""Namespaces and shaped links for real, where the system allows them: rates, cuts, splits; nothing stays."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from deadlines import Deadline, within_s

from p2pdiloco_lab.namespaces import NETWORK, Links, LinksRefused, free_number
from shaped.homes import Shape, ShapedLinks

pytestmark = pytest.mark.process

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])) as s:
    s.sendall(bytes(int(sys.argv[4])))
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
"""
ECHO = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
best = 9.0
for number in range(5):
    began = time.monotonic()
    s.sendto(b"ping", (sys.argv[1], int(sys.argv[2])))
    s.recv(9)
    best = min(best, time.monotonic() - began)
print(best)
"""


def shown(*words: str) -> str:
    """What `ip` shows."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def made_of(kind: type) -> Iterator[Any]:
    try:
        made = kind()
    except LinksRefused as error:
        pytest.skip(f"{error}; {error.hint}")
    try:
        yield made
    finally:
        made.close()
    assert made._tag not in shown("-o", "link") + shown("netns", "list")
    assert kind is Links or made._switch.poll() is not None


@pytest.fixture(params=[Links, ShapedLinks])
def any_links(request: pytest.FixtureRequest) -> Iterator[Links | ShapedLinks]:
    yield from made_of(request.param)


@pytest.fixture
def bridge() -> Iterator[Links]:
    yield from made_of(Links)


@pytest.fixture
def links() -> Iterator[ShapedLinks]:
    yield from made_of(ShapedLinks)


def reaches(words: list[str], address: str, port: int, size: int = 1, timeout_s: float = 10) -> bool:
    """Whether so many bytes arrive at a server that reads them all."""
    command = [*words, sys.executable, "-c", SEND, address, str(port), str(timeout_s), str(size)]
    return subprocess.run(command, capture_output=True, timeout=within_s(30)).returncode == 0


def serve(server: socket.socket) -> int:
    """Read all of one connection, say so; the bytes."""
    connection, _ = server.accept()
    with connection:
        total = 0
        while piece := connection.recv(1 << 16):
            total += len(piece)
        connection.sendall(b"!")
    return total


def test_a_home_can_be_cut_off_and_a_split_heals(any_links: Links | ShapedLinks) -> None:
    links = any_links
    inside = {node: links.add(node)[0] for node in ("a", "b")}
    with socket.create_server((links.address, 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]

        def reached(node: str) -> bool:
            taken = pool.submit(serve, server)
            return reaches(inside[node], links.address, port) and taken.result() == 1

        def cut_off(node: str) -> bool:
            return not reaches(inside[node], links.address, port, timeout_s=0.5)

        assert reached("a") and reached("b")
        links.split(["b"])
        assert reached("a") and cut_off("b")
        links.heal(["b"])
        assert reached("b")
        links.split(["a"])
        assert reached("b") and cut_off("a")
        links.heal(["a"])
        assert reached("a")
        links.cut("a")
        assert reached("b") and cut_off("a")
        links.restore("a")
        assert reached("a")


def test_delay_and_loss_are_those_that_were_asked_for(links: ShapedLinks) -> None:
    words, _ = links.add("a", Shape(delay_s=0.05))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server, ThreadPoolExecutor(1) as pool:
        server.bind((links.address, 0))
        server.settimeout(10)

        def echo(times: int) -> None:
            for _ in range(times):
                data, sender = server.recvfrom(99)
                server.sendto(data, sender)

        echoing = pool.submit(echo, 5)
        command = [*words, sys.executable, "-c", ECHO, links.address, str(server.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=within_s(30))
        echoing.result()
        assert float(done.stdout) >= 0.1  # there and back; a busy machine makes it longer
        before = links.counts()["a"]
        links.reshape("a", Shape(loss=0.3))
        script = "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        script += "for _ in range(400): s.sendto(b'x', (sys.argv[1], int(sys.argv[2])))"
        target = (links.address, str(server.getsockname()[1]))
        subprocess.run([*words, sys.executable, "-c", script, *target], check=True, timeout=within_s(30))
        deadline = Deadline(30)
        while (after := links.counts()["a"])["packets"] < before["packets"] + 400:
            assert not deadline.over(), "the switch has not had all of them"  # it is behind, if busy
        assert 80 <= after["lost"] - before["lost"] <= 160  # of 400; the seed is fixed


def test_the_rate_is_the_kernels(links: ShapedLinks) -> None:
    """A second's worth of bytes takes no less than that, nearly (the bucket's depth comes on top)."""
    words, _ = links.add("a", Shape.of(4e6, 0.02))
    with socket.create_server((links.address, 0)) as server, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(serve, server)
        began = time.monotonic()
        assert reaches(words, links.address, server.getsockname()[1], 500_000)
        assert taken.result() == 500_000 and time.monotonic() - began > 0.95


def test_homes_reach_each_other_and_hand_on_their_name(links: ShapedLinks) -> None:
    (first, _), (second, address) = links.add("a"), links.add("b")
    listen = "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True)\n"
    listen += "c, _ = s.accept(); c.recv(9); c.sendall(b'!')"
    listening = subprocess.Popen([*second, sys.executable, "-c", listen], stdout=subprocess.PIPE)
    try:
        assert listening.stdout is not None
        port = int(listening.stdout.readline())
        links.reassign("a", "c")
        links.cut("c")
        assert not reaches(first, address, port, timeout_s=0.5)
        links.restore("c")
        assert reaches(first, address, port)
    finally:
        listening.kill()
        listening.communicate()


def test_all_is_removed_also_when_the_switch_has_died(links: ShapedLinks) -> None:
    links.add("a")
    links._switch.kill()
    links._switch.wait()
    with pytest.raises(LinksRefused):
        links.slow("a")  # and the fixture looks for what is left


def test_no_link_is_left_of_a_namespace_that_is_still_in_use(bridge: Links) -> None:
    """As by sockets of a killed node, which send on for a while."""
    words, _ = bridge.add("a")
    command = [*words, sys.executable, "-c", "print('here', flush=True); input()"]
    user = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert user.stdout is not None and user.stdout.readline() == b"here\n"
        bridge.close()
        assert user.poll() is None and bridge._tag not in shown("-o", "link")
    finally:
        user.kill()
        user.communicate()


def test_a_network_that_is_in_use_is_left_to_its_user(bridge: Links) -> None:
    assert f"{NETWORK}.{free_number(NETWORK)}.1" != bridge.address
