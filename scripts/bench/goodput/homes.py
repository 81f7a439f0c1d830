"""Goodput of volunteers on home links, from the protocol's simulator: by size and session length."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchkit import spread
from goodput.sessions import Home, Sessions

SESSIONS_S = (600.0, 3600.0, 28_800.0)
SETTINGS: dict[int, dict[str, Any]] = {
    8: {"window_s": 3600.0},
    32: {"warm_up_s": 300.0, "window_s": 400.0, "heartbeat_s": 2.0, "term_versions": 4},
    128: {"warm_up_s": 240.0, "window_s": 200.0, "heartbeat_s": 4.0, "term_versions": 4, "fragments": 4},
}
"""Nodes -> what differs from `Home`. Larger swarms have more sessions in a shorter span, and heartbeats take
the time. The genesis node has all offices for the first term: its uplink is too small for 31 others."""
SEED = 1


def home_of(nodes: int, mean_session_s: float, group_size: int) -> Home:
    """Make a home with the settings of the next larger size in the table."""
    settings = next((found for size, found in sorted(SETTINGS.items()) if nodes <= size), SETTINGS[128])
    return Home(nodes, mean_session_s, group_size=group_size, **settings)


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


def length(seconds: float) -> str:
    """Tell a length in hours or minutes."""
    return f"{seconds / 3600:.0f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


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
        shares = [100 * c[key] for key in ("goodput", "not_made", "lost", "pending", "participation")]
        catch_up_s = c["catch_up_s"].get("median", float("nan"))
        print(
            f"{c['nodes']:>12}{c['group_size']:>12}{length(c['mean_session_s']):>12}{c['window_s']:>12.0f}{c['sessions_ended']:>12}"
            + "".join(f"{share:>12.1f}" for share in shares)
            + f"{c['tokens_lost']:>12,.0f}{catch_up_s:>12.1f}{c['versions']:>12}{c['elections']:>12}"
        )
