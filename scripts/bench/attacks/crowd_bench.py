"""Do identities of one process that trains nothing cost a run anything?

    python scripts/bench/bench_attacks.py --who crowd [--only ROW,…] [--riders 5] [--seconds 40] [--json FILE]
        [--list]

Three honest nodes of `micro` on loopback, which have three of six seats, beside a calm swarm on the same
machine at the same time. In a row named AGE-DOOR-KIND a crowd (`attacks.crowd`) comes to a young run or to
one of 64 versions. Doors: `open`; `invite`, one invite for as many as they are; `race`, an invite for one,
shown to another member by each at once; `admits`, an invite for one, and a fourth member that admits whoever
asks.

versions, loss: attacked / calm. tokens: what the learners' clock gained in that time over what was trained,
chain: what the chains' heads gained, in both swarms. weight, seats: the crowd's share of merges and of the
seats, as honest nodes saved them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct

import bench_attacks
from attacks.crowd import KINDS
from attacks.crowd_outcome import CrowdRow, judge_crowd, seen_of, shares, trained_tokens
from attacks.rider import CrowdWork
from attacks.watching import addresses_of, merged_tokens
from bench_attacks import HONEST, PACE, Side, attacking, number
from benchkit import NEVER, START_TIMEOUT_S, arguments, finish, running_swarm, wait_until
from p2pdiloco.config.manifest import AdmissionSection
from p2pdiloco.config.presets import for_run
from p2pdiloco.daemon.run_files.ownership import Ownership
from p2pdiloco.demo.swarm import read_log
from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.identity import Identity

RIDERS, MOST_RIDERS = 5, 32
ASLEEP = 3
"""Seats of nodes that are not here: with those of the honest ones they leave an invite no place."""
SECONDS, MOST_SECONDS = 40.0, 300.0
OLD_VERSIONS = 64
"""Versions of each fragment of a run that is no longer young."""
OLD_TIMEOUT_S = 600.0
ASKING_S = 8.0
"""Time before the end at which members are asked for their tokens: the crowd is there still."""
AGES = ("young", "old")
ROWS = tuple(
    "-".join(words)
    for words in (
        *itertools.product(AGES, ("open", "invite"), KINDS),
        *itertools.product(AGES, ("race", "admits"), ("rides",)),
    )
)


@contextmanager
def sides(folder: Path, door: str) -> Iterator[tuple[Side, Side]]:
    """The attacked and the calm swarm, ended whatever happens."""
    doorkeeper = [sys.executable, "-m", "attacks.doorkeeper"]
    nodes = HONEST + (door == "admits")
    asleep = tuple(Identity.generate().peer_id for _ in range(ASLEEP))
    admission = AdmissionSection(mode="open" if door == "open" else "invite", seats=asleep)
    found = []
    with ExitStack() as stack:
        for name in ("attacked", "calm"):
            home = folder / name
            home.mkdir()
            wrappers = [doorkeeper if name == "attacked" and n >= HONEST else None for n in range(nodes)]
            manifest = msgspec.structs.replace(for_run("micro", name, 1), admission=admission)
            swarm = stack.enter_context(
                running_swarm(home, manifest, nodes, *NEVER, *PACE, wrappers=wrappers)
            )
            swarm.guard.adopt(folder)
            found.append(Side(swarm, HONEST))
        yield found[0], found[1]


def is_old(side: Side) -> bool:
    """Tell whether every honest node has more than `OLD_VERSIONS` of each fragment."""
    for node in side.nodes:
        newest: dict[int, int] = {}
        for line in read_log(node.events):
            if line.is_head():
                newest[line.fragment] = max(newest.get(line.fragment, 0), line.number)
        if not newest or min(newest.values()) <= OLD_VERSIONS:
            return False
    return True


def work_of(side: Side, folder: Path, door: str, kind: str, riders: int, seconds: float) -> CrowdWork:
    """Make the crowd's task, with the one invite that it has."""
    invite, doors = "", "all"
    if door != "open":
        owned = Ownership.find(side.name, side.swarm.bootstrap.data_dir)
        invite = owned.link(owned.invite(0, riders if door == "invite" else 1, "", (side.join,)))
    if door == "race":
        doors = "one"
    if door == "admits":
        doors = side.liars[0].peer
    return CrowdWork(
        attack=kind,
        folder=str(folder),
        join=side.join,
        run=side.run,
        run_name=side.name,
        members={node.peer: addresses_of(node) for node in side.swarm.nodes},
        manifest=str(side.manifest),
        seconds=seconds,
        riders=riders,
        invite=invite,
        doors=doors,
    )


def one(row: str, riders: int, seconds: float) -> CrowdRow:
    """Carry one row out."""
    age, door, kind = row.split("-", 2)
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-crowd-") as name:
        folder = Path(name)
        with sides(folder, door) as both:
            for side in both:
                wait_until(side.settled, START_TIMEOUT_S)
                if age == "old":
                    wait_until(lambda side=side: is_old(side), OLD_TIMEOUT_S)  # type: ignore[misc]
            work = work_of(both[0], folder / "riders", door, kind, riders, seconds)
            with attacking("attacks.crowd", work, both[0]) as process:
                assert process.stdin is not None and process.stdout is not None
                word, *ids = process.stdout.readline().split() or [""]
                if word != "ready":
                    raise SystemExit("the crowd did not start")
                first = [count_of(side) for side in both]
                before = [side.moment() for side in both]
                process.stdin.write("go\n")
                process.stdin.flush()
                time.sleep(max(0.0, seconds - ASKING_S))
                last = [count_of(side) for side in both]
                time.sleep(max(0.0, before[0].at_s + seconds - time.monotonic()))
                after = [side.moment() for side in both]
                did = json.loads(process.stdout.readline() or "{}")
            found = [
                msgspec.structs.replace(
                    seen_of(s.nodes, s.liars, before[n], after[n]),
                    tokens_in_chain=in_chain(s, first[n], last[n]),
                )
                for n, s in enumerate(both)
            ]
        # saved versions are read when the nodes have ended
        weight, seats = shares(both[0].nodes, both[0].run, {*ids})
    attacked = msgspec.structs.replace(found[0], weight_share=weight, seats_share=seats)
    return judge_crowd(row, riders, attacked, found[1], did)


class Count(Struct, frozen=True):
    """Tokens of a run's chains at a time."""

    at_s: float
    tokens: int


def count_of(side: Side) -> Count | None:
    """Ask a side's members for the tokens of their chains; None: one of them does not answer."""
    try:
        peers = [node.peer for node in side.swarm.nodes]
        return Count(time.monotonic(), uvloop.run(merged_tokens(side.join, side.run, peers)))
    except (P2PDilocoError, KeyError):
        return None


def in_chain(side: Side, first: Count | None, last: Count | None) -> float:
    """Compute what the chains gained between two counts over what was trained; 0: one is missing."""
    if first is None or last is None:
        return 0.0
    trained = trained_tokens(side.swarm.nodes, first.at_s, last.at_s)
    return (last.tokens - first.tokens) / max(1, trained)


def shown(rows: Sequence[CrowdRow]) -> str:
    """Lay the rows out as text."""
    figures = (
        f"{'versions':>9}{'loss':>7}{'tokens':>8}{'calm':>6}{'chain':>8}{'calm':>6}{'out':>5}{'end':>5}"
        f"{'weight':>8}{'seats':>7}"
    )
    lines = [f"{'crowd':26}{figures}  broken"]
    for row in rows:
        cells = [number(row.versions_ratio, 9), number(row.loss_ratio, 7), number(row.tokens_counted, 8)]
        cells += [number(row.tokens_calm, 6), number(row.tokens_in_chain, 8)]
        cells += [number(row.tokens_in_chain_calm, 6), f"{row.honest_excluded:5}{row.honest_ended:5}"]
        cells += [number(row.weight_share, 8), number(row.seats_share, 7)]
        lines.append(f"{row.attack:26}{''.join(cells)}  {', '.join(row.broken) or 'nothing'}")
        lines.append(f"{'':26}  {row.riders} riders did {bench_attacks.counts(row.did)}")
    return "\n".join(lines)


def options(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options; `rows` are those that are to be carried out."""
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--who", choices=("crowd",), default="crowd")
    parser.add_argument("--only", metavar="ROW", help="some of the rows, by name, separated by commas")
    parser.add_argument("--riders", type=int, default=RIDERS, help="identities of the crowd")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of an attack")
    parser.add_argument("--list", action="store_true", help="name the rows, and do nothing")
    chosen = parser.parse_args(words)
    chosen.rows = chosen.only.split(",") if chosen.only else list(ROWS)
    wrong = [name for name in chosen.rows if name not in ROWS]
    if wrong:
        parser.error(f"no such row: {', '.join(wrong)} (there are: {', '.join(ROWS)})")
    if not 0 < chosen.seconds <= MOST_SECONDS:
        parser.error(f"--seconds: more than 0, at most {MOST_SECONDS:.0f}")
    if not 0 < chosen.riders <= MOST_RIDERS:
        parser.error(f"--riders: more than 0, at most {MOST_RIDERS}")
    return chosen


def main(words: Sequence[str]) -> int:
    """Attack, print, write. Returns the exit status."""
    chosen = options(words)
    if chosen.list:
        print("\n".join(chosen.rows))
        return 0
    signal.signal(signal.SIGTERM, bench_attacks.interrupted)
    # crowd and doorkeeper are modules beside the bench, started from anywhere
    paths = [str(Path(bench_attacks.__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    rows: list[CrowdRow] = []
    status = 0
    try:
        for row in chosen.rows:
            rows.append(one(row, chosen.riders, chosen.seconds))
            print(shown(rows[-1:]), flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    if len(rows) > 1:
        print(shown(rows))
    figures = {"seconds": chosen.seconds, "riders": chosen.riders, "rows": msgspec.to_builtins(rows)}
    finish("crowds", figures, chosen.json)
    return status
