"""Goodput of volunteers on home links, from the protocol's simulator: by size and session length."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchkit import spread

from p2pdiloco.simulation.sessions import Home, Sessions

SESSIONS_S = (600.0, 3600.0, 28_800.0)
SPANS = {8: (3600.0, 0.5), 32: (400.0, 2.0), 128: (200.0, 4.0)}
"""Nodes -> (measured span of virtual time, interval of heartbeats), in seconds. Heartbeats between all are
what takes time here; larger swarms have more sessions in a shorter span."""
SEED = 1


def home_of(nodes: int, mean_session_s: float, group_size: int) -> Home:
    """With the span of the next larger size in the table."""
    window_s, heartbeat_s = next((v for size, v in sorted(SPANS.items()) if nodes <= size), SPANS[128])
    return Home(nodes, mean_session_s, window_s=window_s, heartbeat_s=heartbeat_s, group_size=group_size)


def measure_homes(sizes: Sequence[int], group_size: int) -> list[dict[str, Any]]:
    """Every size with every session length; progress goes to stderr."""
    cells = []
    for nodes in sizes:
        for mean_session_s in SESSIONS_S:
            home = home_of(nodes, mean_session_s, group_size)
            began_s = time.process_time()
            outcome = Sessions(home, SEED).play()
            took_s = time.process_time() - began_s
            print(f"{nodes} nodes, sessions of {mean_session_s:.0f} s: {took_s:.0f} CPU-s", file=sys.stderr)
            cells.append(
                {
                    "nodes": nodes,
                    "group_size": group_size,
                    "mean_session_s": mean_session_s,
                    "window_s": home.window_s,
                    "mean_up": outcome.mean_up,
                    "sessions_ended": outcome.sessions_ended,
                    "goodput": outcome.goodput,
                    "not_made": outcome.not_made,
                    "lost": outcome.lost,
                    "participation": statistics.fmean(outcome.participation),
                    "tokens_made": outcome.tokens_made,
                    "tokens_lost": outcome.tokens_lost,
                    "catch_up_s": spread(outcome.catch_up_s),
                    "versions": outcome.versions,
                    "elections": outcome.elections,
                    "messages_per_node_s": outcome.messages / outcome.mean_up / home.window_s,
                    "took_s": took_s,
                }
            )
    return cells


def print_homes(cells: Sequence[dict[str, Any]]) -> None:
    """One line per cell."""
    example = Home(8, 600.0)
    print("\n3. Volunteers: 20 Mbit/s up, 20 to 300 ms, 2 % of messages lost; sessions end without a word;")
    print(f"   {example.parameters / 1e6:.1f} M parameters, H = {example.inner_steps}, steps of 1.0 to 1.5 s")
    print(
        f"{'nodes':>6}{'group':>6}{'session':>9}{'window s':>9}{'ended':>7}{'goodput %':>11}"
        f"{'not made %':>11}"
        f"{'lost %':>8}{'part. %':>9}{'tokens lost':>13}{'catch-up s':>11}{'merges':>8}{'elected':>8}"
    )
    for c in cells:
        minutes = c["mean_session_s"] / 60.0
        length = f"{minutes / 60:.0f} h" if minutes >= 60 else f"{minutes:.0f} min"
        print(
            f"{c['nodes']:>6}{c['group_size']:>6}{length:>9}{c['window_s']:>9.0f}{c['sessions_ended']:>7}"
            f"{100 * c['goodput']:>11.1f}{100 * c['not_made']:>11.1f}{100 * c['lost']:>8.1f}"
            f"{100 * c['participation']:>9.1f}{c['tokens_lost']:>13,.0f}"
            f"{c['catch_up_s'].get('median', float('nan')):>11.1f}{c['versions']:>8}{c['elections']:>8}"
        )
