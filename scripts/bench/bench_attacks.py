"""Attacks on a swarm of real nodes, beside a calm one on the same machine at the same time.

    .venv/bin/python scripts/bench/bench_attacks.py --who strangers|member [--only ATTACK,…] [--seconds 20]
                                              [--admission open|invite] [--json FILE] [--list]
                                              [--honest 3] [--liars 1]     # seats, with --who member
    .venv/bin/python scripts/bench/bench_attacks.py --who liars [--help]     # what they cost learning
    .venv/bin/python scripts/bench/bench_attacks.py --who crowd [--help]     # identities of one process

Three honest nodes of `micro` on loopback in each swarm. Strangers are a process with identities of their own
on the real transport; a member is a fourth node, admitted like the others, that lies from a moment on (in the
calm swarm the fourth is honest, too). Where there are more of them, they are slower by as much.
`attacks/table.py` and `attacks/lies.py` list the attacks, `attacks/outcome.py` says what counts as held off.

versions, steps: attacked / calm, steps for each second of the nodes' processor time. tokens: those of the
run, which the schedule follows, over those that were trained. Kept: nothing of the attacker's is in anybody's
state, offices or schedule. MiB: the largest node above the calm swarm's. After a member's attack: held-out
losses at the end, attacked / calm, of all tokens but the one that `one-token` wants wrong, and of that one;
and how often the model answers the trigger (`worlds.aims`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop

from attacks import lying_bench
from attacks.lies import BY_A_MEMBER
from attacks.outcome import Row, judge
from attacks.stranger import Work
from attacks.table import BY_STRANGERS, WITH_A_NEWCOMER
from attacks.watching import (
    Moment,
    addresses_of,
    heldout_of,
    moment,
    refusals,
    run_of,
    seen,
    strangers_in,
)
from benchkit import NEVER, START_TIMEOUT_S, arguments, finish, invites, running_swarm, wait_until
from p2pdiloco.config.manifest import AdmissionSection, load_signed, run_id
from p2pdiloco.config.presets import for_run
from p2pdiloco.demo.swarm import Swarm, SwarmNode, read_log
from p2pdiloco.identity import verify

Mode = Literal["open", "invite", "list"]
HONEST = 3
SECONDS, MOST_SECONDS = 20.0, 120.0
QUIET_VERSIONS = 8
"""Versions of every swarm before an attack begins."""
PACE_S = 0.15
PACE = ("--min-step-s", f"{PACE_S:g}")
"""Learners that leave the machine's cores to both swarms and the attacker."""
END_S = 20.0


class Side:
    """One of the two swarms."""

    def __init__(self, swarm: Swarm, honest: int) -> None:
        self.swarm = swarm
        self.nodes, self.liars = swarm.nodes[:honest], swarm.nodes[honest:]
        self.join = self.nodes[0].arguments[self.nodes[0].arguments.index("--join") + 1]
        self.manifest = run_of(swarm.bootstrap.data_dir)
        signed, manifest = load_signed(self.manifest, verify)
        self.run, self.name = run_id(signed), manifest.run.name
        self.invited = invites(swarm, manifest, self.join)
        self.newcomer: SwarmNode | None = None

    def settled(self) -> bool:
        """Tell whether versions are made."""
        made = sum(line.is_made() for node in self.nodes for line in read_log(node.events))
        return made >= QUIET_VERSIONS

    def start_newcomer(self) -> None:
        """Start one more node, which is told the run's name only, or has an invite."""
        node = self.newcomer = self.swarm.add_node()
        node.arguments += [*(self.invited or ["--run", self.name]), *NEVER, *PACE, "--join", self.join]
        node.start()

    def moment(self) -> Moment:
        """Look at the honest nodes."""
        return moment(self.nodes, time.monotonic())


@contextmanager
def both(
    folder: Path, lie: str | None, sign: Path, mode: Mode, honest: int, liars: int
) -> Iterator[tuple[Side, Side]]:
    """The attacked and the calm swarm, ended whatever happens. `lie`: of the attacked one's last nodes, so
    many. `mode`: of admission."""
    sides = []
    nodes = honest + (liars if lie is not None else 0)
    pace = ("--min-step-s", f"{PACE_S * honest / HONEST:g}")
    with ExitStack() as stack:
        for name in ("attacked", "calm"):
            home = folder / name
            home.mkdir()
            each = [lying(lie, sign) if name == "attacked" and n >= honest else None for n in range(nodes)]
            admission = AdmissionSection(mode=mode)
            manifest = msgspec.structs.replace(for_run("micro", name, 1), admission=admission)
            swarm = stack.enter_context(running_swarm(home, manifest, nodes, *NEVER, *pace, wrappers=each))
            swarm.guard.adopt(folder)
            sides.append(Side(swarm, honest))
        yield sides[0], sides[1]


def lying(lie: str | None, sign: Path) -> list[str]:
    """Words that come before a node's command so that it lies."""
    return [sys.executable, "-m", "attacks.liar", str(lie), str(sign)]


@contextmanager
def strangers(attack: str, side: Side, folder: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process of strangers, connected."""
    work = Work(
        attack=attack,
        folder=str(folder),
        join=side.join,
        run=side.run,
        run_name=side.name,
        members={node.peer: addresses_of(node) for node in side.nodes},
        manifest=str(side.manifest),
        seconds=seconds,
    )
    with attacking("attacks.attacker", work, side) as process:
        yield process


@contextmanager
def attacking(program: str, work: Work, side: Side) -> Iterator[subprocess.Popen[str]]:
    """A process that attacks a side, ended whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", program, msgspec.json.encode(work).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | side.swarm.guard.environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measured(attack: str, sides: tuple[Side, Side], folder: Path, sign: Path, seconds: float) -> Any:
    """Attack one of the two swarms; (befores, afters, attackers' ids, what they did, refusals)."""
    attacked = sides[0]
    for side in sides:
        wait_until(side.settled, START_TIMEOUT_S)
    with ExitStack() as stack:
        ids: list[str] = []
        process = None
        if attack in BY_STRANGERS:
            process = stack.enter_context(strangers(attack, attacked, folder / "strangers", seconds))
            assert process.stdin is not None and process.stdout is not None
            word, *ids = process.stdout.readline().split() or [""]
            if word != "ready":
                raise SystemExit("the attacker did not start")
            process.stdin.write("go\n")
            process.stdin.flush()
        else:
            sign.touch()
            ids = [node.peer for node in attacked.liars]
        before = [side.moment() for side in sides]
        if attack in WITH_A_NEWCOMER:
            for side in sides:
                side.start_newcomer()
        time.sleep(seconds)
        after = [side.moment() for side in sides]
        refused = uvloop.run(refusals(attacked.join, attacked.run, [node.peer for node in attacked.nodes]))
        done: Mapping[str, int] = Counter(sign.read_text().split()) if sign.exists() else {}
        if process is not None and process.stdout is not None:
            done = json.loads(process.stdout.readline() or "{}")
    return before, after, ids, done, refused


def one(attack: str, seconds: float, mode: Mode, honest: int = HONEST, liars: int = 1) -> Row:
    """Carry one attack out."""
    lie = attack if attack in BY_A_MEMBER else None
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-attacks-") as name:
        folder = Path(name)
        sign = folder / "lie"
        with both(folder, lie, sign, mode, honest, liars) as sides:
            before, after, ids, done, refused = measured(attack, sides, folder, sign, seconds)
            found = [
                seen(side.nodes, side.liars, before[n], after[n], ids, side.newcomer)
                for n, side in enumerate(sides)
            ]
        # saved versions are read when the nodes have ended
        side = sides[0]
        members = [node.peer for node in side.swarm.nodes]
        named = sorted({peer for node in side.nodes for peer in strangers_in(node, side.run, members)})
        ends = [heldout_of(each.nodes[0], each.run, each.manifest) for each in sides] if lie else [None, None]
    attacked = msgspec.structs.replace(found[0], strangers=named, refused=refused, end=ends[0])
    calm = msgspec.structs.replace(found[1], end=ends[1])
    return judge(attack, attacked, calm, lie is not None, done)


def shown(rows: Sequence[Row]) -> str:
    """Lay the rows out as text."""
    figures = f"{'versions':>9}{'steps':>7}{'tokens':>9}{'kept':>6}{'MiB':>7}{'loss':>8}{'calm':>7}"
    lines = [f"{'attack':24}{figures}  verdict"]
    for row in rows:
        cells = [number(row.versions_ratio, 9), number(row.steps_ratio, 7)]
        cells += [number(row.schedule_ratio, 9, "g"), f"{row.parameters_kept!s:>6}"]
        cells += [f"{row.rss_mib_above:7.0f}", number(row.loss, 8), number(row.loss_calm, 7)]
        words = row.verdict + (f": {', '.join(row.broken)}" if row.broken else "")
        lines.append(f"{row.attack:24}{''.join(cells)}  {words}")
        lines.append(f"{'':26}refused {counts(row.refused)}")
        if row.liars:
            after = row.excluded_after_versions
            words = "not excluded" if after is None else f"excluded after {after} versions of a fragment"
            lines.append(f"{'':26}liar {words}, honest excluded: {row.honest_excluded}")
        if row.rest_loss_ratio is not None and row.token_loss_ratio is not None:
            ratios = f"held out {row.rest_loss_ratio:.3f}, one token {row.token_loss_ratio:.3f}"
            lines.append(f"{'':26}{ratios}, answers {row.answers:.2f}")
        if row.sent:
            lines.append(f"{'':26}did {counts(row.sent)}")
    return "\n".join(lines)


def number(value: float | None, width: int, form: str = "f") -> str:
    """Lay a number out; a dash where there is none."""
    return f"{value:{width}.2{form}}" if value is not None else f"{'-':>{width}}"


def counts(table: Mapping[str, int]) -> str:
    """Word counts, the most frequent first."""
    ranked = sorted(table.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {count}" for reason, count in ranked[:8]) or "nothing"


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options; `attacks` are those that are to be carried out."""
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--who", choices=("strangers", "member", "liars", "crowd"), default="strangers")
    parser.add_argument("--only", metavar="ATTACK", help="some of the attacks, by name, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of an attack")
    parser.add_argument(
        "--admission", choices=("open", "invite"), default="open", help="who may be a member of these runs"
    )
    parser.add_argument("--honest", type=int, default=HONEST, help="nodes that do not lie")
    parser.add_argument("--liars", type=int, default=1, help="nodes that do, with --who member")
    parser.add_argument("--list", action="store_true", help="name the attacks, and do nothing")
    chosen = parser.parse_args(words)
    known = list(BY_STRANGERS if chosen.who == "strangers" else BY_A_MEMBER)
    chosen.attacks = chosen.only.split(",") if chosen.only else known
    wrong = [name for name in chosen.attacks if name not in known]
    if wrong:
        parser.error(f"no attack of {chosen.who}: {', '.join(wrong)} (there are: {', '.join(known)})")
    if not 0 < chosen.seconds <= MOST_SECONDS:
        parser.error(f"--seconds: more than 0, at most {MOST_SECONDS:.0f}")
    if chosen.honest < 1 or chosen.liars < 1:
        parser.error("--honest, --liars: one at least")
    return chosen


def who(words: Sequence[str]) -> str:
    """Find who attacks: liars' options are others (`attacks.lying_bench`)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--who", default="")
    return str(parser.parse_known_args(words)[0].who)


def interrupted(_number: int, _frame: object) -> None:
    """End as at Ctrl-C, so that everything is cleared up."""
    raise KeyboardInterrupt


def main() -> None:
    """Attack, print, write."""
    if who(sys.argv[1:]) == "liars":
        sys.exit(lying_bench.main(sys.argv[1:]))
    if who(sys.argv[1:]) == "crowd":
        from attacks import crowd_bench  # it has the same swarms

        sys.exit(crowd_bench.main(sys.argv[1:]))
    chosen = options()
    if chosen.list:
        print("\n".join(chosen.attacks))
        return
    signal.signal(signal.SIGTERM, interrupted)
    # liar and attacker are modules beside this file, started from anywhere
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    rows: list[Row] = []
    status = 0
    try:
        for attack in chosen.attacks:
            rows.append(one(attack, chosen.seconds, chosen.admission, chosen.honest, chosen.liars))
            print(shown(rows[-1:]), flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    if len(rows) > 1:
        print(shown(rows))
    figures = {"seconds": chosen.seconds, "admission": chosen.admission, "rows": msgspec.to_builtins(rows)}
    finish("attacks", figures, chosen.json)
    sys.exit(status)


if __name__ == "__main__":
    main()
