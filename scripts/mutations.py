#!/usr/bin/env python3
"""Is the simulator any good? Each rule of the protocol is taken away in turn, and must be missed soon.

python scripts/mutations.py [WORD]   a table; exit status 1 if a mutation survives. WORD: only names with it
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutation_kit import Mutation, Patch
from mutation_list import MUTATIONS
from p2pdiloco_lab.simulation.sim_world import run_seed


def hunt(mutation: Mutation) -> tuple[str, int, set[str]]:
    """(rule that caught it, seeds needed, rules that were broken before and are not its own)."""
    others: set[str] = set()
    with Patch() as patch:
        mutation.apply(patch)
        for seed in range(mutation.first_seed, mutation.first_seed + mutation.within_seeds):
            result = run_seed(seed, mutation.mix, mutation.nodes)
            found = result.violation or ("stuck" if result.stuck else "")
            if found in mutation.rules:
                return found, seed + 1 - mutation.first_seed, others
            if found:
                others.add(found)
    return "", mutation.within_seeds, others


def main(arguments: list[str]) -> int:
    """Hunt them all."""
    word = arguments[0] if arguments else ""
    survivors = 0
    print(f"{'mutation':<56} {'mix':<11} {'nodes':>5}  {'caught by':<18} seeds")
    for mutation in MUTATIONS:
        if word not in mutation.name:
            continue
        rule, seeds, others = hunt(mutation)
        survivors += not rule
        shown = rule or "SURVIVED " + ",".join(sorted(others))
        print(
            f"{mutation.name:<56} {mutation.mix:<11} {mutation.nodes:>5}  {shown:<18} {seeds:>4}", flush=True
        )
    print(f"{survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
