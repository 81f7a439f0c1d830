"""Probe of a peer with py-libp2p, in a process of its own, and by a Python of its own.

Its dependencies and hivemind's exclude each other (protobuf below 7, and from 7.35 on), so it lives in an
environment of its own, which `--probe-python` names.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from p2pdiloco.cli.doctor.findings import Diagnosis, bad, good, skipped, warning
from p2pdiloco.errors import clean

CHECK = "libp2p"
PROGRAM = Path(__file__).with_name("probe_program.py")
WITHIN_S, LOAD_S = 20.0, 15.0
"""Time of the probe, and more for Python to load the library."""
OURS = "p2pdiloco/"
"""Beginning of the names of our own protocols."""
INSTALL = "python3 -m venv probe && probe/bin/pip install libp2p, then --probe-python probe/bin/python"


async def probed(python: str, address: str) -> list[Diagnosis]:
    """Dial a peer with py-libp2p."""
    if not python:
        return [skipped(CHECK, "no Python with py-libp2p is named", f"optional: {INSTALL}")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            str(PROGRAM),
            address,
            str(WITHIN_S),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
    except OSError as error:
        return [skipped(CHECK, f"{python} cannot be started: {error.strerror}", INSTALL)]
    try:
        async with asyncio.timeout(WITHIN_S + LOAD_S):
            out, err = await process.communicate()
    except TimeoutError:
        return [skipped(CHECK, f"py-libp2p did not end within {WITHIN_S + LOAD_S:g} s")]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return [judge(json.loads(out))]
    except (ValueError, AttributeError, KeyError, TypeError):
        last = (err.decode(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
        return [skipped(CHECK, f"py-libp2p does not run with {python}: {clean(last[:200])}", INSTALL)]


def judge(said: dict[str, Any]) -> Diagnosis:
    """Judge what the program says. Raises: KeyError, TypeError, AttributeError (it says something else)."""
    if not said["ok"]:
        todo = "if our own dial went well, the two implementations do not agree: please report it"
        return bad(CHECK, f"py-libp2p does not get through: {clean(str(said['error']))}", todo)
    how = f"py-libp2p {clean(said['library'])} gets through by TCP, Noise and yamux"
    words = f"{how}: ping {said['round_trip_ms']:g} ms, it is {clean(said['agent'])}"
    if not any(protocol.startswith(OURS) for protocol in said["protocols"]):
        return warning(CHECK, f"{words}, which is no p2pdiloco", "check the address")
    return good(CHECK, words)
