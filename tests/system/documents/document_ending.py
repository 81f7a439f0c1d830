"""Ends what a document started, whatever it is."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import psutil
from launcher import Launched

EXIT_S = 30.0


def end(process: Launched | subprocess.Popen[bytes]) -> None:
    """End a process, and what it started: of a node that ends with it, of a shell it would stay."""
    started: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    if isinstance(process, subprocess.Popen):
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.terminate()
    try:
        process.wait(EXIT_S)
    except (subprocess.TimeoutExpired, AssertionError):
        process.kill()
    _, left = psutil.wait_procs(started, EXIT_S)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if isinstance(process, subprocess.Popen):
        process.wait()
