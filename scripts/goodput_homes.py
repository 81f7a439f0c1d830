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
WINDOWS_S = {8: 3600.0, 32: 900.0, 128: 300.0}
"""Nodes -> measured span of virtual time; larger swarms have more sessions in it, and take longer to play."""
SEED = 1


def window_s(nodes: int) -> float:
    """Of the next larger size in the table."""
    return next((span for size, span in sorted(WINDOWS_S.items()) if nodes <= size), 300.0)


def measure_homes(sizes: Sequence[int], group_size: int | None) -> list[dict[str, Any]]:
    """Every size with every session length; progress goes to stderr."""
    cells = []
    for nodes in sizes:
        for mean_session_s in SESSIONS_S:
            size = group_size or max(nodes, 2)
            home = Home(nodes, mean_session_s, window_s=window_s(nodes), group_size=size)
            began_s = time.monotonic()
            outcome = Sessions(home, SEED).play()
            took_s = time.monotonic() - began_s
            print(f"{nodes} nodes, sessions of {mean_session_s:.0f} s: {took_s:.0f} s", file=sys.stderr)
            cells.append(
                {
                    "nodes": nodes,
                    "group_size": size,
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
