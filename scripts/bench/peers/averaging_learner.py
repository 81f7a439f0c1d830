"""A process of bench_averaging.py: a learner beside a node, at its production priority.

Its inner steps are real ones (forward, backward, AdamW of a small network, one thread), and it takes a share
of a core for them: one that is paced, or waits for an accelerator, takes less than all of it. It prints
`trains` when it does. For every `round` it does, one fragment between two inner steps, what a learner has to
do for a round: copies the fragment out, and goes over to the new version. For every `count` it prints
`count`, the inner steps so far, the monotonic time at the end of the last, and its processor time. Ends with
its input.
"""

from __future__ import annotations

import queue
import statistics
import sys
import threading
import time
from collections import deque

import torch

from p2pdiloco.learner.ranks import step_back

PRODUCTION_NICENESS = 10
WIDTH, BATCH = 256, 64
WARM_UP_STEPS, TIMED_STEPS = 5, 15


class Fragment:
    """State that a learner keeps of one fragment: its parameters, and what it shares with the daemon."""

    def __init__(self, numel: int) -> None:
        self.theta, self.base, self.new, self.sent = (torch.zeros(numel) for _ in range(4))

    def copy_out(self) -> None:
        """A contribution."""
        self.sent.copy_(self.theta)

    def install(self) -> None:
        """A new version: the displacement stays."""
        self.theta.add_(self.new).sub_(self.base)


def main(share: float, numels: list[int]) -> int:
    """Train until the input ends. `share`: of a core; 1: as fast as it goes."""
    torch.set_num_threads(1)
    step_back(PRODUCTION_NICENESS)
    words: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            words.put(line.strip())
        words.put("")

    threading.Thread(target=listen, daemon=True).start()
    fragments = [Fragment(numel) for numel in numels]
    network = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
    )
    optimizer = torch.optim.AdamW(network.parameters())
    sample = torch.randn(BATCH, WIDTH)
    chores: deque[tuple[Fragment, bool]] = deque()
    steps, least_step_s = 0, 0.0
    taken_s: list[float] = []
    while True:
        started_s, cpu_s = time.monotonic(), time.process_time()
        optimizer.zero_grad()
        (network(sample) - sample).square().mean().backward()
        optimizer.step()
        if WARM_UP_STEPS <= steps < TIMED_STEPS:
            taken_s.append(time.process_time() - cpu_s)
            least_step_s = statistics.median(taken_s) / share if share < 1 else 0.0
        if chores:
            fragment, out = chores.popleft()
            fragment.copy_out() if out else fragment.install()
        time.sleep(max(0.0, started_s + least_step_s - time.monotonic()))
        steps += 1
        ended_s = time.monotonic()
        if steps == TIMED_STEPS:
            print("trains", flush=True)
        while not words.empty():
            word = words.get()
            if not word:
                return 0
            if word == "round":
                chores.extend((fragment, True) for fragment in fragments)
                chores.extend((fragment, False) for fragment in fragments)
            else:
                print("count", steps, ended_s, time.process_time(), flush=True)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]))
