#!/usr/bin/env python3
"""Writes docs/reference/architectures.md: each causal architecture of transformers, sent through a run.

python scripts/architectures.py           write it (minutes)
python scripts/architectures.py KIND ...  say what becomes of these
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor


def _prepare() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main(kinds: list[str]) -> int:
    """Send architectures through a run; the exit status."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by what the workers import
    from survey.journey import WRONG, outcome
    from survey.page import CLASSES, PAGE, page, row

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, initializer=_prepare) as pool:
        found = list(pool.map(outcome, kinds or CLASSES))
    if kinds:
        print("\n".join(map(row, found)))
    else:
        PAGE.write_text(page(found), encoding="utf-8")
    wrong = [each for each in found if each.verdict == WRONG]
    for each in wrong:
        print(f"{each.kind}: {each.words}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
