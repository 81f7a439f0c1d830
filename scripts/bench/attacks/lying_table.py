"""Table of what liars cost, from results that were kept.

    cd scripts/bench && python -m attacks.lying_table FILE …

FILES are those that `bench_attacks.py --who liars --out FILE` has written, any number and of any settings: a
line for each lie and setting, the mean over all seeds that are there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from attacks.lying_rows import means_of, results, rows_of, shown


def table(paths: Sequence[Path]) -> str:
    """Lay out what these files have."""
    done = results(*paths)
    return shown(means_of(rows_of((result.trial for result in done.values()), done)))


def main(words: Sequence[str]) -> int:
    """Print it."""
    if not words or words[0].startswith("-"):
        print((__doc__ or "").strip())
        return 0 if words else 2
    print(table([Path(word) for word in words]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
