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
                    "pending": outcome.pending,
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
    head = (
        "nodes",
        "group",
        "session",
        "window s",
        "ended",
        "goodput %",
        "not made %",
        "lost %",
        "pending %",
    )
    head += ("part. %", "tokens lost", "catch-up s", "merges", "elected")
    print("".join(f"{title:>12}" for title in head))
    for c in cells:
        minutes = c["mean_session_s"] / 60.0
        length = f"{minutes / 60:.0f} h" if minutes >= 60 else f"{minutes:.0f} min"
        shares = [100 * c[key] for key in ("goodput", "not_made", "lost", "pending", "participation")]
        catch_up_s = c["catch_up_s"].get("median", float("nan"))
        print(
            f"{c['nodes']:>12}{c['group_size']:>12}{length:>12}{c['window_s']:>12.0f}{c['sessions_ended']:>12}"
            + "".join(f"{share:>12.1f}" for share in shares)
            + f"{c['tokens_lost']:>12,.0f}{catch_up_s:>12.1f}{c['versions']:>12}{c['elections']:>12}"
        )
