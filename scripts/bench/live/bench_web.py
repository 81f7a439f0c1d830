#!/usr/bin/env python3
"""Cost of the web page: processor time of a node's daemon with nobody, one and a hundred who watch.

    .venv/bin/python scripts/bench/live/bench_web.py [--watchers 100] [--seconds 20] [--min-step-s 0]

Two real nodes on loopback; one serves its page. Rounds without, with one and with many that watch take turns,
as what else the machine does changes. Processor time of the daemon, not of who watches, nor of the learner,
whose inner steps are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what benchmarks share

import psutil
from msgspec import Struct

from benchkit import arguments, finish, running_swarm
from p2pdiloco.config.presets import for_run
from p2pdiloco.demo.swarm import SwarmNode, Tail, of_kind
from p2pdiloco.web.keys import token_file

SETTLE_S = 3.0


class Round(Struct, frozen=True):
    """Round with so many that watch."""

    watchers: int
    cores: float
    """Processors that the daemon used, on average."""
    steps_per_s: float
    bytes_per_s: float
    """Bytes that all who watch were sent."""


def free_port() -> int:
    """Find a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


async def watch(port: int, token: str, count: list[int]) -> None:
    """Watch the page, and count the bytes that come, until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(
            f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        while data := await reader.read(1 << 16):
            count[0] += len(data)
    raise RuntimeError("the page ended")


def daemon_s(node: SwarmNode) -> float:
    """Read the processor time of a node's daemon."""
    times = psutil.Process(node.pid).cpu_times()
    return float(times.user + times.system)


async def measured(node: SwarmNode, port: int, watchers: int, seconds: float) -> Round:
    """Measure one round."""
    token, count = token_file(node.data_dir).read_text().strip(), [0]
    tasks = [asyncio.create_task(watch(port, token, count)) for _ in range(watchers)]
    try:
        await asyncio.sleep(SETTLE_S)  # the first event is whole for each, and comes at once
        broken = [task.exception() for task in tasks if task.done()]
        if broken:
            raise SystemExit(f"{len(broken)} cannot watch: {broken[0]}")
        log = Tail(node.events)
        log.lines()
        loop = asyncio.get_running_loop()
        began_s, used_s, came = loop.time(), daemon_s(node), count[0]
        await asyncio.sleep(seconds)
        took_s = loop.time() - began_s
        progress = of_kind(log.lines(), "progress")
        steps = progress[-1].inner_step - progress[0].inner_step if len(progress) > 1 else 0
        span_s = progress[-1].mono - progress[0].mono if len(progress) > 1 else 1.0
        cores = (daemon_s(node) - used_s) / took_s
        return Round(watchers, cores, steps / span_s, (count[0] - came) / took_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Measure, and print a table."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--watchers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preset", default="micro")
    parser.add_argument("--min-step-s", type=float, default=0.0)
    asked = parser.parse_args()
    port, rounds = free_port(), list[Round]()
    with tempfile.TemporaryDirectory() as folder:
        pages = [["--web", str(port)], []]
        flags = ["--min-step-s", str(asked.min_step_s)]
        with running_swarm(Path(folder), for_run(asked.preset, "web"), 2, *flags, each=pages) as swarm:
            for _ in range(asked.rounds):
                for watchers in (0, 1, asked.watchers):
                    rounds.append(asyncio.run(measured(swarm.nodes[0], port, watchers, asked.seconds)))
                    swarm.watch()
    print("watchers  cores of the daemon  inner steps/s  kB/s to all")
    figures = {}
    for watchers in (0, 1, asked.watchers):
        mine = [found for found in rounds if found.watchers == watchers]
        cores, steps, size = (
            statistics.median(getattr(found, name) for found in mine)
            for name in ("cores", "steps_per_s", "bytes_per_s")
        )
        spread = f"{min(found.cores for found in mine):.4f}-{max(found.cores for found in mine):.4f}"
        print(f"{watchers:>8}  {cores:.4f} ({spread})  {steps:>10.2f}  {size / 1000:>10.1f}")
        figures[str(watchers)] = {"cores": cores, "steps_per_s": steps, "bytes_per_s": size}
    told = [[found.watchers, found.cores, found.steps_per_s] for found in rounds]
    finish("web", {"rounds": told, "median": figures}, asked.json)


if __name__ == "__main__":
    main()
