"""Namespaces for real, where the system allows them: a split lets nothing pass, and nothing of it is left."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from p2pdiloco_lab.namespaces import NETWORK, Links, LinksRefused, free_number

pytestmark = pytest.mark.process

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"


@pytest.fixture
def links() -> Iterator[Links]:
    try:
        made = Links()
    except LinksRefused as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()
    shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert made._tag not in shown + spaces


def test_a_split_and_its_healing(links: Links) -> None:
    inside = {node: links.add(node)[0] for node in ("a", "b")}
    with socket.create_server((links.address, 0)) as server:
        port = server.getsockname()[1]

        def reaches(node: str, timeout_s: float) -> bool:
            command = [*inside[node], sys.executable, "-c", CONNECT, links.address, str(port), str(timeout_s)]
            return subprocess.run(command, capture_output=True).returncode == 0

        assert reaches("a", 10) and reaches("b", 10)
        links.split(["b"])
        assert reaches("a", 10) and not reaches("b", 0.5)
        links.heal(["b"])
        assert reaches("b", 10)
        links.split(["a"])
        assert reaches("b", 10) and not reaches("a", 0.5)


def test_no_link_is_left_of_a_namespace_that_is_still_in_use(links: Links) -> None:
    """As by sockets of a killed node, which send on for a while."""
    words, _ = links.add("a")
    command = [*words, sys.executable, "-c", "print('here', flush=True); input()"]
    user = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert user.stdout is not None and user.stdout.readline() == b"here\n"
        links.close()
        shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        assert user.poll() is None and links._tag not in shown
    finally:
        user.kill()
        user.communicate()


def test_a_network_that_is_in_use_is_left_to_its_user(links: Links) -> None:
    assert f"{NETWORK}.{free_number(NETWORK)}.1" != links.address
