"""Channel of a program that has more descriptors than `select` takes."""

import fcntl
import resource
import socket

import pytest

from p2pdiloco.learner.channel import LearnerEnd, Stop, frame


def test_a_program_with_thousands_of_descriptors_can_wait():
    """`select` takes none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < 1200:
        pytest.skip("no such many descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    daemon, mine = socket.socketpair()
    other, woken = socket.socketpair()
    high = [socket.socket(fileno=fcntl.fcntl(one.detach(), fcntl.F_DUPFD, 1100)) for one in (mine, woken)]
    try:
        end = LearnerEnd(high[0])
        assert not end.arrived(0.0)
        end.wait(0.0)
        other.shutdown(socket.SHUT_RDWR)
        assert not end.wait_or(high[1])
        daemon.sendall(frame(Stop(None)))
        assert end.wait_start() is None
    finally:
        for one in (daemon, other, *high):
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
